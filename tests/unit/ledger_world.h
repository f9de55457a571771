/* The simulated world of test_ledger_model.c and its reference: one state per byte. */
#ifndef R2_TESTS_UNIT_LEDGER_WORLD_H
#define R2_TESTS_UNIT_LEDGER_WORLD_H

#include "check.h"

#include "engine/core/ledger.h"

#define MAX_PATHS 4
#define MAX_LANES 3
#define MAX_BYTES (128 * 48)
#define MAX_IDS 8192
#define WIRE 32
#define CTRL 256
#define LATE 512
#define STEPS 400000

struct chunk_msg {
    uint64_t off;
    uint32_t len;
    uint32_t gen;
    uint32_t id;
    uint16_t path;
    bool copy; /* sent again over another path: claimed when it is whole */
};

struct ctrl_msg {
    enum { CTRL_ACK, CTRL_ACK_ALL } type;
    struct chunk_msg about;
};

struct lane {
    bool sending; /* the sender's side reads tx */
    struct chunk_msg tx;
    struct chunk_msg wire[WIRE];
    unsigned wire_count;
    bool receiving;
    bool placing; /* rx is claimed; else it is being drained */
    bool cut;     /* the rest of rx never comes */
    uint32_t progress;
    uint32_t limit; /* where rx is cut */
    struct chunk_msg rx;
};

struct path {
    bool up;        /* the truth */
    bool sender_up; /* what the sender thinks */
    bool receiver_up;
    uint32_t gen;
    struct lane lanes[MAX_LANES];
    struct ctrl_msg ctrl[CTRL]; /* receiver to sender */
    unsigned ctrl_count;
};

/* The reference's view of one transmission. */
struct ref_tx {
    struct chunk_msg c;
    bool reading;
    bool lost;
    bool copied;
};

/* A writer that has not left the buffer yet although its path is dead. */
struct leaver {
    struct chunk_msg c;
    uint32_t progress;
};

static struct world {
    uint32_t total;
    unsigned paths;
    unsigned lanes;
    unsigned failures_left;
    unsigned chunk_max; /* in units of 128 */
    bool with_copies;
    unsigned char src[MAX_BYTES];
    unsigned char dst[MAX_BYTES];

    struct r2_send_ledger send;
    struct r2_recv_ledger recv;
    struct path path[MAX_PATHS];

    /* sender's reference */
    enum { UNSENT, QUEUED, FLYING } out[MAX_BYTES];
    uint32_t owner[MAX_BYTES]; /* FLYING: number of the transmission */
    bool acked[MAX_BYTES];
    bool empty_out;
    bool empty_acked;
    struct ref_tx tx[MAX_IDS];
    uint32_t tx_count;
    uint32_t late[LATE]; /* transmissions to be released some time */
    unsigned late_count;

    /* receiver's reference */
    enum { OPEN, CLAIMED, DONE } in[MAX_BYTES];
    uint32_t claimant[MAX_BYTES];
    bool total_seen;
    struct leaver leaving[LATE];
    unsigned leaving_count;
    struct chunk_msg to_ack[LATE];
    unsigned to_ack_count;
    unsigned replays, refused;
    unsigned copies, rescues, copies_late; /* sent, took the claim, came second */
} w;

/* ---- Reference answers ------------------------------------------------------------------- */

static uint32_t ref_count_acked(void)
{
    uint32_t n = 0;

    for (uint32_t b = 0; b < w.total; b++) {
        n += w.acked[b];
    }
    return n;
}

static bool ref_tx_over(const struct ref_tx *t)
{
    if (t->c.len == 0) {
        return w.empty_acked;
    }
    for (uint32_t b = 0; b < t->c.len; b++) {
        if (!w.acked[t->c.off + b]) {
            return false;
        }
    }
    return true;
}

static bool ref_reading(void)
{
    for (uint32_t i = 0; i < w.tx_count; i++) {
        if (w.tx[i].reading) {
            return true;
        }
    }
    return false;
}

static bool ref_idle(void)
{
    if (w.total == 0) {
        return w.empty_out || w.empty_acked;
    }
    for (uint32_t b = 0; b < w.total; b++) {
        if (!w.acked[b] && w.out[b] != FLYING) {
            return false;
        }
    }
    return true;
}

static bool ref_send_complete(void)
{
    bool all = w.total ? ref_count_acked() == w.total : w.empty_acked;

    return all && !ref_reading();
}

static void expect_sender(void)
{
    uint32_t waiting = 0;

    for (uint32_t b = 0; b < w.total; b++) {
        waiting += !w.acked[b] && w.out[b] != FLYING;
    }
    CHECK_EQ(w.send.acked.bytes, ref_count_acked());
    CHECK_EQ(r2_send_waiting_bytes(&w.send), waiting);
    CHECK_EQ(r2_send_idle(&w.send), ref_idle());
    CHECK_EQ(r2_send_complete(&w.send), ref_send_complete());
    if (w.tx_count > 0 && check_below(4) == 0) {
        uint32_t records = 0;

        for (uint32_t i = 0; i < w.tx_count; i++) {
            records += w.tx[i].reading || (!w.tx[i].lost && !ref_tx_over(&w.tx[i]));
        }
        CHECK_EQ(w.send.count, records); /* none is kept longer than it must be */
    }
}

static void expect_receiver(void)
{
    uint32_t done = 0;
    uint32_t prefix = 0;
    bool claimed = false;

    for (uint32_t b = 0; b < w.total; b++) {
        done += w.in[b] == DONE;
        claimed = claimed || w.in[b] == CLAIMED;
    }
    while (prefix < w.total && w.in[prefix] == DONE) {
        prefix++;
    }
    CHECK_EQ(w.recv.done.bytes, done);
    CHECK_EQ(r2_ranges_first_gap(&w.recv.done, 0), prefix);
    CHECK_EQ(r2_recv_writing(&w.recv), claimed);
    CHECK_EQ(r2_recv_complete(&w.recv), w.total_seen && done == w.total);
}

#endif
