#include "engine/core/pathrate.h"

#include <string.h>

#include "util/num.h"

#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S UINT64_C(1000000000)

#define RATE_SPAN_MIN_NS (200 * NS_PER_MS)
#define RATE_SPAN_MAX_NS (800 * NS_PER_MS)
#define RATE_SPAN_RTTS 10
#define SAMPLE_GAP_MAX_NS (100 * NS_PER_MS) /* more is idle time: does not age the rate */
#define SOLID_BYTES (512 * 1024)            /* what a sample must span, ... */
#define SOLID_NS (20 * NS_PER_MS)           /* ... or for how long */
#define LATE_NS (4 * NS_PER_MS)             /* threads that wake late are no fault of the path */
#define LATE_CHUNKS 3
#define LATE_TURNS 2 /* one thread that is kept waiting makes all late that is in flight */
#define IDLE_SHARE 4 /* of a sample: so much of its time may have passed with nothing in flight */
#define MIN_RTT_SPAN_NS (10 * NS_PER_S)

#define CHUNK_TIME_NS (NS_PER_MS / 4)
#define CHUNK_STEP 4096

#define WINDOW_GAIN 2
#define SLACK_NS (4 * NS_PER_MS) /* in flight beyond the round trip, as a time */
#define SLACK_ANY_NS NS_PER_MS
#define SLACK_MAX (1024 * 1024)
#define SLACK_CHUNKS 2 /* where these are more than that */
#define STARTUP_GAIN 4
#define STARTUP_ROUNDS 3               /* rounds without a quarter more rate end the start-up */
#define LANE_RATE UINT64_C(1000000000) /* one lane surely carries this much, bytes/s */

