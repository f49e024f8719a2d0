// The side that stores: listens, lets those in that know a target's secret, and checks every frame against
// that target's regions before a byte of it is stored.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "channel.hpp"

namespace baton {

// Memory of this process that a target lets its writer store into.
struct StreamRegion {
    char* start;
    uint64_t nbytes;
    std::shared_ptr<void> owner;
};

class StreamTargets {
public:
    StreamTargets(const StreamBounds& bounds, bool is_encrypted);
    ~StreamTargets();
    StreamTargets(const StreamTargets&) = delete;
    StreamTargets& operator=(const StreamTargets&) = delete;

    // Listens at a numeric host, on the first port in low..high that is free (0: any), and says which.
    // A host is listened on once. Throws StreamError.
    uint16_t listen(const std::string& host, uint16_t low, uint16_t high);
    void open(const TargetId& id, const Secret& secret, std::vector<StreamRegion> regions);
    // Returns when no thread stores anything for this target any more.
    void close(const TargetId& id);
    void end();
    // Connections, and those of them that have not shown a secret yet.
    std::pair<size_t, size_t> counts();

private:
    struct Target {
        Secret secret;
        std::vector<StreamRegion> regions;
    };
    // One accepted connection and the thread that serves it.
    struct Incoming {
        Incoming(File socket, const StreamBounds& bounds) : channel(std::move(socket), bounds) {}
        Channel channel;
        std::thread thread;
        TargetId target{};
        bool is_known = false;    // has shown the secret of `target`
        bool is_leaving = false;  // its socket was shut: a newer one has its place
        bool is_over = false;     // its thread touches nothing any more but the end of itself
    };
    using IncomingList = std::list<std::unique_ptr<Incoming>>;

    static bool is_stranger(const std::unique_ptr<Incoming>& incoming) {
        return !incoming->is_known && !incoming->is_leaving && !incoming->is_over;
    }
    void accept_all();
    void accept_one(int listener);
    void serve(Incoming& incoming);
    std::shared_ptr<const Target> admit(Incoming& incoming);
    void store_frames(Channel& channel, const Target& target);
    std::optional<Secret> secret_of(const TargetId& id);
    IncomingList take_over();
    static void join(IncomingList gone);

    const StreamBounds bounds_;
    std::unique_ptr<TlsServer> tls_;  // null if nothing is encrypted
    Signal wake_;
    std::thread acceptor_;

    std::mutex mutex_;
    std::map<std::string, std::pair<File, uint16_t>> listeners_;
    std::map<TargetId, std::shared_ptr<const Target>> targets_;
    IncomingList incoming_;
    bool is_ended_ = false;
};

}  // namespace baton
