#define _GNU_SOURCE
#include "engine/p2pchunk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/internal.h"

#define NAME "NCCL_P2P_NET_CHUNKSIZE"
#define OF_NCCL (128 * 1024) /* where nothing is set */

static uint16_t here; /* written before the first connection */

/* As NCCL reads numbers. */
static int64_t of_environment(void)
{
    const char *text = getenv(NAME);
    int64_t value;

    if (!text || !text[0])
        return OF_NCCL;
    errno = 0;
    value = strtoll(text, NULL, 0);
    return errno ? OF_NCCL : value;
}

void r2_p2pchunk_start(uint64_t bytes)
{
    const char *set = getenv(NAME);
    char text[24];
    int64_t now;

    snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
    if (bytes && (!set || !set[0]) && setenv(NAME, text, 1) == 0)
        R2_INFO(NAME "=%s, by R2CCL_P2P_CHUNK", text);
    now = of_environment();
    here = now <= 0                           ? 0
           : now > (int64_t)UINT16_MAX * 1024 ? UINT16_MAX
                                              : (uint16_t)((now + 1023) / 1024);
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
    R2_WARN(NAME
            " is %u KiB here and %u KiB at %s pid %u: what NCCL sends and receives between the "
            "two, alltoall included, goes wrong. Set it, or R2CCL_P2P_CHUNK, to the same on all "
            "ranks",
            (unsigned)here, (unsigned)word, p->host[0] ? p->host : "?", p->pid);
}
