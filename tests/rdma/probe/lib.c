#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "probe.h"

int lib_load(struct verbs_lib *lib, const char *name)
{
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fprintf(stderr, "probe: %s\n", dlerror());
        return -1;
    }
#define LOOK(fn)                                                                                   \
    do {                                                                                           \
        *(void **)&lib->fn = dlsym(handle, "ibv_" #fn);                                            \
        if (!lib->fn) {                                                                            \
            fprintf(stderr, "probe: %s has no ibv_" #fn "\n", name);                               \
            return -1;                                                                             \
        }                                                                                          \
    } while (0)
    LOOK(get_device_list);
    LOOK(free_device_list);
    LOOK(get_device_name);
    LOOK(open_device);
    LOOK(close_device);
    LOOK(query_device);
    LOOK(query_port);
    LOOK(query_gid);
    LOOK(alloc_pd);
    LOOK(dealloc_pd);
    LOOK(reg_mr);
    LOOK(dereg_mr);
    LOOK(create_comp_channel);
    LOOK(destroy_comp_channel);
    LOOK(create_cq);
    LOOK(destroy_cq);
    LOOK(get_cq_event);
    LOOK(ack_cq_events);
    LOOK(create_qp);
    LOOK(modify_qp);
    LOOK(destroy_qp);
    LOOK(get_async_event);
    LOOK(ack_async_event);
#undef LOOK
    *(void **)&lib->query_qp = dlsym(handle, "ibv_query_qp");
    return 0;
}
