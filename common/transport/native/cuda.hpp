// The CUDA context of the progress thread, through a dlopen'ed driver: no link-time CUDA dependency.
#pragma once

#include <atomic>
#include <memory>

namespace baton {

// Retains the primary context of `device` and makes it current on the calling thread. UCX's CUDA
// transports call the driver from the progress thread, and crash there without a context.
// Throws UcxError if there is no driver or no such device.
void use_primary_cuda_context(int device);

// Waits, on a thread of its own, until the device has done all that this process has asked of it so far.
class DeviceWait {
public:
    // The context of the calling thread, which `use_primary_cuda_context` has made.
    DeviceWait();
    bool is_over() const { return state_->is_over; }
    // Of the driver, 0 for none. Only once it is over.
    int error() const { return state_->error; }

private:
    struct State {
        std::atomic<bool> is_over{false};
        int error = 0;
    };
    std::shared_ptr<State> state_;  // the thread may outlive this: nothing ends a wait for a device
};

}  // namespace baton
