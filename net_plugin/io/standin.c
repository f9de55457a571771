#include "io/standin.h"

#include <stdatomic.h>
#include <stdint.h>

#include "io/io.h"
#include "io/pause.h"
#include "util/clock.h"

#define LOOKS 64                   /* judged over so many, ... */
#define SPAN_NS (1 * R2_NS_PER_MS) /* ... and so much time, ... */
#define GAP_NS (10 * SPAN_NS)      /* ... anew after a pause of that */
#define MOST 800                   /* of a thousand looks that found work: they do not keep up */

/* Of one thread that polls. */
struct load {
    uint64_t since, last;         /* ns */
    unsigned looks, worked, next; /* `next`: I/O thread */
};

static _Thread_local struct load load;

/* Since it was last cleared somebody has stood in for several: some of them may sleep for that. Set
 * after they have been told so (release), cleared before they are told otherwise (acquire): a word
 * that comes too late for who clears it is followed by a flag for the next one who looks. */
static atomic_bool lent;

static void take_back(void)
{
    if (atomic_load_explicit(&lent, memory_order_relaxed) &&
        atomic_exchange_explicit(&lent, false, memory_order_acquire))
        r2_io_take_back();
}

void r2_standin_limit(uint64_t now, uint64_t bytes)
{
    if (r2_pause_limit(now, bytes))
        take_back();
}

/* By looks, not by time: a caller that is kept from its core, or has other work, finds more. */
static void judge(uint64_t now, bool worked)
{
    if (now > load.last + GAP_NS) {
        load.since = now;
        load.looks = load.worked = 0;
    }
    load.last = now;
    load.looks++;
    load.worked += worked;
    if (load.looks < LOOKS || now < load.since + SPAN_NS)
        return;
    if (load.worked * 1000 > load.looks * MOST && r2_pause_crowd(now))
        take_back();
    load.since = now;
    load.looks = load.worked = 0;
}

/* The next that has sockets, those that are given nothing new among them. */
static struct r2_io *next_io(void)
{
    for (int i = 0, n = r2_io_count(); i < n; i++) {
        struct r2_io *io = r2_io_at((int)(load.next++ % (unsigned)n));

        if (r2_io_lends(io))
            return io;
    }
    return NULL;
}

/* True if it stood in, and no other thread was ever started. Other threads, no longer in use, may
 * still have sockets that need help. */
static bool for_the_only_one(void)
{
    bool worked;

    return r2_io_lend(r2_io_at(0), &worked) && r2_io_count() == 1;
}

bool r2_standin_look(void)
{
    uint64_t now;
    struct r2_io *io;
    bool worked, stood_in;

    if (r2_io_alone())
        return for_the_only_one();
    now = r2_now_ns();
    if (!r2_pause_limited(now)) {
        take_back(); /* nobody comes to what they sleep through any more */
        return false;
    }
    io = next_io();
    if (!io)
        return false;
    stood_in = r2_io_lend(io, &worked);
    if (stood_in) /* a load first would not be ordered behind what they were told */
        atomic_exchange_explicit(&lent, true, memory_order_acq_rel);
    if (stood_in || worked) /* else another caller is at it */
        judge(now, worked);
    return true;
}
