#include "copy.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

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

}  // namespace baton
