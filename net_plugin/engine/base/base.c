/* What all layers of the engine share. */
#include "engine/base/base.h"
#include "engine/core/verdict.h"

struct r2_engine r2_eng = {.lock = PTHREAD_MUTEX_INITIALIZER,
                           .nic_lock = PTHREAD_MUTEX_INITIALIZER,
                           .peers = R2_LIST_INIT(r2_eng.peers),
                           .listens = R2_LIST_INIT(r2_eng.listens)};

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

enum r2_nicreach r2_nic_reach(int nic, enum r2_nicreach_event event)
{
    unsigned char was = atomic_load(&r2_eng.nic_state[nic].reach), next;

    do
        next = (unsigned char)r2_nicreach_next(was, event);
    while (!atomic_compare_exchange_weak(&r2_eng.nic_state[nic].reach, &was, next));
    return (enum r2_nicreach)was;
}

struct r2_health r2_nic_health(int nic)
{
    struct r2_health health;

    pthread_mutex_lock(&r2_eng.nic_lock);
    health = r2_eng.nic_state[nic].health;
    pthread_mutex_unlock(&r2_eng.nic_lock);
    return health;
}

bool r2_nic_trusted(int nic)
{
    enum r2_health_state state = r2_nic_health(nic).state;

    return state == R2_HEALTH_HEALTHY || state == R2_HEALTH_SUSPECT;
}

void r2_nic_forget(int nic)
{
    pthread_mutex_lock(&r2_eng.nic_lock);
    r2_damp_clear(&r2_eng.nic_state[nic].damp);
    pthread_mutex_unlock(&r2_eng.nic_lock);
}

void r2_nic_journal(int nic, enum r2_seg_event event, const char *cause)
{
    struct r2_control_event ev = {.event = event, .nic = r2_nic_name(nic), .cause = cause};

    r2_control_journal(r2_eng.ctl, &ev);
}

int r2_nic_meeting(void)
{
    int first = -1;

    for (int i = 0; i < r2_local.n; i++) {
        if (r2_local.nics[i].bare)
            continue;
        if (r2_nic_is_up(i))
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
