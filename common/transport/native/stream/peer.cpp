#include "peer.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "endpoint.hpp"
#include "threads.hpp"

namespace baton {

namespace {

// Frames of one connection that the target has not acknowledged: one that it stores, one on the way, and
// some more for a long way.
constexpr size_t IN_FLIGHT_COUNT_MAX = 8;

double thread_cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

StreamPeer::StreamPeer(uint64_t id, StreamAddress address, std::vector<Extent> regions,
                       size_t connection_count, const StreamBounds& bounds, const TlsClient* tls,
                       EventQueue& events)
    : id_(id), address_(std::move(address)), regions_(std::move(regions)), bounds_(bounds), tls_(tls),
      events_(events) {
    for (size_t index = 0; index < connection_count; ++index) {
        connections_.push_back(std::make_unique<Connection>());
    }
}

StreamPeer::~StreamPeer() {
    disconnect();
    for (const auto& connection : connections_) {
        if (connection->thread.joinable()) {
            connection->thread.join();
        }
    }
}

// Called on Python's threads --------------------------------------------------------------------------

void StreamPeer::start() {
    for (const auto& connection : connections_) {
        try {
            connection->thread = start_thread("baton-stream", [this, &connection] { run(*connection); });
        } catch (const std::system_error& error) {
            fail(std::string("no thread: ") + error.what());
            end_connection();
        }
    }
}

void StreamPeer::submit(std::unique_ptr<Batch> batch) {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
        batch->stop(failure_);
    }
    batches_.push_back(std::move(batch));
    settle_over();
    for (const auto& connection : connections_) {
        connection->wake.raise();
    }
}

void StreamPeer::cancel(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    for (const auto& batch : batches_) {
        if (batch->tag == tag && !batch->is_issued()) {
            batch->stop("cancelled");
        }
    }
    settle_over();
}

void StreamPeer::disconnect() {
    {
        const std::lock_guard lock(mutex_);
        is_disconnect_ = true;
    }
    fail("the connection was closed here");
}

// From any thread --------------------------------------------------------------------------------------

// Ends every connection; the first reason wins.
void StreamPeer::fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
        failure_ = reason;
    }
    for (const auto& connection : connections_) {
        if (connection->channel != nullptr) {
            connection->channel->shut();
        }
        connection->wake.raise();
    }
}

bool StreamPeer::has_failed() {
    const std::lock_guard lock(mutex_);
    return !failure_.empty();
}

// Settles batches with no frame under way and none left to begin. With the lock held.
void StreamPeer::settle_over() {
    const bool is_ready = ready_count_ == connections_.size();
    for (auto entry = batches_.begin(); entry != batches_.end();) {
        const Batch& batch = **entry;
        const bool is_over = batch.outstanding == 0 && (batch.is_stopped() || (is_ready && batch.is_issued()));
        if (is_over) {
            events_.push(batch.settle(true));
            entry = batches_.erase(entry);
        } else {
            ++entry;
        }
    }
}

void StreamPeer::note_ready() {
    const std::lock_guard lock(mutex_);
    if (++ready_count_ == connections_.size() && failure_.empty()) {
        events_.push(Event{EventKind::peer_connected, id_, "stream"});
        settle_over();
        for (const auto& connection : connections_) {
            connection->wake.raise();
        }
    }
}

// The last connection that ends settles the open batches. Frames that were not acknowledged may still be
// carried, and stored, until the target has closed its end.
void StreamPeer::end_connection() {
    const std::lock_guard lock(mutex_);
    if (++ended_count_ < connections_.size()) {
        return;
    }
    for (const auto& batch : batches_) {
        batch->stop(failure_);
        events_.push(batch->settle(batch->outstanding == 0));
    }
    batches_.clear();
    is_gone_ = true;
    events_.push(is_disconnect_ ? Event{EventKind::peer_closed, id_}
                                : Event{EventKind::peer_failed, id_, failure_});
}

// The threads of the connections ------------------------------------------------------------------------

void StreamPeer::run(Connection& connection) {
    try {
        connect(connection);
        note_ready();
        pump(connection);
    } catch (const std::exception& error) {
        fail(error.what());
    }
    end_connection();
}

void StreamPeer::connect(Connection& connection) {
    const auto deadline = StreamClock::now() + std::chrono::duration_cast<StreamClock::duration>(
                                                   std::chrono::duration<double>(bounds_.handshake_s));
    const Endpoint endpoint = endpoint_of(address_.host, address_.port);
    File socket(::socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) {
        throw StreamError(system_error("socket", errno));
    }
    auto channel = std::make_unique<Channel>(std::move(socket), bounds_);
    if (::connect(channel->fd(), reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.nbytes) != 0 &&
        errno != EINPROGRESS) {
        throw StreamError(system_error("connect", errno));
    }
    Channel& opened = *channel;
    {
        const std::lock_guard lock(mutex_);
        connection.channel = std::move(channel);
        if (!failure_.empty()) {
            throw StreamError(failure_);
        }
    }
    if (!opened.wait(POLLOUT, &connection.wake, deadline)) {
        throw StreamError("no connection in time");
    }
    int error = 0;
    socklen_t nbytes = sizeof(error);
    getsockopt(opened.fd(), SOL_SOCKET, SO_ERROR, &error, &nbytes);
    if (error != 0) {
        throw StreamError(system_error("connect", error));
    }
    if (tls_ != nullptr) {
        opened.encrypt(tls_->open(&address_.key), deadline);
    } else {
        Hello hello{HELLO_MAGIC, address_.key.target, address_.key.secret};
        Pieces pieces;
        pieces.add(&hello, sizeof(hello));
        opened.send_all(pieces, deadline);
    }
    Ack ready{1};
    Pieces pieces;
    pieces.add(&ready, sizeof(ready));
    opened.receive_all(pieces, deadline);
    if (ready.sequence != 0) {
        throw StreamError("what answers is no target");
    }
}

