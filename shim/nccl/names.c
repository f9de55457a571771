/* The table of functions as data. */
#include <string.h>

#include "nccl/ids.h"

const char *const r2_api_names[R2_API_COUNT] = {
#define R2_PLAIN(name, since, params, args) #name,
#define R2_COMM(name, since, params, args) #name,
#define R2_BYPASS(name, since, what, params, args) #name,
#define R2_COLL(name, since, kind, params, args) #name,
#define R2_P2P(name, since, kind, params, args) #name,
#define R2_OWN(name, since, ret, params) #name,
#include "nccl/nccl.def"
};

const int r2_api_since[R2_API_COUNT] = {
#define R2_PLAIN(name, since, params, args) since,
#define R2_COMM(name, since, params, args) since,
#define R2_BYPASS(name, since, what, params, args) since,
#define R2_COLL(name, since, kind, params, args) since,
#define R2_P2P(name, since, kind, params, args) since,
#define R2_OWN(name, since, ret, params) since,
#include "nccl/nccl.def"
};

int r2_api_find(const char *name)
{
    for (int id = 0; id < R2_API_COUNT; id++)
        if (!strcmp(r2_api_names[id], name))
            return id;
    return -1;
}
