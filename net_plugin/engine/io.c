#define _GNU_SOURCE
#include "engine/io.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/iocpus.h"
#include "engine/pause.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define MAX_THREADS 64
#define BATCH 64
#define LONGEST_NS (10 * R2_NS_PER_S)
#define LENT_NS (300 * R2_NS_PER_US) /* a caller that polls comes again within that */
/* How often the thread asks whether it still does. Several do so while a slow NIC is waited for,
 * which has more than that before it. */
#define LENT_LOOK_NS (1 * R2_NS_PER_MS)
#define LENT_LOOK_SEVERAL_NS (2 * R2_NS_PER_MS)
#define LENT_BATCH 4 /* events, and tasks, per call: the caller has other work */

struct r2_io {
    int index;
    int epoll;
    int wake; /* eventfd, in the epoll set */
    pthread_t thread;
    pthread_mutex_t lock; /* tasks, timers */
    struct r2_list tasks;
    struct r2_heap timers;
    atomic_ulong next_deadline; /* earliest timer, 0 = none; written under lock */
    /* Pairs with r2_io_wake: the thread stores `sleeping`, then looks at `pending`; a producer
     * stores `pending`, then looks at `sleeping`. Both use seq_cst, so one of them sees the
     * other's store and no wake-up is lost. */
    atomic_bool sleeping;
    atomic_bool pending;
    atomic_bool busy; /* runs something; a hint, of no order with anything */
    atomic_bool away; /* r2_io_away; likewise */
    /* Held by whoever runs callbacks, the thread or one that stands in for it: from collecting
     * events to the end of the tasks. */
    pthread_mutex_t turn;
    struct epoll_event left[LENT_BATCH]; /* what a stand-in may not run; under turn */
    int n_left;
    /* Somebody stands in for the thread until then. A hint: a thread that reads an old value
     * watches descriptors without need, or looks a millisecond later. */
    atomic_ulong lent_until;
    atomic_int brief; /* descriptors; relaxed, a number that orders nothing */
    /* Under lock: the thread sleeps, and looks for tasks by itself when nobody stands in any more.
     */
    bool looks;
};

static struct r2_io threads[MAX_THREADS];
static int n_threads;
static atomic_int used; /* of them, the first ones: those that something new is given to */
static atomic_uint next_pick;
static _Thread_local struct r2_io *self_io;
static _Thread_local struct r2_io *standing_for; /* r2_io_lend, while it is at it */
static _Thread_local bool worked, upkeep;        /* r2_io_note, of the callback that runs */
static atomic_int asleep;                        /* threads in epoll_wait; a hint */

static void r2_io_wake(struct r2_io *io)
{
    atomic_store(&io->pending, true);
    if (atomic_exchange(&io->sleeping, false)) {
        uint64_t one = 1;
        ssize_t n = write(io->wake, &one, sizeof(one));

        (void)n; /* EAGAIN: the counter is full, so the thread wakes anyway */
    }
}

int r2_io_count(void)
{
    return n_threads;
}

/* Relaxed, and where it is read: a number that orders nothing. */
void r2_io_use(int n)
{
    n = n < 1 ? 1 : n > n_threads ? n_threads : n;
    atomic_store_explicit(&used, n, memory_order_relaxed);
    r2_pause_use(n);
}

int r2_io_used(void)
{
    return atomic_load_explicit(&used, memory_order_relaxed);
}

struct r2_io *r2_io_at(int index)
{
    return &threads[index % n_threads];
}

struct r2_io *r2_io_pick(void)
{
    return r2_io_at((int)(atomic_fetch_add(&next_pick, 1) % (unsigned)r2_io_used()));
}

bool r2_io_awake(struct r2_io *io)
{
    return !atomic_load_explicit(&io->sleeping, memory_order_relaxed) &&
           !atomic_load_explicit(&io->away, memory_order_relaxed);
}

void r2_io_away(bool away)
{
    if (self_io)
        atomic_store_explicit(&self_io->away, away, memory_order_relaxed);
}

bool r2_io_polls(struct r2_io *io)
{
    return r2_io_awake(io) && !atomic_load_explicit(&io->busy, memory_order_relaxed);
}

bool r2_io_all_awake(void)
{
    int n = r2_io_used();

    if (n == n_threads)
        return atomic_load_explicit(&asleep, memory_order_relaxed) == 0;
    while (n > 0 && !atomic_load_explicit(&threads[n - 1].sleeping, memory_order_relaxed))
        n--;
    return n == 0;
}

