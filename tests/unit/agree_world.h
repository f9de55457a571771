/* Three machines of the agreement and the messages between them, as test_agree_model.c explores
 * them: one state of everything, in a form that compares, and what the network does. */
#ifndef R2_TESTS_UNIT_AGREE_WORLD_H
#define R2_TESTS_UNIT_AGREE_WORLD_H

#include "agree/machine.h"
#include "check.h"

#define RANKS 3
#define INDEXES 4 /* at most; collectives 0 .. */
#define EPOCHS 6
#define MESSAGES 512
#define WORDS (MESSAGES / 64)

struct world {
    struct r2_agree_machine m[RANKS];
    uint64_t promises;
    uint8_t next[RANKS];
    uint8_t begun; /* bit per rank: between lookup and advance */
    uint8_t dead;
    uint8_t late; /* bit per rank: timed out */
    uint8_t proposals;
    uint8_t ran[INDEXES]; /* 1 + epoch of the plan that ranks ran it under; 0: nobody did */
    bool split;           /* two ranks ran one collective under different plans */
    uint64_t net[WORDS];
};

struct envelope {
    uint8_t from, to;
    struct r2_agree_msg msg;
};

/* A state as bytes; what the world is made of and nothing else. */
struct packed {
    uint8_t m[RANKS][24];
    uint8_t misc[7 + INDEXES];
    uint64_t net[WORDS];
};

static struct envelope post[MESSAGES];
static int nposts;
static int mirror[MESSAGES];
/* --- packing ------------------------------------------------------------------------------ */

static void pack(const struct world *w, struct packed *p)
{
    memset(p, 0, sizeof(*p));
    for (int r = 0; r < RANKS; r++) {
        const struct r2_agree_machine *m = &w->m[r];
        uint8_t *b = p->m[r];

        b[0] = (uint8_t)m->decided;
        b[1] = (uint8_t)m->committed;
        b[2] = (uint8_t)m->committed_at;
        b[3] = (uint8_t)m->floor;
        b[4] = (uint8_t)m->promise.epoch;
        b[5] = (uint8_t)m->promise.at;
        b[6] = (uint8_t)m->npending;
        for (int i = 0; i < m->npending; i++) {
            b[7 + 2 * i] = (uint8_t)m->pending[i].epoch;
            b[8 + 2 * i] = (uint8_t)m->pending[i].at;
        }
        b[15] = (uint8_t)m->force.epoch;
        b[16] = (uint8_t)m->force.at;
        b[17] = (uint8_t)(m->failed | m->closed << 1);
        b[18] = (uint8_t)m->proposal.epoch;
        b[19] = (uint8_t)m->proposal.at;
        b[20] = (uint8_t)m->npromises;
        p->misc[r] = w->next[r];
    }
    p->m[0][21] = (uint8_t)w->promises;
    p->misc[3] = w->begun;
    p->misc[4] = w->dead;
    p->misc[5] = w->proposals;
    p->misc[6] = w->late;
    memcpy(p->misc + 7, w->ran, sizeof(w->ran));
    memcpy(p->net, w->net, sizeof(w->net));
}

static void unpack(const struct packed *p, struct world *w)
{
    memset(w, 0, sizeof(*w));
    for (int r = 0; r < RANKS; r++) {
        struct r2_agree_machine *m = &w->m[r];
        const uint8_t *b = p->m[r];

        m->rank = r;
        m->nranks = RANKS;
        m->decided = b[0];
        m->committed = b[1];
        m->committed_at = b[2];
        m->floor = b[3];
        m->promise = (struct r2_agree_slot){b[4], b[5]};
        m->npending = b[6];
        for (int i = 0; i < m->npending; i++) {
            m->pending[i] = (struct r2_agree_slot){b[7 + 2 * i], b[8 + 2 * i]};
        }
        m->force = (struct r2_agree_slot){b[15], b[16]};
        m->failed = b[17] & 1;
        m->closed = b[17] >> 1;
        m->proposal = (struct r2_agree_slot){b[18], b[19]};
        m->npromises = b[20];
        w->next[r] = p->misc[r];
    }
    w->promises = p->m[0][21];
    w->m[0].promises = &w->promises;
    w->begun = p->misc[3];
    w->dead = p->misc[4];
    w->proposals = p->misc[5];
    w->late = p->misc[6];
    memcpy(w->ran, p->misc + 7, sizeof(w->ran));
    memcpy(w->net, p->net, sizeof(w->net));
}

/* --- the network -------------------------------------------------------------------------- */

static int post_number(const struct envelope *e)
{
    static int numbers[RANKS][RANKS][R2_AGREE_TYPES][EPOCHS][EPOCHS][EPOCHS][INDEXES]; /* + 1 */
    int *number;

    CHECK(e->msg.epoch < EPOCHS && e->msg.decided < EPOCHS && e->msg.committed < EPOCHS);
    CHECK(e->msg.at < INDEXES);
    number = &numbers[e->from][e->to][e->msg.type][e->msg.epoch][e->msg.decided][e->msg.committed]
                     [e->msg.at];
    if (!*number) {
        CHECK_LT(nposts, MESSAGES);
        post[nposts++] = *e;
        *number = nposts;
    }
    return *number - 1;
}

