/* The one semantics under all versions of NCCL's net API: plugin.c has it, in the shape of v12;
 * plugin_old.c bends v6 to v10 onto it.
 *
 * All return an enum r2_nccl_result, may be called from any thread, and always write their out
 * parameters (NCCL leaves them uninitialised). */
#ifndef R2_NCCL_ABI_ABI_H
#define R2_NCCL_ABI_ABI_H

#include "nccl_abi/nccl_net_abi.h"

struct r2_ctx;

extern const char r2_abi_name[]; /* what NCCL_NET= selects */

/* Notes who calls, for operators. */
void r2_abi_called_by(unsigned net_api, r2_nccl_logger log);
/* A communicator's configuration; NULL: none. */
void r2_abi_configured(const struct r2_ncclnet_config *config);
int r2_abi_init(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config, r2_nccl_logger log,
                r2_nccl_profiler prof);
int r2_abi_devices(int *ndev);
int r2_abi_properties(int dev, struct r2_ncclnet_props_v12 *props);
int r2_abi_listen(void *ctx, int dev, void *handle, void **lcomm);
int r2_abi_connect(void *ctx, int dev, void *handle, void **scomm,
                   struct r2_ncclnet_device_handle **dev_handle);
int r2_abi_accept(void *lcomm, void **rcomm, struct r2_ncclnet_device_handle **dev_handle);
int r2_abi_regmr(void *comm, void *data, size_t size, int type, void **mhandle);
int r2_abi_regmr_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                        void **mhandle);
int r2_abi_deregmr(void *comm, void *mhandle);
int r2_abi_isend(void *scomm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                 void **request);
int r2_abi_irecv(void *rcomm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                 void **phandles, void **request);
int r2_abi_iflush(void *rcomm, int n, void **data, int *sizes, void **mhandles, void **request);
int r2_abi_test(void *request, int *done, int *sizes);
int r2_abi_close(void *comm);
int r2_abi_close_listen(void *lcomm);

/* Members of the properties that came with a version, from those of v12; each version has those of
 * the ones before it. */
#define R2_PROPS_V6(to, from)                                                                      \
    ((to)->name = (from)->name, (to)->pci_path = (from)->pci_path, (to)->guid = (from)->guid,      \
     (to)->ptr_support = (from)->ptr_support, (to)->speed = (from)->speed,                         \
     (to)->port = (from)->port, (to)->latency = (from)->latency,                                   \
     (to)->max_comms = (from)->max_comms, (to)->max_recvs = (from)->max_recvs)
#define R2_PROPS_V7(to, from)                                                                      \
    (R2_PROPS_V6(to, from), (to)->netdev_type = (from)->netdev_type,                               \
     (to)->netdev_version = (from)->netdev_version)
#define R2_PROPS_V8(to, from) (R2_PROPS_V7(to, from), (to)->reg_is_global = (from)->reg_is_global)
#define R2_PROPS_V9(to, from)                                                                      \
    (R2_PROPS_V8(to, from), (to)->force_flush = (from)->force_flush,                               \
     (to)->vprops.ndevs = (from)->vprops.ndevs, (to)->vprops.devs[0] = (from)->vprops.devs[0],     \
     (to)->max_p2p_bytes = (from)->max_p2p_bytes, (to)->max_coll_bytes = (from)->max_coll_bytes)

#endif