int r2_io_add(struct r2_io *io, struct r2_io_fd *f)
{
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = f};
    int brief = f->brief, err; /* once it is added, its thread may free what holds it */

    ev.events |= f->reads ? 0 : EPOLLOUT;
    f->io = io;
    atomic_fetch_add_explicit(&io->brief, brief, memory_order_relaxed);
    if (epoll_ctl(io->epoll, EPOLL_CTL_ADD, f->fd, &ev) == 0)
        return 0;
    err = errno;
    atomic_fetch_sub_explicit(&io->brief, brief, memory_order_relaxed);
    return -err;
}

void r2_io_del(struct r2_io_fd *f)
{
    if (!f->io || f->fd < 0 || epoll_ctl(f->io->epoll, EPOLL_CTL_DEL, f->fd, NULL) < 0)
        return;
    atomic_fetch_sub_explicit(&f->io->brief, f->brief, memory_order_relaxed);
}

bool r2_io_lends(struct r2_io *io)
{
    return atomic_load_explicit(&io->brief, memory_order_relaxed) > 0;
}

void r2_task_init(struct r2_task *t, struct r2_io *io, void (*run)(struct r2_task *))
{
    r2_list_init(&t->node);
    t->io = io;
    t->queued = false;
    t->brief = false;
    t->run = run;
}

bool r2_task_kick(struct r2_task *t)
{
    struct r2_io *io = t->io;
    bool fresh, lent;

    pthread_mutex_lock(&io->lock);
    fresh = !t->queued;
    if (fresh) {
        t->queued = true;
        r2_list_add_tail(&io->tasks, &t->node);
    }
    /* Its thread looks by itself soon, should nobody stand in any more (sleep_on). */
    lent = standing_for == io || (io->looks && !r2_io_alone());
    pthread_mutex_unlock(&io->lock);
    if (fresh && !(t->brief && lent)) /* else r2_io_lend comes to it */
        r2_io_wake(io);
    return fresh;
}

void r2_timer_init(struct r2_timer *t, struct r2_io *io, void (*fire)(struct r2_timer *, uint64_t))
{
    t->node = (struct r2_heap_node){0};
    t->io = io;
    t->deadline = 0;
    t->fire = fire;
}

/* Under the thread's lock. */
static void timer_place(struct r2_timer *t, uint64_t deadline)
{
    struct r2_io *io = t->io;

    if (t->deadline)
        r2_heap_remove(&io->timers, &t->node);
    if (deadline)
        r2_heap_add(&io->timers, &t->node, deadline);
    t->deadline = deadline;
    atomic_store(&io->next_deadline, io->timers.first ? io->timers.first->key : 0);
}

static uint64_t look_ns(void)
{
    return r2_io_alone() ? LENT_LOOK_NS : LENT_LOOK_SEVERAL_NS;
}

/* Under the thread's lock, by who stands in for it: it looks by itself before then. (The only one
 * every millisecond, and is not woken for less.) */
static bool looks_by(const struct r2_io *io, uint64_t deadline)
{
    return standing_for == io && io->looks && (r2_io_alone() || deadline > r2_now_ns() + look_ns());
}

static void timer_store(struct r2_timer *t, uint64_t deadline, bool only_sooner)
{
    struct r2_io *io = t->io;
    uint64_t before;
    bool wake;

    pthread_mutex_lock(&io->lock);
    if (only_sooner && t->deadline && t->deadline <= deadline) {
        pthread_mutex_unlock(&io->lock);
        return;
    }
    before = atomic_load(&io->next_deadline);
    timer_place(t, deadline);
    wake = deadline && (!before || deadline < before) && self_io != io && !looks_by(io, deadline);
    pthread_mutex_unlock(&io->lock);
    if (wake)
        r2_io_wake(io);
}

void r2_timer_set(struct r2_timer *t, uint64_t deadline)
{
    timer_store(t, deadline, false);
}

void r2_timer_here(struct r2_timer *t, uint64_t deadline)
{
    if (self_io || standing_for)
        t->io = self_io ? self_io : standing_for;
    timer_store(t, deadline, false);
}

void r2_timer_sooner(struct r2_timer *t, uint64_t deadline)
{
    timer_store(t, deadline, true);
}

static void set_busy(struct r2_io *io, bool busy)
{
    if (atomic_load_explicit(&io->busy, memory_order_relaxed) != busy)
        atomic_store_explicit(&io->busy, busy, memory_order_relaxed);
}

void r2_io_note(bool work)
{
    *(work ? &worked : &upkeep) = true;
}

/* Of the callback that has just returned. */
static bool did_work(void)
{
    bool only_upkeep = upkeep && !worked;

    upkeep = worked = false;
    return !only_upkeep;
}