static uint64_t add_sat(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

void r2_pathrate_init(struct r2_pathrate *pr)
{
    memset(pr, 0, sizeof(*pr));
    pr->startup = true;
}

void r2_pathrate_reset(struct r2_pathrate *pr)
{
    bool known_slow = pr->known_slow;

    r2_pathrate_init(pr);
    pr->known_slow = known_slow;
}

/* The next samples begin with the latest acknowledgement. */
static void anchor(struct r2_pathrate *pr)
{
    pr->anchor.delivered = pr->delivered;
    pr->anchor.time_ns = pr->delivered_time_ns;
    pr->anchor.first_sent_ns = pr->first_sent_ns;
    pr->anchor.idle_ns = 0;
}

/* A sample that begins at the anchor spans enough now. */
static bool is_solid(const struct r2_pathrate *pr, uint64_t now_ns)
{
    return pr->delivered - pr->anchor.delivered >= SOLID_BYTES ||
           now_ns - pr->anchor.time_ns >= SOLID_NS;
}

/* The pipe was empty for `idle`: that says nothing about its rate. Between chunks that go out one
 * after the other it is, though, for a moment each; samples would then never span enough. */
static bool broken_off(const struct r2_pathrate *pr, uint64_t idle, uint64_t now_ns)
{
    return is_solid(pr, now_ns) ||
           (pr->anchor.idle_ns + idle) * IDLE_SHARE > now_ns - pr->anchor.time_ns;
}

void r2_pathrate_forget(struct r2_pathrate *pr)
{
    memset(pr->bucket, 0, sizeof(pr->bucket));
    pr->bucket_used_ns = 0;
    pr->last_sample_ns = 0;
    pr->valid_from = pr->delivered;
    pr->startup = true;
    pr->startup_window = 0;
    pr->full_rate = 0;
    pr->full_rounds = 0;
    pr->round_end = pr->delivered;
    memset(&pr->far, 0, sizeof(pr->far));
    memset(&pr->beyond, 0, sizeof(pr->beyond));
    anchor(pr);
}

void r2_pathrate_on_send(struct r2_pathrate *pr, uint64_t len, uint64_t now_ns,
                         struct r2_rate_stamp *stamp)
{
    uint64_t idle = now_ns > pr->delivered_time_ns ? now_ns - pr->delivered_time_ns : 0;

    if (pr->inflight == 0 && broken_off(pr, idle, now_ns)) {
        pr->delivered_time_ns = now_ns;
        pr->first_sent_ns = now_ns;
        anchor(pr);
    } else if (pr->inflight == 0) {
        pr->anchor.idle_ns += idle;
        pr->delivered_time_ns = now_ns;
        pr->first_sent_ns = now_ns;
    } else if (is_solid(pr, now_ns)) {
        anchor(pr);
    }
    stamp->delivered = pr->anchor.delivered;
    stamp->at_send = pr->delivered;
    stamp->delivered_time_ns = pr->anchor.time_ns;
    stamp->first_sent_ns = pr->anchor.first_sent_ns;
    stamp->app_limited = pr->app_limited_until > 0;
    stamp->clean = pr->inflight == 0;
    pr->inflight += len;
}

uint64_t r2_pathrate_rate(const struct r2_pathrate *pr)
{
    uint64_t rate = 0;

    for (int i = 0; i < R2_PATHRATE_BUCKETS; i++) {
        rate = r2_max(rate, pr->bucket[i]);
    }
    return rate;
}

uint64_t r2_pathrate_rate_now(const struct r2_pathrate *pr, uint64_t now_ns)
{
    uint64_t rate = r2_pathrate_rate(pr);
    uint64_t waited = now_ns > pr->delivered_time_ns ? now_ns - pr->delivered_time_ns : 0;
    uint64_t due;

    if (pr->inflight == 0) {
        return rate;
    }
    due = rate ? pr->min_rtt_ns + r2_mul_div(pr->inflight, NS_PER_S, rate) : 0;
    return waited <= 2 * due + LATE_NS ? rate
                                       : r2_max(r2_mul_div(pr->inflight, NS_PER_S, waited), 1);
}

uint64_t r2_pathrate_srtt_now(const struct r2_pathrate *pr, uint64_t now_ns)
{
    uint64_t waited = now_ns > pr->delivered_time_ns ? now_ns - pr->delivered_time_ns : 0;

    return pr->inflight ? r2_max(pr->srtt_ns, waited) : pr->srtt_ns;
}

/* Lets `gap` ns of traffic pass: buckets that fall out of the span are forgotten. */
static void rate_age(struct r2_pathrate *pr, uint64_t gap)
{
    uint64_t span =
        r2_min(r2_max(RATE_SPAN_RTTS * pr->srtt_ns, RATE_SPAN_MIN_NS), RATE_SPAN_MAX_NS) /
        R2_PATHRATE_BUCKETS;

    pr->bucket_used_ns += r2_min(gap, SAMPLE_GAP_MAX_NS);
    while (pr->bucket_used_ns >= span) {
        pr->bucket_used_ns -= span;
        pr->bucket_now = (pr->bucket_now + 1) % R2_PATHRATE_BUCKETS;
        pr->bucket[pr->bucket_now] = 0;
    }
}

/* Another chunk came, late, in time, or neither. True once so many were late, and none in time
 * between them, that the path must be slower. One stall, of a thread, a peer or a lost packet,
 * makes all late that is in flight, but not what is sent after that. The chunks of one message that
 * are sent with nothing acknowledged between them count as one. */
static bool keeps_late(struct r2_late *l, bool late, bool in_time, uint64_t at_send,
                       uint64_t t_sent_ns, uint64_t now_ns)
{
    if (in_time) {
        l->chunks = l->turns = 0;
    } else if (late) {
        bool turn = !l->turns || t_sent_ns >= l->at;

        l->chunks += turn || at_send > l->mark;
        l->mark = r2_max(l->mark, at_send);
        if (turn) {
            l->turns++;
            l->at = now_ns;
        }
    }
    return l->chunks >= LATE_CHUNKS && l->turns >= LATE_TURNS;
}

/* Chunks take more than twice what the bytes ahead of them and the round trip account for: they
 * wait before a link that is slower than the estimate, however little there is to send. A wide
 * estimate would otherwise keep itself: its window takes in all that the sender has, who then
 * counts as limited for ever, and other paths get nothing of it. */
static bool overdue(struct r2_pathrate *pr, const struct r2_rate_stamp *stamp, uint64_t t_sent_ns,
                    uint64_t now_ns)
{
    uint64_t rate = r2_pathrate_rate(pr), moved = pr->delivered - stamp->at_send;
    uint64_t took = now_ns > t_sent_ns ? now_ns - t_sent_ns : 0, due;

    if (rate == 0)
        return false;
    due = add_sat(pr->min_rtt_ns, r2_mul_div(moved, NS_PER_S, rate));
    return keeps_late(&pr->beyond, took / 2 > add_sat(due, LATE_NS / 8),
                      took <= add_sat(due, LATE_NS / 4), stamp->at_send, t_sent_ns, now_ns);
}

static void rate_sample(struct r2_pathrate *pr, const struct r2_rate_stamp *stamp, bool limited,
                        uint64_t t_sent_ns, uint64_t now_ns)
{
    uint64_t ack_span = now_ns > stamp->delivered_time_ns ? now_ns - stamp->delivered_time_ns : 0;
    uint64_t send_span = t_sent_ns > stamp->first_sent_ns ? t_sent_ns - stamp->first_sent_ns : 0;
    uint64_t span = r2_max(ack_span, send_span); /* acknowledgements that come in a burst lie */
    uint64_t gap =
        pr->last_sample_ns && now_ns > pr->last_sample_ns ? now_ns - pr->last_sample_ns : 0;
    uint64_t bytes = pr->delivered - stamp->delivered;
    bool solid = bytes >= SOLID_BYTES || span >= SOLID_NS;
    uint64_t rate;

    if (span == 0 || stamp->delivered < pr->valid_from || (!solid && pr->last_sample_ns)) {
        return;
    }
    rate = r2_mul_div(bytes, NS_PER_S, span);
    if (solid && !pr->last_sample_ns) {
        memset(pr->bucket, 0, sizeof(pr->bucket)); /* shorter ones may have seen a burst */
    }
    if (solid) {
        pr->last_sample_ns = now_ns;
    }
    if (!limited) {
        rate_age(pr, gap);
    } else if (rate <= r2_pathrate_rate(pr)) {
        return;
    }
    pr->bucket[pr->bucket_now] = r2_max(pr->bucket[pr->bucket_now], rate);
}

static void set_min_rtt(struct r2_pathrate *pr, uint64_t rtt, uint64_t len, uint64_t now_ns)
{
    pr->min_rtt_ns = rtt;
    pr->min_rtt_len = (uint32_t)r2_min(len, UINT32_MAX);
    pr->min_rtt_time_ns = now_ns;
    pr->clean_rtt_ns = 0;
}

static void rtt_sample(struct r2_pathrate *pr, uint64_t len, bool clean, uint64_t t_sent_ns,
                       uint64_t now_ns)
{
    uint64_t rtt = now_ns > t_sent_ns ? now_ns - t_sent_ns : 1;
    bool expired = now_ns - pr->min_rtt_time_ns > MIN_RTT_SPAN_NS;

    pr->srtt_ns = pr->srtt_ns ? pr->srtt_ns - pr->srtt_ns / 8 + rtt / 8 : rtt;
    if (pr->min_rtt_ns == 0 || rtt <= pr->min_rtt_ns) {
        set_min_rtt(pr, rtt, len, now_ns);
        expired = false;
    } else if (expired && clean && pr->clean_rtt_ns) {
        set_min_rtt(pr, r2_min(rtt, pr->clean_rtt_ns), len, now_ns);
        expired = false;
    } else if (expired && clean) {
        pr->clean_rtt_ns = rtt;
    }
    /* For 10 s every sample had our own queue in it. Without clean ones the minimum would grow to
     * what the window makes of it, and the window with it, for ever. */
    pr->probing_rtt = expired || (pr->probing_rtt && !clean);
}

/* `len`: of a chunk whose acknowledgement was overtaken, beside what has been delivered.
 * Three chunks in a row that took more than four times what they should: the path has become
 * slower. What the last of them saw is believed, the first ones may have been under way when it
 * happened.
 */
static void drop_sample(struct r2_pathrate *pr, uint64_t at_send, uint64_t len, uint64_t t_sent_ns,
                        uint64_t now_ns)
{
    uint64_t moved = pr->delivered - at_send + len;
    uint64_t took = now_ns > t_sent_ns ? now_ns - t_sent_ns : 0;
    uint64_t rate = r2_pathrate_rate(pr);

    bool late =
        rate > 0 && took / 4 > pr->min_rtt_ns + r2_mul_div(moved, NS_PER_S, rate) + LATE_NS / 4;

    if (!keeps_late(&pr->far, late, !late, at_send, t_sent_ns, now_ns))
        return;
    memset(pr->bucket, 0, sizeof(pr->bucket));
    pr->bucket[pr->bucket_now] =
        r2_max(r2_mul_div(moved, NS_PER_S, r2_max(took - pr->min_rtt_ns, 1)), 1);
    memset(&pr->far, 0, sizeof(pr->far));
    memset(&pr->beyond, 0, sizeof(pr->beyond));
    pr->valid_from = pr->delivered;
    anchor(pr);
}

/* Once per round trip of the start-up: goes on while the rate rises. */
static void startup_round(struct r2_pathrate *pr, const struct r2_rate_stamp *stamp, bool limited)
{
    uint64_t rate = r2_pathrate_rate(pr);

    if (stamp->delivered < pr->round_end) {
        return;
    }
    pr->round_end = pr->delivered;
    if (rate >= pr->full_rate + pr->full_rate / 4) {
        pr->full_rate = rate;
        pr->full_rounds = 0;
    } else if (!limited && ++pr->full_rounds >= STARTUP_ROUNDS) {
        pr->startup = false;
        pr->probing_rtt = true; /* drains what the start-up has queued */
    }
}

void r2_pathrate_on_ack(struct r2_pathrate *pr, uint64_t len, const struct r2_rate_stamp *stamp,
                        uint64_t t_sent_ns, uint64_t now_ns)
{
    uint64_t was_inflight = pr->inflight;
    bool limited;

    pr->delivered += len;
    pr->delivered_time_ns = r2_max(now_ns, pr->delivered_time_ns);
    pr->first_sent_ns = r2_max(t_sent_ns, pr->first_sent_ns);
    pr->inflight -= r2_min(len, pr->inflight);
    if (pr->app_limited_until && pr->delivered > pr->app_limited_until) {
        pr->app_limited_until = 0;
    }
    limited = !overdue(pr, stamp, t_sent_ns, now_ns) && stamp->app_limited;
    rate_sample(pr, stamp, limited, t_sent_ns, now_ns);
    rtt_sample(pr, len, stamp->clean, t_sent_ns, now_ns);
    drop_sample(pr, stamp->at_send, 0, t_sent_ns, now_ns);
    if (pr->startup) {
        if (!limited) {
            pr->startup_window = r2_max(pr->startup_window, was_inflight) + len;
        }
        startup_round(pr, stamp, limited);
    }
}

void r2_pathrate_overtaken(struct r2_pathrate *pr, uint64_t len, const struct r2_rate_stamp *stamp,
                           uint64_t t_sent_ns, uint64_t now_ns)
{
    drop_sample(pr, stamp->at_send, len, t_sent_ns, now_ns);
}

void r2_pathrate_on_lost(struct r2_pathrate *pr, uint64_t len)
{
    pr->inflight -= r2_min(len, pr->inflight);
}

void r2_pathrate_app_limited(struct r2_pathrate *pr)
{
    pr->app_limited_until = r2_max(pr->delivered + pr->inflight, 1);
}

uint64_t r2_pathrate_window(const struct r2_pathrate *pr, uint64_t chunk, unsigned lanes,
                            bool any_nic)
{
    uint64_t rate = r2_pathrate_rate(pr), slack_ns = any_nic ? SLACK_ANY_NS : SLACK_NS;
    uint64_t all = lanes ? lanes : 1;
    uint64_t pipe; /* bytes that leave during the shortest round trip */
    uint64_t
        rest; /* that round trip may be a shorter chunk's: what a whole one needs in addition */
    uint64_t bdp;
    uint64_t floor;

    if (rate == 0) {
        return 2 * chunk * all;
    }
    pipe = r2_mul_div(rate, pr->min_rtt_ns, NS_PER_S);
    rest = chunk > pr->min_rtt_len ? chunk - pr->min_rtt_len : 0;
    bdp = add_sat(pipe, rest);
    /* Fast paths need all their lanes busy: one lane may be bound by one core, and a window too
     * small for that would measure a rate that makes it smaller still. */
    floor = add_sat(pipe, chunk * r2_min(1 + rate / LANE_RATE, all));
    /* Acknowledgements wait behind the peer's own data and for threads that have to wake, which the
     * shortest round trip has not seen. The queue that this makes is no longer for a slow path. */
    floor = r2_max(floor, chunk + r2_min(r2_mul_div(rate, slack_ns, NS_PER_S),
                                         r2_max(SLACK_MAX, SLACK_CHUNKS * chunk)));
    if (pr->startup) {
        return r2_min(r2_max(2 * chunk * all, pr->startup_window),
                      r2_max(r2_mul_div(STARTUP_GAIN, bdp, 1), floor));
    }
    if (pr->probing_rtt) { /* messages shorter than a chunk would never let it run empty */
        return pr->inflight ? 0 : chunk;
    }
    return r2_max(r2_mul_div(WINDOW_GAIN, bdp, 1), floor);
}

uint32_t r2_pathrate_chunk_len(const struct r2_pathrate *pr, uint32_t max_chunk)
{
    uint64_t len = r2_mul_div(r2_pathrate_rate(pr), CHUNK_TIME_NS, NS_PER_S);

    len = r2_min(r2_max(len, pr->known_slow ? R2_CHUNK_SLOW : R2_CHUNK_MIN), max_chunk);
    return (uint32_t)r2_max(len - len % CHUNK_STEP, CHUNK_STEP);
}
