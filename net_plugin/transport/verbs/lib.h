/* libibverbs, opened at run time: the plugin works without it, and another library with the same
 * symbols can stand in (R2CCL_IBVERBS_LIB).
 *
 * Only what the library exports is here. Posting, polling and arming are inline functions of
 * <infiniband/verbs.h> that go through the context's own table and need no symbol.
 *
 * Threads: r2_ibv_load from one thread, once; the table is constant afterwards.
 */
#ifndef R2_TRANSPORT_VERBS_LIB_H
#define R2_TRANSPORT_VERBS_LIB_H

#include <infiniband/verbs.h>

struct r2_ibv {
    struct ibv_device **(*get_device_list)(int *n);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *dev);
    struct ibv_context *(*open_device)(struct ibv_device *dev);
    int (*close_device)(struct ibv_context *ctx);
    int (*query_device)(struct ibv_context *ctx, struct ibv_device_attr *attr);
    /* Fills all up to and with `flags`; clear the rest before. */
    int (*query_port)(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr);
    int (*query_gid)(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid);
    int (*query_pkey)(struct ibv_context *ctx, uint8_t port, int index, __be16 *pkey);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *ctx);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t len, int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *ctx);
    int (*destroy_comp_channel)(struct ibv_comp_channel *ch);
    struct ibv_cq *(*create_cq)(struct ibv_context *ctx, int cqe, void *arg,
                                struct ibv_comp_channel *ch, int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    int (*get_cq_event)(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **arg);
    void (*ack_cq_events)(struct ibv_cq *cq, unsigned int n);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*get_async_event)(struct ibv_context *ctx, struct ibv_async_event *ev);
    void (*ack_async_event)(struct ibv_async_event *ev);
    /* Not in every version: NULL. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova,
                                    int fd, int access);
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova,
                                   unsigned int access);
    int (*fork_init)(void);
    __be64 (*get_device_guid)(struct ibv_device *dev);
};

extern struct r2_ibv r2_ibv;

/* `name`: path or soname. 0; -ENOENT: no such library; -ENOSYS: it lacks a symbol. The reason is in
 * `why`. */
int r2_ibv_load(const char *name, char *why, size_t cap);

#endif
