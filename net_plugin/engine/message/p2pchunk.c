/* The pieces that NCCL cuts sends and receives into between nodes (NCCL_P2P_NET_CHUNKSIZE; alltoall
 * is made of them). NCCL takes 128 KiB for granted and has eight of a connection under way, which
 * is too little for several fast NICs (docs/decisions.md 40). */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/message/message.h"
#include "settings/launch.h"
#include "settings/settings.h"
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
    set = r2_value_nccl(r2_settings_getenv("NCCL_BUFFSIZE"), buffer);
    return (set > 0 ? set : buffer) / STEPS;
}

#define NCCLS (128 * KIB)                   /* NCCL's own pieces */
#define ENOUGH (UINT64_C(1024) * KIB * KIB) /* for a rank */

void r2_p2pchunk_memory(uint64_t limit, int ranks, uint64_t bytes, char *out, size_t cap)
{
    out[0] = '\0';
    if (!limit || ranks < 1 || bytes <= NCCLS || limit / (unsigned)ranks >= ENOUGH)
        return;
    snprintf(out, cap,
             "this control group has %llu MiB of memory for %d rank%s, and NCCL's buffers for "
             "alltoall, send and receive take %.1f times what they take without R2CCL: "
             "R2CCL_P2P_CHUNK=128K on all ranks takes that back",
             (unsigned long long)(limit >> 20), ranks, ranks == 1 ? "" : "s",
             (double)bytes / NCCLS);
}

static uint64_t read_limit(const char *folder)
{
    char path[600], text[32] = "";
    FILE *file;

    snprintf(path, sizeof(path), "%s/memory.max", folder);
    file = fopen(path, "re");
    if (!file)
        return 0;
    if (!fgets(text, sizeof(text), file))
        text[0] = '\0';
    fclose(file);
    return strtoull(text, NULL, 10); /* "max" is 0 */
}

uint64_t r2_p2pchunk_limit(const char *root, const char *cgroup)
{
    const char *own = strstr(cgroup, "0::");
    char folder[512];
    uint64_t least = 0;
    size_t base = strlen(root);

    snprintf(folder, sizeof(folder), "%s%.*s", root, own ? (int)strcspn(own + 3, "\n") : 0,
             own ? own + 3 : "");
    for (char *slash;; *slash = '\0') {
        uint64_t limit = read_limit(folder);

        if (limit && (!least || limit < least))
            least = limit;
        slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < base)
            return least;
    }
}

static void say_memory(uint64_t bytes)
{
    char groups[1024] = "", text[400];
    FILE *file = fopen("/proc/self/cgroup", "re");
    int ranks = r2_launch_local_ranks(getenv);
    size_t n = file ? fread(groups, 1, sizeof(groups) - 1, file) : 0;

    groups[n] = '\0';
    if (file)
        fclose(file);
    r2_p2pchunk_memory(r2_p2pchunk_limit("/sys/fs/cgroup", groups), ranks > 0 ? ranks : 1, bytes,
                       text, sizeof(text));
    if (text[0])
        R2_TELL("%s", text);
}

void r2_p2pchunk_start(uint64_t bytes, unsigned nccl)
{
    const char *set = r2_settings_getenv(NAME);
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
        R2_INFO(NAME "=%s, by R2CCL_P2P_CHUNK: its buffers take %.1f times NCCL's memory", text,
                (double)bytes / NCCLS);
    now = r2_value_nccl(r2_settings_getenv(NAME), NCCLS);
    say_memory(now > 0 ? (uint64_t)now : 0);
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
    char who[R2_PEER_WHO];

    if (word == here || p->p2pchunk_told)
        return;
    p->p2pchunk_told = true;
    R2_WARN_LIMIT(NAME " is %u KiB here and %u KiB at %s: what NCCL sends and receives "
                       "between the two, alltoall included, goes wrong. Set it, "
                       "NCCL_BUFFSIZE and R2CCL_P2P_CHUNK to the same on all ranks",
                  (unsigned)here, (unsigned)word, r2_peer_who(p, who));
}
