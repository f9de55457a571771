/* The wrappers by number. */
#include <stddef.h>

#include "api/call.h"
#include "nccl/ids.h"

#define R2_PLAIN(name, since, params, args) int name params;
#define R2_COMM(name, since, params, args) int name params;
#define R2_BYPASS(name, since, what, params, args) int name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#define R2_OWN(name, since, ret, params) ret name params;
#include "nccl/nccl.def"

void *r2_api_wrapper(enum r2_api id)
{
    static void *const wrappers[R2_API_COUNT] = {
#define R2_PLAIN(name, since, params, args) (void *)name,
#define R2_COMM(name, since, params, args) (void *)name,
#define R2_BYPASS(name, since, what, params, args) (void *)name,
#define R2_COLL(name, since, kind, params, args) (void *)name,
#define R2_P2P(name, since, kind, params, args) (void *)name,
#define R2_OWN(name, since, ret, params) (void *)name,
#include "nccl/nccl.def"
    };

    return id >= 0 && id < R2_API_COUNT ? wrappers[id] : NULL;
}
