#ifndef R2CCL_TESTS_COMM_ROW_H
#define R2CCL_TESTS_COMM_ROW_H

#include "check.h"
#include "comms/inside.h"

/* A copy of the communicator's row. The thread of plans writes the row, too. */
static inline struct r2_seg_comm row_of(r2_nccl_comm handle)
{
    struct r2_comm *comm = r2_comms_hold(handle);
    uint64_t words[sizeof(struct r2_seg_comm) / 8];
    struct r2_seg_comm row;

    CHECK(comm != NULL);
    for (size_t i = 0; i < sizeof(row) / 8; i++)
        words[i] = __atomic_load_n((uint64_t *)r2_comm_row(comm) + i, __ATOMIC_ACQUIRE);
    memcpy(&row, words, sizeof(row));
    r2_comms_drop(comm);
    return row;
}

#endif
