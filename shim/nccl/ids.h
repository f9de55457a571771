/* One number per function of nccl.def that has a wrapper. */
#ifndef R2_NCCL_IDS_H
#define R2_NCCL_IDS_H

enum r2_api {
#define R2_PLAIN(name, since, params, args) R2_API_##name,
#define R2_COMM(name, since, params, args) R2_API_##name,
#define R2_BYPASS(name, since, what, params, args) R2_API_##name,
#define R2_COLL(name, since, kind, params, args) R2_API_##name,
#define R2_P2P(name, since, kind, params, args) R2_API_##name,
#define R2_OWN(name, since, ret, params) R2_API_##name,
#include "nccl/nccl.def"
    R2_API_COUNT
};

/* By number: the name, and the release that first had it (22809 is 2.28.9). */
extern const char *const r2_api_names[R2_API_COUNT];
extern const int r2_api_since[R2_API_COUNT];

/* The number of a name, or -1. */
int r2_api_find(const char *name);

#endif
