/* NCCL and, where there is a GPU and a real NCCL, the CUDA driver: both found at run time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "perf.h"

static void need(void **slot, const char *name)
{
    *slot = dlsym(RTLD_DEFAULT, name);
    if (!*slot)
        perf_die("NCCL has no function %s", name);
}

#define NEED(n, f) need((void **)&(n)->f, "nccl" #f)

/* The library becomes global; a preloaded one comes before it in the look-up. */
void perf_lib_load(struct perf_nccl *n, const char *path)
{
    const char *name = path && *path ? path : "libnccl.so.2";
    if (!dlopen(name, RTLD_NOW | RTLD_GLOBAL) &&
        ((path && *path) || !dlsym(RTLD_DEFAULT, "ncclGetVersion")))
        perf_die("cannot load NCCL: %s; name it with --nccl or R2CCL_PERF_NCCL", dlerror());
    n->standin = dlsym(RTLD_DEFAULT, "hostncclSynchronize") != NULL;
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

typedef int (*cu_fn)();

static struct {
    bool used;
    cu_fn alloc, release, write, read, query;
    void *stream;
} cuda;

static cu_fn driver(void *lib, const char *name)
{
    cu_fn fn;
    *(void **)&fn = dlsym(lib, name);
    if (!fn)
        perf_die("libcuda.so.1 has no function %s", name);
    return fn;
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
    void *lib = n->standin ? NULL : dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (n->standin)
        return;
    if (!lib)
        perf_die("a real NCCL needs a GPU, and there is no libcuda.so.1: %s", dlerror());
    checked(driver(lib, "cuInit")(0u), "cuInit");
    checked(driver(lib, "cuDeviceGetCount")(&count), "cuDeviceGetCount");
    if (count < 1)
        perf_die("no GPU is visible (CUDA_VISIBLE_DEVICES)");
    checked(driver(lib, "cuDeviceGet")(&device, local_rank % count), "cuDeviceGet");
    checked(driver(lib, "cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
    checked(driver(lib, "cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    checked(driver(lib, "cuStreamCreate")(&cuda.stream, 1u), "cuStreamCreate"); /* non-blocking */
    cuda.alloc = driver(lib, "cuMemAlloc_v2");
    cuda.release = driver(lib, "cuMemFree_v2");
    cuda.write = driver(lib, "cuMemcpyHtoD_v2");
    cuda.read = driver(lib, "cuMemcpyDtoH_v2");
    cuda.query = driver(lib, "cuStreamQuery");
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
    unsigned long long address = 0;
    bytes = (bytes + 4096) / 4096 * 4096;
    void *host = cuda.used ? NULL : aligned_alloc(4096, bytes);
    if (cuda.used)
        checked(cuda.alloc(&address, bytes), "cuMemAlloc");
    else if (!host)
        perf_die("no memory for %zu bytes", bytes);
    return cuda.used ? (void *)(uintptr_t)address : host;
}

void perf_gpu_free(void *data)
{
    if (cuda.used)
        cuda.release((unsigned long long)(uintptr_t)data);
    else
        free(data);
}

void perf_gpu_write(void *to, const void *from, size_t bytes)
{
    if (!cuda.used && bytes)
        memcpy(to, from, bytes);
    else if (bytes)
        checked(cuda.write((unsigned long long)(uintptr_t)to, from, bytes), "cuMemcpyHtoD");
}

void perf_gpu_read(void *to, const void *from, size_t bytes)
{
    if (!cuda.used && bytes)
        memcpy(to, from, bytes);
    else if (bytes)
        checked(cuda.read(to, (unsigned long long)(uintptr_t)from, bytes), "cuMemcpyDtoH");
}

int perf_gpu_query(void)
{
    int rc = cuda.used ? cuda.query(cuda.stream) : 0;
    if (rc && rc != 600) /* not ready */
        checked(rc, "cuStreamQuery");
    return rc == 0;
}
