/* Executors of the direct AllReduce over simulated NICs (rung 2), in virtual time. A path goes from
 * a NIC to the same NIC of the peer. Its window and its chunks are engine/core/pathrate's, who
 * takes a chunk says engine/core/sched_next, as engine/sched/next_chunk.c asks them. A NIC sends in
 * the order in which it is given packets, and receives in the order of arrival; both by a token
 * bucket. Acknowledgements and the peer's word that it has posted queue with the data. Adding costs
 * nothing. It cannot show what TCP does, and what threads do. */
#ifndef R2_TESTS_NICS_SIM_H
#define R2_TESTS_NICS_SIM_H

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "direct/exec.h"
#include "engine/core/leave.h"
#include "engine/core/pathrate.h"
#include "engine/core/sched_next.h"
#include "plan/shard.h"
#include "plan/sizes.h"
#include "sim_events.h"
#include "util/random.h"

#define NSIM_RANKS 4
#define NSIM_NICS 4
#define NSIM_PACKET 8948u
#define NSIM_HEADERS 66
#define NSIM_MESSAGES 32 /* of a stream, at once, as of a connection of NCCL's */
#define NSIM_CHUNK (512u << 10)

struct nsim_chunk {
    int from, to, nic, sums;
    uint32_t message, len, left; /* left: packets that have not come */
    uint64_t sent_ns;
    struct r2_rate_stamp stamp;
};

enum nsim_kind { NSIM_TURN, NSIM_LEFT, NSIM_DATA, NSIM_ACK, NSIM_POSTED };

struct nsim_packet {
    struct nsim_packet *next;
    enum nsim_kind kind;
    int from, to, nic, sums;
    uint32_t len;
    struct nsim_chunk *chunk;
};

/* When the next packet may leave: the bucket holds `burst` seconds of the rate. */
struct nsim_bucket {
    double due;
};

struct nsim_nic {
    struct nsim_packet *first, **last;
    struct nsim_bucket out, in;
    double in_free;
    uint64_t inflight;
    bool busy;
};

struct nsim_message {
    uint32_t len, given, arrived, acked;
};

/* One stream from one rank to another: messages so far. */
struct nsim_stream {
    struct nsim_message of[NSIM_MESSAGES];
    uint32_t sent, posted, heard, waiting, arrived, acked, told_receiver, told_sender;
};

struct nsim_path {
    struct r2_pathrate rate;
    bool asked;
};

struct nsim_rank {
    int me, nics;
    struct r2_exec *x;
    struct r2_schedule schedule;
    size_t credit;
    void *slots;
    unsigned copies[2], frames;
    double landed; /* 0: not yet */
    struct nsim_nic nic[NSIM_NICS];
    struct nsim_path path[NSIM_RANKS][NSIM_NICS];
    struct nsim_stream stream[NSIM_RANKS][2]; /* [to][sums] */
    uint64_t lately[NSIM_RANKS];              /* bytes to each */
    uint32_t leaves[NSIM_RANKS];
    double looked;        /* when NICs were left last */
    int turn[NSIM_RANKS]; /* which stream comes first */
};

static struct nsim {
    double now, rate, burst; /* rate: of a NIC, bytes per second */
    struct r2_prng prng;
    struct nsim_rank *ranks;
    struct sim_events events;
} nsim;

static uint64_t nsim_ns(void)
{
    return (uint64_t)(nsim.now * 1e9) + 1;
}

/* Of a wire and of a thread that wakes. Always the same one makes ranks wait for each other in
 * turn, for ever. */
static double nsim_latency(void)
{
    return (20 + (double)(r2_prng_next(&nsim.prng) % 100)) * 1e-6;
}

/* ---- NICs */

static double nsim_leaves(struct nsim_bucket *b, double at, uint32_t len)
{
    double from = b->due > at ? b->due : at;

    b->due = from + (len + NSIM_HEADERS) / nsim.rate;
    return b->due - nsim.burst > at ? b->due - nsim.burst : at;
}

static void nsim_leave(struct nsim_nic *nic)
{
    struct nsim_packet *packet = nic->first;

    if (nic->busy || !packet)
        return;
    nic->first = packet->next;
    if (!nic->first)
        nic->last = &nic->first;
    nic->busy = true;
    sim_push(&nsim.events, nsim_leaves(&nic->out, nsim.now, packet->len), NSIM_LEFT, packet->from,
             packet);
}

