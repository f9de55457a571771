/* A transport without sockets, for tests of the engine: nothing moves unless the test says so.
 *
 * Endpoints that the engine connects are found with fake_find; those that the test's remote process
 * connects are made with fake_accept. The test then plays the transport: the functions below make
 * the upcalls of transport.h and do nothing (-EPIPE, false) once the engine has shut the endpoint.
 * One test thread; the engine's threads call the operations.
 */
#ifndef R2_TESTS_FAKE_H
#define R2_TESTS_FAKE_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/loop/loop.h"
#ifndef R2_ENGINELIB /* the programs, each of one file */
#include "../added_time.h"
#endif

#define FAKE_HELD 128

struct fake_frame {
    uint8_t type;
    uint16_t len;
    bool taken;
    uint8_t *body;
};

struct r2_ep {
    struct r2_ep_params params;
    atomic_int refs;
    struct r2_ep *next; /* all endpoints, newest first; the list holds a reference */
    pthread_mutex_t lock;
    bool dead;                        /* under lock: shut */
    struct r2_bulk tx[FAKE_HELD];     /* under lock: handed out, not let go of */
    struct r2_bulk rx[FAKE_HELD];     /* under lock: claimed */
    int n_tx, n_rx;                   /* under lock */
    unsigned asking, turn;            /* bulk lanes that ask for chunks, in turn; 0: all four */
    atomic_bool unconfirmed;          /* shut() does not come to an end */
    atomic_bool cleared;              /* the last detach() was told so */
    atomic_bool hold_shut;            /* shut() waits while it is set (5 s at most) */
    atomic_bool reading;              /* revoke: the lane is inside a read just now */
    atomic_bool silent;               /* health: nothing answers */
    atomic_bool connected;            /* health of a probe, and reached(): the host's kernel did */
    atomic_bool there, given_up;      /* fake_fail: as in r2_ep_health */
    atomic_int health_ms;             /* health() takes so long, by the engine's clock */
    atomic_int asked;                 /* times that health() was called */
    atomic_int rtt_us;                /* health: round trip of the network */
    atomic_int segments, retransmits; /* the same */
    atomic_int flushes;
    atomic_int kicks, detached, waiting; /* waiting: threads in shut() */
    atomic_bool is_shut, failed;

    /* The test thread's: what the engine said. */
    bool manual_sent; /* the kernel takes nothing until fake_sent */
    uint64_t pulled;
    uint8_t *in;
    size_t in_len;
    struct fake_frame *frames;
    int n_frames;
};

extern const struct r2_transport_ops fake_ops;
/* All endpoints, newest first, and what guards the list. */
extern struct r2_ep *fake_all;
extern pthread_mutex_t fake_all_lock;
/* Bit per NIC: memory is not registered with it. */
extern unsigned fake_unregistered;
/* What the NICs offer (R2_OFFER_*); endpoints of R2_VIA_VERBS are one-sided. */
extern _Atomic uint8_t fake_offers;
/* Bit per NIC: it offers nothing of that. */
extern atomic_uint fake_plain;
/* Lanes that every endpoint says it has. */
extern atomic_uint fake_lanes;
/* Bit per transport: connect() finds nobody by it. */
extern atomic_uint fake_unreachable;
/* The last registration was given back with the word that its keys must be dead. */
extern atomic_bool fake_revoked;
/* Bit per NIC: it was asked to flush what it wrote; it answers at once. */
extern atomic_uint fake_flush_asked;
static inline uint32_t fake_key(int nic)
{
    return 0x4b00u + (uint32_t)nic;
}

/* What connect() answers for this process from now on: 0 endpoints, or -errno. */
void fake_policy(const uint8_t process[16], int rc);
int fake_policy_of(const uint8_t process[16]); /* 0: none */
/* The newest endpoint to that process for the pair of NICs with a generation above `gen`, waited
 * for 3 s; NULL. -1 for any NIC. The list keeps the reference. */
struct r2_ep *fake_find(const uint8_t process[16], int lnic, int rnic, uint32_t gen);
/* The newest between NICs of that number by one transport that is not shut, without waiting. */
struct r2_ep *fake_newest(const uint8_t process[16], int lnic, int via);
/* As above, without waiting; probes only. */
struct r2_ep *fake_probe(const uint8_t process[16]);
/* The newest probe of that pair of NICs that is not over; without waiting. */
struct r2_ep *fake_probe_at(const uint8_t process[16], int lnic, int rnic);
/* How many endpoints to the process were ever connected. */
int fake_count(const uint8_t process[16]);
/* The remote process connects: NULL if the engine refuses. */
struct r2_ep *fake_accept(const uint8_t process[16], int lnic, int rnic, uint32_t gen);

bool fake_up(struct r2_ep *ep);
/* shut(), which was unconfirmed, is over. */
void fake_shut_over(struct r2_ep *ep);
/* The endpoint breaks, once. `refused`: a living host said so; ESRCH: another process answered. */
void fake_fail(struct r2_ep *ep, int err, bool refused);
/* No other path could carry what this one does. */
bool fake_alone(struct r2_ep *ep);
/* One control frame that arrives, then the end of the burst. */
int fake_ctrl(struct r2_ep *ep, uint8_t type, const void *body, size_t len);
bool fake_next(struct r2_ep *ep, struct r2_bulk *bulk);
bool fake_chunk_sent(struct r2_ep *ep, const struct r2_bulk *bulk);
int fake_claim(struct r2_ep *ep, struct r2_bulk *bulk);
bool fake_done(struct r2_ep *ep, const struct r2_bulk *bulk);
bool fake_dropped(struct r2_ep *ep, const struct r2_bulk *bulk, bool bad_crc);
/* Takes what the engine wants to say. Frames that r2_wire_check refuses end the program. */
void fake_pull(struct r2_ep *ep);
/* All that was pulled has reached the kernel. */
void fake_sent(struct r2_ep *ep);
/* Fails every endpoint of the process and lets go of them. */
void fake_forget(const uint8_t process[16]);
/* So much time passes: the engine's clock goes from one timer to the next, and its threads do what
 * is due before the next step. Not by one of them, nor while the test keeps one awake. */
void fake_pass_ms(int ms);
/* At most so much of it, until that holds; else the test has failed. */
#define FAKE_AWAIT(ms, cond)                                                                       \
    do {                                                                                           \
        for (int left_ = (ms); left_ > 0 && !(cond); left_--)                                      \
            fake_pass_ms(1);                                                                       \
        CHECK_MSG(cond, "waited in vain for %s", #cond);                                           \
    } while (0)
/* How many of its threads wait for the test: they are not waited for. */
extern atomic_int fake_held;

/* Takes a chunk out of those that an endpoint holds. */
static inline bool unhold(struct r2_bulk *held, int *n, const struct r2_bulk *b)
{
    for (int i = 0; i < *n; i++) {
        if (held[i].conn == b->conn && held[i].seq == b->seq && held[i].offset == b->offset) {
            held[i] = held[--*n];
            return true;
        }
    }
    return false;
}

#endif
