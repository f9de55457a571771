/* NCCL's public functions that move data. */
#define _GNU_SOURCE
#include <string.h>

#include "group.h"

#define API __attribute__((visibility("default")))

/* Averages and user operations become plain sums with a scalar before or a division after. */
static ncclResult_t resolve(struct hn_op *op, ncclRedOp_t redop)
{
    struct ncclComm *comm = op->comm;
    op->op = (struct hn_redop){.op = redop};
    if (redop < 0)
        return hn_util_fail(ncclInvalidArgument, "reduction %d is unknown", (int)redop);
    if (redop < ncclAvg)
        return ncclSuccess;
    op->op.op = ncclSum;
    if (redop == ncclAvg) {
        op->op.pre = hn_reduce_is_float(op->type);
        op->op.real = 1.0 / comm->nranks;
        op->op.post_div = op->op.pre ? 0 : comm->nranks;
        return ncclSuccess;
    }
    unsigned index = (unsigned)redop - ncclNumOps;
    ncclResult_t result = ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    if (index < HN_MAX_USER_OPS && comm->user_ops[index].used &&
        comm->user_ops[index].type == op->type) {
        op->op = comm->user_ops[index].op;
        result = ncclSuccess;
    }
    pthread_mutex_unlock(&comm->lock);
    return result == ncclSuccess
               ? result
               : hn_util_fail(result, "reduction %d was not made for this communicator and type",
                              (int)redop);
}

static ncclResult_t submit(struct hn_op op, ncclRedOp_t redop, const char *name)
{
    if (!op.comm)
        return hn_util_fail(ncclInvalidArgument, "%s: comm is NULL", name);
    int ready = atomic_load(&op.comm->async);
    if (ready == ncclInProgress)
        return hn_util_fail(ncclInvalidArgument, "%s: the communicator is not ready yet", name);
    if (!hn_reduce_size(op.type))
        return hn_util_fail(ncclInvalidArgument, "%s: data type %d is unknown", name, op.type);
    if (op.peer < 0 || op.peer >= op.comm->nranks)
        return hn_util_fail(ncclInvalidArgument, "%s: rank %d is not one of %d", name, op.peer,
                            op.comm->nranks);
    bool sends = op.func != HN_RECV && !(op.func == HN_BROADCAST && op.peer != op.comm->rank);
    bool receives = op.func != HN_SEND && !(op.func == HN_REDUCE && op.peer != op.comm->rank);
    if (op.count && ((sends && !op.send) || (receives && !op.recv)))
        return hn_util_fail(ncclInvalidArgument, "%s: a buffer is NULL", name);
    ncclResult_t result = resolve(&op, redop);
    return result == ncclSuccess ? hn_group_op(&op) : result;
}

API ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_ALLREDUCE,
                                 .send = send,
                                 .recv = recv,
                                 .count = count,
                                 .type = type},
                  op, "ncclAllReduce");
}

/* Of NCCL 2.31. The configuration is passed over. */
API ncclResult_t ncclAllReduceConfig(const void *send, void *recv, size_t count,
                                     ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                     ncclStream_t stream, const void *config)
{
    (void)config;
    return ncclAllReduce(send, recv, count, type, op, comm, stream);
}

API ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recvcount,
                                   ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                   ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_REDUCESCATTER,
                                 .send = send,
                                 .recv = recv,
                                 .count = recvcount,
                                 .type = type},
                  op, "ncclReduceScatter");
}

API ncclResult_t ncclAllGather(const void *send, void *recv, size_t sendcount, ncclDataType_t type,
                               ncclComm_t comm, ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_ALLGATHER,
                                 .send = send,
                                 .recv = recv,
                                 .count = sendcount,
                                 .type = type},
                  ncclSum, "ncclAllGather");
}

API ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_BROADCAST,
                                 .send = send,
                                 .recv = recv,
                                 .count = count,
                                 .type = type,
                                 .peer = root},
                  ncclSum, "ncclBroadcast");
}

API ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           ncclStream_t stream)
{
    return ncclBroadcast(buff, buff, count, type, root, comm, stream);
}

API ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, int root, ncclComm_t comm, ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_REDUCE,
                                 .send = send,
                                 .recv = recv,
                                 .count = count,
                                 .type = type,
                                 .peer = root},
                  op, "ncclReduce");
}

API ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_SEND,
                                 .send = send,
                                 .count = count,
                                 .type = type,
                                 .peer = peer},
                  ncclSum, "ncclSend");
}

API ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          ncclStream_t stream)
{
    (void)stream;
    return submit((struct hn_op){.comm = comm,
                                 .func = HN_RECV,
                                 .recv = recv,
                                 .count = count,
                                 .type = type,
                                 .peer = peer},
                  ncclSum, "ncclRecv");
}

API ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
                              ncclComm_t comm, ncclStream_t stream)
{
    if (!comm)
        return hn_util_fail(ncclInvalidArgument, "ncclAlltoAll: comm is NULL");
    size_t block = count * hn_reduce_size(type);
    ncclResult_t result = ncclSuccess;
    ncclGroupStart();
    for (int r = 0; r < comm->nranks && result == ncclSuccess; r++) {
        const char *from = send ? (const char *)send + (size_t)r * block : NULL;
        char *to = recv ? (char *)recv + (size_t)r * block : NULL;
        result = ncclSend(from, count, type, r, comm, stream);
        if (result == ncclSuccess)
            result = ncclRecv(to, count, type, r, comm, stream);
    }
    ncclResult_t end = ncclGroupEnd();
    return result == ncclSuccess ? end : result;
}

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                          ncclScalarResidence_t residence, ncclComm_t comm)
{
    (void)residence; /* host memory in both cases: read now */
    if (!comm || !op || !scalar || !hn_reduce_size(type))
        return hn_util_fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: a NULL argument or an "
                                                 "unknown data type");
    struct hn_redop redop = {.op = ncclSum, .pre = true, .real = hn_reduce_load(scalar, type)};
    if (type == ncclInt64 || type == ncclUint64)
        memcpy(&redop.whole, scalar, sizeof(redop.whole));
    else if (!hn_reduce_is_float(type))
        redop.whole = (int64_t)redop.real;
    ncclResult_t result = ncclSystemError;
    pthread_mutex_lock(&comm->lock);
    for (int i = 0; i < HN_MAX_USER_OPS && result != ncclSuccess; i++) {
        if (comm->user_ops[i].used)
            continue;
        comm->user_ops[i] = (struct hn_redop_user){true, redop, type};
        *op = (ncclRedOp_t)(ncclNumOps + i);
        result = ncclSuccess;
    }
    pthread_mutex_unlock(&comm->lock);
    return result == ncclSuccess
               ? result
               : hn_util_fail(result, "more than %d reductions in use", HN_MAX_USER_OPS);
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    unsigned index = (unsigned)op - ncclNumOps;
    if (!comm || index >= HN_MAX_USER_OPS || !comm->user_ops[index].used)
        return hn_util_fail(ncclInvalidArgument, "reduction %d was not made here", (int)op);
    pthread_mutex_lock(&comm->lock);
    comm->user_ops[index].used = false;
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}
