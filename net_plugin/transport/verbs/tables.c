#include "transport/verbs/tables.h"

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

/* Whose fault, behind each meaning, so that journal and status say it. */
#define OF_NOBODY ""
#define OF_PATH " (path's or peer's fault)"
#define OF_LOCAL " (this NIC's fault)"
#define OF_REMOTE " (peer's fault)"
#define OF_MEMORY " (no NIC's fault)"
#define CODE(code, meaning, whose, err)                                                            \
    {                                                                                              \
        IBV_WC_##code, #code, meaning OF_##whose, R2_BLAME_##whose, err                            \
    }

static const struct r2_wc_info wc_table[] = {
    CODE(SUCCESS, "success", NOBODY, 0),
    CODE(LOC_LEN_ERR, "a message longer than its receive", REMOTE, EPROTO),
    CODE(LOC_QP_OP_ERR, "local queue pair failed, or its port", LOCAL, EIO),
    CODE(LOC_EEC_OP_ERR, "local end-to-end context failed", LOCAL, EIO),
    CODE(LOC_PROT_ERR, "local key does not cover the memory", MEMORY, EFAULT),
    CODE(WR_FLUSH_ERR, "flushed: the queue pair had failed before", NOBODY, ECONNABORTED),
    CODE(MW_BIND_ERR, "memory window not bound", LOCAL, EIO),
    CODE(BAD_RESP_ERR, "an answer that makes no sense", PATH, EPROTO),
    CODE(LOC_ACCESS_ERR, "local memory may not be written", MEMORY, EFAULT),
    CODE(REM_INV_REQ_ERR, "request refused by the peer's NIC", REMOTE, EPROTO),
    CODE(REM_ACCESS_ERR, "the peer's memory is taken back", MEMORY, EACCES),
    CODE(REM_OP_ERR, "the peer's NIC could not do it", REMOTE, EREMOTEIO),
    CODE(RETRY_EXC_ERR, "no acknowledgement in all retries", PATH, ETIMEDOUT),
    CODE(RNR_RETRY_EXC_ERR, "the peer posted no receive for too long", REMOTE, ETIMEDOUT),
    CODE(LOC_RDD_VIOL_ERR, "reliable datagram domain violated", LOCAL, EIO),
    CODE(REM_INV_RD_REQ_ERR, "reliable datagram request refused", REMOTE, EPROTO),
    CODE(REM_ABORT_ERR, "given up by the peer's NIC", REMOTE, ECONNRESET),
    CODE(INV_EECN_ERR, "no such end-to-end context", LOCAL, EIO),
    CODE(INV_EEC_STATE_ERR, "state of the end-to-end context", LOCAL, EIO),
    CODE(FATAL_ERR, "the device failed", LOCAL, EIO),
    CODE(RESP_TIMEOUT_ERR, "no answer in time", PATH, ETIMEDOUT),
    CODE(GENERAL_ERR, "an error without a code of its own", LOCAL, EIO),
    CODE(TM_ERR, "tag matching failed", LOCAL, EIO),
    CODE(TM_RNDV_INCOMPLETE, "tag matching not complete", LOCAL, EIO),
};

const struct r2_wc_info *r2_wc_info(int status)
{
    static const struct r2_wc_info other = {-1, "unknown", "a code of a newer library" OF_PATH,
                                            R2_BLAME_PATH, EIO};

    for (size_t i = 0; i < sizeof(wc_table) / sizeof(wc_table[0]); i++) {
        if (wc_table[i].status == status)
            return &wc_table[i];
    }
    return &other;
}

