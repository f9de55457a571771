#include "engine/core/grey.h"

#include <stdio.h>
#include <string.h>

#include "util/num.h"

#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S UINT64_C(1000000000)

#define WINDOW_NS (50 * NS_PER_MS)
#define WINDOW_CHUNKS 4
#define SPARSE_NS (150 * NS_PER_MS) /* a window with fewer chunks */
#define GAP_NS (500 * NS_PER_MS)    /* without a chunk: idle, what was begun counts no more */
#define FRESH_NS (400 * NS_PER_MS)
#define WINDOWS 3
#define WELL_BYTES (256 * 1024)
#define SLOW_NS (400 * NS_PER_MS) /* a thread that the machine keeps waiting is no slow NIC */
#define WELL_NS (700 * NS_PER_MS)
#define SLACK_NS (200 * UINT64_C(1000)) /* threads wake late: no fault of the path */
#define LATE_MIN_NS (300 * UINT64_C(1000))
#define SPAN_NS (1000 * NS_PER_MS) /* of evidence: what was shown counts for one to two */
#define CHANGE 2                   /* a factor that moved by less than half is not worth telling */

#define LOSS_NS (500 * NS_PER_MS)
#define LOSS_SEGMENTS 100
#define LOSS_LEAST 10   /* sent again: a few may be a timer's mistake */
#define LOSS_PPM 10000  /* 1 %: grey */
#define CLEAN_PPM 2000  /* well again */
#define LOSS_SIBLINGS 4 /* and that many times what its siblings lose */
#define LOSSY_ROUNDS 1
#define CLEAN_ROUNDS 4

static void forget(struct r2_grey *g)
{
    g->window_from = 0;
    g->expected_ns = g->actual_ns = g->rate = g->bytes = 0;
    g->busy_ns = g->busy_bytes = 0;
    g->chunks = g->moves = g->free_moves = 0;
}

void r2_grey_init(struct r2_grey *g, uint64_t announced)
{
    memset(g, 0, sizeof(*g));
    g->announced = announced;
    g->factor = R2_GREY_FULL;
}

void r2_grey_restart(struct r2_grey *g)
{
    struct r2_grey was = *g;

    r2_grey_init(g, was.announced);
    g->best_rate = was.best_rate;
    g->peak = was.peak;
    g->least_ns = was.least_ns;
    g->least_bytes = was.least_bytes;
}

uint64_t r2_grey_expect(const struct r2_grey *g, uint64_t bytes)
{
    uint64_t least;

    if (!g->best_rate)
        return 0;
    least = r2_mul_div(g->least_bytes, NS_PER_S, g->best_rate);
    return r2_mul_div(bytes, NS_PER_S, g->best_rate) +
           (g->least_ns > least ? g->least_ns - least : 0);
}

/* The best rate is one that was kept up: a single good window may be a burst that a shaper or a
 * switch let through. */
static void keep_rate(struct r2_grey *g)
{
    uint64_t least = UINT64_MAX;

    g->kept[g->kept_at++ % 4] = g->rate;
    for (int i = 0; i < 4; i++)
        least = r2_min(least, g->kept[i]);
    g->peak = r2_max(g->peak, least);
    g->best_rate = r2_max(g->best_rate, least);
}

/* A window in which the path had more to do than it could: its rate is what the path can now. */
static void take_evidence(struct r2_grey *g)
{
    uint64_t least = UINT64_MAX;

    if (!g->moves || 2 * g->free_moves < g->moves)
        return;
    g->busy_rates[g->busy_at++ % 4] = g->rate;
    g->fade_ns += g->busy_ns;
    g->shown_ns += g->busy_ns;
    if (g->shown_ns >= SPAN_NS) {
        g->shown_ns = 0;
        g->shown[1] = g->shown[0];
        g->shown[0] = 0;
    }
    for (int i = 0; i < 4; i++)
        least = r2_min(least, g->busy_rates[i]);
    g->shown[0] = r2_max(g->shown[0], least);
}

static uint64_t shown(const struct r2_grey *g)
{
    return r2_max(g->shown[0], g->shown[1]);
}

