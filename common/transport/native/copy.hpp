// Copies between mappings of this process. Knows nothing of UCX.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Copies `nbytes` from memory of this process to a peer's segment that is mapped here.
void copy_mapped(void* target, const void* source, size_t nbytes);

// Starts fetching the first lines of a run that is copied next. Hides most of the address translation
// of a random page; a bad address is harmless.
void prefetch_run(const void* target, const void* source);

// A thread that this thread notifies afterwards sees every byte copied so far. A barrier where stores are
// not ordered.
void publish_copies();

// Which memory an extent is, the same in every process of a machine that maps it: a file, that of a
// shared-memory segment, and where the extent begins in it. All zero if it is this process's alone.
struct SharedExtent {
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t offset = 0;

    bool is_shared() const { return inode != 0; }
    bool operator==(const SharedExtent&) const = default;
};

// Of an extent that lies in writable mappings of one file, one behind the other.
SharedExtent shared_extent(const void* start, size_t nbytes);

// Enters the pages of a mapped segment into this process's page table without changing a byte: the
// first put through a fresh mapping would otherwise run at page-fault speed. Returns 0, or an errno if
// the file behind the mapping is shorter than the extent.
int populate_mapping(void* start, size_t nbytes);

// The reference of the benchmark: one memcpy per run.
void copy_runs(char* target, const char* source, const int64_t* target_offsets,
               const int64_t* source_offsets, const int64_t* nbytes, size_t run_count);

// Of some bytes. Another value of any one word of 8 bytes gives another digest.
uint64_t digest_bytes(const char* from, size_t nbytes);

// Copies whole pages and digests each one that arrived, while it is in the cache. After every `piece_nbytes`, and at
// the end, nothing is copied for `pause_ratio` times as long as they took.
void save_pages(char* target, const char* source, const int64_t* target_ids, const int64_t* source_ids,
                size_t page_count, size_t page_nbytes, size_t piece_nbytes, double pause_ratio, uint64_t* digests);

}  // namespace baton
