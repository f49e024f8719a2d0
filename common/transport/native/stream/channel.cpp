#include "channel.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

namespace baton {

namespace {

constexpr size_t RECORD_NBYTES = 16 << 10;  // the most that TLS encrypts at once
constexpr long OUT_NBYTES = 128 << 10;      // that are encrypted before they leave
const char* const CLOSED_BY_PEER = "the peer closed the connection";

void set_option(int fd, int level, int name, int value) {
    // Advice: a socket without it still moves bytes.
    setsockopt(fd, level, name, &value, sizeof(value));
}

int milliseconds_until(StreamClock::time_point until) {
    if (until == NEVER) {
        return -1;
    }
    const std::chrono::duration<double, std::milli> left = until - StreamClock::now();
    return static_cast<int>(std::clamp(std::ceil(left.count()), 0.0, 60'000.0));
}

}  // namespace

std::string system_error(const std::string& what, int error) {
    return what + ": " + std::generic_category().message(error);
}

File& File::operator=(File&& other) noexcept {
    close();
    fd_ = other.release();
    return *this;
}

void File::close() {
    if (fd_ >= 0) {
        ::close(std::exchange(fd_, -1));
    }
}

int File::release() { return std::exchange(fd_, -1); }

void Pieces::clear() {
    pieces_.clear();
    first_ = 0;
}

void Pieces::add(void* start, size_t nbytes) {
    if (nbytes > 0) {
        pieces_.push_back({start, nbytes});
    }
}

size_t Pieces::count() const { return std::min<size_t>(pieces_.size() - first_, RUN_COUNT_MAX + 2); }

void Pieces::advance(size_t nbytes) {
    while (nbytes > 0) {
        iovec& piece = pieces_[first_];
        const size_t step = std::min(nbytes, piece.iov_len);
        piece.iov_base = static_cast<char*>(piece.iov_base) + step;
        piece.iov_len -= step;
        nbytes -= step;
        if (piece.iov_len == 0) {
            ++first_;
        }
    }
}

Channel::Channel(File socket, const StreamBounds& bounds) : socket_(std::move(socket)), bounds_(bounds) {
    set_option(fd(), IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd(), SOL_SOCKET, SO_KEEPALIVE, 1);
    const int interval_s = std::max(1, static_cast<int>(bounds.keepalive_s));
    set_option(fd(), IPPROTO_TCP, TCP_KEEPIDLE, interval_s);
    set_option(fd(), IPPROTO_TCP, TCP_KEEPINTVL, interval_s);
    set_option(fd(), IPPROTO_TCP, TCP_KEEPCNT, 3);
    // Unsent bytes are dropped at close.
    const linger drop{1, 0};
    setsockopt(fd(), SOL_SOCKET, SO_LINGER, &drop, sizeof(drop));
}

void Channel::shut() const { shutdown(fd(), SHUT_RDWR); }

StreamClock::time_point Channel::stall_deadline() const {
    return StreamClock::now() +
           std::chrono::duration_cast<StreamClock::duration>(std::chrono::duration<double>(bounds_.stall_s));
}

// Records are encrypted into memory, and many of them leave with one system call.
void Channel::encrypt(SslPtr ssl, StreamClock::time_point deadline) {
    BIO* in = BIO_new_socket(fd(), BIO_NOCLOSE);
    out_ = BIO_new(BIO_s_mem());
    if (in == nullptr || out_ == nullptr) {
        BIO_free(in);
        BIO_free(out_);
        throw std::bad_alloc();
    }
    SSL_set_bio(ssl.get(), in, out_);  // which owns them now
    ssl_ = std::move(ssl);
    Pieces nothing;
    while (true) {
        ERR_clear_error();
        const int result = SSL_do_handshake(ssl_.get());
        const bool is_waiting = result != 1 && SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ;
        if (result != 1 && !is_waiting) {
            flush_unsent();  // the alert that tells the peer why
            fail_tls(result);
        }
        send_all(nothing, deadline);
        if (result == 1) {
            return;
        }
        if (!wait(POLLIN, nullptr, deadline)) {
            throw StreamError("no TLS handshake in time");
        }
    }
}

void Channel::fail_tls(int result) {
    const int error = errno;
    if (SSL_get_error(ssl_.get(), result) == SSL_ERROR_SYSCALL && ERR_peek_error() == 0 && error != 0) {
        throw StreamError(system_error("receive", error));
    }
    throw StreamError(tls_failure(ssl_.get(), result));
}

bool Channel::send_some(Pieces& pieces) {
    if (ssl_ != nullptr) {
        while (!pieces.is_empty() && BIO_pending(out_) < OUT_NBYTES) {
            encrypt_record(pieces);
        }
        return flush_unsent();
    }
    if (pieces.is_empty()) {
        return false;
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.count();
    const ssize_t sent = sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
        pieces.advance(static_cast<size_t>(sent));
        return sent > 0;
    }
    if (errno == EAGAIN || errno == EINTR) {
        return false;
    }
    throw StreamError(system_error("send", errno));
}

// One record of a long piece as it lies, or of many short ones gathered.
void Channel::encrypt_record(Pieces& pieces) {
    const iovec* piece = pieces.data();
    const void* start = piece->iov_base;
    size_t nbytes = RECORD_NBYTES;
    if (piece->iov_len < RECORD_NBYTES) {
        record_.clear();
        for (const iovec* end = piece + pieces.count(); piece != end && record_.size() < RECORD_NBYTES; ++piece) {
            const auto* bytes = static_cast<const unsigned char*>(piece->iov_base);
            record_.insert(record_.end(), bytes, bytes + std::min(piece->iov_len, RECORD_NBYTES - record_.size()));
        }
        start = record_.data();
        nbytes = record_.size();
    }
    ERR_clear_error();
    const int result = SSL_write(ssl_.get(), start, static_cast<int>(nbytes));
    if (result <= 0) {
        fail_tls(result);
    }
    pieces.advance(static_cast<size_t>(result));
    renew_key(static_cast<uint64_t>(result));
}

bool Channel::flush_unsent() {
    char* start = nullptr;
    const long nbytes = BIO_get_mem_data(out_, &start);
    if (nbytes == out_sent_) {
        return false;
    }
    const ssize_t sent =
        send(fd(), start + out_sent_, static_cast<size_t>(nbytes - out_sent_), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        throw StreamError(system_error("send", errno));
    }
    out_sent_ += std::max<ssize_t>(sent, 0);
    if (out_sent_ == nbytes) {
        out_sent_ = 0;
        BIO_reset(out_);
    }
    return sent > 0;
}

// One key of AES-GCM is good for some 400 GiB (RFC 8446, 5.5), and OpenSSL leaves the count to us.
void Channel::renew_key(uint64_t nbytes) {
    key_nbytes_ += nbytes;
    if (key_nbytes_ >= bounds_.rekey_nbytes) {
        key_nbytes_ = 0;
        if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) {
            throw StreamError(tls_failure(ssl_.get(), 0));
        }
    }
}

bool Channel::receive_some(Pieces& pieces) {
    if (pieces.is_empty()) {
        return false;
    }
    if (ssl_ != nullptr) {
        ERR_clear_error();
        errno = 0;
        const size_t room = std::min<size_t>(pieces.data()->iov_len, 1 << 30);
        const int result = SSL_read(ssl_.get(), pieces.data()->iov_base, static_cast<int>(room));
        if (result <= 0 && SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ) {
            return false;
        }
        if (result <= 0) {
            fail_tls(result);
        }
        pieces.advance(static_cast<size_t>(result));
        return true;
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.count();
    const ssize_t got = recvmsg(fd(), &message, MSG_DONTWAIT);
    if (got > 0) {
        pieces.advance(static_cast<size_t>(got));
        return true;
    }
    if (got == 0) {
        throw StreamError(CLOSED_BY_PEER);
    }
    if (errno == EAGAIN || errno == EINTR) {
        return false;
    }
    throw StreamError(system_error("receive", errno));
}

void Channel::send_all(Pieces& pieces, StreamClock::time_point deadline) {
    const bool may_stall = deadline == NEVER;
    auto until = may_stall ? stall_deadline() : deadline;
    while (!pieces.is_empty() || has_unsent()) {
        if (send_some(pieces)) {
            until = may_stall ? stall_deadline() : deadline;
        } else if (!wait(POLLOUT, nullptr, until)) {
            throw StreamError("the peer takes nothing");
        }
    }
}

void Channel::receive_all(Pieces& pieces, StreamClock::time_point deadline, bool is_idle) {
    const bool may_stall = deadline == NEVER;
    auto until = is_idle ? NEVER : may_stall ? stall_deadline() : deadline;
    while (!pieces.is_empty()) {
        if (receive_some(pieces)) {
            until = may_stall ? stall_deadline() : deadline;
        } else if (!wait(POLLIN, nullptr, until)) {
            throw StreamError("the peer stopped in the middle");
        }
    }
}

bool Channel::wait(short events, const Signal* wake, StreamClock::time_point until) {
    pollfd entries[] = {{fd(), events, 0}, {wake != nullptr ? wake->fd() : -1, POLLIN, 0}};
    // A thread that the other end on the same host wakes is put on that one's core, and then they take
    // turns; while bytes flow, neither should sleep.
    const auto spin_until = StreamClock::now() + std::chrono::microseconds(bounds_.spin_us);
    do {
        if (poll(entries, 2, 0) > 0) {
            return true;
        }
    } while (StreamClock::now() < spin_until);
    while (true) {
        const int ready = poll(entries, 2, milliseconds_until(until));
        if (ready > 0) {
            return true;
        }
        if (ready < 0 && errno != EINTR) {
            throw StreamError(system_error("poll", errno));
        }
        if (StreamClock::now() >= until) {
            return false;
        }
    }
}

}  // namespace baton
