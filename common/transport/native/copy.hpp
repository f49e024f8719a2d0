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

// Every byte copied so far is visible to whoever hears of it from this thread afterwards.
void publish_copies();

// Whether the extent lies in one writable mapping that other processes can share.
bool is_shared_mapping(const void* start, size_t nbytes);

// Enters the pages of a mapped segment into this process's page table without changing a byte: the
// first put through a fresh mapping would otherwise run at page-fault speed. Returns 0, or an errno if
// the file behind the mapping is shorter than the extent.
int populate_mapping(void* start, size_t nbytes);

// The reference of the benchmark: one memcpy per run.
void copy_runs(char* target, const char* source, const int64_t* target_offsets,
               const int64_t* source_offsets, const int64_t* nbytes, size_t run_count);

}  // namespace baton
