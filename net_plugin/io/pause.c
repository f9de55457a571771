#include "io/pause.h"

#include <limits.h>
#include <stdatomic.h>

#include "util/clock.h"

#define MANY_THREADS 4
#define SPIN_FEW_NS (50 * R2_NS_PER_US)
#define PAYS_FEW 300                  /* per mille of idle times */
#define PAYS_MANY 600                 /* docs/decisions.md 31 */
#define PAID_SPAN 16                  /* idle times that count */
#define WAKING_NS (20 * R2_NS_PER_US) /* what sleeping adds to an idle time */
/* ... and to one that was slept through, the peer's sleep included: who would have polled answers
 * sooner, and is answered sooner. */
#define WAKING_BOTH_NS (100 * R2_NS_PER_US)
#define CROWDED_NS (50 * R2_NS_PER_MS)
#define CROWD_RATE 3 /* bytes in a nanosecond, over ... */
#define CROWD_SPAN_NS (2 * R2_NS_PER_MS)

static uint64_t spin_ns;                       /* as set; written before the first thread runs */
static bool places;                            /* threads are four and more, likewise */
static atomic_bool many;                       /* ... of those that are in use */
static atomic_bool several;                    /* likewise */
static atomic_int may_poll = INT_MAX, polling; /* threads; with `many` */
static atomic_ulong limited_until, crowded_until;
static atomic_ulong span_from, span_bytes; /* what was carried since then, of slow NICs */

void r2_pause_start(int threads, uint64_t spin)
{
    spin_ns = spin;
    places = threads >= MANY_THREADS;
    r2_pause_use(threads);
}

/* Relaxed: it orders nothing; an idle time that began before goes by either rule. */
void r2_pause_use(int threads)
{
    atomic_store_explicit(&many, threads >= MANY_THREADS, memory_order_relaxed);
    atomic_store_explicit(&several, threads > 1, memory_order_relaxed);
}

static bool are_many(void)
{
    return atomic_load_explicit(&many, memory_order_relaxed);
}

static bool are_several(void)
{
    return atomic_load_explicit(&several, memory_order_relaxed);
}

static uint64_t spin(void)
{
    return !are_many() && spin_ns > SPIN_FEW_NS ? SPIN_FEW_NS : spin_ns;
}

void r2_pause_let(int n)
{
    atomic_store_explicit(&may_poll, n, memory_order_relaxed);
}

/* Relaxed, here and below: times that order nothing. Written seldom, as many read them. True: it
 * was over. */
static bool extend(atomic_ulong *until, uint64_t now, uint64_t ns)
{
    uint64_t before = atomic_load_explicit(until, memory_order_relaxed);

    if (before < now + ns - ns / 8)
        atomic_store_explicit(until, now + ns, memory_order_relaxed);
    return before <= now;
}

bool r2_pause_crowd(uint64_t now)
{
    return extend(&crowded_until, now, CROWDED_NS);
}

/* Bytes that another thread adds while a span ends count in the next one. */
static bool carried(uint64_t now, uint64_t bytes)
{
    uint64_t from = atomic_load_explicit(&span_from, memory_order_relaxed);

    atomic_fetch_add_explicit(&span_bytes, bytes, memory_order_relaxed);
    if (now < from + CROWD_SPAN_NS ||
        !atomic_compare_exchange_strong_explicit(&span_from, &from, now, memory_order_relaxed,
                                                 memory_order_relaxed))
        return false;
    bytes = atomic_exchange_explicit(&span_bytes, 0, memory_order_relaxed);
    return bytes > (now - from) * CROWD_RATE && r2_pause_crowd(now);
}

bool r2_pause_limit(uint64_t now, uint64_t bytes)
{
    extend(&limited_until, now, R2_LIMITED_NS);
    return bytes && carried(now, bytes);
}

static bool before(const atomic_ulong *until, uint64_t now)
{
    return now < atomic_load_explicit(until, memory_order_relaxed);
}

bool r2_pause_limited(uint64_t now)
{
    return before(&limited_until, now) && !before(&crowded_until, now) && are_several();
}

/* Relaxed, here and below: numbers that order nothing else; that no more poll than may is the
 * compare-exchange's. */
static bool take_place(void)
{
    int others = atomic_load_explicit(&polling, memory_order_relaxed);

    do {
        if (others >= atomic_load_explicit(&may_poll, memory_order_relaxed))
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&polling, &others, others + 1,
                                                    memory_order_relaxed, memory_order_relaxed));
    return true;
}

static void leave_place(struct r2_pause *p)
{
    if (p->counted)
        atomic_fetch_sub_explicit(&polling, 1, memory_order_relaxed);
    p->counted = false;
}

bool r2_pause_polls(struct r2_pause *p, uint64_t now)
{
    bool limited = r2_pause_limited(now);

    if (!spin_ns)
        return false;
    if (!p->since) {
        p->since = now;
        p->counted = places && !limited && take_place();
        p->slept = true;
    }
    if (p->counted == places && !limited && p->paid >= (are_many() ? PAYS_MANY : PAYS_FEW) &&
        now < p->since + spin()) {
        p->slept = false;
        return true;
    }
    leave_place(p);
    return false;
}

void r2_pause_over(struct r2_pause *p, uint64_t now)
{
    uint64_t waking = p->slept && are_many() ? WAKING_BOTH_NS : WAKING_NS;

    leave_place(p);
    if (!p->since)
        return;
    p->paid += ((now - p->since <= spin() + waking ? 1000 : 0) - p->paid) / PAID_SPAN;
    p->since = 0;
}
