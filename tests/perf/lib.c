/* NCCL and, where there is a GPU and a real NCCL, the CUDA driver: both found at run time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "perf.h"

static void need(void **slot, const char *name)
{
    *slot = dlsym(RTLD_DEFAULT, name);
    if (!*slot)
        perf_die("NCCL has no function %s", name);
}

#define NEED(n, f) need((void **)&(n)->f, "nccl" #f)

/* The stand-in lies beside the program in a checkout and in the wheel. */
static void *open_beside(void)
{
    char path[PATH_MAX + 64] = "";
    if (readlink("/proc/self/exe", path, PATH_MAX - 1) <= 0 || !strrchr(path, '/'))
        return NULL;
    strcpy(strrchr(path, '/'), "/hostnccl/libnccl.so.2");
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

/* The library becomes global; a preloaded one comes before it in the look-up. */
void perf_lib_load(struct perf_nccl *n, const char *path)
{
    bool named = path && *path;
    char why[512];
    void *lib = dlopen(named ? path : "libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    snprintf(why, sizeof(why), "%s", lib ? "" : dlerror());
    if (!lib && !named)
        lib = open_beside();
    if (!lib && (named || !dlsym(RTLD_DEFAULT, "ncclGetVersion")))
        perf_die("cannot load NCCL: %s; name it with --nccl or R2CCL_PERF_NCCL", why);
    *(void **)&n->Synchronize = dlsym(RTLD_DEFAULT, "hostncclSynchronize");
    n->standin = n->Synchronize != NULL;
    NEED(n, GetVersion);
    NEED(n, GetUniqueId);
    NEED(n, CommInitRank);
    NEED(n, CommDestroy);
    NEED(n, CommAbort);
    NEED(n, CommGetAsyncError);
    NEED(n, GetErrorString);
    NEED(n, GroupStart);
    NEED(n, GroupEnd);
    NEED(n, AllReduce);
    NEED(n, ReduceScatter);
    NEED(n, AllGather);
    NEED(n, Broadcast);
    NEED(n, Reduce);
    NEED(n, Send);
    NEED(n, Recv);
    *(void **)&n->GetLastError = dlsym(RTLD_DEFAULT, "ncclGetLastError");
}

typedef unsigned long long cu_ptr; /* CUdeviceptr */

static struct { /* CUresult is an int */
    bool used;
    int (*Init)(unsigned flags);
    int (*DeviceGetCount)(int *count);
    int (*DeviceGet)(int *device, int ordinal);
    int (*DevicePrimaryCtxRetain)(void **context, int device);
    int (*CtxSetCurrent)(void *context);
    int (*CtxSynchronize)(void);
    int (*StreamCreate)(void **stream, unsigned flags);
    int (*StreamQuery)(void *stream);
    int (*MemAlloc)(cu_ptr *out, size_t bytes);
    int (*MemFree)(cu_ptr data);
    int (*MemcpyHtoD)(cu_ptr to, const void *from, size_t bytes);
    int (*MemcpyDtoH)(void *to, cu_ptr from, size_t bytes);
    void *stream;
} cuda;

static void *driver(void *lib, const char *name)
{
    void *fn = dlsym(lib, name);
    if (!fn)
        perf_die("libcuda.so.1 has no function %s", name);
    return fn;
}

#define DRIVER(lib, f, symbol) (*(void **)&cuda.f = driver(lib, symbol))

static void look_up(void *lib)
{
    DRIVER(lib, Init, "cuInit");
    DRIVER(lib, DeviceGetCount, "cuDeviceGetCount");
    DRIVER(lib, DeviceGet, "cuDeviceGet");
    DRIVER(lib, DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    DRIVER(lib, CtxSetCurrent, "cuCtxSetCurrent");
    DRIVER(lib, CtxSynchronize, "cuCtxSynchronize");
    DRIVER(lib, StreamCreate, "cuStreamCreate");
    DRIVER(lib, StreamQuery, "cuStreamQuery");
    DRIVER(lib, MemAlloc, "cuMemAlloc_v2");
    DRIVER(lib, MemFree, "cuMemFree_v2");
    DRIVER(lib, MemcpyHtoD, "cuMemcpyHtoD_v2");
    DRIVER(lib, MemcpyDtoH, "cuMemcpyDtoH_v2");
}

static void checked(int rc, const char *what)
{
    if (rc)
        perf_die("CUDA driver: %s failed with %d", what, rc);
}

void perf_gpu_open(const struct perf_nccl *n, int local_rank)
{
    int count = 0, device = 0;
    void *context = NULL;
    if (n->standin)
        return;
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!lib)
        perf_die("a real NCCL needs a GPU, and there is no libcuda.so.1: %s", dlerror());
    look_up(lib);
    checked(cuda.Init(0), "cuInit");
    checked(cuda.DeviceGetCount(&count), "cuDeviceGetCount");
    if (count < 1)
        perf_die("no GPU is visible (CUDA_VISIBLE_DEVICES)");
    checked(cuda.DeviceGet(&device, local_rank % count), "cuDeviceGet");
    checked(cuda.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    checked(cuda.CtxSetCurrent(context), "cuCtxSetCurrent");
    checked(cuda.StreamCreate(&cuda.stream, 1), "cuStreamCreate"); /* 1: non-blocking */
    cuda.used = true;
}

bool perf_gpu_used(void)
{
    return cuda.used;
}

ncclStream_t perf_gpu_stream(void)
{
    return cuda.stream;
}

void *perf_gpu_alloc(size_t bytes)
{
    cu_ptr address = 0;
    bytes = (bytes + 4096) / 4096 * 4096;
    void *host = cuda.used ? NULL : aligned_alloc(4096, bytes);
    if (cuda.used)
        checked(cuda.MemAlloc(&address, bytes), "cuMemAlloc");
    else if (!host)
        perf_die("no memory for %zu bytes", bytes);
    return cuda.used ? (void *)(uintptr_t)address : host;
}

void perf_gpu_free(void *data)
{
    if (cuda.used)
        cuda.MemFree((cu_ptr)(uintptr_t)data);
    else
        free(data);
}

void perf_gpu_write(void *to, const void *from, size_t bytes)
{
    if (!bytes)
        return;
    if (!cuda.used) {
        memcpy(to, from, bytes);
        return;
    }
    checked(cuda.MemcpyHtoD((cu_ptr)(uintptr_t)to, from, bytes), "cuMemcpyHtoD");
    checked(cuda.CtxSynchronize(), "cuCtxSynchronize"); /* pageable copies may still be under way */
}

void perf_gpu_read(void *to, const void *from, size_t bytes)
{
    if (!cuda.used && bytes)
        memcpy(to, from, bytes);
    else if (bytes)
        checked(cuda.MemcpyDtoH(to, (cu_ptr)(uintptr_t)from, bytes), "cuMemcpyDtoH");
}

int perf_gpu_query(void)
{
    int rc = cuda.used ? cuda.StreamQuery(cuda.stream) : 0;
    if (rc && rc != 600) /* not ready */
        checked(rc, "cuStreamQuery");
    return rc == 0;
}
