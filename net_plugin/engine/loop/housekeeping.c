/* What is done every few milliseconds, whatever peers there are: a timer on I/O thread 0. And what
 * the kernel says about links there. */
#include <stdio.h>

#include "engine/loop/loop.h"
#include "io/pollers.h"

#define HOUSE_NS (20 * R2_NS_PER_MS)

static struct r2_timer house;
static struct r2_task links;

/* Once: on stderr, in the journal and in `status`. */
static void say_short(void)
{
    static bool said;
    char text[128];

    if (said || !r2_io_fds_short())
        return;
    said = true;
    snprintf(text, sizeof(text),
             "few file descriptors left (ulimit -n %d): new peers get one path with one stream",
             r2_io_fds_limit());
    R2_TELL("%s; raise the hard limit of descriptors (ulimit -Hn); docs/failures.md says how many "
            "a job needs",
            text);
    r2_control_set_warning(r2_eng.ctl, text);
    r2_control_journal(r2_eng.ctl,
                       &(struct r2_control_event){.event = R2_EV_WARNING, .cause = text});
}

static void house_keeping(struct r2_timer *t, uint64_t now)
{
    r2_nicfaults_tick(now);
    r2_niccmd_tick(now);
    r2_niclink_tick(now);
    r2_nicstate_tick(now);
    r2_nicreach_tick(now);
    r2_nicquality_tick(now);
    r2_colls_tick(now);
    r2_leave_tick();
    say_short();
    r2_nic_publish_rdma();
    r2_pollers_house(now);
    r2_gauge(&r2_eng.g->sockets, r2_eng.ops->sockets());
    r2_gauge(&r2_eng.g->memory_bytes, r2_mem_now());
    r2_timer_set(t, now + HOUSE_NS);
}

static void links_answered(struct r2_task *t)
{
    (void)t;
    r2_niclink_answers(r2_now_ns());
}

static void links_watched(struct r2_io_fd *f, uint32_t events)
{
    (void)f;
    (void)events;
    r2_niclink_events(r2_now_ns());
}

void r2_housekeeping_start(void)
{
    r2_task_init(&links, r2_io_at(0), links_answered);
    r2_eng.watch_fd.ready = links_watched;
    r2_niclink_start(&links);
    r2_timer_init(&house, r2_io_at(0), house_keeping);
    r2_timer_set(&house, r2_now_ns() + HOUSE_NS);
}
