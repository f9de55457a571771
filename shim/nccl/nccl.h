/* NCCL's public interface as the shim needs it: our own declarations, from the facts in
 * docs/shim.md. Everything that NCCL hands out or takes is a pointer or a number here; only the
 * unique id, which is passed by value, and the head of the configuration have a shape.
 */
#ifndef R2_NCCL_NCCL_H
#define R2_NCCL_NCCL_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_NCCL_ID_BYTES 128
#define R2_NCCL_CONFIG_MAGIC 0xcafebeefu
#define R2_NCCL_UNDEF INT_MIN
#define R2_NCCL_NOCOLOR (-1)
#define R2_NCCL_SHRINK_ABORT 1 /* flag of ncclCommShrink */

/* Results (ncclResult_t). */
enum {
    R2_NCCL_OK = 0,
    R2_NCCL_SYSTEM = 2,
    R2_NCCL_INTERNAL = 3,
    R2_NCCL_ARGUMENT = 4,
    R2_NCCL_USAGE = 5,
    R2_NCCL_REMOTE = 6,
    R2_NCCL_IN_PROGRESS = 7,
};

struct r2_nccl_id {
    char bytes[R2_NCCL_ID_BYTES];
};

/* ncclConfig_t grows at its end with NCCL's releases. `size` is the caller's: nothing beyond it
 * may be read, and a field that it cuts off counts as unset. */
struct r2_nccl_config {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char *net_name;
    int split_share;
    int traffic_class; /* 2.26 */
    const char *name;  /* 2.27 and the next three as well */
    int collnet_enable;
    int cta_policy;
    int shrink_share;
};

_Static_assert(offsetof(struct r2_nccl_config, blocking) == 16, "as in ncclConfig_t");
_Static_assert(offsetof(struct r2_nccl_config, net_name) == 32, "as in ncclConfig_t");
_Static_assert(offsetof(struct r2_nccl_config, name) == 48, "as in ncclConfig_t");

/* Whether the caller's configuration has this field. */
#define R2_NCCL_CONFIG_HAS(config, field)                                                          \
    ((config) && (config)->magic == R2_NCCL_CONFIG_MAGIC &&                                        \
     (config)->size >= offsetof(struct r2_nccl_config, field) + sizeof((config)->field))

/* Handles: what they lead to is NCCL's. */
typedef struct r2_nccl_comm *r2_nccl_comm;
typedef void *r2_nccl_stream;
typedef void *r2_nccl_window;

/* Element types (ncclDataType_t). */
enum {
    R2_NCCL_INT8 = 0,
    R2_NCCL_UINT8 = 1,
    R2_NCCL_INT32 = 2,
    R2_NCCL_UINT32 = 3,
    R2_NCCL_INT64 = 4,
    R2_NCCL_UINT64 = 5,
    R2_NCCL_FLOAT16 = 6,
    R2_NCCL_FLOAT32 = 7,
    R2_NCCL_FLOAT64 = 8,
    R2_NCCL_BFLOAT16 = 9,
    R2_NCCL_FLOAT8E4M3 = 10,
    R2_NCCL_FLOAT8E5M2 = 11,
    R2_NCCL_TYPES = 12,
};

/* Reductions (ncclRedOp_t). Larger numbers are what ncclRedOpCreatePreMulSum made. */
enum {
    R2_NCCL_SUM = 0,
    R2_NCCL_PROD = 1,
    R2_NCCL_MAX = 2,
    R2_NCCL_MIN = 3,
    R2_NCCL_AVG = 4,
    R2_NCCL_OPS = 5,
};

/* Bytes of an element of an ncclDataType_t; 0 for a type that we do not know. */
static inline size_t r2_nccl_type_size(int type)
{
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

    return type >= 0 && (size_t)type < sizeof(sizes) ? sizes[type] : 0;
}

#endif
