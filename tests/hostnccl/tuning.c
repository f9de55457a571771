#define _GNU_SOURCE
#include "tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const proto_names[] = {"LL", "LL128", "Simple"};

/* A list of names, or ^ and what is left out. Bit i: names[i] is allowed. */
static unsigned allowed(const char *variable, const char *const *names, int count)
{
    const char *text = getenv(variable);
    unsigned all = (1u << count) - 1, mask = 0;
    if (!text || !*text)
        return all;
    bool exclude = *text == '^';
    char list[128];
    char *rest = NULL;
    snprintf(list, sizeof(list), "%s", text + exclude);
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        for (int i = 0; i < count; i++)
            if (!strcasecmp(name, names[i]))
                mask |= 1u << i;
    mask = exclude ? all & ~mask : mask;
    if (mask)
        return mask;
    HN_WARN("%s=%s ignored: none of its names is known here", variable, text);
    return all;
}

/* How far a protocol is from the one that the size asks for; -1: excluded. Larger ones come before
 * smaller ones. */
static int proto_rank(int proto, size_t bytes, bool p2p)
{
    unsigned mask = allowed("NCCL_PROTO", proto_names, HN_PROTOS);
    int wish = HN_SIMPLE;
    if (bytes <= (p2p ? 16u << 10 : 64u << 10))
        wish = HN_LL;
    else if (!p2p && bytes <= 1u << 20)
        wish = HN_LL128;
    if (p2p) { /* NCCL has no LL128 there */
        mask &= 1u << HN_LL | 1u << HN_SIMPLE;
        mask = mask ? mask : 1u << HN_SIMPLE;
    }
    if (!(mask & 1u << proto))
        return -1;
    return proto >= wish ? proto - wish : HN_PROTOS + wish - proto;
}

enum hn_proto hn_tuning_protocol(size_t bytes, bool p2p)
{
    int best = HN_SIMPLE, least = 100;
    for (int p = 0; p < HN_PROTOS; p++) {
        int rank = proto_rank(p, bytes, p2p);
        if (rank >= 0 && rank < least) {
            least = rank;
            best = p;
        }
    }
    return (enum hn_proto)best;
}