static void close_window(struct r2_grey *g, uint64_t now)
{
    g->measured = g->rate;
    if (g->busy_ns)
        g->rate = r2_min(g->rate, r2_mul_div(g->busy_bytes, NS_PER_S, g->busy_ns));
    keep_rate(g);
    take_evidence(g);
    if (g->best_rate) {
        g->speed = (uint32_t)r2_min(
            r2_mul_div(g->expected_ns, R2_GREY_FULL, r2_max(g->actual_ns, 1)), R2_GREY_FULL);
        g->speed = (uint32_t)r2_max(g->speed, 1);
        if (g->announced && g->rate >= g->announced / 2)
            g->speed = R2_GREY_FULL;
        g->judged_at = now;
        g->fresh = true;
        g->window_bytes = g->bytes;
        g->late_ns =
            g->actual_ns > g->expected_ns ? (g->actual_ns - g->expected_ns) / g->chunks : 0;
    }
    forget(g);
}

static void sample(struct r2_grey *g, uint64_t moved, uint64_t took, uint64_t now)
{
    g->expected_ns += r2_grey_expect(g, moved) + SLACK_NS;
    g->actual_ns += took + SLACK_NS;
    g->chunks++;
    g->bytes += moved;
    if (!g->window_from)
        g->window_from = now;
    else if (now - g->window_from >= (g->chunks >= WINDOW_CHUNKS ? WINDOW_NS : SPARSE_NS))
        close_window(g, now);
}

void r2_grey_moved(struct r2_grey *g, uint64_t bytes, uint64_t took, bool limited, uint64_t now)
{
    uint64_t from = r2_max(g->acked_at, now > took ? now - took : 0);

    g->busy_ns += now > from ? now - from : 0;
    g->busy_bytes += bytes;
    g->acked_at = now;
    g->moves++;
    g->free_moves += !limited;
}

void r2_grey_chunk(struct r2_grey *g, uint64_t moved, uint64_t took, uint64_t rate, uint64_t now)
{
    if (g->window_from && now - g->window_from > GAP_NS)
        forget(g);
    if (!g->least_ns || took < g->least_ns) {
        g->least_ns = r2_max(took, 1);
        g->least_bytes = moved;
    }
    g->rate = rate;
    sample(g, moved, took, now);
}

void r2_grey_waiting(struct r2_grey *g, uint64_t inflight, uint64_t waited, uint64_t now)
{
    uint64_t expected = r2_grey_expect(g, inflight);

    if (!inflight || !expected || waited < WINDOW_NS || waited < 2 * expected)
        return;
    g->rate = 0;
    sample(g, inflight, waited, now);
}

void r2_grey_segments(struct r2_grey *g, uint64_t sent, uint64_t resent, uint64_t now)
{
    uint64_t was;

    if (!g->loss_from || sent < g->sent_from || resent < g->resent_from) {
        g->loss_from = now;
        g->sent_from = sent;
        g->resent_from = resent;
        return;
    }
    if (now - g->loss_from < LOSS_NS || sent - g->sent_from < LOSS_SEGMENTS)
        return;
    g->loss_ppm = (uint32_t)r2_min(
        r2_mul_div(resent - g->resent_from, 1000000, sent - g->sent_from), 1000000);
    was = g->resent_from;
    g->loss_at = now;
    g->loss_from = now;
    g->sent_from = sent;
    g->resent_from = resent;
    if (g->loss_ppm >= LOSS_PPM && resent - was >= LOSS_LEAST) {
        g->lossy_rounds++;
        g->clean_rounds = 0;
    } else if (g->loss_ppm <= CLEAN_PPM) {
        g->clean_rounds++;
        g->lossy_rounds = 0;
    }
}

enum what { SPEED, LATENESS, LOSS };

/* Numbers, the greatest first. */
struct sorted {
    uint64_t v[64];
    int n;
};

static void add(struct sorted *s, uint64_t x)
{
    int k;

    for (k = s->n++; k > 0 && s->v[k - 1] < x; k--)
        s->v[k] = s->v[k - 1];
    s->v[k] = x;
}

/* What the sibling shows, in proportion to the announced speeds. */
static uint64_t as_mine(const struct r2_grey *me, const struct r2_grey *sibling, uint64_t rate)
{
    return me->announced && sibling->announced ? r2_mul_div(rate, me->announced, sibling->announced)
                                               : rate;
}

