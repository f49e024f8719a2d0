#include "worker.hpp"

namespace baton {

Worker::Worker(std::shared_ptr<Context> context) : context_(std::move(context)) {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_->handle(), &params, &handle_), "ucp_worker_create");
    const ucs_status_t status = ucp_worker_get_efd(handle_, &event_fd_);
    if (status != UCS_OK) {
        ucp_worker_destroy(handle_);
        check(status, "ucp_worker_get_efd");
    }
}

Worker::~Worker() { ucp_worker_destroy(handle_); }

std::string Worker::address() const {
    ucp_address_t* address = nullptr;
    size_t nbytes = 0;
    check(ucp_worker_get_address(handle_, &address, &nbytes), "ucp_worker_get_address");
    std::string packed(reinterpret_cast<const char*>(address), nbytes);
    ucp_worker_release_address(handle_, address);
    return packed;
}

bool Worker::arm() {
    if (is_armed_) {
        return true;
    }
    const ucs_status_t status = ucp_worker_arm(handle_);
    if (status == UCS_ERR_BUSY) {
        return false;
    }
    check(status, "ucp_worker_arm");
    is_armed_ = true;
    return true;
}

}  // namespace baton
