#define _GNU_SOURCE
#include "transport/verbs/lib.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct r2_ibv r2_ibv;

/* `version`: of the symbol in rdma-core; a stand-in need not have versions. */
static const struct symbol {
    const char *name, *version;
    size_t at;
    bool optional;
} symbols[] = {
#define R2_SYM(field, version)                                                                     \
    {                                                                                              \
        "ibv_" #field, version, offsetof(struct r2_ibv, field), false                              \
    }
#define R2_OPT(field, version)                                                                     \
    {                                                                                              \
        "ibv_" #field, version, offsetof(struct r2_ibv, field), true                               \
    }
    R2_SYM(get_device_list, "IBVERBS_1.1"),
    R2_SYM(free_device_list, "IBVERBS_1.1"),
    R2_SYM(get_device_name, "IBVERBS_1.1"),
    R2_SYM(open_device, "IBVERBS_1.1"),
    R2_SYM(close_device, "IBVERBS_1.1"),
    R2_SYM(query_device, "IBVERBS_1.1"),
    R2_SYM(query_port, "IBVERBS_1.1"),
    R2_SYM(query_gid, "IBVERBS_1.1"),
    R2_SYM(query_pkey, "IBVERBS_1.1"),
    R2_SYM(alloc_pd, "IBVERBS_1.1"),
    R2_SYM(dealloc_pd, "IBVERBS_1.1"),
    R2_SYM(reg_mr, "IBVERBS_1.1"),
    R2_SYM(dereg_mr, "IBVERBS_1.1"),
    R2_SYM(create_comp_channel, "IBVERBS_1.0"),
    R2_SYM(destroy_comp_channel, "IBVERBS_1.0"),
    R2_SYM(create_cq, "IBVERBS_1.1"),
    R2_SYM(destroy_cq, "IBVERBS_1.1"),
    R2_SYM(get_cq_event, "IBVERBS_1.1"),
    R2_SYM(ack_cq_events, "IBVERBS_1.1"),
    R2_SYM(create_qp, "IBVERBS_1.1"),
    R2_SYM(modify_qp, "IBVERBS_1.1"),
    R2_SYM(destroy_qp, "IBVERBS_1.1"),
    R2_SYM(get_async_event, "IBVERBS_1.1"),
    R2_SYM(ack_async_event, "IBVERBS_1.1"),
    R2_OPT(reg_dmabuf_mr, "IBVERBS_1.12"),
    R2_OPT(reg_mr_iova2, "IBVERBS_1.8"),
    R2_OPT(fork_init, "IBVERBS_1.1"),
    R2_OPT(get_device_guid, "IBVERBS_1.1"),
};

int r2_ibv_load(const char *name, char *why, size_t cap)
{
    void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);

    if (!lib) {
        snprintf(why, cap, "%s", dlerror());
        return -ENOENT;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        const struct symbol *s = &symbols[i];
        void *fn = dlvsym(lib, s->name, s->version);

        if (!fn)
            fn = dlsym(lib, s->name);
        if (!fn && !s->optional) {
            snprintf(why, cap, "%s has no %s", name, s->name);
            dlclose(lib);
            memset(&r2_ibv, 0, sizeof(r2_ibv));
            return -ENOSYS;
        }
        /* POSIX gives functions as object pointers here. */
        memcpy((char *)&r2_ibv + s->at, &fn, sizeof(fn));
    }
    return 0;
}