/* Median of what is known about the siblings of path `self`. Of two it is the better one: two that
 * fall together are no excuse for each other. False: nothing is known. */
static bool siblings(struct r2_grey *const *paths, int n, int self, uint64_t now, enum what what,
                     uint64_t *out)
{
    struct sorted s = {.n = 0};

    for (int i = 0; i < n && i < 64; i++) {
        const struct r2_grey *g = paths[i];
        uint64_t at = !g ? 0 : what == LOSS ? g->loss_at : g->judged_at;

        if (i == self || !at || now - at > (what == LOSS ? 4 * LOSS_NS : FRESH_NS))
            continue;
        add(&s, what == LOSS ? g->loss_ppm : what == SPEED ? g->speed : g->late_ns);
    }
    if (s.n)
        *out = s.v[what == SPEED ? (s.n - 1) / 2 : s.n / 2];
    return s.n > 0;
}

/* What path `self` should carry if it could what its siblings have shown lately: their median, of
 * two the greater one, where one that had no occasion counts as more than any. 0: that is it. */
static uint64_t level(struct r2_grey *const *paths, int n, int self)
{
    const struct r2_grey *me = paths[self];
    struct sorted s = {.n = 0};

    for (int i = 0; i < n && i < 64; i++) {
        const struct r2_grey *g = paths[i];

        if (g && i != self)
            add(&s, shown(g) ? as_mine(me, g, shown(g)) : UINT64_MAX);
    }
    return s.n && s.v[(s.n - 1) / 2] != UINT64_MAX ? s.v[(s.n - 1) / 2] : 0;
}

/* What it can at the least, as of about the time `at`: others may want the same NICs, so what was
 * once says nothing. */
static uint64_t lately(const struct r2_grey *g, uint64_t at)
{
    uint64_t age = g->judged_at > at ? g->judged_at - at : at - g->judged_at;

    if (!g->judged_at || age > 4 * FRESH_NS)
        return 0;
    return r2_max(shown(g), g->measured);
}

uint32_t r2_grey_beside(struct r2_grey *const *paths, int n, int self)
{
    const struct r2_grey *me = paths[self];
    uint64_t own = me && shown(me) ? lately(me, me->judged_at) : 0;
    struct sorted s = {.n = 0};

    for (int i = 0; i < n && i < 64 && own; i++) {
        const struct r2_grey *g = paths[i];
        uint64_t x = g && i != self ? lately(g, me->judged_at) : 0;

        if (x)
            add(&s, as_mine(me, g, x));
    }
    if (!s.n)
        return 0;
    own = r2_mul_div(own, R2_GREY_FULL, r2_max(s.v[s.n / 2], 1));
    return (uint32_t)r2_max(r2_min(own, R2_GREY_FULL), 1);
}

static void fade(struct r2_grey *const *paths, int n, int self)
{
    struct r2_grey *g = paths[self];
    uint64_t least, gone;

    g->level = level(paths, n, self);
    least = g->level ? r2_max(shown(g), r2_min(g->peak, g->level)) : g->best_rate;
    gone = r2_mul_div(g->best_rate, r2_min(g->fade_ns, R2_GREY_HALF_LIFE) * 693 / 1000,
                      R2_GREY_HALF_LIFE); /* ln 2; a step is short against the half-life */
    g->best_rate = r2_max(least, g->best_rate - gone);
    g->fade_ns = 0;
}

static bool is_lossy(struct r2_grey *const *paths, int n, int self, uint64_t now)
{
    struct r2_grey *g = paths[self];
    uint64_t others;

    if (g->why == R2_GREY_LOSS && g->clean_rounds < CLEAN_ROUNDS)
        return true;
    return g->lossy_rounds >= LOSSY_ROUNDS && siblings(paths, n, self, now, LOSS, &others) &&
           others * LOSS_SIBLINGS < g->loss_ppm;
}

static void well_window(struct r2_grey *g, uint64_t now)
{
    g->well_from = g->well_windows++ ? g->well_from : now;
    g->well_bytes += g->window_bytes;
    g->slow_windows = 0;
}

