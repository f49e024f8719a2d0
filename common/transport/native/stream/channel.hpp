// One connected socket, encrypted or not: never waits, unless it is asked to, and then for so long at most.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../queues.hpp"
#include "tls.hpp"

namespace baton {

using StreamClock = std::chrono::steady_clock;
constexpr auto NEVER = StreamClock::time_point::max();

// The connection can't be made, or not be used any more. The text says why.
struct StreamError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

std::string system_error(const std::string& what, int error);

// A file descriptor of ours.
class File {
public:
    explicit File(int fd = -1) : fd_(fd) {}
    ~File() { close(); }
    File(File&& other) noexcept : fd_(other.release()) {}
    File& operator=(File&& other) noexcept;
    int fd() const { return fd_; }
    void close();
    int release();

private:
    int fd_;
};

// Pieces of memory that are still to be moved, of which several at a time go into a system call.
class Pieces {
public:
    void clear();
    void add(void* start, size_t nbytes);
    bool is_empty() const { return first_ == pieces_.size(); }
    const iovec* data() const { return pieces_.data() + first_; }
    size_t count() const;
    void advance(size_t nbytes);

private:
    std::vector<iovec> pieces_;
    size_t first_ = 0;
};

// Bounds that a connection keeps, on both sides.
struct StreamBounds {
    double handshake_s;   // until a connection is ready
    double stall_s;       // without a byte where one is due
    double keepalive_s;   // between two probes of an idle connection
    int spin_us;          // how long to look on before sleeping
    uint64_t rekey_nbytes;  // bytes that one TLS key encrypts
};

class Channel {
public:
    // Takes a connected socket, or one that is connecting, over.
    Channel(File socket, const StreamBounds& bounds);
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // Encrypts from here on. Returns when the TLS handshake is done. Throws StreamError.
    void encrypt(SslPtr ssl, StreamClock::time_point deadline);

    // Move some of the pieces without waiting; true if any byte moved. Throws StreamError.
    bool send_some(Pieces& pieces);
    bool receive_some(Pieces& pieces);
    // Whether bytes that were taken from the caller have not left yet.
    bool has_unsent() const { return ssl_ != nullptr && BIO_pending(out_) > out_sent_; }
    // Move all of them by `deadline`; without one, the peer may stand still for `stall_s`. `is_idle`: the
    // first byte may take for ever. They throw StreamError, also if another thread calls `shut`.
    void send_all(Pieces& pieces, StreamClock::time_point deadline = NEVER);
    void receive_all(Pieces& pieces, StreamClock::time_point deadline = NEVER, bool is_idle = false);
    // Sleep until one of the poll `events` is there, or `wake` is raised, or it is `until`: then false.
    bool wait(short events, const Signal* wake, StreamClock::time_point until);

    // Nothing is received any more from here on, by any thread. From any thread.
    void shut() const;
    int fd() const { return socket_.fd(); }
    StreamClock::time_point stall_deadline() const;

private:
    void encrypt_record(Pieces& pieces);
    bool flush_unsent();
    void renew_key(uint64_t nbytes);
    [[noreturn]] void fail_tls(int result);

    File socket_;
    const StreamBounds bounds_;
    SslPtr ssl_;
    BIO* out_ = nullptr;                 // of ssl_: encrypted bytes that have not left
    long out_sent_ = 0;                  // bytes of it that have left
    std::vector<unsigned char> record_;  // short pieces, gathered
    uint64_t key_nbytes_ = 0;
};

}  // namespace baton
