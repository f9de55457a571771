#define _GNU_SOURCE
#include "io/iothread.h"

#include <poll.h>
#include <time.h>

#include "util/clock.h"

#define LENT_NS (300 * R2_NS_PER_US) /* a caller that polls comes again within that */
/* How often the thread asks whether it still does. Several do so while a slow NIC is waited for,
 * which has more than that before it. */
#define LENT_LOOK_NS (1 * R2_NS_PER_MS)
#define LENT_LOOK_SEVERAL_NS (2 * R2_NS_PER_MS)

_Thread_local struct r2_io *r2_io_standing_for;

bool r2_io_lends(struct r2_io *io)
{
    return atomic_load_explicit(&io->brief, memory_order_relaxed) > 0;
}

static uint64_t look_ns(void)
{
    return r2_io_alone() ? LENT_LOOK_NS : LENT_LOOK_SEVERAL_NS;
}

bool r2_io_leaves_task(const struct r2_io *io, bool brief)
{
    return brief && (r2_io_standing_for == io || (io->looks && !r2_io_alone()));
}

/* It is told by who stands in for it, or does not need to be. (The only one looks every
 * millisecond, and is not woken for less.) */
bool r2_io_looks_by(const struct r2_io *io, uint64_t deadline)
{
    return io->looks &&
           (deadline == UINT64_MAX ||
            (r2_io_standing_for == io && (r2_io_alone() || deadline > r2_now_ns() + look_ns())));
}

/* Events of other descriptors are kept for the thread, which runs them before any task: so what
 * r2_io_del promises holds for them too. True: there may be more than it took. */
static bool lend_events(struct r2_io *io, bool *worked)
{
    struct epoll_event ev[R2_LENT_BATCH];
    int most = R2_LENT_BATCH - io->n_left, n = epoll_wait(io->epoll, ev, most, 0);

    for (int i = 0; i < n; i++) {
        struct r2_io_fd *f = ev[i].data.ptr;

        if (f && f->brief)
            *worked |= r2_io_run_event(io, &ev[i]);
        else if (f)
            io->left[io->n_left++] = ev[i];
    }
    return n == most;
}

/* What tasks have queued of their own kind is left for the caller's next look: as a rule a lane
 * that has sent a chunk and asks once more, in vain. Should the caller not come again, the thread
 * looks (r2_io_sleep_on), unless it watches its descriptors just now. */
static bool leaves_tasks(struct r2_io *io)
{
    bool left;

    pthread_mutex_lock(&io->lock);
    left = !r2_list_empty(&io->tasks) && !io->looks;
    pthread_mutex_unlock(&io->lock);
    return left;
}

bool r2_io_lend(struct r2_io *io, bool *worked)
{
    bool more = true;
    int cancel;

    *worked = r2_io_awake(io);
    if (*worked)
        return false;
    /* The caller may be a thread that its application cancels; callbacks read and write sockets,
     * where it would end with the turn and their locks in hand. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (pthread_mutex_trylock(&io->turn)) {
        pthread_setcancelstate(cancel, NULL);
        return false;
    }
    r2_io_did_work(); /* what others have said on this thread is not of these callbacks */
    atomic_store_explicit(&io->lent_until, r2_now_ns() + LENT_NS, memory_order_relaxed);
    r2_io_standing_for = io;
    if (io->n_left < R2_LENT_BATCH)
        more = lend_events(io, worked);
    more |= io->n_left > 0;
    *worked |= r2_io_run_tasks(io, &more) || more;
    r2_io_standing_for = NULL;
    pthread_mutex_unlock(&io->turn);
    if (more || leaves_tasks(io))
        r2_io_wake(io);
    pthread_setcancelstate(cancel, NULL);
    return true;
}

void r2_io_take_back(void)
{
    for (int i = 0; i < r2_io_count(); i++) {
        struct r2_io *io = r2_io_at(i);
        bool looks;

        /* Before `looks` is read: goes_on reads both under the lock, in the other order. */
        atomic_store_explicit(&io->lent_until, 0, memory_order_relaxed);
        pthread_mutex_lock(&io->lock);
        looks = io->looks;
        pthread_mutex_unlock(&io->lock);
        if (looks)
            r2_io_wake(io);
    }
}

/* Whether it goes on sleeping, and who is left with the tasks is said (leaves_tasks). `*lent`,
 * true: becomes whether somebody stands in. */
static bool goes_on(struct r2_io *io, bool *may_be_lent)
{
    bool on, lent = *may_be_lent;

    pthread_mutex_lock(&io->lock);
    lent = lent && r2_now_ns() < atomic_load_explicit(&io->lent_until, memory_order_relaxed);
    on = lent || !io->looks || r2_list_empty(&io->tasks);
    io->looks = *may_be_lent = lent;
    pthread_mutex_unlock(&io->lock);
    return on;
}

void r2_io_sleep_on(struct r2_io *io)
{
    struct pollfd pfd = {.events = POLLIN};
    struct timespec ts;
    uint64_t ns, look;
    bool lent, again;
    int n;

    do {
        lent = true;
        if (!goes_on(io, &lent))
            return;
        ns = r2_io_wait_ns(io);
        look = look_ns();
        again = lent && ns > look;
        ns = again ? look : ns;
        ts = (struct timespec){.tv_sec = (time_t)(ns / R2_NS_PER_S),
                               .tv_nsec = (long)(ns % R2_NS_PER_S)};
        pfd.fd = lent ? io->wake : io->epoll;
        n = ppoll(&pfd, 1, &ts, NULL);
    } while (n == 0 && again);
    lent = false;
    goes_on(io, &lent);
}
