#include "cuda.hpp"

#include <dlfcn.h>

#include <string>

#include "config.hpp"

namespace baton {

namespace {

template <typename Function>
Function driver_symbol(void* library, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
        throw UcxError(std::string("libcuda.so.1 has no ") + name);
    }
    return reinterpret_cast<Function>(symbol);
}

void check_cuda(int result, const char* what) {
    if (result != 0) {
        throw UcxError(std::string(what) + " failed with CUDA driver error " + std::to_string(result));
    }
}

}  // namespace

void use_primary_cuda_context(int device) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw UcxError("cuda_device=" + std::to_string(device) + ": libcuda.so.1 can't be loaded");
    }
    auto init = driver_symbol<int (*)(unsigned)>(library, "cuInit");
    auto get_device = driver_symbol<int (*)(int*, int)>(library, "cuDeviceGet");
    auto retain = driver_symbol<int (*)(void**, int)>(library, "cuDevicePrimaryCtxRetain");
    auto set_current = driver_symbol<int (*)(void*)>(library, "cuCtxSetCurrent");
    int handle = 0;
    void* context = nullptr;
    check_cuda(init(0), "cuInit");
    check_cuda(get_device(&handle, device), "cuDeviceGet");
    check_cuda(retain(&context, handle), "cuDevicePrimaryCtxRetain");
    check_cuda(set_current(context), "cuCtxSetCurrent");
}

}  // namespace baton
