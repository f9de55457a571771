/* What verbs' codes mean, whose fault they are, and what follows. Pure.
 *
 * Every failed work request leaves its queue pair in ERR. So this generation of the path always
 * ends and is fenced, and the path is made anew; the bytes go over other paths meanwhile. None of
 * the codes ends a connection.
 *
 * Whose fault it was stands behind the meaning, which is the cause that journal and status show.
 * Two things follow from it. What is nobody's (a flush) does not replace the cause that came
 * before. What is the memory's carries EFAULT or EACCES, so no failure of a NIC is counted and none
 * is looked for. For the others the same follows: NICs are judged by which of their paths end
 * (engine/locate), not by a code, since devices differ in which one they give.
 */
#ifndef R2_TRANSPORT_VERBS_TABLES_H
#define R2_TRANSPORT_VERBS_TABLES_H

#include <stdbool.h>
#include <stdint.h>

enum r2_blame {
    R2_BLAME_NOBODY, /* follows from something else that has its own code */
    R2_BLAME_PATH,   /* the way between the two NICs, or the peer's NIC: cannot be told apart */
    R2_BLAME_LOCAL,  /* this NIC */
    R2_BLAME_REMOTE, /* the peer's NIC or process said so */
    R2_BLAME_MEMORY, /* a key that does not hold (any more): revoked memory, else one of us errs */
};

struct r2_wc_info {
    int status; /* enum ibv_wc_status */
    const char *name;
    const char *meaning; /* and whose fault: the cause in the journal, at most 63 characters */
    enum r2_blame blame;
    int err; /* errno that the path's end carries; EFAULT, EACCES: R2_BLAME_MEMORY, and only then */
};

/* Never NULL: codes of a newer library have an entry of their own. */
const struct r2_wc_info *r2_wc_info(int status);

enum r2_async_scope { R2_ASYNC_NONE, R2_ASYNC_QP, R2_ASYNC_CQ, R2_ASYNC_PORT, R2_ASYNC_DEVICE };
enum r2_async_act {
    R2_ASYNC_IGNORE,
    R2_ASYNC_FAIL,    /* the paths in scope end */
    R2_ASYNC_DOWN,    /* ... and none is made until R2_ASYNC_UP */
    R2_ASYNC_UP,      /* the port is looked at again, then used */
    R2_ASYNC_REFRESH, /* read again; paths end if address, LID or partition key are others now */
    R2_ASYNC_GONE,    /* the device is let go of, until it is listed anew (hca.c) */
};

struct r2_async_info {
    int type; /* enum ibv_event_type */
    const char *name;
    const char *meaning;
    enum r2_async_scope scope;
    enum r2_async_act act;
};

const struct r2_async_info *r2_async_info(int type);

/* NCCL's list of RDMA devices: "mlx5_0,mlx5_1:2" prefixes with an optional port, "=..." exact
 * names, "^..." none of these, "^=...". An empty list has everything in it. */
bool r2_hca_match(const char *list, const char *device, int port);

enum r2_gid_type { R2_GID_UNKNOWN, R2_GID_V1, R2_GID_V2 };

/* How good an entry of a RoCE port's table is; higher is better, below 0: unusable. `ip`: the NIC's
 * address as 16 bytes (IPv4 mapped), or NULL. The NIC's own address first, then RoCE v2 before v1,
 * IPv4 before IPv6, and no link-local address. */
int r2_gid_score(const uint8_t gid[16], enum r2_gid_type type, const uint8_t *ip);

/* What the user wants of an entry, each part only where it was asked for (else 0). */
struct r2_gid_wants {
    bool v4, v6;
    int version;        /* of RoCE: 1 or 2 */
    uint8_t prefix[16]; /* IPv4 mapped */
    int bits;           /* of it, from the first byte on */
};

/* Link-local ones fit AF_INET6 only where a range names them. */
bool r2_gid_fits(const uint8_t gid[16], enum r2_gid_type type, const struct r2_gid_wants *wants);
/* "ADDR/BITS" of IPv4 or IPv6; fills prefix and bits. False: it is none. */
bool r2_gid_range(const char *text, struct r2_gid_wants *wants);

/* "Active", "Down": ibstat's words for enum ibv_port_state. */
const char *r2_port_state_text(int state);
/* Gbit/s of a port, from enum-like width and speed bits; 0: unknown. */
unsigned r2_port_rate_gbps(unsigned width, unsigned speed);

#endif
