// One ucp_worker of the progress thread, and whether it must be looked at before sleeping.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "config.hpp"

namespace baton {

// A worker that is armed and has not signalled its event descriptor has nothing to do: it is skipped
// until then, so that many idle peers cost nothing per turn.
class Worker {
public:
    explicit Worker(std::shared_ptr<Context> context);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    ucp_worker_h handle() const { return handle_; }
    int event_fd() const { return event_fd_; }
    std::string address() const;

    bool progress() { return !is_armed_ && ucp_worker_progress(handle_) != 0; }
    // Call before any operation on this worker, and when its descriptor has signalled.
    void touch() { is_armed_ = false; }
    // False if there is progress to make first.
    bool arm();

private:
    std::shared_ptr<Context> context_;
    ucp_worker_h handle_ = nullptr;
    int event_fd_ = -1;
    bool is_armed_ = false;
};

}  // namespace baton
