// The side that writes: one peer, its connections with a thread each, and its open batches.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../batch.hpp"
#include "../queues.hpp"
#include "channel.hpp"

namespace baton {

struct StreamAddress {
    std::string host;  // numeric
    uint16_t port;
    TlsClient::Key key;
};

class StreamPeer {
public:
    // tls: null if nothing is encrypted. Events are pushed from the threads of its connections.
    StreamPeer(uint64_t id, StreamAddress address, std::vector<Extent> regions, size_t connection_count,
               const StreamBounds& bounds, const TlsClient* tls, EventQueue& events);
    ~StreamPeer();
    StreamPeer(const StreamPeer&) = delete;
    StreamPeer& operator=(const StreamPeer&) = delete;

    const std::vector<Extent>& regions() const { return regions_; }
    // Throws std::system_error if there can't be as many threads.
    void start();
    void submit(std::unique_ptr<Batch> batch);
    void cancel(uint64_t tag);
    void disconnect();
    // Its last event was pushed: the threads end without another one.
    bool is_gone() const { return is_gone_; }

private:
    // A frame that was not acknowledged.
    struct InFlight {
        Batch* batch;
        double cpu_seconds;
    };
    struct Connection {
        std::unique_ptr<Channel> channel;
        Signal wake;
        std::thread thread;
        // The rest is its thread's alone.
        std::vector<WireRun> runs;
        FrameHead head{};
        Pieces pieces;  // of the frame that leaves
        std::deque<InFlight> in_flight;
        Ack ack{};
        Pieces ack_pieces;
        uint64_t sent_sequence = 0;
        uint64_t acked_sequence = 0;
    };

    void run(Connection& connection);
    void connect(Connection& connection);
    void pump(Connection& connection);
    bool begin_frame(Connection& connection);
    void fill_frame(Connection& connection, Batch& batch);
    bool send_frame(Connection& connection);
    bool take_ack(Connection& connection);
    void fail(const std::string& reason);
    bool has_failed();
    void note_ready();
    void settle_over();
    void end_connection();

    const uint64_t id_;
    StreamAddress address_;
    const std::vector<Extent> regions_;
    const StreamBounds bounds_;
    const TlsClient* const tls_;
    EventQueue& events_;
    std::vector<std::unique_ptr<Connection>> connections_;
    std::atomic<bool> is_gone_ = false;

    std::mutex mutex_;
    std::list<std::unique_ptr<Batch>> batches_;  // whose turn it is, first
    size_t ready_count_ = 0;
    size_t ended_count_ = 0;
    bool is_disconnect_ = false;
    std::string failure_;
};

}  // namespace baton
