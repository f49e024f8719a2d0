// Native threads beside Python's.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace baton {

// Signals are for Python's main thread; a write to a closed socket is an error and no signal.
// Throws std::system_error if there can't be another one.
template <typename Work>
std::thread start_thread(const char* name, Work work) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by what is started
    struct Restore {
        sigset_t* mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
    } restore{&before};
    std::thread thread(std::move(work));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

}  // namespace baton
