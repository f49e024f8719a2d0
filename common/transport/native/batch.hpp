// One submitted CopyPlan: checked, resolved to addresses, with its outcome.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "queues.hpp"

namespace baton {

// A run leaves its source or target region. Nothing of the batch has been written.
struct PlanOutOfBounds : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The five int64 arrays of a CopyPlan, borrowed from Python.
struct PlanArrays {
    const int64_t* source_region;
    const int64_t* source_offset;
    const int64_t* target_region;
    const int64_t* target_offset;
    const int64_t* nbytes;
    size_t run_count;
};

// Where a region lies: in this process, or in the address space of the peer.
struct Extent {
    uint64_t address;
    uint64_t nbytes;
};

class Peer;

struct Run {
    uint64_t source;
    uint64_t target;  // in the address space that the targets were given in
    uint64_t nbytes;
    uint32_t source_region;
    uint32_t target_region;
};

class Batch {
public:
    // Throws PlanOutOfBounds. Called on the submitting thread.
    Batch(uint64_t tag, const PlanArrays& plan, const std::vector<Extent>& sources,
          const std::vector<Extent>& targets);

    bool is_stopped() const { return !error_.empty(); }
    bool is_issued() const { return is_stopped() || next == runs.size(); }
    void stop(const std::string& reason);  // the first reason wins
    Event settle(bool is_quiet) const;

    const uint64_t tag;
    std::vector<Run> runs;
    size_t next = 0;              // first run not yet issued in full
    uint64_t next_offset = 0;     // bytes of that run already issued
    uint32_t window = 0;          // puts that may be outstanding
    uint32_t outstanding = 0;     // callbacks or acknowledgements still to come, the flush included
    bool has_remote_puts = false; // some run went through a UCX operation
    bool is_flush_started = false;
    bool is_flushed = false;
    Peer* owner = nullptr;        // set with `submit`
    int64_t issued_nbytes = 0;
    double issue_seconds = 0;

private:
    std::string error_;
    std::chrono::steady_clock::time_point submitted_;
};

}  // namespace baton