/* `left`: no more than a stand-in may run, and of those a few; says whether it left any. */
static bool run_tasks(struct r2_io *io, bool *left)
{
    int room = left ? LENT_BATCH : INT_MAX;
    bool any = false;
    struct r2_list *n, *tmp;

    /* Tasks kicked by tasks run in the next round, so that descriptors are not starved. */
    struct r2_list round;

    r2_list_init(&round);
    pthread_mutex_lock(&io->lock);
    R2_LIST_FOR_EACH_SAFE (n, tmp, &io->tasks) {
        if (left && (!R2_CONTAINER_OF(n, struct r2_task, node)->brief || room == 0)) {
            *left = true;
            continue;
        }
        room--;
        r2_list_del(n);
        r2_list_add_tail(&round, n);
    }
    while (!r2_list_empty(&round)) {
        struct r2_task *t = R2_CONTAINER_OF(r2_list_first(&round), struct r2_task, node);

        r2_list_del(&t->node);
        t->queued = false;
        pthread_mutex_unlock(&io->lock);
        set_busy(io, true);
        t->run(t);
        any |= did_work();
        pthread_mutex_lock(&io->lock);
    }
    pthread_mutex_unlock(&io->lock);
    return any;
}

/* Fires one due timer; returns false when none is due. */
static bool fire_one(struct r2_io *io, uint64_t now)
{
    struct r2_timer *due = NULL;

    pthread_mutex_lock(&io->lock);
    if (io->timers.first && io->timers.first->key <= now) {
        due = R2_CONTAINER_OF(io->timers.first, struct r2_timer, node);
        timer_place(due, 0);
    }
    pthread_mutex_unlock(&io->lock);
    if (due)
        due->fire(due, now);
    return due != NULL;
}

static void run_timers(struct r2_io *io)
{
    uint64_t next = atomic_load(&io->next_deadline);
    uint64_t now;

    if (!next)
        return;
    now = r2_now_ns();
    while (next && next <= now) {
        if (!fire_one(io, now))
            break;
        next = atomic_load(&io->next_deadline);
    }
}

/* Until the next timer; whole milliseconds, so that those of one go together, but for the last. */
static uint64_t wait_ns(struct r2_io *io)
{
    uint64_t next = atomic_load(&io->next_deadline);
    uint64_t now;

    if (!next)
        return LONGEST_NS;
    now = r2_now_ns();
    if (next <= now)
        return 0;
    next -= now;
    if (next > R2_NS_PER_MS)
        next = (next + R2_NS_PER_MS - 1) / R2_NS_PER_MS * R2_NS_PER_MS;
    return next > LONGEST_NS ? LONGEST_NS : next;
}

static bool run_event(struct r2_io *io, const struct epoll_event *ev)
{
    struct r2_io_fd *f = ev->data.ptr;
    uint64_t count;
    ssize_t got;

    if (!f) {
        got = read(io->wake, &count, sizeof(count));
        (void)got; /* the counter only wakes */
        return false;
    }
    set_busy(io, true);
    f->ready(f, ev->events);
    return did_work();
}

static bool run_events(struct r2_io *io)
{
    struct epoll_event ev[BATCH];
    bool any = false;
    int n;

    for (int i = 0; i < io->n_left; i++)
        any |= run_event(io, &io->left[i]);
    io->n_left = 0;
    n = epoll_wait(io->epoll, ev, BATCH, 0);
    for (int i = 0; i < n; i++)
        any |= run_event(io, &ev[i]);
    return any;
}

/* Events of other descriptors are kept for the thread, which runs them before any task: so what
 * r2_io_del promises holds for them too. True: there may be more than it took. */
static bool lend_events(struct r2_io *io, bool *worked)
{
    struct epoll_event ev[LENT_BATCH];
    int most = LENT_BATCH - io->n_left, n = epoll_wait(io->epoll, ev, most, 0);

    for (int i = 0; i < n; i++) {
        struct r2_io_fd *f = ev[i].data.ptr;

        if (f && f->brief)
            *worked |= run_event(io, &ev[i]);
        else if (f)
            io->left[io->n_left++] = ev[i];
    }
    return n == most;
}

/* What tasks have queued of their own kind is left for the caller's next look: as a rule a lane
 * that has sent a chunk and asks once more, in vain. Should the caller not come again, the thread
 * looks (sleep_on), unless it watches its descriptors just now. */
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
    if (*worked || pthread_mutex_trylock(&io->turn))
        return false;
    did_work(); /* what others have said on this thread is not of these callbacks */
    /* The caller may be a thread that its application cancels; callbacks read and write sockets,
     * where it would end with the turn and their locks in hand. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    atomic_store_explicit(&io->lent_until, r2_now_ns() + LENT_NS, memory_order_relaxed);
    standing_for = io;
    if (io->n_left < LENT_BATCH)
        more = lend_events(io, worked);
    more |= io->n_left > 0;
    *worked |= run_tasks(io, &more) || more;
    standing_for = NULL;
    pthread_mutex_unlock(&io->turn);
    if (more || leaves_tasks(io))
        r2_io_wake(io);
    pthread_setcancelstate(cancel, NULL);
    return true;
}

/* Whether it goes on sleeping, and who is left with the tasks is said (leaves_tasks). */
static bool goes_on(struct r2_io *io, bool lent)
{
    bool on;

    pthread_mutex_lock(&io->lock);
    on = lent || !io->looks || r2_list_empty(&io->tasks);
    io->looks = lent;
    pthread_mutex_unlock(&io->lock);
    return on;
}

