/* The shim over the NCCL that does nothing (tests/shim/noop): settings that have to be there before
 * the first call, and the functions that tell about it. */
#ifndef R2_TESTS_NOOP_BED_H
#define R2_TESTS_NOOP_BED_H

#include <dlfcn.h>

#include "../shim/noop/noop.h"
#include "check.h"

#define NOOP_BED(X) X(calls) X(next_result) X(hang)

static struct {
#define X(f) __typeof__(noop_##f) *f;
    NOOP_BED(X)
#undef X
} noop;

/* plan: of R2CCL_PLAN, or NULL. Other settings are the caller's, before its first NCCL call. */
static void noop_bed(const char *plan)
{
    const char *path = check_built("tests/noop/libnccl.so.2");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    CHECK_MSG(lib, "%s", dlerror());
#define X(f)                                                                                       \
    *(void **)(void *)&noop.f = dlsym(lib, "noop_" #f);                                            \
    CHECK(noop.f);
    NOOP_BED(X)
#undef X
    setenv("R2CCL_REAL_NCCL", path, 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    if (plan)
        setenv("R2CCL_PLAN", plan, 1);
}

#endif
