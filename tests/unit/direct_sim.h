/* Executors of the direct AllReduce over simulated ports (rung 2), in virtual time, so that what an
 * operation takes is the same on every machine. A port sends packet by packet, in turn to each
 * peer, and receives in the order of arrival; a message begins when both ends have posted it and
 * the sender has heard of it. Adding costs nothing. It cannot show what TCP makes of a full queue:
 * `queued` is the most that has waited at a port. */
#ifndef R2_TESTS_DIRECT_SIM_H
#define R2_TESTS_DIRECT_SIM_H

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "direct/exec.h"
#include "plan/schedule.h"
#include "sim_events.h"

#define SIM_RANKS 16
#define SIM_PACKET 8192
#define SIM_MESSAGES 4096 /* of a stream, at once; a power of two */

struct sim_message {
    size_t len;
    double heard; /* when the sender knows that it may */
};

/* One stream from one rank to another. */
struct sim_stream {
    struct sim_message sent[SIM_MESSAGES], wanted[SIM_MESSAGES];
    uint32_t n_sent, n_wanted, begun; /* messages; begun: given to the port */
    uint32_t arrived, told_receiver, acked, told_sender;
};

/* What waits in a port for one peer, in order. */
struct sim_packet {
    struct sim_packet *next;
    struct sim_stream *stream;
    int from, to;
    size_t len;
    bool last; /* of its message */
};

struct sim_queue {
    struct sim_packet *first, **last;
};

struct sim_port {
    struct sim_queue peer[SIM_RANKS]; /* of what it sends */
    int turn;
    double free, in_free; /* when it is */
    double most;          /* seconds that something has waited to be received */
    bool busy;
};

enum sim_kind { SIM_TURN, SIM_LEFT, SIM_ARRIVED, SIM_ACKED };

struct sim_rank {
    int me;
    struct r2_exec *x;
    struct r2_schedule schedule;
    size_t credit;
    void *slots;
    unsigned begun[2];
    double landed; /* 0: not yet */
};

static struct sim {
    int p;
    double now, latency;                  /* seconds */
    double out[SIM_RANKS], in[SIM_RANKS]; /* bytes per second */
    struct sim_rank ranks[SIM_RANKS];
    struct sim_port ports[SIM_RANKS];
    struct sim_stream (*streams)[SIM_RANKS][2]; /* [from][to][sums] */
    struct sim_events events;
} sim;

/* ---- ports */

static void sim_leave(int rank)
{
    struct sim_port *port = &sim.ports[rank];

    for (int i = 0; i < sim.p && !port->busy; i++) {
        int to = (port->turn + i) % sim.p;
        struct sim_queue *q = &port->peer[to];
        struct sim_packet *packet = q->first;

        if (!packet)
            continue;
        q->first = packet->next;
        if (!q->first)
            q->last = &q->first;
        port->turn = to + 1;
        port->busy = true;
        sim_push(&sim.events, sim.now + (double)packet->len / sim.out[rank], SIM_LEFT, rank,
                 packet);
    }
}

/* Messages that both ends have posted and the sender knows of go to the port. */
static void sim_begin(int from, int to, int sums)
{
    struct sim_stream *s = &sim.streams[from][to][sums];

    while (s->begun != s->n_sent && s->begun != s->n_wanted) {
        struct sim_message *m = &s->sent[s->begun % SIM_MESSAGES];
        struct sim_message *w = &s->wanted[s->begun % SIM_MESSAGES];

        if (w->heard > sim.now)
            break;
        CHECK_EQ(m->len, w->len);
        for (size_t left = m->len; left > 0;) {
            struct sim_packet *packet = malloc(sizeof(*packet));
            struct sim_queue *q = &sim.ports[from].peer[to];
            size_t len = left < SIM_PACKET ? left : SIM_PACKET;

            CHECK(packet);
            left -= len;
            *packet = (struct sim_packet){
                .stream = s, .from = from, .to = to, .len = len, .last = left == 0};
            *q->last = packet;
            q->last = &packet->next;
        }
        s->begun++;
    }
    sim_leave(from);
}

/* ---- what executors do */

static struct sim_stream *sim_stream_of(int me, enum r2_lane_kind kind, int peer)
{
    bool sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT;
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;

    return send ? &sim.streams[me][peer][sums] : &sim.streams[peer][me][sums];
}

static int sim_post(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len)
{
    struct sim_rank *r = user;
    struct sim_stream *s = sim_stream_of(r->me, kind, peer);
    int sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT;

    (void)data;
    if (kind == R2_LANE_UP || kind == R2_LANE_OUT) {
        s->sent[s->n_sent++ % SIM_MESSAGES].len = len;
        sim_begin(r->me, peer, sums);
        return 1;
    }
    s->wanted[s->n_wanted++ % SIM_MESSAGES] = (struct sim_message){len, sim.now + sim.latency};
    sim_push(&sim.events, sim.now + sim.latency, SIM_TURN, peer, NULL);
    return 1;
}

