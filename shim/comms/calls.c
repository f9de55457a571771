#include "comms/calls.h"

#include <stddef.h>

/* Release and acquire throughout: no word is seen before the count of the call before it. So a
 * count that is still the same after the words were read proves all but the oldest place. */
void r2_calls_note(struct r2_calls_log *log, uint64_t number, uint64_t bytes, bool taken)
{
    uint64_t count = atomic_load_explicit(&log->count, memory_order_relaxed); /* its own */
    uint64_t all = atomic_load_explicit(&log->taken, memory_order_relaxed) + taken;
    int at = (int)(count % (R2_CALLS + 1));

    atomic_store_explicit(&log->taken, all, memory_order_relaxed);
    atomic_store_explicit(&log->of[at].number, number, memory_order_release);
    atomic_store_explicit(&log->of[at].bytes, bytes, memory_order_release);
    atomic_store_explicit(&log->of[at].taken, all, memory_order_release);
    atomic_store_explicit(&log->count, count + 1, memory_order_release);
}

void r2_calls_forget(struct r2_calls_log *log)
{
    for (int i = 0; i < R2_CALLS; i++)
        r2_calls_note(log, 0, 0, false);
}

uint64_t r2_calls_count(const struct r2_calls_log *log)
{
    return atomic_load_explicit(&log->count, memory_order_acquire);
}

bool r2_calls_read(const struct r2_calls_log *log, struct r2_calls *out)
{
    uint64_t count = r2_calls_count(log);

    *out = (struct r2_calls){0};
    for (uint64_t i = 0; i < R2_CALLS && i < count; i++) {
        int at = (int)((count - 1 - i) % (R2_CALLS + 1));

        out->of[i].number = atomic_load_explicit(&log->of[at].number, memory_order_acquire);
        out->of[i].bytes = atomic_load_explicit(&log->of[at].bytes, memory_order_acquire);
        out->of[i].taken = atomic_load_explicit(&log->of[at].taken, memory_order_acquire);
    }
    return r2_calls_count(log) == count;
}

static const struct r2_calls_entry *find(const struct r2_calls *c, uint64_t number)
{
    for (int i = 0; i < R2_CALLS; i++)
        if (number && c->of[i].number == number)
            return &c->of[i];
    return NULL;
}

bool r2_calls_differ(const struct r2_calls *a, const struct r2_calls *b,
                     struct r2_calls_difference *out)
{
    bool found = false;

    for (int i = 0; i < R2_CALLS; i++) {
        const struct r2_calls_entry *one = find(a, a->of[i].number),
                                    *other = find(b, a->of[i].number);

        if (!one || !other || one->taken == other->taken)
            continue;
        found = true;
        out->number = one->number;
        out->first = one->taken > other->taken;
        out->taken_bytes = out->first ? one->bytes : other->bytes;
        out->left_bytes = out->first ? other->bytes : one->bytes;
    }
    return found;
}
