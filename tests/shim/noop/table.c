/* Every function of the table that only returns; noop.c has the others, and wins. */
#include "noop.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define SIMPLE(name, params, args)                                                                 \
    API __attribute__((weak)) int name params;                                                     \
    int name params                                                                                \
    {                                                                                              \
        return noop_note(R2_API_##name);                                                           \
    }
#define R2_PLAIN(name, since, params, args) SIMPLE(name, params, args)
#define R2_COMM(name, since, params, args) SIMPLE(name, params, args)
#define R2_BYPASS(name, since, what, params, args) SIMPLE(name, params, args)
#define R2_P2P(name, since, kind, params, args)                                                    \
    API __attribute__((weak)) int name params;                                                     \
    int name params                                                                                \
    {                                                                                              \
        return noop_enqueue(R2_API_##name);                                                        \
    }
#define R2_COLL(name, since, kind, params, args)                                                   \
    API __attribute__((weak)) int name params;                                                     \
    int name params                                                                                \
    {                                                                                              \
        return noop_collective(R2_API_##name, comm);                                               \
    }
#include "nccl/nccl.def"
