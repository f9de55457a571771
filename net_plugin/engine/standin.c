#include "engine/standin.h"

#include <stdint.h>

#include "engine/io.h"
#include "engine/pause.h"
#include "util/clock.h"

#define SPAN_NS (1 * R2_NS_PER_MS) /* judged over so much time at least, ... */
#define GAP_NS (10 * SPAN_NS)      /* ... but for more than that it did not poll */
#define MOST 800                   /* per mille of that time */

/* Of one thread that polls. */
struct load {
    uint64_t since, busy; /* ns, ns in work since then */
    unsigned next;        /* I/O thread */
};

static _Thread_local struct load load;

static void judge(uint64_t start, uint64_t end, bool worked)
{
    uint64_t span;

    if (start - load.since > GAP_NS) {
        load.since = start;
        load.busy = 0;
    }
    load.busy += worked ? end - start : 0;
    span = end - load.since;
    if (span < SPAN_NS)
        return;
    if (load.busy * 1000 > span * MOST)
        r2_pause_crowd(end);
    load.since = end;
    load.busy = 0;
}

bool r2_standin_look(void)
{
    uint64_t start = r2_now_ns();
    bool worked;

    if (!r2_pause_limited(start))
        return false;
    if (r2_io_lend(r2_io_at((int)(load.next++ % (unsigned)r2_io_used())), &worked))
        judge(start, r2_now_ns(), worked);
    return true;
}
