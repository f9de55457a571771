/* The network of a communicator: a plugin found as NCCL finds it, or the built-in Socket transport,
 * behind calls of the newest semantics (net API v12).
 *
 * Threads: open and close from any thread (a lock inside); connection calls from the service
 * thread of a communicator, isend/irecv/test from its progress thread, possibly at once.
 */
#ifndef HOSTNCCL_NET_H
#define HOSTNCCL_NET_H

#include "nccl_abi/nccl_net_abi.h"
#include "util.h"

#define HN_MAX_DEVS 64

struct hn_net {        /* one loaded library: process-wide */
    char file[256];    /* as in the list of NCCL_NET_PLUGIN; "" for the built-in one */
    int state;         /* loader.c */
    int version;       /* 6..12 */
    const void *table; /* struct r2_ncclnet_v<version> */
    void *dl;          /* NULL for the built-in one */
    int contexts;      /* communicators that use it */
    int ndev;
    struct r2_ncclnet_props_v12 props[HN_MAX_DEVS];
};

struct hn_netctx { /* one init(): one communicator, or several that share */
    struct hn_net *net;
    void *ctx; /* plugin's, v11 and later */
    struct r2_ncclnet_config config;
    int users;
};

/* Walks the candidates as NCCL does. `net_name` (NCCL_NET or the configuration) may be NULL. */
ncclResult_t hn_net_open(uint64_t comm_id, const char *net_name, int traffic_class,
                         struct hn_netctx **out);
void hn_net_share(struct hn_netctx *ctx);
/* The last user finalizes the context; the last context unloads the library. */
void hn_net_close(struct hn_netctx *ctx);

const char *hn_net_name(const struct hn_net *net);

/* adapters.c: one per entry of the table, whatever its version; plugin's results unchanged. */
int hn_net_init(struct hn_net *net, struct hn_netctx *ctx, uint64_t comm_id);
int hn_net_devices(struct hn_net *net, int *ndev);
int hn_net_properties(struct hn_net *net, int dev, struct r2_ncclnet_props_v12 *props);
int hn_net_listen(struct hn_netctx *ctx, int dev, void *handle, void **lcomm);
int hn_net_connect(struct hn_netctx *ctx, int dev, void *handle, void **scomm);
int hn_net_accept(struct hn_netctx *ctx, void *lcomm, void **rcomm);
int hn_net_regmr(struct hn_netctx *ctx, void *comm, void *data, size_t size, int type,
                 void **mhandle);
int hn_net_deregmr(struct hn_netctx *ctx, void *comm, void *mhandle);
/* `request` is passed through with what it holds: poison or the optional-completion hint. */
int hn_net_isend(struct hn_netctx *ctx, void *scomm, void *data, size_t size, int tag,
                 void *mhandle, void **request);
int hn_net_irecv(struct hn_netctx *ctx, void *rcomm, void *data, size_t size, int tag,
                 void *mhandle, void **request);
int hn_net_test(struct hn_netctx *ctx, void *request, int *done, int *size);
int hn_net_close_comm(struct hn_netctx *ctx, void *comm, bool send);
int hn_net_close_listen(struct hn_netctx *ctx, void *lcomm);
int hn_net_finalize(struct hn_netctx *ctx);
void hn_net_set_attr(struct hn_netctx *ctx, unsigned op, unsigned proto);
/* True if the plugin has ever called the profiler without a handle: a contract violation. */
bool hn_net_profiler_misused(void);

/* socketnet.c: the built-in transport, named "Socket". */
extern const struct r2_ncclnet_v12 hn_socketnet;

#endif
