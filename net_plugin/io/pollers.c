#define _GNU_SOURCE
#include "io/pollers.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/sysinfo.h>

#include "control/control.h"
#include "io/io.h"
#include "io/pause.h"
#include "io/sharing.h"
#include "settings/launch.h"
#include "settings/settings.h"
#include "util/clock.h"

#define OF_NCCL 2                   /* cores of a process, see pollers.h */
#define FRESH_NS (1 * R2_NS_PER_MS) /* a look is good for so long, or */
#define SELDOM 4                    /* for so many times as long as it took */
#define LOOK_NS (UINT64_C(2000) * R2_NS_PER_MS)
#define WORD_NS (60 * R2_NS_PER_S) /* a launcher's word is heeded for; it may be wrong */

int r2_pollers(int part)
{
    return part > OF_NCCL ? part - OF_NCCL : 0;
}

/* With whom the cores are shared, and with whom for certain. */
struct seen {
    struct r2_sharing all, known;
};

/* Where another PID namespace hides its place, a neighbour may be on cores of its own: threads poll
 * less for it, and all stay in use. */
static void neighbour(void *arg, int pid)
{
    struct seen *seen = arg;
    cpu_set_t set;
    bool known = pid > 0 && !sched_getaffinity(pid, sizeof(set), &set);

    r2_sharing_add(&seen->all, known ? &set : NULL);
    if (known)
        r2_sharing_add(&seen->known, &set);
}

static pthread_mutex_t at_it = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static struct r2_control *control;                        /* NULL: not started */
static const struct r2_settings *settings;

/* Ranks of a node start together, and the first opens its sockets before it sees the others: until
 * they are there, how many they are is what their launcher says. */
static void look(struct seen *seen, struct r2_sharing_word *word, uint64_t now)
{
    int poll;

    r2_sharing_start(&seen->all);
    seen->known = seen->all;
    r2_control_neighbours(control, neighbour, seen);
    if (r2_sharing_word(word, 1 + seen->all.n, now)) {
        int cores = get_nprocs();

        r2_sharing_among(&seen->all, cores, word->n);
        r2_sharing_among(&seen->known, cores, word->n);
    }
    poll = r2_pollers(r2_sharing_part(&seen->all));
    if (settings->io_threads <= 0) {
        r2_io_use(r2_pollers(r2_sharing_part(&seen->known)));
        poll = poll < 1 ? 1 : poll; /* as where there is one thread */
    }
    r2_pause_let(poll);
}

static struct r2_sharing_word word; /* who is at it, as what r2_pollers_look keeps */

void r2_pollers_start(struct r2_control *ctl, const struct r2_settings *set)
{
    pthread_mutex_lock(&at_it);
    control = ctl;
    settings = set;
    word = (struct r2_sharing_word){.n = r2_launch_local_ranks(getenv),
                                    .until = r2_now_ns() + WORD_NS};
    pthread_mutex_unlock(&at_it);
}

void r2_pollers_look(void)
{
    static struct seen seen;
    static uint64_t next;
    uint64_t now = r2_now_ns();

    if (r2_io_count() < 2 || pthread_mutex_trylock(&at_it)) /* one thread: no choice */
        return;
    if (control && now >= next) {
        look(&seen, &word, now);
        now = SELDOM * (r2_now_ns() - now);
        next = r2_now_ns() + (now < FRESH_NS ? FRESH_NS : now > LOOK_NS ? LOOK_NS : now);
    }
    pthread_mutex_unlock(&at_it);
}

void r2_pollers_house(uint64_t now)
{
    static uint64_t next; /* the house timer's thread only */
    static unsigned looks;

    if (now < next)
        return;
    next = now + (looks < 10 ? LOOK_NS / 100 : looks < 30 ? LOOK_NS / 20 : LOOK_NS);
    looks++; /* ranks of a node start together */
    r2_pollers_look();
}
