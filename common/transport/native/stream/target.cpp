#include "target.hpp"

#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "endpoint.hpp"
#include "threads.hpp"

namespace baton {

namespace {

// Connections that have not shown a secret yet; a newer one takes the place of the oldest.
constexpr size_t STRANGER_COUNT_MAX = 32;
// Connections of one writer.
constexpr size_t CONNECTION_COUNT_MAX = 16;
// As many as the kernel allows: a connection without a place waits a second.
constexpr int BACKLOG = 4096;
// How long no connection is accepted after the process has run out of descriptors.
constexpr int PAUSE_MS = 100;

// Not a socket if the port is taken. Throws StreamError.
File try_listen(const std::string& host, uint16_t port) {
    const Endpoint endpoint = endpoint_of(host, port);
    File socket(::socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) {
        throw StreamError(system_error("socket", errno));
    }
    const int yes = 1;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(socket.fd(), reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.nbytes) != 0 ||
        ::listen(socket.fd(), BACKLOG) != 0) {
        if (errno == EADDRINUSE) {
            return File();
        }
        throw StreamError(system_error("listening on " + host, errno));
    }
    return socket;
}

}  // namespace

StreamTargets::StreamTargets(const StreamBounds& bounds, bool is_encrypted) : bounds_(bounds) {
    if (is_encrypted) {
        tls_ = std::make_unique<TlsServer>([this](const TargetId& id) { return secret_of(id); });
    }
}

StreamTargets::~StreamTargets() { end(); }

uint16_t StreamTargets::listen(const std::string& host, uint16_t low, uint16_t high) {
    const std::lock_guard lock(mutex_);
    if (const auto found = listeners_.find(host); found != listeners_.end()) {
        return found->second.second;
    }
    for (uint32_t port = low; port <= high; ++port) {
        File socket = try_listen(host, static_cast<uint16_t>(port));
        if (socket.fd() < 0) {
            continue;
        }
        const uint16_t bound = port_of(socket.fd());
        listeners_[host] = {std::move(socket), bound};
        if (!acceptor_.joinable()) {
            acceptor_ = start_thread("baton-stream", [this] { accept_all(); });
        }
        wake_.raise();
        return bound;
    }
    throw StreamError("listening on " + host + ": all ports of " + std::to_string(low) + ".." +
                      std::to_string(high) + " are in use");
}

void StreamTargets::open(const TargetId& id, const Secret& secret, std::vector<StreamRegion> regions) {
    const std::lock_guard lock(mutex_);
    targets_[id] = std::make_shared<const Target>(Target{secret, std::move(regions)});
}

// Closing its sockets is the fence: only their threads store, and they have ended when this returns.
void StreamTargets::close(const TargetId& id) {
    IncomingList gone;
    {
        const std::lock_guard lock(mutex_);
        targets_.erase(id);  // admits no connection any more
        for (auto entry = incoming_.begin(); entry != incoming_.end();) {
            const auto here = entry++;
            if ((*here)->is_known && (*here)->target == id) {
                (*here)->channel.shut();
                gone.splice(gone.end(), incoming_, here);
            }
        }
    }
    join(std::move(gone));
}

void StreamTargets::end() {
    IncomingList gone;
    {
        const std::lock_guard lock(mutex_);
        is_ended_ = true;
        targets_.clear();
    }
    wake_.raise();
    if (acceptor_.joinable()) {
        acceptor_.join();
    }
    {
        const std::lock_guard lock(mutex_);
        listeners_.clear();
        for (const auto& incoming : incoming_) {
            incoming->channel.shut();
        }
        gone.swap(incoming_);
    }
    join(std::move(gone));
}

std::pair<size_t, size_t> StreamTargets::counts() {
    const std::lock_guard lock(mutex_);
    const auto is_there = [](const auto& incoming) { return !incoming->is_over; };
    return {std::count_if(incoming_.begin(), incoming_.end(), is_there),
            std::count_if(incoming_.begin(), incoming_.end(), is_stranger)};
}

void StreamTargets::join(IncomingList gone) {
    for (const auto& incoming : gone) {
        incoming->thread.join();
    }
}

// Those whose threads have ended. With the lock held.
StreamTargets::IncomingList StreamTargets::take_over() {
    IncomingList over;
    for (auto entry = incoming_.begin(); entry != incoming_.end();) {
        const auto here = entry++;
        if ((*here)->is_over) {
            over.splice(over.end(), incoming_, here);
        }
    }
    return over;
}

// The acceptor's thread ------------------------------------------------------------------------------

void StreamTargets::accept_all() {
    std::vector<pollfd> entries;
    while (true) {
        entries.assign(1, {wake_.fd(), POLLIN, 0});
        IncomingList over;
        {
            const std::lock_guard lock(mutex_);
            if (is_ended_) {
                return;
            }
            over = take_over();
            // Else those who wait are let in when a thread has ended, which wakes this one.
            const bool has_room =
                incoming_.size() < 2 * STRANGER_COUNT_MAX + CONNECTION_COUNT_MAX * targets_.size();
            for (const auto& [host, listener] : listeners_) {
                entries.push_back({listener.first.fd(), static_cast<short>(has_room ? POLLIN : 0), 0});
            }
        }
        join(std::move(over));
        if (poll(entries.data(), entries.size(), -1) <= 0) {
            continue;
        }
        if (entries[0].revents != 0) {
            wake_.lower();
        }
        for (size_t index = 1; index < entries.size(); ++index) {
            if (entries[index].revents != 0) {
                accept_one(entries[index].fd);
            }
        }
    }
}

