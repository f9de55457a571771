/* What is done every few milliseconds, whatever peers there are: a timer on I/O thread 0. */
#include "engine/internal.h"
#include "engine/locate/locate.h"
#include "io/pollers.h"

#define HOUSE_NS (20 * R2_NS_PER_MS)

static struct r2_timer house;

static void house_keeping(struct r2_timer *t, uint64_t now)
{
    r2_niccmd_tick(now);
    r2_nicstate_tick(now);
    r2_nicreach_tick(now);
    r2_locate_house(now);
    r2_nic_publish_rdma();
    r2_pollers_house(now);
    r2_gauge(&r2_eng.g->sockets, r2_eng.ops->sockets());
    r2_gauge(&r2_eng.g->memory_bytes, r2_mem_now());
    r2_timer_set(t, now + HOUSE_NS);
}

void r2_house_start(void)
{
    r2_timer_init(&house, r2_io_at(0), house_keeping);
    r2_timer_set(&house, r2_now_ns() + HOUSE_NS);
}
