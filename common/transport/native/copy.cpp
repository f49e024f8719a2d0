#include "copy.hpp"

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

namespace baton {

void copy_mapped(void* target, const void* source, size_t nbytes) { std::memcpy(target, source, nbytes); }

void prefetch_run(const void* target, const void* source) {
    constexpr size_t line_nbytes = 64;
    constexpr size_t line_count = 4;
    for (size_t line = 0; line < line_count; ++line) {
        __builtin_prefetch(static_cast<const char*>(source) + line * line_nbytes, 0);
        __builtin_prefetch(static_cast<const char*>(target) + line * line_nbytes, 1);
    }
}

void publish_copies() { std::atomic_thread_fence(std::memory_order_seq_cst); }

SharedExtent shared_extent(const void* start, size_t nbytes) {
    const uint64_t begin = reinterpret_cast<uint64_t>(start);
    uint64_t covered = begin;
    SharedExtent found;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; covered < begin + nbytes && std::getline(maps, line);) {
        uint64_t low = 0;
        uint64_t high = 0;
        uint64_t offset = 0;
        unsigned major = 0;
        unsigned minor = 0;
        uint64_t inode = 0;
        char permissions[5] = {};
        if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &low,
                        &high, permissions, &offset, &major, &minor, &inode) != 7 ||
            high <= covered) {
            continue;
        }
        const SharedExtent here{static_cast<uint64_t>(major) << 32 | minor, inode, offset + covered - low};
        const bool is_shared = permissions[1] == 'w' && permissions[3] == 's' && inode != 0;
        const bool is_next = covered == begin ||
                             here == SharedExtent{found.device, found.inode, found.offset + covered - begin};
        if (low > covered || !is_shared || !is_next) {
            return {};
        }
        found = covered == begin ? here : found;
        covered = high;
    }
    return covered >= begin + nbytes ? found : SharedExtent{};
}

int populate_mapping(void* start, size_t nbytes) {
    constexpr uint64_t page_nbytes = 4096;
    constexpr int madv_populate_write = 23;  // Linux 5.14; absent from older headers
    const uint64_t begin = reinterpret_cast<uint64_t>(start) & ~(page_nbytes - 1);
    const uint64_t end = reinterpret_cast<uint64_t>(start) + nbytes;
    if (madvise(reinterpret_cast<void*>(begin), end - begin, madv_populate_write) == 0) {
        return 0;
    }
    if (errno != EINVAL) {
        return errno;
    }
    // An atomic add of nothing is a write access that leaves the owner's bytes alone, even while the
    // owner writes them.
    auto* bytes = static_cast<unsigned char*>(start);
    for (uint64_t offset = 0; offset < nbytes; offset += page_nbytes) {
        __atomic_fetch_add(bytes + offset, 0, __ATOMIC_RELAXED);
    }
    return 0;
}

void copy_runs(char* target, const char* source, const int64_t* target_offsets,
               const int64_t* source_offsets, const int64_t* nbytes, size_t run_count) {
    for (size_t run = 0; run < run_count; ++run) {
        std::memcpy(target + target_offsets[run], source + source_offsets[run],
                    static_cast<size_t>(nbytes[run]));
    }
}

// Each step is one to one in the word and in the lane, so a word that differs alone is never lost. Eight lanes, for
// one waits for its product.
uint64_t digest_bytes(const char* from, size_t nbytes) {
    constexpr size_t lane_count = 8;
    constexpr size_t stripe_nbytes = lane_count * sizeof(uint64_t);
    constexpr uint64_t factor = 0x9e3779b97f4a7c15;  // odd, of the golden ratio
    uint64_t lanes[lane_count];
    for (size_t lane = 0; lane < lane_count; ++lane) {
        lanes[lane] = factor * (lane + 1);
    }
    auto mix = [factor](uint64_t state, uint64_t word) { return std::rotl((state ^ word) * factor, 29); };
    for (size_t place = 0; place < nbytes; place += stripe_nbytes) {
        uint64_t words[lane_count] = {};
        std::memcpy(words, from + place, nbytes - place < stripe_nbytes ? nbytes - place : stripe_nbytes);
        for (size_t lane = 0; lane < lane_count; ++lane) {
            lanes[lane] = mix(lanes[lane], words[lane]);
        }
    }
    uint64_t digest = nbytes;
    for (uint64_t lane : lanes) {
        digest = mix(digest, lane);
    }
    return digest;
}

void save_pages(char* target, const char* source, const int64_t* target_ids, const int64_t* source_ids,
                size_t page_count, size_t page_nbytes, size_t piece_nbytes, double pause_ratio, uint64_t* digests) {
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    size_t copied_nbytes = 0;
    for (size_t page = 0; page < page_count; ++page) {
        char* to = target + target_ids[page] * page_nbytes;
        std::memcpy(to, source + source_ids[page] * page_nbytes, page_nbytes);
        digests[page] = digest_bytes(to, page_nbytes);
        copied_nbytes += page_nbytes;
        // At the end as well: what is saved next begins at once.
        if (copied_nbytes >= piece_nbytes || page + 1 == page_count) {
            std::this_thread::sleep_for((Clock::now() - began) * pause_ratio);
            began = Clock::now();
            copied_nbytes = 0;
        }
    }
}

}  // namespace baton
