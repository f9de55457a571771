/* A remote process played by the test, over the fake transport: it says and hears control frames.
 *
 * `out` as in engine/objects.h: the engine under test sends bulk data, the remote process receives
 * it. One test thread. Waits are bounded by 3 s. */
#ifndef R2_TESTS_REMOTE_H
#define R2_TESTS_REMOTE_H

#include "fake.h"

#define REMOTE_WAIT_MS 3000

struct remote {
    uint8_t id[16];
    bool out;
    int nics;
    int number;   /* its host is "remoteN", its NIC i has address 127.0.(i+1).(10+N) */
    uint32_t gen; /* !out: the newest generation used */
    uint64_t conn_id;
    uint64_t listen_id;
    struct r2_listen *listen;
    struct r2_conn *conn;
    uint8_t handle[R2_HANDLE_BYTES];
};

/* The engine of this process with `nics` NICs and the fake transport; once, before all else.
 * `env`: further settings, "NAME=VALUE NAME=VALUE". */
extern unsigned remote_plain; /* bit per NIC of remote ones: as fake_plain */
extern bool remote_wired;     /* before it: the NICs count as real ones, not as loopback's */
void remote_engine(int nics, const char *env);
struct r2_ctx *remote_ctx(void); /* its only context */
/* Settings with which a peer without a path is waited for longer than a test takes. */
extern const char remote_outlives[];

/* A process with a fresh random id; no path and no connection yet. */
void remote_new(struct remote *r, bool out, int nics);
/* Paths between NICs 0..n-1 of both sides come up, and a connection is made (r->conn). False: it
 * did not happen in time. */
bool remote_open(struct remote *r, int paths);
/* One path more or again, proven by test chunks; NULL if the engine does not want it. */
struct r2_ep *remote_path(struct remote *r, int nic, uint32_t above);
/* The newest between NICs of that number by one transport, waited for so long; NULL. */
struct r2_ep *remote_via(const struct remote *r, int nic, int via, int ms);
/* The same before the test chunks; remote_prove then lets them arrive. */
struct r2_ep *remote_unproven(struct remote *r, int nic, uint32_t above);
bool remote_prove(struct remote *r, struct r2_ep *ep);
/* One connection more, said over `ep`; it becomes r->conn, the former is the caller's. */
bool remote_more(struct remote *r, struct r2_ep *ep);
/* Closes the connection, answers its CLOSE, and lets the process vanish. */
void remote_end(struct remote *r);

/* Waits for a frame of the type, and takes it: its index among all frames of the endpoint, -1 if
 * none came within `ms`. `body` may be NULL. Earlier frames of other types stay. */
int remote_hear_ms(struct r2_ep *ep, uint8_t type, void *body, size_t cap, int ms);
int remote_hear(struct r2_ep *ep, uint8_t type, void *body, size_t cap);
/* Forgets what was said so far. */
void remote_forget(struct r2_ep *ep);

int remote_cts(struct r2_ep *ep, struct remote *r, uint64_t seq, uint64_t size);
int remote_ack(struct r2_ep *ep, struct remote *r, uint64_t cumulative);
int remote_ack_range(struct r2_ep *ep, struct remote *r, uint64_t seq, uint64_t off, uint64_t len);
int remote_eager(struct r2_ep *ep, struct remote *r, uint64_t seq, const void *data, uint32_t size);
int remote_close(struct r2_ep *ep, struct remote *r, uint64_t cumulative);
/* An INFO, as it would be now; and one that says how one of the NICs is from now on. */
struct remote_info {
    struct r2_msg_info m;
    struct r2_info_nic nics[R2_MAX_NICS];
} __attribute__((packed));
void remote_info(const struct remote *r, struct remote_info *info);
int remote_say_info(struct r2_ep *ep, const struct remote_info *info);
int remote_nic(struct r2_ep *ep, int nic, bool usable, uint32_t number);
int remote_word(struct r2_ep *ep, int nic, enum r2_nic_word word, unsigned weight, uint32_t number);
int remote_word_of(struct r2_ep *ep, int nic, const struct r2_info_nic *said, uint32_t number);
/* Calls f(nic) on I/O thread 0, as commands of operators are, and waits until it has returned.
 * False: not within 20 s. One at a time. */
bool remote_command(void (*f)(int nic), int nic);
/* For it: the operator's words. */
void remote_drain(int nic);
void remote_undrain(int nic);
/* Its link goes and comes: what a verdict took out is tried again. */
void remote_nic_back(int nic);
/* Word about the generation of a path, said over another. */
int remote_down(struct r2_ep *ep, const struct r2_ep *dead);
int remote_fenced(struct r2_ep *ep, const struct r2_ep *dead);

/* A chunk of the connection, as its head says. */
struct r2_bulk remote_chunk(const struct remote *r, uint64_t seq, uint64_t off, uint32_t len,
                            uint64_t total);
/* Writes a claimed chunk from the message's bytes, and ends it. */
bool remote_place(struct r2_ep *ep, const struct r2_bulk *b, const uint8_t *message);

/* State of the path between NICs of that number (enum r2_path_state), -1: none; of queue pairs,
 * where there is one. */
int remote_state(const struct remote *r, int nic);
bool remote_up(const struct remote *r, int nic); /* proven or not */
bool remote_there(const struct remote *r);       /* the engine has not forgotten it */
bool remote_wait_state(const struct remote *r, int nic, int state);
bool remote_suspect(const struct remote *r);
/* Address of its NIC. */
struct r2_wire_addr remote_addr(const struct remote *r, int nic);
/* Waits until the request ends: 1 done, 0 not within `ms`, -errno. */
/* What operators are shown: since when something waits for the peer, and for what; 0: nothing. */
uint64_t remote_waits(const struct remote *r, enum r2_seg_waits_for *what);
int remote_test(struct r2_req *req, int ms, size_t *size);
bool remote_wait_flag(atomic_bool *flag);
/* As if its path had carried 64 chunks of 32 KiB, one after the other, that took so long each. */
void remote_rate(struct r2_ep *ep, uint64_t ns_per_chunk);
/* As if the path had kept up `best` once, and shown `shown` bytes per second in the second just
 * over (0: it had nothing to do). Under the peer's lock. */
void remote_shows(struct r2_path *path, uint64_t best, uint64_t shown);

#endif
