#include "queues.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <iterator>
#include <system_error>
#include <utility>

namespace baton {

Signal::Signal() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) {
        throw std::system_error(errno, std::generic_category(), "eventfd");
    }
}

Signal::~Signal() { close(fd_); }

void Signal::raise() const {
    const uint64_t one = 1;
    // EAGAIN means that the counter is full, hence raised; nothing else can happen on our own eventfd.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof(one));
}

void Signal::lower() const {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof(count));
}

void EventQueue::push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() == 1) {
        signal_.raise();
    }
}

std::vector<Event> EventQueue::drain() {
    const std::lock_guard lock(mutex_);
    if (events_.empty()) {
        return {};
    }
    signal_.lower();
    std::vector<Event> drained(std::make_move_iterator(events_.begin()),
                               std::make_move_iterator(events_.end()));
    events_.clear();
    return drained;
}

bool EventQueue::wait(double timeout_s) const {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    while (true) {
        const std::chrono::duration<double, std::milli> left = deadline - Clock::now();
        const double left_ms = std::clamp(std::ceil(left.count()), 0.0, 60'000.0);
        pollfd entry{signal_.fd(), POLLIN, 0};
        const int ready = poll(&entry, 1, static_cast<int>(left_ms));
        if (ready > 0) {
            return true;
        }
        if (ready == 0 && Clock::now() >= deadline) {
            return false;
        }
        if (ready < 0) {
            return false;  // EINTR: let Python run its signal handlers
        }
    }
}

void CommandQueue::post(Command command) {
    bool must_wake;
    {
        const std::lock_guard lock(mutex_);
        commands_.push_back(std::move(command));
        must_wake = is_sleeping_;
    }
    if (must_wake) {
        signal_.raise();
    }
}

std::vector<CommandQueue::Command> CommandQueue::take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(commands_, {});
}

bool CommandQueue::begin_sleep() {
    const std::lock_guard lock(mutex_);
    is_sleeping_ = commands_.empty();
    return is_sleeping_;
}

void CommandQueue::end_sleep() {
    {
        const std::lock_guard lock(mutex_);
        is_sleeping_ = false;
    }
    signal_.lower();
}

}  // namespace baton
