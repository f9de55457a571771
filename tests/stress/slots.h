/* Buffers of pair.c: of this process, or of a "device" that no thread of the engine can touch. */
#ifndef R2_TESTS_STRESS_SLOTS_H
#define R2_TESTS_STRESS_SLOTS_H

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/engine.h"

/* `buf` is what the engine is told; `view` where this program sees it. */
struct slot {
    struct r2_req *req;
    struct r2_mr *mr;
    uint8_t *buf, *view;
    uint64_t size;
};

/* 0 or -errno. */
static int slot_make(struct r2_conn *c, struct slot *s, size_t len, bool reg, bool device)
{
    size_t size = (len + 8191) & ~UINT64_C(4095);
    int fd, rc;

    if (!device) {
        s->view = s->buf = aligned_alloc(4096, size);
        memset(s->buf, 0, len);
        return reg ? r2_engine_reg(c, s->buf, len, 1, &s->mr) : 0;
    }
    fd = memfd_create("pair", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        return -errno;
    s->view = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    s->buf = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->view == MAP_FAILED || s->buf == MAP_FAILED)
        return -errno;
    rc = r2_engine_reg_dmabuf(c, s->buf, len, 2, 0, fd, &s->mr);
    close(fd); /* as NCCL does */
    return rc;
}

static void slot_free(struct slot *s, size_t len, bool device)
{
    size_t size = (len + 8191) & ~UINT64_C(4095);

    if (!device) {
        free(s->buf);
        return;
    }
    munmap(s->view, size);
    munmap(s->buf, size);
}

/* The driver of the "GPU": the stand-in for libibverbs shows all that was written. */
__attribute__((visibility("default"))) int cuFlushGPUDirectRDMAWrites(int target, int scope);
int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    void *lib = dlopen(getenv("R2CCL_IBVERBS_LIB"), RTLD_NOW | RTLD_NOLOAD);
    int (*script)(const char *);

    (void)target, (void)scope;
    *(void **)(void *)&script = lib ? dlsym(lib, "fv_script") : NULL;
    if (!script)
        return 999;
    script("show");
    return 0;
}

/* What NICs brought is to be seen from here. */
static int flush_slot(struct r2_conn *c, struct slot *s)
{
    struct r2_req *req = NULL;
    int done = 0, rc = r2_engine_iflush(c, s->buf, s->mr, &req);

    while (rc == 0 && req && !done)
        rc = r2_engine_test(req, &done, NULL);
    return rc;
}

#endif
