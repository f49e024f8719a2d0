// The CUDA context of the progress thread, through a dlopen'ed driver: no link-time CUDA dependency.
#pragma once

namespace baton {

// Retains the primary context of `device` and makes it current on the calling thread. UCX's CUDA
// transports call the driver from the progress thread, and crash there without a context.
// Throws UcxError if there is no driver or no such device.
// Unverified: this code has not run on a machine with a GPU yet.
void use_primary_cuda_context(int device);

}  // namespace baton