/* Beside siblings that carry no more, nothing waits for the path, whatever it could do once. */
static uint64_t held_to(const struct r2_grey *g)
{
    return g->level ? r2_min(g->best_rate, g->level) : g->best_rate;
}

/* A window's verdict; whether the path is slow now. What one window says about times may be the
 * machine's doing, which kept a thread waiting. The delivery rate is a maximum over several
 * windows. So it has to have fallen as well, and once it is back nothing is slow. */
static bool is_slow(struct r2_grey *const *paths, int n, int self, uint64_t now)
{
    struct r2_grey *g = paths[self];
    bool was = g->why == R2_GREY_SLOW;
    uint64_t others = R2_GREY_FULL, late = 0;

    if (!g->fresh)
        return was;
    g->fresh = false;
    if (!siblings(paths, n, self, now, SPEED, &others) && !was)
        return false; /* alone: nobody to compare with, and nobody to take over */
    siblings(paths, n, self, now, LATENESS, &late);
    g->siblings = (uint32_t)others;
    g->share = (uint32_t)r2_min(g->speed * (uint64_t)R2_GREY_FULL / others, R2_GREY_FULL);
    g->lately[g->lately_at++ % 3] = g->share;
    if (was && g->measured >= g->best_rate / 4 * 3) {
        well_window(g, now);
    } else if (g->share < R2_GREY_BELOW && g->measured < held_to(g) / 2 &&
               g->late_ns >= LATE_MIN_NS + 2 * late) {
        g->slow_from = g->slow_windows++ ? g->slow_from : now;
        g->well_windows = 0;
        g->well_bytes = 0;
    } else if (g->share >= R2_GREY_ABOVE) {
        well_window(g, now);
    } else if (!was && g->measured >= g->best_rate / 2) {
        g->slow_windows = 0;
    }
    return was ? g->well_windows < WINDOWS ||
                     (g->well_bytes < WELL_BYTES && now - g->well_from < WELL_NS)
               : g->slow_windows >= WINDOWS && now - g->slow_from >= SLOW_NS;
}

static uint32_t wanted(const struct r2_grey *g, bool slow, bool lossy)
{
    uint32_t f = R2_GREY_FULL;

    if (slow) { /* the least of three windows: one between two speeds says nothing */
        f = (uint32_t)r2_min(r2_min(g->lately[0], g->lately[1]), g->lately[2]);
        f = (uint32_t)r2_min(r2_max(f, R2_GREY_LEAST), R2_GREY_ABOVE);
    }
    return lossy ? (uint32_t)r2_min(f, R2_GREY_LOSSY) : f;
}

uint64_t r2_grey_judge(struct r2_grey *const *paths, int n, uint64_t now)
{
    uint64_t changed = 0;

    for (int i = 0; i < n && i < 64; i++) {
        struct r2_grey *g = paths[i];
        enum r2_grey_why why;
        bool slow, lossy, moved;
        uint32_t f, gap;

        if (!g)
            continue;
        fade(paths, n, i);
        slow = is_slow(paths, n, i, now);
        lossy = is_lossy(paths, n, i, now);
        f = wanted(g, slow, lossy);
        gap = f > g->factor ? f - g->factor : g->factor - f;
        why = slow ? R2_GREY_SLOW : lossy ? R2_GREY_LOSS : R2_GREY_WELL;
        moved = why != g->why || (gap * CHANGE > g->factor && !g->well_windows);
        g->why = why;
        if (moved) {
            g->factor = f;
            changed |= UINT64_C(1) << i;
        }
    }
    return changed;
}

const char *r2_grey_reason(const struct r2_grey *g, char *out, size_t cap)
{
    if (g->why == R2_GREY_SLOW)
        snprintf(out, cap, "slow: %u.%u %% of its best (%llu MB/s), siblings at %u %%",
                 g->speed / 10, g->speed % 10, (unsigned long long)(g->best_rate / 1000000),
                 g->siblings / 10);
    else if (g->why == R2_GREY_LOSS)
        snprintf(out, cap, "lossy: %u.%u %% of its segments are sent again, its siblings' are not",
                 g->loss_ppm / 10000, g->loss_ppm / 1000 % 10);
    else
        snprintf(out, cap, "as fast and clean as its siblings again");
    return out;
}
