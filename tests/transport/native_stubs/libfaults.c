// Calls that fail when the test says so. Preloaded, so that our transport's calls come here first.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <ucp/api/ucp.h>

#include "control_file.h"

// The same order as in `Faults` of process_faults.py.
typedef struct {
    atomic_int epoll_wait;  // errno
    atomic_int flush;       // statuses of UCX
    atomic_int late_flush;
} control_t;

static control_t own_control;
static control_t *control = &own_control;

static void __attribute__((constructor)) share_control(void) {
    control = map_control("FAULTS_CONTROL", sizeof(control_t), &own_control);
}

static int is_progress_thread(void) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return strcmp(name, "baton-ucx") == 0;
}

int epoll_wait(int file, struct epoll_event *events, int count, int timeout) {
    const int failure = atomic_load(&control->epoll_wait);
    // With a timeout: UCX's own calls on that thread only look.
    if (failure != 0 && timeout != 0 && is_progress_thread()) {
        errno = failure;
        return -1;
    }
    return epoll_pwait(file, events, count, timeout, NULL);
}

typedef struct {
    ucp_send_nbx_callback_t callback;
    void *user_data;
} original_t;

static void fail_late(void *request, ucs_status_t status, void *user_data) {
    const original_t original = *(original_t*)user_data;
    (void)status;
    free(user_data);
    original.callback(request, (ucs_status_t)atomic_load(&control->late_flush), original.user_data);
}

ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h endpoint, const ucp_request_param_t *asked) {
    static ucs_status_ptr_t (*real)(ucp_ep_h, const ucp_request_param_t*);
    if (real == NULL) {
        void *library = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
        *(void**)&real = dlsym(library, "ucp_ep_flush_nbx");
    }
    const int status = atomic_load(&control->flush);
    if (status != 0) {
        return (ucs_status_ptr_t)(intptr_t)status;
    }
    if (atomic_load(&control->late_flush) == 0) {
        return real(endpoint, asked);
    }
    ucp_request_param_t params = *asked;
    original_t *original = malloc(sizeof(*original));
    *original = (original_t){asked->cb.send, asked->user_data};
    params.cb.send = fail_late;
    params.user_data = original;
    return real(endpoint, &params);
}
