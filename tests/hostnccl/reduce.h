/* Arithmetic on host arrays in NCCL's types: pure. Half precisions are computed in float and
 * rounded to nearest even after every operation. */
#ifndef HOSTNCCL_REDUCE_H
#define HOSTNCCL_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl.h"

struct hn_redop {
    ncclRedOp_t op; /* ncclSum .. ncclMin */
    bool pre;       /* every rank's own input is multiplied by the scalar first */
    int post_div;   /* > 1: the result is divided by it (average of integers) */
    double real;    /* scalar of floating types */
    int64_t whole;  /* scalar of integer types */
};

size_t hn_reduce_size(ncclDataType_t type); /* bytes per element; 0: unknown type */
bool hn_reduce_is_float(ncclDataType_t type);
/* Value of one element. */
double hn_reduce_load(const void *at, ncclDataType_t type);

/* out = in `op` scale(own); `in` NULL: out = scale(own). `out` may equal `in` or `own`. */
void hn_reduce_apply(void *out, const void *in, const void *own, size_t count, ncclDataType_t type,
                     const struct hn_redop *op);
/* The division after the last step; nothing unless op->post_div > 1. */
void hn_reduce_finish(void *data, size_t count, ncclDataType_t type, const struct hn_redop *op);

#endif
