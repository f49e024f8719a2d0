// The streams of a process: its memory, the targets that others write through, and the peers it writes to.
// Python's threads call in here; the threads of targets and peers never touch Python.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "peer.hpp"
#include "target.hpp"

namespace baton {

struct StreamSettings {
    StreamBounds bounds;
    bool is_encrypted;
    size_t connection_count;  // that a writer makes to one target
};

class StreamEngine {
public:
    explicit StreamEngine(const StreamSettings& settings);
    ~StreamEngine();
    StreamEngine(const StreamEngine&) = delete;
    StreamEngine& operator=(const StreamEngine&) = delete;

    // Regions get indexes 0, 1, 2, ... in the order of these calls. Throw StreamError.
    size_t allocate(uint64_t nbytes);
    size_t enroll(uint64_t address, uint64_t nbytes);  // memory of the caller, who keeps it
    StreamRegion region(size_t index) const;

    uint16_t listen(const std::string& host, uint16_t low, uint16_t high);
    void open_target(const TargetId& id, const Secret& secret, const std::vector<size_t>& regions);
    void close_target(const TargetId& id) { targets_.close(id); }

    // Connection ids are never reused. The outcomes are events. `regions`: how large the target's are.
    void connect(uint64_t id, StreamAddress address, const std::vector<uint64_t>& regions);
    void disconnect(uint64_t id);
    void submit(uint64_t id, uint64_t tag, const PlanArrays& plan);  // throws PlanOutOfBounds
    void cancel(uint64_t tag);

    std::vector<Event> drain() { return events_.drain(); }
    bool wait(double timeout_s) const { return events_.wait(timeout_s); }
    int fd() const { return events_.fd(); }
    std::pair<size_t, size_t> incoming_counts() { return targets_.counts(); }
    void close();

private:
    void forget_gone();

    const StreamSettings settings_;
    std::unique_ptr<TlsClient> tls_;
    EventQueue events_;
    mutable std::mutex mutex_;
    std::vector<StreamRegion> regions_;
    std::map<uint64_t, std::unique_ptr<StreamPeer>> peers_;
    bool is_closed_ = false;
    StreamTargets targets_;
};

}  // namespace baton