static bool nsim_reaches(int a, int b, int nic)
{
    return a != b && nic < nsim.ranks[a].nics && nic < nsim.ranks[b].nics;
}

static void nsim_give(struct nsim_packet what)
{
    struct nsim_nic *nic = &nsim.ranks[what.from].nic[what.nic];
    struct nsim_packet *packet = malloc(sizeof(*packet));

    CHECK(packet);
    *packet = what;
    packet->next = NULL;
    *nic->last = packet;
    nic->last = &packet->next;
    nsim_leave(nic);
}

/* ---- what the engine does */

static bool nsim_room(int me, int peer, int nic)
{
    const struct r2_pathrate *rate = &nsim.ranks[me].path[peer][nic].rate;
    uint32_t chunk = r2_pathrate_chunk_len(rate, NSIM_CHUNK);

    return nsim_reaches(me, peer, nic) &&
           r2_pathrate_window(rate, chunk, 1, true) > r2_pathrate_inflight(rate);
}

static struct r2_sched_path nsim_seen(int me, int peer, int nic)
{
    const struct nsim_rank *r = &nsim.ranks[me];
    const struct r2_pathrate *rate = &r->path[peer][nic].rate;
    unsigned paths = 0;
    uint64_t rates = 0;

    for (int to = 0; to < NSIM_RANKS; to++) {
        if (nsim_reaches(me, to, nic)) {
            paths++;
            rates += r2_pathrate_rate(&r->path[to][nic].rate);
        }
    }
    return (struct r2_sched_path){.rate = r2_pathrate_rate_now(rate, nsim_ns()),
                                  .inflight = r2_pathrate_inflight(rate),
                                  .srtt = r2_pathrate_srtt_now(rate, nsim_ns()),
                                  .nic_inflight = r->nic[nic].inflight,
                                  .nic_rate = rates,
                                  .nic_paths = paths,
                                  .chunk = r2_pathrate_chunk_len(rate, NSIM_CHUNK),
                                  .takes = r2_pathrate_inflight(rate) || nsim_room(me, peer, nic),
                                  .left = r->leaves[peer] >> nic & 1};
}

/* The stream's first message that waits, and the bytes of all. NULL: none that the peer posted. */
static struct nsim_message *nsim_waits(struct nsim_stream *s, uint64_t *bytes)
{
    *bytes = 0;
    for (uint32_t i = s->waiting; i != s->sent && i != s->heard; i++)
        *bytes += s->of[i % NSIM_MESSAGES].len - s->of[i % NSIM_MESSAGES].given;
    return *bytes ? &s->of[s->waiting % NSIM_MESSAGES] : NULL;
}

/* The NIC that takes the next chunk of `bytes` for which paths[nic] asks. */
static int nsim_taker(int me, int peer, int nic, uint64_t bytes)
{
    const struct r2_sched_bytes wait = {.waiting = bytes, .any_nic = true};
    struct r2_sched_path paths[NSIM_NICS] = {nsim_seen(me, peer, nic)};
    int of[NSIM_NICS] = {nic}, n = 1;

    for (int i = 0; i < NSIM_NICS; i++) {
        if (i == nic || !nsim_reaches(me, peer, i))
            continue;
        paths[n] = nsim_seen(me, peer, i);
        of[n++] = i;
    }
    return of[r2_sched_next(paths, n, &wait)];
}

static void nsim_send(int me, int peer, int nic, int sums, uint32_t len)
{
    struct nsim_rank *r = &nsim.ranks[me];
    struct nsim_chunk *c = malloc(sizeof(*c));

    CHECK(c);
    *c = (struct nsim_chunk){.from = me,
                             .to = peer,
                             .nic = nic,
                             .sums = sums,
                             .message = r->stream[peer][sums].waiting,
                             .len = len,
                             .left = (len + NSIM_PACKET - 1) / NSIM_PACKET,
                             .sent_ns = nsim_ns()};
    r2_pathrate_on_send(&r->path[peer][nic].rate, len, nsim_ns(), &c->stamp);
    r->nic[nic].inflight += len;
    r->lately[peer] += len;
    for (uint32_t at = 0; at < len; at += NSIM_PACKET) {
        uint32_t size = len - at < NSIM_PACKET ? len - at : NSIM_PACKET;

        nsim_give((struct nsim_packet){
            .kind = NSIM_DATA, .from = me, .to = peer, .nic = nic, .len = size, .chunk = c});
    }
}

