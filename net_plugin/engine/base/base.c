/* What all layers of the engine share. */
#include "engine/base/base.h"
#include "engine/core/verdict.h"

struct r2_engine r2_eng = {.lock = PTHREAD_MUTEX_INITIALIZER};

int r2_nic_own(const struct r2_wire_addr *addr)
{
    struct r2_wire_addr own;

    for (int i = 0; i < r2_local.n; i++) {
        if (r2_eng.ops->address(i, &own) == 0 && !(own.offers & R2_OFFER_NO_TCP) &&
            r2_same_nic(&own, addr))
            return i;
    }
    return -1;
}

void r2_nic_met(int nic)
{
    if (!atomic_load_explicit(&r2_eng.nic_state[nic].met, memory_order_relaxed))
        atomic_store_explicit(&r2_eng.nic_state[nic].met, true, memory_order_relaxed);
}

int r2_nic_meeting(void)
{
    int first = -1;

    for (int i = 0; i < r2_local.n; i++) {
        if (r2_local.nics[i].bare)
            continue;
        if (r2_eng.nic_state[i].link_up && !atomic_load(&r2_eng.nic_state[i].addr_gone))
            return i;
        first = first < 0 ? i : first;
    }
    return first;
}

void r2_near_find(void)
{
    int order[R2_MAX_NICS];

    for (int home = 0; home < r2_local.n; home++) {
        r2_nics_order(r2_local.nics, r2_local.n, home, order);
        for (int i = 0; i < r2_local.n; i++)
            r2_eng.near[home][order[i]] = (uint8_t)i;
    }
}