static int sim_posted(void *user, enum r2_lane_kind kind, int peer)
{
    struct sim_rank *r = user;
    struct sim_stream *s = sim_stream_of(r->me, kind, peer);
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;
    uint32_t *told = send ? &s->told_sender : &s->told_receiver;
    int n = (int)((send ? s->acked : s->arrived) - *told);

    *told += (uint32_t)n;
    return n;
}

static int sim_copy(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len)
{
    struct sim_rank *r = user;

    (void)written, (void)slot, (void)offset, (void)len;
    r->begun[out]++;
    return 1;
}

static int sim_copied(void *user, bool out)
{
    struct sim_rank *r = user;
    int n = (int)r->begun[out];

    r->begun[out] = 0;
    return n;
}

static void sim_add(void *user, void *sum, const void *const *in, int n, size_t count)
{
    (void)user, (void)sum, (void)in, (void)n, (void)count;
}

static const struct r2_exec_ops sim_ops = {sim_post, sim_posted, sim_copy, sim_copied, sim_add};

/* ---- a run */

static void sim_turn(int rank)
{
    struct sim_rank *r = &sim.ranks[rank];

    for (int to = 0; to < sim.p; to++)
        for (int sums = 0; sums < 2; sums++)
            sim_begin(rank, to, sums);
    while (r2_exec_turn(r->x) == 1)
        ;
    if (r->landed == 0 && r2_exec_landed(r->x))
        r->landed = sim.now;
}

static void sim_step(const struct sim_event *e)
{
    struct sim_packet *packet = e->packet;
    struct sim_port *port;
    double wait;

    switch (e->kind) {
    case SIM_LEFT:
        sim.ports[e->rank].busy = false;
        port = &sim.ports[packet->to];
        wait = port->in_free > sim.now ? port->in_free - sim.now : 0;
        port->most = wait > port->most ? wait : port->most;
        port->in_free = sim.now + wait + (double)packet->len / sim.in[packet->to];
        sim_push(&sim.events, port->in_free + sim.latency, SIM_ARRIVED, packet->to, packet);
        sim_leave(e->rank);
        break;
    case SIM_ARRIVED:
        if (packet->last) {
            packet->stream->arrived++;
            sim_turn(e->rank);
            sim_push(&sim.events, sim.now + sim.latency, SIM_ACKED, packet->from, packet);
        } else {
            free(packet);
        }
        break;
    case SIM_ACKED:
        packet->stream->acked++;
        free(packet);
        sim_turn(e->rank);
        break;
    default:
        sim_turn(e->rank);
        break;
    }
}

static void sim_open(int p, double latency, const struct r2_exec_config *config)
{
    memset(&sim, 0, sizeof(sim));
    sim.p = p;
    sim.latency = latency;
    sim.streams = calloc(SIM_RANKS, sizeof(*sim.streams));
    CHECK(sim.streams);
    for (int r = 0; r < p; r++) {
        struct sim_rank *k = &sim.ranks[r];
        struct r2_exec_config own = *config;

        k->me = r;
        own.p = p;
        own.ops = &sim_ops;
        own.user = k;
        own.slots = k->slots = malloc(config->piece * (size_t)config->n_slots);
        CHECK(k->slots);
        CHECK_EQ(r2_exec_new(&k->x, &own), 0);
        for (int to = 0; to < p; to++)
            sim.ports[r].peer[to].last = &sim.ports[r].peer[to].first;
    }
}

static bool sim_over(void)
{
    for (int r = 0; r < sim.p; r++)
        if (sim.ranks[r].landed == 0 || !r2_exec_ended(sim.ranks[r].x))
            return false;
    return true;
}

/* An operation; the schedules are set. Seconds until all ranks have the result. */
static double sim_run(void)
{
    double begun = sim.now, last = 0;

    for (int r = 0; r < sim.p; r++) {
        sim.ranks[r].landed = 0;
        r2_exec_begin(sim.ranks[r].x, &sim.ranks[r].schedule, sim.ranks[r].credit);
        sim_push(&sim.events, sim.now, SIM_TURN, r, NULL);
    }
    while (!sim_over()) {
        struct sim_event e;

        e = sim_pop(&sim.events);
        sim.now = e.at;
        sim_step(&e);
    }
    for (int r = 0; r < sim.p; r++)
        last = sim.ranks[r].landed > last ? sim.ranks[r].landed : last;
    return last - begun;
}

static void sim_close(void)
{
    while (sim.events.n > 0) {
        struct sim_event e = sim_pop(&sim.events);

        free(e.packet);
    }
    for (int r = 0; r < sim.p; r++) {
        r2_exec_free(sim.ranks[r].x);
        free(sim.ranks[r].slots);
    }
    free(sim.streams);
    free(sim.events.heap);
}

#endif
