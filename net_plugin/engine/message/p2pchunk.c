#define _GNU_SOURCE
#include "engine/message/p2pchunk.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/message/message.h"
#include "settings/values.h"

#define NAME "NCCL_P2P_NET_CHUNKSIZE"
#define KIB 1024
#define STEPS 8             /* NCCL's: so many pieces share a buffer */
#define LIMITS_ITSELF 21900 /* NCCL 2.19 and later do, and have 4 MiB on all processors */
#define UNIT (4 * KIB)

static uint16_t here; /* written before the first connection */

/* The largest piece that NCCL's buffers have room for. */
static int64_t most(unsigned nccl)
{
    int64_t buffer = 4096 * KIB, set;

#ifdef __aarch64__
    if (nccl < LIMITS_ITSELF)
        buffer = 1024 * KIB;
#else
    (void)nccl;
#endif
    set = r2_value_nccl(getenv("NCCL_BUFFSIZE"), buffer);
    return (set > 0 ? set : buffer) / STEPS;
}

void r2_p2pchunk_start(uint64_t bytes, unsigned nccl)
{
    const char *set = getenv(NAME);
    int64_t limit = most(nccl), now;
    char text[24];

    if (bytes)
        bytes = bytes < UNIT ? UNIT : bytes - bytes % UNIT;
    if (bytes > (uint64_t)limit)
        bytes = limit < UNIT ? (uint64_t)limit : (uint64_t)limit - (uint64_t)limit % UNIT;
    snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
    if (bytes && set && set[0])
        R2_INFO(NAME "=%s stays as it is (R2CCL_P2P_CHUNK: %s)", set, text);
    else if (bytes && setenv(NAME, text, 1) == 0)
        R2_INFO(NAME "=%s, by R2CCL_P2P_CHUNK", text);
    now = r2_value_nccl(getenv(NAME), 128 * KIB);
    if (now > limit && (nccl >= LIMITS_ITSELF || !nccl))
        now = limit;
    here = now <= 0                          ? 0
           : now > (int64_t)UINT16_MAX * KIB ? UINT16_MAX
                                             : (uint16_t)((now + KIB - 1) / KIB);
}

uint16_t r2_p2pchunk_word(void)
{
    return here;
}

void r2_p2pchunk_heard(struct r2_peer *p, uint16_t word)
{
    if (word == here || p->p2pchunk_told)
        return;
    p->p2pchunk_told = true;
    R2_WARN_LIMIT(NAME " is %u KiB here and %u KiB at %s pid %u: what NCCL sends and receives "
                       "between the two, alltoall included, goes wrong. Set it, "
                       "NCCL_BUFFSIZE and R2CCL_P2P_CHUNK to the same on all ranks",
                  (unsigned)here, (unsigned)word, p->host[0] ? p->host : "?", p->pid);
}
