/* An NCCL that is too old for the shim: 2.17, and only a few functions. */
#include "nccl/nccl.h"

#define API __attribute__((visibility("default")))

API int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = 21701;
    return 0;
}

API int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank);
int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank)
{
    static int made;

    (void)nranks, (void)id, (void)rank;
    *out = (r2_nccl_comm)&made;
    return 0;
}