/* False: the path takes none, perhaps since it has left it to another, which is asked. */
static bool nsim_take(int me, int peer, int nic)
{
    struct nsim_rank *r = &nsim.ranks[me];
    struct nsim_path *path = &r->path[peer][nic];

    for (int i = 0; i < 2 && nsim_room(me, peer, nic); i++) {
        int sums = (r->turn[peer] + i) % 2, to;
        uint64_t bytes;
        struct nsim_message *m = nsim_waits(&r->stream[peer][sums], &bytes);
        uint32_t len = r2_pathrate_chunk_len(&path->rate, NSIM_CHUNK), left;

        if (!m)
            continue;
        to = nsim_taker(me, peer, nic, bytes);
        if (to != nic) {
            r->path[peer][to].asked = nsim_room(me, peer, to);
            return false;
        }
        left = m->len - m->given;
        len = left <= len + len / 2 ? left : len;
        nsim_send(me, peer, nic, sums, len);
        m->given += len;
        r->stream[peer][sums].waiting += m->given == m->len;
        r->turn[peer] = (sums + 1) % 2;
        return true;
    }
    if (nsim_room(me, peer, nic))
        r2_pathrate_app_limited(&path->rate);
    return false;
}

static uint32_t nsim_nics(int me, int to)
{
    uint32_t nics = 0;

    for (int nic = 0; nic < NSIM_NICS; nic++)
        nics |= (uint32_t)nsim_reaches(me, to, nic) << nic;
    return nics;
}

/* As engine/sched/leave.c, every 20 ms. */
static void nsim_leave_nics(int me)
{
    struct nsim_rank *r = &nsim.ranks[me];
    struct r2_leave l = {.all = 0};
    uint32_t leaves;

    if (nsim.now - r->looked < 0.02)
        return;
    r->looked = nsim.now;
    for (int nic = 0; nic < R2_LEAVE_NICS; nic++)
        l.speed[nic] = 1;
    for (int to = 0; to < NSIM_RANKS; to++)
        l.all |= nsim_nics(me, to);
    for (int to = 0; to < NSIM_RANKS; to++) {
        if (to != me)
            r2_leave_add(&l, nsim_nics(me, to), r->lately[to]);
        r->lately[to] /= 2;
    }
    leaves = r2_leave_nics(&l);
    for (int to = 0; to < NSIM_RANKS; to++)
        r->leaves[to] = nsim_nics(me, to) == l.all ? leaves : 0;
}

static void nsim_kick(int me, int peer)
{
    struct nsim_rank *r = &nsim.ranks[me];
    struct r2_sched_path paths[NSIM_NICS];
    uint16_t order[NSIM_NICS];
    int of[NSIM_NICS], n = 0;
    bool again = true;

    nsim_leave_nics(me);
    for (int nic = 0; nic < NSIM_NICS; nic++) {
        if (!nsim_room(me, peer, nic))
            continue;
        paths[n] = nsim_seen(me, peer, nic);
        of[n++] = nic;
    }
    r2_sched_order(paths, n, order);
    for (int i = 0; i < n; i++) {
        while (nsim_take(me, peer, of[order[i]]))
            ;
    }
    for (int turns = 0; again && turns < 100; turns++) { /* those to which a chunk was left */
        again = false;
        for (int nic = 0; nic < NSIM_NICS; nic++) {
            struct nsim_path *path = &r->path[peer][nic];

            if (!path->asked)
                continue;
            path->asked = false;
            again = true;
            while (nsim_take(me, peer, nic))
                ;
        }
    }
}

/* ---- what executors do */

static int nsim_post(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len)
{
    struct nsim_rank *r = user;
    int sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT, nic = 0;
    struct nsim_stream *s = &r->stream[peer][sums], *in = &nsim.ranks[peer].stream[r->me][sums];

    (void)data;
    if (kind == R2_LANE_UP || kind == R2_LANE_OUT) {
        if (s->sent - s->told_sender == NSIM_MESSAGES)
            return 0;
        s->of[s->sent++ % NSIM_MESSAGES] = (struct nsim_message){.len = (uint32_t)len};
        nsim_kick(r->me, peer);
        return 1;
    }
    if (in->posted - in->told_receiver == NSIM_MESSAGES)
        return 0;
    in->posted++;
    do
        nic = (int)(r->frames++ % NSIM_NICS);
    while (!nsim_reaches(r->me, peer, nic));
    nsim_give((struct nsim_packet){
        .kind = NSIM_POSTED, .from = r->me, .to = peer, .nic = nic, .sums = sums, .len = 40});
    return 1;
}

