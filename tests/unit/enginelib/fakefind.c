/* Looking for endpoints of the fake transport. */
#define R2_ENGINELIB
#include <string.h>

#include "fake.h"

static bool is_of(const struct r2_ep *ep, const uint8_t process[16])
{
    return memcmp(ep->params.remote_process, process, 16) == 0;
}

struct r2_ep *fake_find(const uint8_t process[16], int lnic, int rnic, uint32_t gen)
{
    struct r2_ep *found = NULL;

    for (int i = 0; i < 3000 && !found; i++) {
        if (i)
            fake_pass_ms(1);
        pthread_mutex_lock(&fake_all_lock);
        for (struct r2_ep *e = fake_all; e && !found; e = e->next) {
            if (is_of(e, process) && !e->params.probe && e->params.gen > gen &&
                (lnic < 0 || e->params.local_nic == lnic) &&
                (rnic < 0 || e->params.remote_nic == rnic))
                found = e;
        }
        pthread_mutex_unlock(&fake_all_lock);
    }
    return found;
}

struct r2_ep *fake_newest(const uint8_t process[16], int lnic, int via)
{
    struct r2_ep *found = NULL;

    pthread_mutex_lock(&fake_all_lock);
    for (struct r2_ep *e = fake_all; e && !found; e = e->next) {
        if (is_of(e, process) && !e->params.probe && e->params.local_nic == lnic &&
            e->params.remote_nic == lnic && e->params.transport == via && !atomic_load(&e->is_shut))
            found = e;
    }
    pthread_mutex_unlock(&fake_all_lock);
    return found;
}

struct r2_ep *fake_probe(const uint8_t process[16])
{
    struct r2_ep *found = NULL;

    pthread_mutex_lock(&fake_all_lock);
    for (struct r2_ep *e = fake_all; e && !found; e = e->next) {
        if (is_of(e, process) && e->params.probe)
            found = e;
    }
    pthread_mutex_unlock(&fake_all_lock);
    return found;
}

struct r2_ep *fake_probe_at(const uint8_t process[16], int lnic, int rnic)
{
    struct r2_ep *e;

    pthread_mutex_lock(&fake_all_lock);
    for (e = fake_all; e && !(is_of(e, process) && e->params.probe && e->params.local_nic == lnic &&
                              e->params.remote_nic == rnic && !atomic_load(&e->is_shut));)
        e = e->next;
    pthread_mutex_unlock(&fake_all_lock);
    return e;
}

int fake_count(const uint8_t process[16])
{
    int n = 0;

    pthread_mutex_lock(&fake_all_lock);
    for (struct r2_ep *e = fake_all; e; e = e->next)
        n += is_of(e, process);
    pthread_mutex_unlock(&fake_all_lock);
    return n;
}