void StreamPeer::pump(Connection& connection) {
    Channel& channel = *connection.channel;
    connection.ack_pieces.add(&connection.ack, sizeof(connection.ack));
    auto stalls_at = channel.stall_deadline();
    while (!has_failed()) {
        bool has_moved = connection.pieces.is_empty() && !channel.has_unsent() && begin_frame(connection);
        has_moved |= send_frame(connection);
        has_moved |= take_ack(connection);
        if (has_moved) {
            stalls_at = channel.stall_deadline();
            continue;
        }
        const bool is_sending = !connection.pieces.is_empty() || channel.has_unsent();
        const short events = static_cast<short>(is_sending ? POLLIN | POLLOUT : POLLIN);
        if (!channel.wait(events, &connection.wake, connection.in_flight.empty() ? NEVER : stalls_at)) {
            throw StreamError("the peer stopped in the middle");
        }
        connection.wake.lower();
        if (connection.in_flight.empty()) {
            stalls_at = channel.stall_deadline();
        }
    }
}

// The next frame of the batch whose turn it is; false if there is none, or too much is under way.
bool StreamPeer::begin_frame(Connection& connection) {
    if (connection.in_flight.size() >= IN_FLIGHT_COUNT_MAX) {
        return false;
    }
    const std::lock_guard lock(mutex_);
    const auto found = ready_count_ < connections_.size()
                           ? batches_.end()
                           : std::find_if(batches_.begin(), batches_.end(),
                                          [](const auto& batch) { return !batch->is_issued(); });
    if (found == batches_.end()) {
        return false;
    }
    Batch& batch = **found;
    fill_frame(connection, batch);
    ++batch.outstanding;
    connection.in_flight.push_back({&batch, 0});
    batches_.splice(batches_.end(), batches_, found);
    return true;
}

void StreamPeer::fill_frame(Connection& connection, Batch& batch) {
    connection.runs.clear();
    connection.pieces.clear();
    connection.head = {FRAME_MAGIC, 0, 0, ++connection.sent_sequence};
    const size_t first = batch.next;
    const uint64_t first_offset = batch.next_offset;
    FrameHead& head = connection.head;
    while (!batch.is_issued() && head.run_count < RUN_COUNT_MAX && head.nbytes < FRAME_NBYTES_MAX) {
        const Run& run = batch.runs[batch.next];
        const uint64_t nbytes = std::min(run.nbytes - batch.next_offset, FRAME_NBYTES_MAX - head.nbytes);
        connection.runs.push_back(
            {run.target_region, static_cast<uint32_t>(nbytes), run.target + batch.next_offset});
        head.nbytes += nbytes;
        ++head.run_count;
        batch.next_offset += nbytes;
        if (batch.next_offset == run.nbytes) {
            batch.next_offset = 0;
            ++batch.next;
        }
    }
    batch.issued_nbytes += static_cast<int64_t>(head.nbytes);
    connection.pieces.add(&head, sizeof(head));
    connection.pieces.add(connection.runs.data(), connection.runs.size() * sizeof(WireRun));
    uint64_t offset = first_offset;
    for (size_t index = 0; index < connection.runs.size(); ++index) {
        connection.pieces.add(reinterpret_cast<void*>(batch.runs[first + index].source + offset),
                              connection.runs[index].nbytes);
        offset = 0;
    }
}

bool StreamPeer::send_frame(Connection& connection) {
    if (connection.pieces.is_empty() && !connection.channel->has_unsent()) {
        return false;
    }
    const double before = thread_cpu_seconds();
    const bool has_sent = connection.channel->send_some(connection.pieces);
    // The frame that leaves is the last of those under way.
    connection.in_flight.back().cpu_seconds += thread_cpu_seconds() - before;
    return has_sent;
}

bool StreamPeer::take_ack(Connection& connection) {
    if (!connection.channel->receive_some(connection.ack_pieces)) {
        return false;
    }
    if (!connection.ack_pieces.is_empty()) {
        return true;
    }
    connection.ack_pieces.clear();
    connection.ack_pieces.add(&connection.ack, sizeof(connection.ack));
    if (connection.in_flight.empty() || connection.ack.sequence != ++connection.acked_sequence) {
        throw StreamError("the peer acknowledged what was not sent");
    }
    const std::lock_guard lock(mutex_);
    const InFlight& stored = connection.in_flight.front();
    --stored.batch->outstanding;
    stored.batch->issue_seconds += stored.cpu_seconds;
    connection.in_flight.pop_front();
    settle_over();
    return true;
}

}  // namespace baton
