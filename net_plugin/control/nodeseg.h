/* The node segment: what the processes of one user on one node have found out about NICs.
 *
 * One object of POSIX shared memory per user, boot, network namespace and host name:
 *     /r2ccl-node.<uid>.<inode of the network namespace>.<hash of boot id and host name>
 * so that nodes which are emulated on one machine never share one. Mode 0600. It is read and
 * written with pread and pwrite, never mapped: a file that somebody cuts short gives a short read,
 * not a signal. Each row carries a CRC32C, so a torn, damaged or foreign row is not believed, and
 * readers take no lock. Writers exclude each other by a record lock on byte 1, which goes when its
 * process dies. Every process holds a shared lock on byte 0, by which `r2ccl-ctl gc` sees that the
 * object is in use. The trap of these locks: closing any descriptor of the object drops them all,
 * so a process opens it once.
 *
 * Rows are for operators (`r2ccl-ctl nics`): no process believes another's verdict.
 *
 * Threads: one at a time. Nothing blocks. Numbers are little-endian and never change their
 * meaning; rows are extended in `reserved`.
 */
#ifndef R2_CONTROL_NODESEG_H
#define R2_CONTROL_NODESEG_H

#include <stdbool.h>
#include <stdint.h>

#include "oob/wire.h"

#define R2_NODE_MAGIC UINT64_C(0x45444f4e43433252) /* the bytes "R2CCNODE" */
#define R2_NODE_VERSION 1
#define R2_NODE_ROWS 64
#define R2_NODE_OTHERS 8

struct r2_node_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_size;
    uint32_t row_size;
    uint32_t rows;
    uint64_t changes; /* rows ever written */
    uint64_t netns;
    uint32_t uid;
    uint32_t pad;
    uint64_t created_real_ns;
    char host[64];
    char boot_id[40];
    uint8_t reserved[352];
};
_Static_assert(sizeof(struct r2_node_header) == 512, "node header");

enum r2_node_state { R2_NODE_UNKNOWN = 0, R2_NODE_WORKS, R2_NODE_FAILED };

struct r2_node_row {
    uint32_t crc;   /* CRC32C of what follows; 0 is taken as 1 */
    uint32_t state; /* enum r2_node_state */
    uint64_t epoch; /* grows with every write to the object */
    uint64_t mono_ns, real_ns;
    uint32_t kind; /* enum r2_finding_kind, as seen from this NIC */
    uint32_t pid;  /* the writer, in its own PID namespace */
    uint8_t process[16];
    struct r2_wire_addr nic;                    /* key; port 0 */
    struct r2_wire_addr others[R2_NODE_OTHERS]; /* other ends of the paths that failed */
    uint32_t n_others;
    char name[40]; /* of the NIC, or NIC@host of another node's */
    char why[80];
    uint8_t reserved[152];
};
_Static_assert(sizeof(struct r2_node_row) == 512, "node row");

struct r2_nodeseg;

/* Opens or makes the object of this node. -errno: there is none, and nothing is shared. */
int r2_nodeseg_open(struct r2_nodeseg **out, const char *host);
void r2_nodeseg_close(struct r2_nodeseg *s); /* NULL is allowed */
/* In a forked child: the descriptor goes, the parent's locks stay. Async-signal-safe. */
void r2_nodeseg_child(struct r2_nodeseg *s);
const char *r2_nodeseg_name(const struct r2_nodeseg *s);

/* Writes the row of row->nic; epoch, times and writer's pid are filled in. -EAGAIN: somebody else
 * is writing, try again. The oldest row gives way when the table is full. */
int r2_nodeseg_write(struct r2_nodeseg *s, struct r2_node_row *row);
/* The row of a NIC if there is a sound one. */
bool r2_nodeseg_get(struct r2_nodeseg *s, const struct r2_wire_addr *nic, struct r2_node_row *out);
/* A row as it was read: its CRC fits, its numbers are in range and its texts end. Pure. */
bool r2_node_row_sound(const struct r2_node_row *row);
void r2_node_row_seal(struct r2_node_row *row);

#endif
