// The two queues between Python's threads and the progress thread. Values only, never shared state.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace baton {

enum class EventKind : int {
    peer_connected = 0,
    peer_failed = 1,
    peer_closed = 2,
    transfer_settled = 3,
    engine_failed = 4,  // the last one there is
};

struct Event {
    EventKind kind;
    uint64_t id = 0;          // connection id, or tag of a settled transfer
    std::string text = {};    // transports of a connection, or the reason of a failure; empty is success
    bool is_quiet = true;     // no byte of this transfer can reach the target any more
    int64_t nbytes = 0;       // bytes issued
    int64_t runs = 0;         // puts issued
    double seconds = 0;       // from submission to this event
    double issue_seconds = 0; // CPU time of the progress thread spent issuing
};

// An eventfd that is readable while events wait to be fetched.
class Signal {
public:
    Signal();
    ~Signal();
    Signal(const Signal&) = delete;
    Signal& operator=(const Signal&) = delete;
    int fd() const { return fd_; }
    void raise() const;
    void lower() const;

private:
    int fd_;
};

// Progress thread -> Python. Bounded by Python's submits: one event per batch, and at most two
// per connection.
class EventQueue {
public:
    void push(Event event);
    std::vector<Event> drain();
    bool wait(double timeout_s) const;  // true if there is something to drain
    int fd() const { return signal_.fd(); }

private:
    std::mutex mutex_;
    std::deque<Event> events_;
    Signal signal_;
};

// Python -> progress thread. The signal is raised only while the thread sleeps or is about to.
class CommandQueue {
public:
    using Command = std::function<void()>;
    void post(Command command);
    std::vector<Command> take();
    bool begin_sleep();  // false if a command has come meanwhile
    void end_sleep();
    int fd() const { return signal_.fd(); }

private:
    std::mutex mutex_;
    std::vector<Command> commands_;
    bool is_sleeping_ = false;
    Signal signal_;
};

}  // namespace baton
