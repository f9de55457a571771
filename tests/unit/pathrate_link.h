/* A simulated path for engine/pathrate: lanes that share a link, a queue before it and a receiver
 * that acknowledges. Time is the simulation's own. */
#ifndef R2_TESTS_PATHRATE_LINK_H
#define R2_TESTS_PATHRATE_LINK_H

#include "check.h"

#include "engine/core/pathrate.h"

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)
#define MB UINT64_C(1000000)
#define GB UINT64_C(1000000000)
#define MIB (1024 * 1024)
#define MAX_FLYING 4096

struct flying {
    uint64_t t_sent;
    uint64_t t_acked; /* when the acknowledgement arrives */
    uint32_t len;
    unsigned lane;
    struct r2_rate_stamp stamp;
};

/* One path: lanes that share a link, a FIFO queue before it, a receiver that acknowledges. */
struct link {
    uint64_t rate;       /* bytes per second */
    uint64_t lane_rate;  /* what one lane can carry, 0: as much as the link */
    uint64_t delay;      /* round trip without any bytes, ns */
    uint64_t ack_jitter; /* the receiver batches: up to this much later */
    unsigned lanes;
    uint32_t max_chunk;
    uint32_t message; /* no chunk is longer, 0: no limit */
    uint64_t burst;   /* bytes that a shaper saves up while the link is idle */

    struct r2_pathrate pr;
    uint64_t now;
    uint64_t link_free;
    uint64_t lane_free[16];
    struct flying list[MAX_FLYING];
    unsigned count;
    uint64_t to_send; /* UINT64_MAX: endless */
    uint64_t acked;
    uint64_t peak; /* most bytes in flight since it was last cleared */
    uint64_t worst_rtt;
};

static struct link k;

static void link_init(uint64_t rate, uint64_t delay, unsigned lanes, uint32_t max_chunk)
{
    memset(&k, 0, sizeof(k));
    k.rate = rate;
    k.delay = delay;
    k.lanes = lanes;
    k.max_chunk = max_chunk;
    k.to_send = UINT64_MAX;
    k.now = 12345 * SEC; /* times do not start at 0 */
    r2_pathrate_init(&k.pr);
}

static uint64_t wire_ns(uint64_t len, uint64_t rate)
{
    return (uint64_t)((unsigned __int128)len * SEC / rate);
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The lane that is free first. */
static unsigned pick_lane(void)
{
    unsigned best = 0;

    for (unsigned i = 1; i < k.lanes; i++) {
        best = k.lane_free[i] < k.lane_free[best] ? i : best;
    }
    return best;
}

static void send_one(uint32_t len)
{
    struct flying *f = &k.list[k.count++];
    unsigned lane = pick_lane();
    uint64_t start = later(k.now, k.lane_free[lane]);
    uint64_t end;

    CHECK_LT(k.count, MAX_FLYING);
    if (k.burst) { /* a token bucket: idle time counts backwards up to the burst */
        uint64_t saved = wire_ns(k.burst, k.rate);

        k.link_free = later(k.link_free, start - saved) + wire_ns(len, k.rate);
        end = later(k.link_free, start + wire_ns(len, 5 * GB));
    } else {
        k.link_free = later(k.link_free, start) + wire_ns(len, k.rate);
        end = k.link_free;
    }
    end = later(end, start + (k.lane_rate ? wire_ns(len, k.lane_rate) : 0));
    k.lane_free[lane] = end;
    *f = (struct flying){.t_sent = k.now, .len = len, .lane = lane};
    f->t_acked = end + k.delay + (k.ack_jitter ? check_below(k.ack_jitter) : 0);
    r2_pathrate_on_send(&k.pr, len, k.now, &f->stamp);
    k.to_send -= k.to_send == UINT64_MAX ? 0 : len;
    k.peak = later(k.peak, r2_pathrate_inflight(&k.pr));
}

static void pull(void)
{
    for (;;) {
        uint32_t len = r2_pathrate_chunk_len(&k.pr, k.max_chunk);

        if (r2_pathrate_inflight(&k.pr) >= r2_pathrate_window(&k.pr, len, k.lanes, false)) {
            return;
        }
        if (k.to_send == 0) {
            r2_pathrate_app_limited(&k.pr);
            return;
        }
        len = k.message && k.message < len ? k.message : len;
        send_one(k.to_send < len ? (uint32_t)k.to_send : len);
    }
}

/* Runs until `until`, or, with nothing more to send, until all is acknowledged. */
static void run_until(uint64_t until)
{
    pull();
    while (k.count > 0) {
        unsigned best = 0;
        struct flying f;

        for (unsigned i = 1; i < k.count; i++) {
            best = k.list[i].t_acked < k.list[best].t_acked ? i : best;
        }
        if (k.list[best].t_acked > until) {
            break;
        }
        f = k.list[best];
        k.list[best] = k.list[--k.count];
        k.now = f.t_acked;
        k.acked += f.len;
        k.worst_rtt = later(k.worst_rtt, k.now - f.t_sent);
        r2_pathrate_on_ack(&k.pr, f.len, &f.stamp, f.t_sent, k.now);
        pull();
    }
    k.now = later(k.now, until);
}

static void run_for(uint64_t ns)
{
    run_until(k.now + ns);
}

/* Per cent of the link that a run of `ns` uses. */
__attribute__((unused)) static uint64_t use_of_run(uint64_t ns)
{
    uint64_t before = k.acked;

    run_for(ns);
    return (uint64_t)((unsigned __int128)(k.acked - before) * SEC * 100 / ns / k.rate);
}

__attribute__((unused)) static void expect_rate(uint64_t rate, unsigned percent_below,
                                                unsigned percent_above)
{
    uint64_t got = r2_pathrate_rate(&k.pr);

    CHECK_MSG(
        got >= rate / 100 * (100 - percent_below) && got <= rate / 100 * (100 + percent_above),
        "rate %" PRIu64 " instead of %" PRIu64 " (link %" PRIu64 " delay %" PRIu64 " lanes %u)",
        got, rate, k.rate, k.delay, k.lanes);
}

#endif
