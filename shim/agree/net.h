/* The agreement's sockets: one connection per pair of processes that has something to say, shared
 * by all communicators. Non-blocking; frames in, frames out.
 *
 * Everything here belongs to the service thread, except r2_agree_net_open_listener (any thread,
 * once, before that thread) and r2_agree_net_forked. A connection may be freed by any call that
 * reads or sends; only handlers see one, during the call. Nothing is retried here: frames on a
 * connection that breaks are lost, and the protocol above repeats itself.
 */
#ifndef R2_AGREE_NET_H
#define R2_AGREE_NET_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "agree/wire.h"
#include "util/hash.h"
#include "util/list.h"

/* Accepted connections that have not shown a token yet, at most, and at most this part of the
 * process's descriptors. Beyond, the oldest are closed: a rank shows its token as soon as it is
 * connected, so that those who do not cannot keep it out. */
#define R2_AGREE_STRANGERS 1024
#define R2_AGREE_STRANGERS_PART 4

/* What is known of the other end; net.c alone goes on to the next. */
enum r2_agree_stage {
    R2_CONN_CONNECTING, /* made here, and not there yet */
    R2_CONN_OPEN,       /* nothing was heard */
    R2_CONN_NAMED,      /* it has said hello */
    R2_CONN_TRUSTED,    /* it has shown a token */
};

struct r2_agree_conn {
    struct r2_list node;
    int fd;
    enum r2_agree_stage stage;
    bool outgoing, writing;
    uint8_t process[16]; /* from R2_CONN_NAMED on */
    struct r2_agree_addr addr;
    uint64_t born_ns;
    uint8_t *in;
    size_t in_len, in_room;
    uint8_t *out;
    size_t out_at, out_len, out_room;
};

struct r2_agree_net {
    int epoll, listener;
    uint64_t deaf_ns; /* the listener is not looked at until then; 0: it is */
    struct r2_list conns;
    struct r2_hash by_process; /* first 8 bytes of the process id */
    int strangers, most_strangers;
    struct r2_agree_hello self;
    uint64_t now_ns; /* of the running turn */
    /* A frame from a process that has said hello. True: its token is known here. */
    bool (*on_frame)(void *user, const struct r2_agree_conn *c, const struct r2_agree_frame *f,
                     const uint8_t *payload);
    /* Whether the token of a frame is known here: only then is room made for it. */
    bool (*knows)(void *user, const struct r2_agree_frame *f);
    /* The host of this address lives, and nobody listens there. Within r2_agree_net_turn only. */
    void (*on_refused)(void *user, const struct r2_agree_addr *addr);
    /* A connection with this process is gone: one that was made here, or has shown a token. */
    void (*on_close)(void *user, const uint8_t process[16]);
    void *user;
};

/* Listens on the interface where NCCL bootstraps: NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY, or
 * what NCCL would take; a port of R2CCL_PORT_RANGE. 0 or -errno with a line in `why`. */
int r2_agree_net_open_listener(int *fd, struct r2_agree_addr *addr, char *why, size_t whylen);

/* Takes a listener over; net->self, handlers and user are set by the caller before. */
int r2_agree_net_init(struct r2_agree_net *net, int listener);

/* To the process `process` at `addr`, or (process NULL) to whoever listens at `addr`. 0; -errno:
 * lost. */
int r2_agree_net_send(struct r2_agree_net *net, const uint8_t *process,
                      const struct r2_agree_addr *addr, const struct r2_agree_frame *f,
                      const void *first, size_t first_len, const void *second);

#define R2_NET_LONG_NS (100 * R2_NS_PER_MS) /* for a connection to be made */

/* How far what was sent to a process has come. */
enum r2_agree_way {
    R2_WAY_NONE, /* no connection, or one whose other end is closed: what was sent is lost */
    R2_WAY_LONG, /* the connection has been in the making for R2_NET_LONG_NS: nobody may be there */
    R2_WAY_WAIT, /* the connection is being made, or takes no more for now */
    R2_WAY_SENT, /* with the kernel, which goes on if this process ends (not beyond a lost way) */
    R2_WAY_SELF, /* it is this process (r2_agree_service_way) */
};
enum r2_agree_way r2_agree_net_way(struct r2_agree_net *net, const uint8_t *process,
                                   const struct r2_agree_addr *addr);

/* Waits for sockets or `wake` (an eventfd in epoll with data NULL) at most `timeout_ms`, then moves
 * what can be moved. Called at least every second: only a turn listens again after a pause. */
void r2_agree_net_turn(struct r2_agree_net *net, int timeout_ms);

bool r2_agree_addr_equal(const struct r2_agree_addr *a, const struct r2_agree_addr *b);

/* Descriptors that a forked child closes. Any thread.
 *     r2_agree_fds_begin();
 *     fd = r2_agree_fds_made(socket(...));
 * Between the two no process is forked by another thread, so that none has a descriptor that it
 * does not know of: what made it must not block. A failure (negative) and errno pass through. */
void r2_agree_fds_begin(void);
int r2_agree_fds_made(int fd);
void r2_agree_fds_close(int fd);
void r2_agree_fds_before_fork(void);
void r2_agree_fds_in_parent(void);
void r2_agree_fds_in_child(void);

#endif
