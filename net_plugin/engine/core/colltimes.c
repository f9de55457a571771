#include "engine/core/colltimes.h"

#include <stddef.h>

#define SLOT_BITS 16
#define SMALLEST UINT64_C(1024)
#define LARGEST (UINT64_C(1) << 62)

static struct r2_coll_slot *slot_of(struct r2_colltimes *t, uint64_t handle)
{
    uint64_t i = handle & ((1u << SLOT_BITS) - 1);
    struct r2_coll_slot *slot = i < R2_COLL_SLOTS ? &t->slots[i] : NULL;

    return slot && atomic_load_explicit(&slot->turn, memory_order_relaxed) == handle >> SLOT_BITS
               ? slot
               : NULL;
}

static void set(atomic_ulong *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static uint64_t get(const atomic_ulong *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void let_go(struct r2_coll_slot *slot)
{
    set(&slot->changed, 0);
    atomic_store_explicit(&slot->handed, false, memory_order_relaxed);
    atomic_fetch_add_explicit(&slot->turn, 1, memory_order_release);
}

/* Acquire: pairs with let_go, so that its owner's stores come first. */
static bool take(struct r2_coll_slot *slot, unsigned *turn)
{
    *turn = atomic_load_explicit(&slot->turn, memory_order_relaxed);
    return *turn % 2 == 0 &&
           atomic_compare_exchange_strong_explicit(&slot->turn, turn, *turn + 1,
                                                   memory_order_acquire, memory_order_relaxed);
}

uint64_t r2_coll_begin(struct r2_colltimes *t, const struct r2_coll *what, uint64_t now)
{
    if (!atomic_load_explicit(&t->on, memory_order_relaxed))
        return 0;
    for (int i = 0; i < R2_COLL_TRIES; i++) {
        unsigned at = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed), turn;
        struct r2_coll_slot *slot = &t->slots[at %= R2_COLL_SLOTS];

        if (!take(slot, &turn))
            continue;
        slot->what = *what;
        atomic_store_explicit(&slot->begun, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->ended, 0, memory_order_relaxed);
        set(&slot->first_sent, 0);
        set(&slot->first_received, 0);
        set(&slot->changed, now);
        return (uint64_t)(turn + 1) << SLOT_BITS | at;
    }
    atomic_fetch_add_explicit(&t->dropped, 1, memory_order_relaxed);
    return 0;
}

void r2_coll_handed(struct r2_colltimes *t, uint64_t handle, uint64_t now)
{
    struct r2_coll_slot *slot = slot_of(t, handle);

    if (!slot)
        return;
    set(&slot->changed, now);
    atomic_store_explicit(&slot->handed, true, memory_order_release);
}

bool r2_coll_op_begin(struct r2_colltimes *t, uint64_t handle)
{
    struct r2_coll_slot *slot = slot_of(t, handle);

    if (slot)
        atomic_fetch_add_explicit(&slot->begun, 1, memory_order_relaxed);
    return slot != NULL;
}

void r2_coll_op_end(struct r2_colltimes *t, uint64_t handle, uint64_t now)
{
    struct r2_coll_slot *slot = slot_of(t, handle);

    if (!slot)
        return;
    set(&slot->changed, now);
    atomic_fetch_add_explicit(&slot->ended, 1, memory_order_release);
}

static atomic_ulong *first_of(struct r2_coll_slot *slot, bool sent)
{
    return sent ? &slot->first_sent : &slot->first_received;
}

bool r2_coll_wants_first(struct r2_colltimes *t, uint64_t handle, bool sent)
{
    struct r2_coll_slot *slot = slot_of(t, handle);

    return slot && !get(first_of(slot, sent));
}

void r2_coll_moves(struct r2_colltimes *t, uint64_t handle, bool sent, uint64_t now)
{
    struct r2_coll_slot *slot = slot_of(t, handle);
    unsigned long none = 0;

    if (slot)
        atomic_compare_exchange_strong_explicit(first_of(slot, sent), &none, now,
                                                memory_order_relaxed, memory_order_relaxed);
}

static bool is_over(const struct r2_coll_slot *slot, uint64_t now)
{
    /* Acquires: `what` is whole, `changed` is that of the last end. */
    unsigned ended = atomic_load_explicit(&slot->ended, memory_order_acquire);
    uint64_t changed = get(&slot->changed);

    return ended == atomic_load_explicit(&slot->begun, memory_order_relaxed) && now > changed &&
           now - changed > (ended ? R2_COLL_SETTLE_NS : R2_COLL_IDLE_NS);
}

static bool is_stuck(const struct r2_coll_slot *slot, uint64_t now)
{
    uint64_t changed = get(&slot->changed);

    return changed && now > changed && now - changed > R2_COLL_STUCK_NS;
}

static void report(const struct r2_coll_slot *slot, r2_coll_fn each, void *arg)
{
    uint64_t first = get(&slot->first_sent), last = get(&slot->changed);

    if (!first)
        first = get(&slot->first_received);
    if (first && last > first)
        each(arg, &slot->what, last - first);
}

unsigned r2_coll_reap(struct r2_colltimes *t, uint64_t now, r2_coll_fn each, void *arg)
{
    unsigned used = 0;

    for (unsigned i = 0; i < R2_COLL_SLOTS; i++) {
        struct r2_coll_slot *slot = &t->slots[i];

        if (atomic_load_explicit(&slot->handed, memory_order_acquire) && is_over(slot, now)) {
            report(slot, each, arg);
            let_go(slot);
        } else if (is_stuck(slot, now)) {
            atomic_fetch_add_explicit(&t->dropped, 1, memory_order_relaxed);
            let_go(slot);
        }
        used += atomic_load_explicit(&slot->turn, memory_order_relaxed) % 2;
    }
    return used;
}

uint64_t r2_coll_class(uint64_t bytes)
{
    uint64_t up_to = SMALLEST;

    while (up_to < bytes && up_to < LARGEST)
        up_to *= 4;
    return up_to;
}
