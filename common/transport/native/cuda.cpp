#include "cuda.hpp"

#include <dlfcn.h>

#include <string>
#include <thread>

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

struct Driver {
    int (*set_current)(void*) = nullptr;
    int (*get_current)(void**) = nullptr;
    int (*synchronize)() = nullptr;
};

Driver driver;  // set once, before anything asks for it

}  // namespace

void use_primary_cuda_context(int device) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw UcxError("cuda_device=" + std::to_string(device) + ": libcuda.so.1 can't be loaded");
    }
    auto init = driver_symbol<int (*)(unsigned)>(library, "cuInit");
    auto get_device = driver_symbol<int (*)(int*, int)>(library, "cuDeviceGet");
    auto retain = driver_symbol<int (*)(void**, int)>(library, "cuDevicePrimaryCtxRetain");
    driver.set_current = driver_symbol<int (*)(void*)>(library, "cuCtxSetCurrent");
    driver.get_current = driver_symbol<int (*)(void**)>(library, "cuCtxGetCurrent");
    driver.synchronize = driver_symbol<int (*)()>(library, "cuCtxSynchronize");
    int handle = 0;
    void* context = nullptr;
    check_cuda(init(0), "cuInit");
    check_cuda(get_device(&handle, device), "cuDeviceGet");
    check_cuda(retain(&context, handle), "cuDevicePrimaryCtxRetain");
    check_cuda(driver.set_current(context), "cuCtxSetCurrent");
}

DeviceWait::DeviceWait() : state_(std::make_shared<State>()) {
    void* context = nullptr;
    check_cuda(driver.get_current(&context), "cuCtxGetCurrent");
    std::thread([state = state_, context] {
        state->error = driver.set_current(context);
        if (state->error == 0) {
            state->error = driver.synchronize();
        }
        state->is_over = true;
    }).detach();
}

}  // namespace baton