void StreamTargets::accept_one(int listener) {
    File socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.fd() < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            pollfd entry{wake_.fd(), POLLIN, 0};
            poll(&entry, 1, PAUSE_MS);
        }
        return;  // anything else was the connection's own end
    }
    const std::lock_guard lock(mutex_);
    if (std::count_if(incoming_.begin(), incoming_.end(), is_stranger) >=
        static_cast<ptrdiff_t>(STRANGER_COUNT_MAX)) {
        const auto oldest = std::find_if(incoming_.begin(), incoming_.end(), is_stranger);
        (*oldest)->is_leaving = true;
        (*oldest)->channel.shut();
    }
    incoming_.push_back(std::make_unique<Incoming>(std::move(socket), bounds_));
    Incoming* incoming = incoming_.back().get();
    try {
        incoming->thread = start_thread("baton-stream", [this, incoming] { serve(*incoming); });
    } catch (const std::system_error&) {  // no more threads
        incoming_.pop_back();
    }
}

// The thread of one connection -----------------------------------------------------------------------

void StreamTargets::serve(Incoming& incoming) {
    try {
        const std::shared_ptr<const Target> target = admit(incoming);
        if (target != nullptr) {
            store_frames(incoming.channel, *target);
        }
    } catch (const StreamError&) {
        // The writer sees its own end close, and knows its open frames.
    } catch (const std::bad_alloc&) {
    }
    incoming.channel.shut();
    {
        const std::lock_guard lock(mutex_);
        incoming.is_over = true;
    }
    wake_.raise();
}

// The target that the connection proves to be meant for; null if there is none.
std::shared_ptr<const StreamTargets::Target> StreamTargets::admit(Incoming& incoming) {
    const auto deadline = StreamClock::now() + std::chrono::duration_cast<StreamClock::duration>(
                                                   std::chrono::duration<double>(bounds_.handshake_s));
    TargetId id{};
    Secret shown{};
    if (tls_ != nullptr) {
        incoming.channel.encrypt(tls_->open(&id), deadline);
    } else {
        Hello hello{};
        Pieces pieces;
        pieces.add(&hello, sizeof(hello));
        incoming.channel.receive_all(pieces, deadline);
        if (hello.magic != HELLO_MAGIC) {
            return nullptr;
        }
        id = hello.target;
        shown = hello.secret;
    }
    std::shared_ptr<const Target> target;
    {
        const std::lock_guard lock(mutex_);
        const auto found = targets_.find(id);
        if (found == targets_.end() ||
            (tls_ == nullptr && CRYPTO_memcmp(found->second->secret.data(), shown.data(), shown.size()) != 0)) {
            return nullptr;
        }
        const auto is_of_it = [&id](const auto& other) {
            return other->is_known && !other->is_over && other->target == id;
        };
        if (std::count_if(incoming_.begin(), incoming_.end(), is_of_it) >=
            static_cast<ptrdiff_t>(CONNECTION_COUNT_MAX)) {
            return nullptr;
        }
        target = found->second;
        incoming.target = id;
        incoming.is_known = true;
    }
    Ack ready{0};
    Pieces pieces;
    pieces.add(&ready, sizeof(ready));
    incoming.channel.send_all(pieces, deadline);
    return target;
}

// Until the connection ends. Throws StreamError at the first thing that is not as wire.hpp says.
void StreamTargets::store_frames(Channel& channel, const Target& target) {
    std::vector<WireRun> runs(RUN_COUNT_MAX);
    Pieces pieces;
    for (uint64_t sequence = 1;; ++sequence) {
        FrameHead head{};
        pieces.clear();
        pieces.add(&head, sizeof(head));
        channel.receive_all(pieces, NEVER, true);
        if (head.magic != FRAME_MAGIC || head.sequence != sequence || head.run_count < 1 ||
            head.run_count > RUN_COUNT_MAX || head.nbytes > FRAME_NBYTES_MAX) {
            throw StreamError("no frame");
        }
        pieces.clear();
        pieces.add(runs.data(), head.run_count * sizeof(WireRun));
        channel.receive_all(pieces);
        pieces.clear();
        uint64_t total = 0;
        for (uint32_t index = 0; index < head.run_count; ++index) {
            const WireRun& run = runs[index];
            if (run.region >= target.regions.size()) {
                throw StreamError("a run names no region");
            }
            const StreamRegion& region = target.regions[run.region];
            if (run.nbytes == 0 || run.nbytes > region.nbytes || run.offset > region.nbytes - run.nbytes) {
                throw StreamError("a run leaves its region");
            }
            pieces.add(region.start + run.offset, run.nbytes);
            total += run.nbytes;
        }
        if (total != head.nbytes) {
            throw StreamError("a frame of another size than its runs");
        }
        channel.receive_all(pieces);
        Ack ack{sequence};
        pieces.clear();
        pieces.add(&ack, sizeof(ack));
        channel.send_all(pieces);
    }
}

std::optional<Secret> StreamTargets::secret_of(const TargetId& id) {
    const std::lock_guard lock(mutex_);
    const auto found = targets_.find(id);
    return found == targets_.end() ? std::nullopt : std::optional(found->second->secret);
}

}  // namespace baton
