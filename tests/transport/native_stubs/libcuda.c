// A CUDA driver without a card: one device, whose memory is memfd and whose copies are memcpy.
//
// It has what UCX's CUDA modules and our transport call. Streams run on threads of their own, in
// order, so that a copy is done some time after it was asked for. IPC handles name a file of the
// exporting process, so that they can't be opened once it has ended, and what is open stays.
//
// The file named by STUB_CUDA_CONTROL is mapped by the test: it holds copies back, makes calls fail
// and sees what happened. Errors are those of cuda.h, by number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "control_file.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, MAP_FAILED_ = 205,
    ALREADY_MAPPED = 208, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801
};

// The same order as in `Driver` of process_faults.py.
typedef struct {
    atomic_int hold;           // 1: streams stand still
    atomic_int event_query;    // errors to return, 0 for none
    atomic_int event_record;
    atomic_int add_callback;
    atomic_int memcpy_async;
    atomic_int open_handle;
    atomic_int synchronize;
    atomic_int asked_count;    // what happened: copies asked for, and done
    atomic_int copy_count;
    atomic_int handle_count;   // IPC handles that are open
    atomic_int set_device_count;
} control_t;

static control_t own_control;
static control_t *control = &own_control;

static void __attribute__((constructor)) share_control(void) {
    control = map_control("STUB_CUDA_CONTROL", sizeof(control_t), &own_control);
}

#define FAIL_IF_ASKED(_name) \
    do { \
        const int asked = atomic_load(&control->_name); \
        if (asked != 0) { \
            return asked; \
        } \
    } while (0)

// ---- device and contexts ----------------------------------------------------------------------

typedef struct { int dummy; } context_t;
typedef context_t *CUcontext;

static context_t primary;
static atomic_int primary_count;
#define CONTEXT_DEPTH_MAX 16
static __thread CUcontext stack[CONTEXT_DEPTH_MAX];
static __thread int depth;

CUresult cuInit(unsigned flags) { (void)flags; return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12090; return SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? SUCCESS : 101;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)length, "memfd");
    return SUCCESS;
}

CUresult cuDeviceGetUuid(void *uuid, CUdevice device) {
    memset(uuid, 0x5A, 16);
    ((char*)uuid)[0] = (char)device;
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(void *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = 1ull << 34;
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case 33: *value = 0x65; break;  // PCI bus
    case 34: *value = 0; break;     // PCI device
    case 50: *value = 0; break;     // PCI domain
    case 75: *value = 9; break;     // compute capability
    default: *value = 0; break;     // no dmabuf, no fabric, no integrated memory
    }
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = atomic_load(&primary_count) > 0;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    (void)device;
    atomic_fetch_add(&primary_count, 1);
    *context = &primary;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    (void)device;
    atomic_fetch_sub(&primary_count, 1);
    return SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    depth = depth > 0 ? depth : 1;
    stack[depth - 1] = context;
    atomic_fetch_add(&control->set_device_count, 1);
    return SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == CONTEXT_DEPTH_MAX) {
        return INVALID_CONTEXT;
    }
    stack[depth++] = context;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (depth == 0) {
        return INVALID_CONTEXT;
    }
    --depth;
    if (context != NULL) {
        *context = stack[depth];
    }
    return SUCCESS;
}

static int has_context(void) { return depth > 0 && stack[depth - 1] != NULL; }

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return has_context() ? SUCCESS : INVALID_CONTEXT;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    (void)context;
    *id = 1;
    return SUCCESS;
}