static int nsim_posted(void *user, enum r2_lane_kind kind, int peer)
{
    struct nsim_rank *r = user;
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;
    int sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT;
    struct nsim_stream *s = send ? &r->stream[peer][sums] : &nsim.ranks[peer].stream[r->me][sums];
    uint32_t *told = send ? &s->told_sender : &s->told_receiver;
    int n = (int)((send ? s->acked : s->arrived) - *told);

    *told += (uint32_t)n;
    return n;
}

static int nsim_copy(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len)
{
    struct nsim_rank *r = user;

    (void)written, (void)slot, (void)offset, (void)len;
    r->copies[out]++;
    return 1;
}

static int nsim_copied(void *user, bool out)
{
    struct nsim_rank *r = user;
    int n = (int)r->copies[out];

    r->copies[out] = 0;
    return n;
}

static void nsim_add(void *user, void *sum, const void *const *in, int n, size_t count)
{
    (void)user, (void)sum, (void)in, (void)n, (void)count;
}

static const struct r2_exec_ops nsim_ops = {nsim_post, nsim_posted, nsim_copy, nsim_copied,
                                            nsim_add};

/* ---- a run */

static void nsim_turn(int rank)
{
    struct nsim_rank *r = &nsim.ranks[rank];

    while (r2_exec_turn(r->x) == 1)
        ;
    if (r->landed == 0 && r2_exec_landed(r->x))
        r->landed = nsim.now;
}

static void nsim_arrived(struct nsim_chunk *c)
{
    struct nsim_stream *s = &nsim.ranks[c->from].stream[c->to][c->sums];

    if (--c->left)
        return;
    s->of[c->message % NSIM_MESSAGES].arrived += c->len;
    while (s->arrived != s->waiting &&
           s->of[s->arrived % NSIM_MESSAGES].arrived == s->of[s->arrived % NSIM_MESSAGES].len)
        s->arrived++;
    nsim_give((struct nsim_packet){
        .kind = NSIM_ACK, .from = c->to, .to = c->from, .nic = c->nic, .len = 40, .chunk = c});
    nsim_turn(c->to);
}

static void nsim_acked(struct nsim_chunk *c)
{
    struct nsim_rank *r = &nsim.ranks[c->from];
    struct nsim_stream *s = &r->stream[c->to][c->sums];

    s->of[c->message % NSIM_MESSAGES].acked += c->len;
    r2_pathrate_on_ack(&r->path[c->to][c->nic].rate, c->len, &c->stamp, c->sent_ns, nsim_ns());
    r->nic[c->nic].inflight -= c->len;
    while (s->acked != s->arrived &&
           s->of[s->acked % NSIM_MESSAGES].acked == s->of[s->acked % NSIM_MESSAGES].len)
        s->acked++;
    nsim_kick(c->from, c->to);
    nsim_turn(c->from);
    free(c);
}

static void nsim_step(const struct sim_event *e)
{
    struct nsim_packet *p = e->packet;
    struct nsim_nic *in;

    switch (e->kind) {
    case NSIM_LEFT:
        nsim.ranks[p->from].nic[p->nic].busy = false;
        nsim_leave(&nsim.ranks[p->from].nic[p->nic]);
        in = &nsim.ranks[p->to].nic[p->nic];
        in->in_free = nsim_leaves(&in->in, in->in_free > nsim.now ? in->in_free : nsim.now, p->len);
        sim_push(&nsim.events, in->in_free + nsim_latency(), p->kind, p->to, p);
        return;
    case NSIM_DATA:
        nsim_arrived(p->chunk);
        break;
    case NSIM_ACK:
        nsim_acked(p->chunk);
        break;
    case NSIM_POSTED:
        nsim.ranks[p->to].stream[p->from][p->sums].heard++;
        nsim_kick(p->to, p->from);
        break;
    case NSIM_TURN:
        nsim_turn(e->rank);
        return;
    }
    free(p);
}

