/* What users ask of RDMA with NCCL's names: read once from the settings, and what makes no sense
 * named once and left out. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "settings/launch.h"
#include "settings/settings.h"
#include "transport/verbs/verbs.h"
#include "util/log.h"

#define QPS_MOST 8 /* as R2CCL_IB_QPS */

static struct r2_gid_wants wants;
static int gid_index, qps, timeout, retry_cnt;

/* As NCCL reads it: hexadecimal and octal, too. */
bool r2_wanted_is_number(const char *text, int low, int high, int *out)
{
    char *end;
    long v;

    errno = 0;
    v = strtol(text, &end, 0);
    *out = (int)v;
    return !errno && end != text && !*end && v >= low && v <= high;
}

int r2_wanted_number(const char *name, const char *text, int otherwise, int low, int high)
{
    int v;

    if (!text[0])
        return otherwise;
    if (r2_wanted_is_number(text, low, high, &v))
        return v;
    R2_WARN_LIMIT("%s=%s is no number from %d to %d: %d is used", name, text, low, high, otherwise);
    return otherwise;
}

static void read_index(const struct r2_settings *set)
{
    const char *text = set->ib_gid_index[0] ? set->ib_gid_index : set->nccl_ib_gid_index;

    gid_index = -1;
    if (!text[0] || r2_wanted_is_number(text, -1, R2_GIDS_MOST - 1, &gid_index))
        return;
    gid_index = -1;
    R2_TELL_ONE("%s=%s is no index of a GID: give a number from 0 to 255, such as 3; the entry "
                "that fits the NIC is taken",
                set->ib_gid_index[0] ? "R2CCL_IB_GID_INDEX" : "NCCL_IB_GID_INDEX", text);
}

static void read_wants(const struct r2_settings *set)
{
    const char *family = set->nccl_ib_addr_family, *range = set->nccl_ib_addr_range;
    struct r2_gid_wants w = {0};
    bool v6 = strchr(range, ':') != NULL;

    w.v4 = strcmp(family, "AF_INET") == 0;
    w.v6 = strcmp(family, "AF_INET6") == 0;
    if (family[0] && !w.v4 && !w.v6)
        R2_TELL_ONE(
            "NCCL_IB_ADDR_FAMILY=%s is no address family of a GID: give AF_INET or AF_INET6; "
            "entries of both are taken",
            family);
    if (range[0] && (!r2_gid_range(range, &w) || (v6 ? w.v4 : w.v6))) {
        R2_TELL_ONE("NCCL_IB_ADDR_RANGE=%s is no range of addresses%s: give ADDRESS/BITS, such as "
                    "10.0.0.0/8; entries of all addresses are taken",
                    range,
                    w.v4   ? " of AF_INET"
                    : w.v6 ? " of AF_INET6"
                           : "");
        w.bits = 0;
    }
    w.version = r2_wanted_number("NCCL_IB_ROCE_VERSION_NUM", set->nccl_ib_roce_version, 0, 1, 2);
    wants = w;
}

static void read_all(void)
{
    const struct r2_settings *set = r2_settings_get();

    read_index(set);
    read_wants(set);
    timeout = r2_wanted_number("NCCL_IB_TIMEOUT", set->nccl_ib_timeout, 16, 1, 31);
    retry_cnt = r2_wanted_number("NCCL_IB_RETRY_CNT", set->nccl_ib_retry_cnt, 7, 0, 7);
    qps = set->ib_qps;
    if (!qps)
        qps = r2_wanted_number("NCCL_IB_QPS_PER_CONNECTION", set->nccl_ib_qps, 1, 1, 128);
    if (qps > QPS_MOST) {
        R2_WARN("NCCL_IB_QPS_PER_CONNECTION=%s: a path has %d queue pairs at most, which are used",
                set->nccl_ib_qps, QPS_MOST);
        qps = QPS_MOST;
    }
}

static void ready(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, read_all);
}

int r2_wanted_gid_index(void)
{
    ready();
    return gid_index;
}

const struct r2_gid_wants *r2_wanted_gid(void)
{
    ready();
    return &wants;
}

int r2_wanted_qps(void)
{
    ready();
    return qps;
}

int r2_wanted_timeout(void)
{
    ready();
    return timeout;
}

int r2_wanted_retry_cnt(void)
{
    ready();
    return retry_cnt;
}
