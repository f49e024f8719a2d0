// The engine of a process: one UCX context and one thread that makes every UCX call.
//
// Python's threads only post commands and fetch events; the progress thread never touches Python, so
// transfers proceed while the interpreter is busy or its lock is held.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "batch.hpp"
#include "config.hpp"
#include "memory.hpp"
#include "peer.hpp"
#include "queues.hpp"
#include "spare_files.hpp"
#include "worker.hpp"

namespace baton {

class Engine {
public:
    explicit Engine(const EngineSettings& settings);  // throws UcxError
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Regions get indexes 0, 1, 2, ... in the order of these calls.
    size_t allocate(uint64_t nbytes);
    size_t enroll(uint64_t address, uint64_t nbytes, ucs_memory_type_t type);
    std::shared_ptr<Memory> region(size_t index) const;
    // Scratch memory that connecting peers write to; never part of a plan.
    std::shared_ptr<Memory> probe() const { return probe_; }

    // A worker that one peer incarnation writes through, and its address. Destroying the worker is the
    // proof that nothing more arrives over tcp: the sockets belong to it.
    std::string open_target(uint64_t id);
    void close_target(uint64_t id);

    // Connection ids are never reused. The outcomes are events; after engine_failed none comes.
    void connect(uint64_t id, std::string worker_address, std::vector<RemoteRegionSpec> regions,
                 RemoteRegionSpec probe);
    // The same, but false, and no event, if no transport of UCX reaches that worker.
    bool try_connect(uint64_t id, std::string worker_address, std::vector<RemoteRegionSpec> regions,
                     RemoteRegionSpec probe);
    void disconnect(uint64_t id);
    void submit(uint64_t id, uint64_t tag, const PlanArrays& plan);  // throws PlanOutOfBounds
    void cancel(uint64_t tag);

    std::vector<Event> drain() { return events_.drain(); }
    bool wait(double timeout_s) const { return events_.wait(timeout_s); }
    int fd() const { return events_.fd(); }
    void close();

private:
    void run(const EngineSettings& settings, std::promise<void> started);
    void start(const EngineSettings& settings);
    void loop();
    void release();
    void fail(const std::string& reason);
    bool run_commands();
    bool turn_peers();
    bool progress_workers();
    bool has_news() const;
    bool is_closing() const;
    void sleep();
    void watch(int fd, Worker* worker) const;
    Peer& add_peer(uint64_t id, std::vector<RemoteRegionSpec> regions, RemoteRegionSpec probe);
    void remember_extents(uint64_t id, const std::vector<RemoteRegionSpec>& regions);
    size_t add_region(std::shared_ptr<Memory> memory);
    Peer* find_peer(uint64_t id);
    void settle_gone(uint64_t tag);
    void post(CommandQueue::Command command);
    std::string why_closed() const;
    // Runs `work` on the progress thread and waits for its result.
    template <typename Result>
    Result call(std::function<Result()> work);

    CommandQueue commands_;
    EventQueue events_;
    std::thread thread_;

    // Shared with Python's threads.
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<Memory>> regions_;                // written by the progress thread only
    std::map<uint64_t, std::vector<Extent>> open_targets_;  // by connection
    bool is_closed_ = false;
    std::string failure_;

    // Progress thread only.
    std::shared_ptr<Context> context_;
    std::vector<char> probe_bytes_;
    std::shared_ptr<Memory> probe_;  // set before the constructor returns
    std::unique_ptr<Worker> initiator_;
    std::map<uint64_t, std::unique_ptr<Worker>> target_workers_;
    std::vector<std::unique_ptr<Peer>> peers_;
    SpareFiles spare_files_;
    int epoll_fd_ = -1;
    bool is_stopping_ = false;
    const int spin_us_;
    const double close_patience_s_;
    const bool owns_cuda_memory_;
};

}  // namespace baton