CUresult cuCtxSetFlags(unsigned flags) { (void)flags; return SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
    static __thread char shown[32];
    snprintf(shown, sizeof(shown), "stub error %d", error);
    *text = shown;
    return SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             int *status) {
    (void)version;
    (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (status != NULL) {
        *status = *function == NULL ? 1 : 0;
    }
    return *function == NULL ? NOT_FOUND : SUCCESS;
}

// ---- memory -------------------------------------------------------------------------------------

typedef struct {
    char *base;
    size_t nbytes;
    int file;  // -1: opened from another process
    uint64_t id;
    dev_t device;
    ino_t inode;
} block_t;

#define BLOCK_COUNT_MAX 1024
static block_t blocks[BLOCK_COUNT_MAX];
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t next_id = 1;

static CUresult add_block(int file, size_t nbytes, int is_own, CUdeviceptr *address) {
    struct stat status;
    char *base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED || fstat(file, &status) != 0) {
        return MAP_FAILED_;
    }
    pthread_mutex_lock(&blocks_lock);
    CUresult result = OUT_OF_MEMORY;
    for (int i = 0; i < BLOCK_COUNT_MAX; ++i) {
        if (blocks[i].base == NULL) {
            const uint64_t id = ((uint64_t)getpid() << 32) | next_id++;
            blocks[i] = (block_t){base, nbytes, is_own ? file : -1, id, status.st_dev, status.st_ino};
            *address = (CUdeviceptr)(uintptr_t)base;
            result = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

static int find_block(CUdeviceptr address, block_t *found) {
    int is_found = 0;
    pthread_mutex_lock(&blocks_lock);
    for (int i = 0; i < BLOCK_COUNT_MAX && !is_found; ++i) {
        const uintptr_t base = (uintptr_t)blocks[i].base;
        if (base != 0 && address >= base && address < base + blocks[i].nbytes) {
            *found = blocks[i];
            is_found = 1;
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    return is_found;
}

static int is_idle(void);

// What a copy still reads or writes stays mapped.
static CUresult drop_block(CUdeviceptr address, int is_own) {
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&blocks_lock);
    for (int i = 0; i < BLOCK_COUNT_MAX; ++i) {
        if (address != 0 && (uintptr_t)blocks[i].base == address &&
            (blocks[i].file >= 0) == is_own) {
            if (is_idle()) {
                munmap(blocks[i].base, blocks[i].nbytes);
            }
            if (is_own) {
                close(blocks[i].file);
            }
            blocks[i].base = NULL;
            result = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    const int file = memfd_create("stub-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)nbytes) != 0) {
        return OUT_OF_MEMORY;
    }
    return add_block(file, nbytes, 1, address);
}

CUresult cuMemFree_v2(CUdeviceptr address) { return drop_block(address, 1); }

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    block_t block;
    if (!find_block(address, &block)) {
        return NOT_FOUND;
    }
    if (base != NULL) {
        *base = (CUdeviceptr)(uintptr_t)block.base;
    }
    if (nbytes != NULL) {
        *nbytes = block.nbytes;
    }
    return SUCCESS;
}

static CUresult pointer_attribute(void *value, int attribute, const block_t *block) {
    switch (attribute) {
    case 1: *(CUcontext*)value = block != NULL ? &primary : NULL; break;
    case 2: *(unsigned*)value = block != NULL ? 2 : 0; break;          // memory type: device
    case 7: *(unsigned long long*)value = block != NULL ? block->id : 0; break;
    case 8: *(int*)value = 0; break;                                   // not managed
    case 9: *(int*)value = block != NULL ? 0 : -2; break;              // device ordinal
    case 10: *(int*)value = block != NULL; break;                      // legacy IPC
    case 14: *(uint64_t*)value = 0; break;                             // other handle types
    case 17: *(void**)value = NULL; break;                             // memory pool
    default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    block_t block;
    return find_block(address, &block) ? pointer_attribute(value, attribute, &block) : INVALID_VALUE;
}

CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values, CUdeviceptr address) {
    block_t block;
    const block_t *found = find_block(address, &block) ? &block : NULL;
    for (unsigned i = 0; i < count; ++i) {
        const CUresult result = pointer_attribute(values[i], attributes[i], found);
        if (result != SUCCESS) {
            return result;
        }
    }
    return SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address) {
    (void)value;
    (void)attribute;
    (void)address;
    return SUCCESS;
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    (void)address;
    (void)nbytes;
    (void)flags;
    return SUCCESS;
}

CUresult cuMemHostUnregister(void *address) { (void)address; return SUCCESS; }

// ---- memory of other processes ------------------------------------------------------------------

typedef struct {
    int pid;
    int file;
    uint64_t nbytes;
    char rest[48];
} handle_t;

CUresult cuIpcGetMemHandle(handle_t *handle, CUdeviceptr address) {
    block_t block;
    if (!find_block(address, &block) || block.file < 0) {
        return INVALID_VALUE;
    }
    memset(handle, 0, sizeof(*handle));
    handle->pid = getpid();
    handle->file = block.file;
    handle->nbytes = block.nbytes;
    return SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, handle_t handle, unsigned flags) {
    (void)flags;
    FAIL_IF_ASKED(open_handle);
    if (!has_context() || handle.pid == getpid()) {
        return INVALID_CONTEXT;
    }
    char path[64];
    struct stat status;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) != 0) {
        return INVALID_VALUE;
    }
    CUresult result = SUCCESS;
    pthread_mutex_lock(&blocks_lock);
    for (int i = 0; i < BLOCK_COUNT_MAX; ++i) {
        if (blocks[i].base != NULL && blocks[i].device == status.st_dev &&
            blocks[i].inode == status.st_ino) {
            result = ALREADY_MAPPED;
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    if (result == SUCCESS) {
        result = add_block(file, handle.nbytes, 0, address);
    }
    close(file);
    if (result == SUCCESS) {
        atomic_fetch_add(&control->handle_count, 1);
    }
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    const CUresult result = drop_block(address, 0);
    if (result == SUCCESS) {
        atomic_fetch_sub(&control->handle_count, 1);
    }
    return result;
}

// ---- streams ------------------------------------------------------------------------------------

typedef struct event { atomic_long pending; } event_t;
typedef void (*callback_t)(void *stream, CUresult status, void *argument);

typedef struct work {
    struct work *next;
    void *target;
    const void *source;
    size_t nbytes;
    event_t *event;
    callback_t callback;
    void *argument;
} work_t;

typedef struct stream {
    struct stream *next;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    work_t *first;
    work_t **last;
    int is_busy;
    int is_ending;
    pthread_t thread;
} stream_t;

static stream_t *streams;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static void pause_while_held(void) {
    const struct timespec moment = {0, 200000};
    while (atomic_load(&control->hold) != 0) {
        nanosleep(&moment, NULL);
    }
}

static void *run_stream(void *argument) {
    stream_t *stream = argument;
    pthread_mutex_lock(&stream->lock);
    while (1) {
        while (stream->first == NULL && !stream->is_ending) {
            pthread_cond_wait(&stream->changed, &stream->lock);
        }
        work_t *work = stream->first;
        if (work == NULL) {
            break;
        }
        stream->first = work->next;
        if (stream->first == NULL) {
            stream->last = &stream->first;
        }
        stream->is_busy = 1;
        pthread_mutex_unlock(&stream->lock);
        pause_while_held();
        if (work->nbytes > 0) {
            memcpy(work->target, work->source, work->nbytes);
            atomic_fetch_add(&control->copy_count, 1);
        }
        if (work->event != NULL) {
            atomic_fetch_sub(&work->event->pending, 1);
        }
        if (work->callback != NULL) {
            work->callback(stream, SUCCESS, work->argument);
        }
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->is_busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

CUresult cuStreamCreate(stream_t **created, unsigned flags) {
    (void)flags;
    stream_t *stream = calloc(1, sizeof(*stream));
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->last = &stream->first;
    pthread_create(&stream->thread, NULL, run_stream, stream);
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    *created = stream;
    return SUCCESS;
}

static int is_idle(void) {
    int answer = 1;
    pthread_mutex_lock(&streams_lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next) {
        pthread_mutex_lock(&stream->lock);
        answer &= stream->first == NULL && !stream->is_busy;
        pthread_mutex_unlock(&stream->lock);
    }
    pthread_mutex_unlock(&streams_lock);
    return answer;
}

static void wait_idle(stream_t *stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first != NULL || stream->is_busy) {
        pthread_cond_wait(&stream->changed, &stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
}

// Queued work still runs, as with the real one; no call waits for it.
CUresult cuStreamDestroy_v2(stream_t *stream) {
    pthread_mutex_lock(&streams_lock);
    for (stream_t **link = &streams; *link != NULL; link = &(*link)->next) {
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    }
    pthread_mutex_unlock(&streams_lock);
    pthread_mutex_lock(&stream->lock);
    stream->is_ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_detach(stream->thread);
    return SUCCESS;
}

CUresult cuStreamSynchronize(stream_t *stream) {
    wait_idle(stream);
    return SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    FAIL_IF_ASKED(synchronize);
    pthread_mutex_lock(&streams_lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next) {
        wait_idle(stream);
    }
    pthread_mutex_unlock(&streams_lock);
    return SUCCESS;
}

static CUresult push(stream_t *stream, work_t asked) {
    work_t *work = malloc(sizeof(*work));
    *work = asked;
    work->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *stream->last = work;
    stream->last = &work->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, stream_t *stream) {
    FAIL_IF_ASKED(memcpy_async);
    atomic_fetch_add(&control->asked_count, 1);
    return push(stream, (work_t){.target = (void*)(uintptr_t)target,
                                 .source = (const void*)(uintptr_t)source, .nbytes = nbytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes, stream_t *stream) {
    return cuMemcpyAsync(target, source, nbytes, stream);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t nbytes) {
    memcpy((void*)(uintptr_t)target, source, nbytes);
    return SUCCESS;
}

CUresult cuStreamAddCallback(stream_t *stream, callback_t callback, void *argument, unsigned flags) {
    (void)flags;
    FAIL_IF_ASKED(add_callback);
    return push(stream, (work_t){.callback = callback, .argument = argument});
}

CUresult cuEventCreate(event_t **event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof(**event));
    return SUCCESS;
}

CUresult cuEventDestroy_v2(event_t *event) {
    (void)event;  // a stream may still name it; a test is over before this matters
    return SUCCESS;
}

CUresult cuEventRecord(event_t *event, stream_t *stream) {
    FAIL_IF_ASKED(event_record);
    atomic_fetch_add(&event->pending, 1);
    return push(stream, (work_t){.event = event});
}

CUresult cuEventQuery(event_t *event) {
    FAIL_IF_ASKED(event_query);
    return atomic_load(&event->pending) == 0 ? SUCCESS : NOT_READY;
}

// ---- what a machine of legacy memory has none of --------------------------------------------------

#define UNSUPPORTED(_name) CUresult _name(void) { return NOT_SUPPORTED; }
UNSUPPORTED(cuMemAddressFree)
UNSUPPORTED(cuMemAddressReserve)
UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemCreate)
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemGetAllocationGranularity)
UNSUPPORTED(cuMemGetAllocationPropertiesFromHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
UNSUPPORTED(cuMemMap)
UNSUPPORTED(cuMemPoolDestroy)
UNSUPPORTED(cuMemPoolExportPointer)
UNSUPPORTED(cuMemPoolExportToShareableHandle)
UNSUPPORTED(cuMemPoolImportFromShareableHandle)
UNSUPPORTED(cuMemPoolImportPointer)
UNSUPPORTED(cuMemPoolSetAccess)
UNSUPPORTED(cuMemRangeGetAttribute)
UNSUPPORTED(cuMemRelease)
UNSUPPORTED(cuMemRetainAllocationHandle)
UNSUPPORTED(cuMemSetAccess)
UNSUPPORTED(cuMemUnmap)