/* While somebody stands in for the thread, its descriptors do not wake it. */
static void sleep_on(struct r2_io *io)
{
    struct pollfd pfd = {.events = POLLIN};
    struct timespec ts;
    uint64_t ns, look;
    bool lent, again;
    int n;

    do {
        lent = r2_now_ns() < atomic_load_explicit(&io->lent_until, memory_order_relaxed);
        if (!goes_on(io, lent))
            return;
        ns = wait_ns(io);
        look = look_ns();
        again = lent && ns > look;
        ns = again ? look : ns;
        ts = (struct timespec){.tv_sec = (time_t)(ns / R2_NS_PER_S),
                               .tv_nsec = (long)(ns % R2_NS_PER_S)};
        pfd.fd = lent ? io->wake : io->epoll;
        n = ppoll(&pfd, 1, &ts, NULL);
    } while (n == 0 && again);
    goes_on(io, false);
}

static void *io_main(void *arg)
{
    struct r2_io *io = arg;
    struct r2_pause pause = R2_PAUSE;

    self_io = io;
    for (;;) {
        bool any;

        pthread_mutex_lock(&io->turn);
        any = run_events(io);
        atomic_store(&io->pending, false);
        any |= run_tasks(io, NULL);
        run_timers(io);
        pthread_mutex_unlock(&io->turn);
        if (any) {
            if (pause.since)
                r2_pause_over(&pause, r2_now_ns());
            continue;
        }
        set_busy(io, false);
        if (r2_pause_polls(&pause, r2_now_ns()))
            continue;
        atomic_store(&io->sleeping, true);
        if (atomic_load(&io->pending)) {
            atomic_store(&io->sleeping, false);
            continue;
        }
        atomic_fetch_add_explicit(&asleep, 1, memory_order_relaxed);
        sleep_on(io);
        atomic_fetch_sub_explicit(&asleep, 1, memory_order_relaxed);
        atomic_store(&io->sleeping, false);
    }
    return NULL;
}

static int start_thread(struct r2_io *io, int index, const cpu_set_t *cpus)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    char name[16];
    int rc;

    io->index = index;
    r2_lock_init(&io->lock);
    r2_lock_init(&io->turn);
    r2_list_init(&io->tasks);
    io->epoll = epoll_create1(EPOLL_CLOEXEC);
    io->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (io->epoll < 0 || io->wake < 0)
        return -errno;
    r2_io_fd_track(io->epoll);
    r2_io_fd_track(io->wake);
    if (epoll_ctl(io->epoll, EPOLL_CTL_ADD, io->wake, &ev) < 0)
        return -errno;
    rc = r2_thread_start_on(&io->thread, cpus, io_main, io);
    if (rc)
        return -rc;
    snprintf(name, sizeof(name), "r2ccl-io%u", (unsigned)index % 100);
    pthread_setname_np(io->thread, name);
    return 0;
}

int r2_io_start(int count, const char *cpus, uint64_t spin)
{
    cpu_set_t set;
    int cores = r2_iocpus_allowed(&set), rc;

    if (cpus && *cpus && !r2_iocpus_narrow(cpus, &set))
        R2_TELL("R2CCL_CPUS=%s names no processor this process may use; ignored", cpus);
    if (count <= 0) {
        count = cores * 3 / 8;
        if (count > 16)
            count = 16;
    }
    if (count < 1)
        count = 1;
    if (count > MAX_THREADS)
        count = MAX_THREADS;
    r2_pause_start(count, spin);
    n_threads = count;
    r2_io_use(count);
    for (int i = 0; i < count; i++) {
        rc = start_thread(&threads[i], i, &set);
        if (rc) {
            n_threads = i;
            if (i)
                r2_io_use(i);
            return i ? 0 : rc;
        }
    }
    return 0;
}

uint64_t r2_io_cpu_ns(void)
{
    uint64_t sum = 0;

    for (int i = 0; i < n_threads; i++) {
        struct timespec ts;
        clockid_t id;

        if (pthread_getcpuclockid(threads[i].thread, &id) == 0 && clock_gettime(id, &ts) == 0)
            sum += (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
    }
    return sum;
}