/* Ranks with NICs of `rate` bytes per second each. Next comes nsim_plan. */
static void nsim_open(double rate, unsigned seed)
{
    struct r2_sizes_window w = r2_sizes_window(NSIM_RANKS, (uint64_t)(NSIM_NICS * rate), 1);

    memset(&nsim, 0, sizeof(nsim));
    nsim.rate = rate;
    nsim.burst = 1e-3;
    r2_prng_seed(&nsim.prng, seed);
    nsim.ranks = calloc(NSIM_RANKS, sizeof(*nsim.ranks));
    CHECK(nsim.ranks);
    for (int i = 0; i < NSIM_RANKS; i++) {
        struct nsim_rank *r = &nsim.ranks[i];
        struct r2_exec_config config = {
            .p = NSIM_RANKS, .piece = w.slot, .ops = &nsim_ops, .n_slots = w.n_slots, .user = r};

        r->me = i;
        config.slots = r->slots = malloc((size_t)w.n_slots * w.slot);
        CHECK(r->slots);
        CHECK_EQ(r2_exec_new(&r->x, &config), 0);
        for (int nic = 0; nic < NSIM_NICS; nic++)
            r->nic[nic].last = &r->nic[nic].first;
    }
}

/* Between operations. Ranks have so many NICs left, one of them all of its own. Of paths that were
 * not there before nothing is known. */
static void nsim_plan(const int nics[], const struct r2_schedule_data *data,
                      const uint32_t *weights)
{
    bool was[NSIM_RANKS][NSIM_RANKS][NSIM_NICS];
    int of_a_node = 0;

    for (int i = 0; i < NSIM_RANKS; i++) {
        of_a_node = nics[i] > of_a_node ? nics[i] : of_a_node;
        for (int to = 0; to < NSIM_RANKS; to++)
            for (int nic = 0; nic < NSIM_NICS; nic++)
                was[i][to][nic] = nsim_reaches(i, to, nic);
    }
    for (int i = 0; i < NSIM_RANKS; i++) {
        struct nsim_rank *r = &nsim.ranks[i];

        r->nics = nics[i];
        CHECK_EQ(r2_schedule_direct(&r->schedule, data, i, weights), 0);
        r->credit = r2_sizes_credit(NSIM_RANKS, i, weights, (unsigned)of_a_node,
                                    (uint64_t)(NSIM_NICS * nsim.rate));
        for (int to = 0; to < NSIM_RANKS; to++)
            for (int nic = 0; nic < NSIM_NICS; nic++)
                if (!was[i][to][nic])
                    r2_pathrate_init(&r->path[to][nic].rate);
    }
}

static bool nsim_over(void)
{
    for (int i = 0; i < NSIM_RANKS; i++) {
        if (nsim.ranks[i].landed == 0 || !r2_exec_ended(nsim.ranks[i].x))
            return false;
    }
    return true;
}

/* An operation. Seconds until all ranks have the result. */
static double nsim_run(void)
{
    double begun = nsim.now, last = 0;

    for (int i = 0; i < NSIM_RANKS; i++) {
        nsim.ranks[i].landed = 0;
        r2_exec_begin(nsim.ranks[i].x, &nsim.ranks[i].schedule, nsim.ranks[i].credit);
        sim_push(&nsim.events, nsim.now, NSIM_TURN, i, NULL);
    }
    while (!nsim_over()) {
        struct sim_event e;

        e = sim_pop(&nsim.events);
        nsim.now = e.at;
        nsim_step(&e);
    }
    for (int i = 0; i < NSIM_RANKS; i++)
        last = nsim.ranks[i].landed > last ? nsim.ranks[i].landed : last;
    return last - begun;
}

/* Acknowledgements that nobody waits for. */
static void nsim_drain(void)
{
    while (nsim.events.n > 0) {
        struct sim_event e = sim_pop(&nsim.events);

        nsim.now = e.at;
        nsim_step(&e);
    }
}

static void nsim_close(void)
{
    nsim_drain();
    for (int i = 0; i < NSIM_RANKS; i++) {
        r2_exec_free(nsim.ranks[i].x);
        free(nsim.ranks[i].slots);
    }
    free(nsim.ranks);
    free(nsim.events.heap);
}

#endif