static void send_one(struct world *w, int from, int to, const struct r2_agree_msg *msg)
{
    static const uint8_t other[RANKS] = {0, 2, 1};
    struct envelope e = {(uint8_t)from, (uint8_t)to, *msg};
    struct envelope twin;
    int i;

    e.msg.next = 0; /* a hint, which the machines do not read */
    twin = e;
    twin.from = other[from];
    twin.to = other[to];
    i = post_number(&e);
    mirror[i] = post_number(&twin);
    mirror[mirror[i]] = i;
    w->net[i / 64] |= UINT64_C(1) << (i % 64);
}

/* No delivery of it changes anything any more, nor leads to a message that does. */
static bool spent(const struct world *w, const struct envelope *e)
{
    struct r2_agree_machine to = w->m[e->to];
    uint64_t promises = w->promises;
    struct r2_agree_out out;

    if (w->dead >> e->to & 1) {
        return true;
    }
    if (e->msg.decided > to.decided || e->msg.epoch > to.decided) {
        return false;
    }
    to.promises = &promises;
    r2_agree_machine_receive(&to, e->from, &e->msg, w->next[e->to], true, &out);
    to.promises = w->m[e->to].promises;
    return memcmp(&to, &w->m[e->to], sizeof(to)) == 0 && promises == w->promises &&
           (out.to == R2_AGREE_NOBODY || w->dead >> e->from & 1);
}

/* What can no longer matter is forgotten, so that states which differ in nothing else are one. */
static void normalise(struct world *w)
{
    int first = INDEXES;

    for (int r = 0; r < RANKS; r++) {
        if (w->dead >> r & 1) {
            r2_agree_machine_init(&w->m[r], r, RANKS, &w->promises);
            w->next[r] = 0;
            w->begun &= (uint8_t) ~(1 << r);
            w->late &= (uint8_t) ~(1 << r);
        } else if (!w->m[r].failed && w->next[r] < first) {
            first = w->next[r];
        }
    }
    for (int i = 0; i < INDEXES; i++) {
        w->ran[i] = i < first ? 0 : w->ran[i];
    }
    if (w->dead & 1 || !w->m[0].proposal.epoch) {
        w->promises = 0;
        w->m[0].npromises = 0;
    }
    for (int i = 0; i < nposts; i++) {
        if ((w->net[i / 64] >> (i % 64) & 1) && spent(w, &post[i])) {
            w->net[i / 64] &= ~(UINT64_C(1) << (i % 64));
        }
    }
}

static uint8_t swap_bits(uint8_t b)
{
    return (uint8_t)((b & 1) | (b & 2) << 1 | (b & 4) >> 1);
}

/* The same state with ranks 1 and 2 exchanged: the protocol does not tell them apart. */
static void exchange(const struct packed *p, struct packed *q)
{
    *q = *p;
    memcpy(q->m[1], p->m[2], sizeof(q->m[1]));
    memcpy(q->m[2], p->m[1], sizeof(q->m[2]));
    q->m[0][21] = swap_bits(p->m[0][21]);
    q->misc[1] = p->misc[2];
    q->misc[2] = p->misc[1];
    q->misc[3] = swap_bits(p->misc[3]);
    q->misc[4] = swap_bits(p->misc[4]);
    q->misc[6] = swap_bits(p->misc[6]);
    memset(q->net, 0, sizeof(q->net));
    for (int i = 0; i < nposts; i++) {
        if (p->net[i / 64] >> (i % 64) & 1) {
            q->net[mirror[i] / 64] |= UINT64_C(1) << (mirror[i] % 64);
        }
    }
}

static void emit(struct world *w, int rank, int sender, const struct r2_agree_out *out)
{
    for (int r = 0; r < RANKS; r++) {
        if (r != rank &&
            (out->to == R2_AGREE_EVERYBODY || (out->to == R2_AGREE_SENDER && r == sender))) {
            send_one(w, rank, r, &out->msg);
        }
    }
}

static void deliver(struct world *w, int which, bool willing)
{
    const struct envelope e = post[which];
    struct r2_agree_out out;

    r2_agree_machine_receive(&w->m[e.to], e.from, &e.msg, w->next[e.to], willing, &out);
    emit(w, e.to, e.from, &out);
}

static void ask_all(struct world *w, int rank)
{
    struct r2_agree_msg msg;

    if (r2_agree_machine_ask(&w->m[rank], &msg)) {
        for (int r = 0; r < RANKS; r++) {
            if (r != rank) {
                send_one(w, rank, r, &msg);
            }
        }
    }
}

#endif
