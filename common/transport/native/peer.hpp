// One connection to a peer we write to: its endpoint, the keys of its memory and its open batches.
// Lives on the progress thread only.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "batch.hpp"
#include "cuda.hpp"
#include "memory.hpp"
#include "queues.hpp"
#include "worker.hpp"

namespace baton {

// A region as the peer announced it.
struct RemoteRegionSpec {
    uint64_t address;
    uint64_t nbytes;
    std::string key;
};

class Peer {
public:
    using Sources = std::vector<std::shared_ptr<Memory>>;
    static constexpr uint64_t PROBE_NBYTES_MAX = 16384;

    // `probe` is scratch memory of the peer, written once while connecting. `owns_cuda_memory`: whether
    // sources may lie on a device; else runs into shared memory of this host are copied here instead of
    // put by UCX. `close_patience_s`: how long operations may go on after the connection was closed by
    // force; then `turn` throws.
    Peer(uint64_t id, Worker& worker, EventQueue& events, const Sources& sources,
         std::vector<RemoteRegionSpec> regions, RemoteRegionSpec probe, bool owns_cuda_memory,
         double close_patience_s);
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    // False if no transport of UCX reaches that worker. Other obstacles are failures of the connection.
    bool reach(const std::string& worker_address);
    void submit(std::unique_ptr<Batch> batch);
    void cancel(uint64_t tag);
    void disconnect();
    // Closes the connection in the next turn. The first reason wins.
    void fail(const std::string& reason);
    // The worker is destroyed already: settles the open batches. The keys went with the worker.
    void abandon();
    // One turn: moves every batch a little. True if anything happened. Throws UcxError.
    bool turn();
    // A callback has come since the last turn.
    bool has_news() const { return has_news_; }
    bool is_gone() const { return state_ == State::gone; }
    // It has failed, or was asked to, and is not gone yet.
    bool is_closing() const { return !failure_.empty(); }
    uint64_t id() const { return id_; }

private:
    enum class State { populating, probing, open, closing, gone };
    struct RemoteRegion {
        RemoteRegionSpec spec;
        ucp_rkey_h key = nullptr;
        // The peer's memory in our address space, if it is shared memory of this host. Runs into it
        // are plain copies: the same stores that UCX's own shared-memory put would make, without the
        // per-put protocol selection, and certain not to be carried by anything else.
        char* mapped = nullptr;
    };

    void unpack_keys();
    RemoteRegion unpack_key(RemoteRegionSpec spec) const;
    bool populate_slice();
    void probe();
    bool finish_connecting();
    bool begin_close();
    bool finish_close();
    bool has_device_answered();
    void spend_patience();
    bool pump();
    bool advance(Batch& batch);
    void issue_slice(Batch& batch);
    uint64_t copy_slice(Batch& batch, const Run& run, const RemoteRegion& region, uint64_t budget);
    uint64_t put(Batch& batch, const Run& run, const RemoteRegion& region);
    void start_flush(Batch& batch);
    void fail_put(Batch& batch, ucs_status_t status);
    void fail_flush(Batch& batch, ucs_status_t status);
    void settle(const Batch& batch);
    void settle_stopped();
    void push_last_event();
    std::string transports() const;
    void track(ucs_status_ptr_t request, const char* what);

    static void on_endpoint_error(void* peer, ucp_ep_h, ucs_status_t status);
    static void on_put(void* request, ucs_status_t status, void* batch);
    static void on_flush(void* request, ucs_status_t status, void* batch);
    static void on_own_request(void* request, ucs_status_t status, void* peer);
    static void on_close(void* request, ucs_status_t status, void* peer);

    const uint64_t id_;
    Worker& worker_;
    EventQueue& events_;
    const Sources& sources_;
    const bool owns_cuda_memory_;
    const double close_patience_s_;
    std::vector<RemoteRegionSpec> specs_;
    RemoteRegionSpec probe_spec_;
    std::vector<RemoteRegion> regions_;
    RemoteRegion probe_;
    ucp_ep_h endpoint_ = nullptr;
    State state_ = State::populating;
    size_t populate_region_ = 0;
    uint64_t populate_offset_ = 0;
    double closing_seconds_ = 0;
    std::chrono::steady_clock::time_point closing_turn_;
    uint32_t own_outstanding_ = 0;  // probe, connecting flush and close
    bool must_ask_device_ = false;
    std::unique_ptr<DeviceWait> device_wait_;
    bool is_disconnect_ = false;
    bool has_news_ = false;
    std::string failure_;
    std::deque<std::unique_ptr<Batch>> batches_;
};

}  // namespace baton