static const struct r2_async_info async_table[] = {
    {IBV_EVENT_CQ_ERR, "CQ_ERR", "completion queue overrun or failed", R2_ASYNC_CQ, R2_ASYNC_FAIL},
    {IBV_EVENT_QP_FATAL, "QP_FATAL", "queue pair failed", R2_ASYNC_QP, R2_ASYNC_FAIL},
    {IBV_EVENT_QP_REQ_ERR, "QP_REQ_ERR", "invalid request", R2_ASYNC_QP, R2_ASYNC_FAIL},
    {IBV_EVENT_QP_ACCESS_ERR, "QP_ACCESS_ERR", "the peer wrote where it may not", R2_ASYNC_QP,
     R2_ASYNC_FAIL},
    {IBV_EVENT_COMM_EST, "COMM_EST", "first packet before RTS", R2_ASYNC_QP, R2_ASYNC_IGNORE},
    {IBV_EVENT_SQ_DRAINED, "SQ_DRAINED", "send queue drained", R2_ASYNC_QP, R2_ASYNC_IGNORE},
    {IBV_EVENT_PATH_MIG, "PATH_MIG", "moved to the alternate path", R2_ASYNC_QP, R2_ASYNC_IGNORE},
    {IBV_EVENT_PATH_MIG_ERR, "PATH_MIG_ERR", "no alternate path", R2_ASYNC_QP, R2_ASYNC_FAIL},
    {IBV_EVENT_DEVICE_FATAL, "DEVICE_FATAL", "the device failed, or was removed", R2_ASYNC_DEVICE,
     R2_ASYNC_GONE},
    {IBV_EVENT_PORT_ACTIVE, "PORT_ACTIVE", "port active", R2_ASYNC_PORT, R2_ASYNC_UP},
    {IBV_EVENT_PORT_ERR, "PORT_ERR", "port down", R2_ASYNC_PORT, R2_ASYNC_DOWN},
    {IBV_EVENT_LID_CHANGE, "LID_CHANGE", "the subnet manager gave another LID", R2_ASYNC_PORT,
     R2_ASYNC_REFRESH},
    {IBV_EVENT_PKEY_CHANGE, "PKEY_CHANGE", "partition keys changed", R2_ASYNC_PORT,
     R2_ASYNC_REFRESH},
    {IBV_EVENT_SM_CHANGE, "SM_CHANGE", "another subnet manager", R2_ASYNC_PORT, R2_ASYNC_REFRESH},
    {IBV_EVENT_SRQ_ERR, "SRQ_ERR", "shared receive queue", R2_ASYNC_NONE, R2_ASYNC_IGNORE},
    {IBV_EVENT_SRQ_LIMIT_REACHED, "SRQ_LIMIT_REACHED", "shared receive queue", R2_ASYNC_NONE,
     R2_ASYNC_IGNORE},
    {IBV_EVENT_QP_LAST_WQE_REACHED, "QP_LAST_WQE_REACHED", "last receive consumed", R2_ASYNC_QP,
     R2_ASYNC_IGNORE},
    {IBV_EVENT_CLIENT_REREGISTER, "CLIENT_REREGISTER", "the subnet manager asks to register anew",
     R2_ASYNC_PORT, R2_ASYNC_REFRESH},
    {IBV_EVENT_GID_CHANGE, "GID_CHANGE", "addresses of the port changed", R2_ASYNC_PORT,
     R2_ASYNC_REFRESH},
    {IBV_EVENT_WQ_FATAL, "WQ_FATAL", "work queue failed", R2_ASYNC_NONE, R2_ASYNC_IGNORE},
};

const struct r2_async_info *r2_async_info(int type)
{
    static const struct r2_async_info other = {-1, "unknown", "an event of a newer library",
                                               R2_ASYNC_NONE, R2_ASYNC_IGNORE};

    for (size_t i = 0; i < sizeof(async_table) / sizeof(async_table[0]); i++) {
        if (async_table[i].type == type)
            return &async_table[i];
    }
    return &other;
}

bool r2_hca_match(const char *list, const char *device, int port)
{
    bool exclude, exact, found = false;
    const char *p = list ? list : "";

    exclude = *p == '^';
    p += exclude;
    exact = *p == '=';
    p += exact;
    if (!*p)
        return true;
    while (*p && !found) {
        size_t len = strcspn(p, ","), name = strcspn(p, ":,");

        found = name > 0 && strncmp(p, device, name) == 0 && (!exact || device[name] == 0);
        if (found && name < len)
            found = atoi(p + name + 1) == port;
        p += len;
        p += *p == ',';
    }
    return found != exclude;
}

static bool is_v4(const uint8_t gid[16])
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

    return memcmp(gid, mapped, sizeof(mapped)) == 0;
}

static bool is_link_local(const uint8_t gid[16])
{
    return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

bool r2_gid_fits(const uint8_t gid[16], enum r2_gid_type type, const struct r2_gid_wants *wants)
{
    int whole = wants->bits / 8, rest = wants->bits % 8;

    if (wants->v6 && !wants->bits && is_link_local(gid))
        return false;

    if ((wants->v4 && !is_v4(gid)) || (wants->v6 && is_v4(gid)))
        return false;
    if (wants->version && type != R2_GID_UNKNOWN && (type == R2_GID_V2) != (wants->version == 2))
        return false;
    return memcmp(gid, wants->prefix, (size_t)whole) == 0 &&
           (!rest || (gid[whole] ^ wants->prefix[whole]) >> (8 - rest) == 0);
}

bool r2_gid_range(const char *text, struct r2_gid_wants *wants)
{
    const char *slash = strchr(text, '/');
    char addr[INET6_ADDRSTRLEN] = "", *end;
    bool v6 = strchr(text, ':') != NULL;
    long bits;

    if (!slash || (size_t)(slash - text) >= sizeof(addr) || slash[1] < '0' || slash[1] > '9')
        return false;
    memcpy(addr, text, (size_t)(slash - text));
    bits = strtol(slash + 1, &end, 10);
    if (*end || bits > (v6 ? 128 : 32))
        return false;
    memset(wants->prefix, 0, 16);
    wants->prefix[10] = wants->prefix[11] = v6 ? 0 : 0xff;
    wants->bits = (int)bits + (v6 ? 0 : 96);
    return inet_pton(v6 ? AF_INET6 : AF_INET, addr, wants->prefix + (v6 ? 0 : 12)) == 1;
}

int r2_gid_score(const uint8_t gid[16], enum r2_gid_type type, const uint8_t *ip)
{
    static const uint8_t zero[16];
    bool v4 = is_v4(gid);
    int score = type == R2_GID_V2 ? 20 : type == R2_GID_UNKNOWN ? 10 : 0;

    if (memcmp(gid, zero, 16) == 0 || (memcmp(gid, zero, 8) == 0 && !v4))
        return -1;
    if (is_link_local(gid))
        return score;
    if (ip && memcmp(gid, ip, 16) == 0)
        score += 200;
    return score + (v4 ? 100 : 50);
}

const char *r2_port_state_text(int state)
{
    static const char *const text[] = {"NoChange", "Down",   "Initializing",
                                       "Armed",    "Active", "ActiveDefer"};

    return state >= 0 && state < 6 ? text[state] : "unknown";
}

unsigned r2_port_rate_gbps(unsigned width, unsigned speed)
{
    static const struct {
        unsigned bit, value;
    } widths[] = {{1, 1}, {16, 2}, {2, 4}, {4, 8}, {8, 12}};
    /* Gbit/s of a lane times 10, after encoding. */
    static const struct {
        unsigned bit, value;
    } speeds[] = {{1, 25},   {2, 50},   {4, 100},    {8, 100},   {16, 140},
                  {32, 250}, {64, 500}, {128, 1000}, {256, 2000}};
    unsigned lanes = 0, rate = 0;

    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
        lanes = width == widths[i].bit ? widths[i].value : lanes;
    for (size_t i = 0; i < sizeof(speeds) / sizeof(speeds[0]); i++)
        rate = speed == speeds[i].bit ? speeds[i].value : rate;
    return lanes * rate / 10;
}
