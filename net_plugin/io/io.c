#define _GNU_SOURCE
#include "io/io.h"

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

#include "io/iocpus.h"
#include "io/iothread.h"
#include "io/pause.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define MAX_THREADS 64
#define BATCH 64
#define AT_HAND_NS (200 * R2_NS_PER_US) /* as AT_WORK_NS in bulk.c */
#define AWAKE_NS (20 * R2_NS_PER_US)    /* of a wait for a lock */
#define LONGEST_NS (10 * R2_NS_PER_S)

static struct r2_io threads[MAX_THREADS];
static int n_threads;
static atomic_int used; /* of them, the first ones: those that something new is given to */
static atomic_uint next_pick;
static _Thread_local struct r2_io *self_io;
static _Thread_local bool worked, upkeep; /* r2_io_note, of the callback that runs */
static atomic_int asleep;                 /* threads in epoll_wait; a hint */

void r2_io_wake(struct r2_io *io)
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

void r2_io_lock(pthread_mutex_t *m)
{
    bool waits = r2_io_alone();

#if defined(__SANITIZE_THREAD__) /* learns no order of locks from tries */
    waits = true;
#endif
    if (waits)
        pthread_mutex_lock(m);
    else
        r2_lock_awake(m, AWAKE_NS);
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
    return !atomic_load_explicit(&io->sleeping, memory_order_relaxed);
}

bool r2_io_at_hand(struct r2_io *io)
{
    uint64_t seen = atomic_load_explicit(&io->seen, memory_order_relaxed);

    return r2_io_awake(io) && r2_now_ns() < seen + AT_HAND_NS;
}

bool r2_io_polls(struct r2_io *io)
{
    return r2_io_awake(io) && !atomic_load_explicit(&io->busy, memory_order_relaxed) &&
           !atomic_load_explicit(&io->pending, memory_order_relaxed);
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
    lent = r2_io_leaves_task(io, t->brief);
    pthread_mutex_unlock(&io->lock);
    if (fresh && !lent)
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

/* `due`: when it has to have fired, or looked for. */
static void timer_store(struct r2_timer *t, uint64_t deadline, uint64_t due, bool only_sooner)
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
    wake = deadline && (!before || deadline < before) && self_io != io && !r2_io_looks_by(io, due);
    pthread_mutex_unlock(&io->lock);
    if (wake)
        r2_io_wake(io);
}

void r2_timer_set(struct r2_timer *t, uint64_t deadline)
{
    timer_store(t, deadline, deadline, false);
}

void r2_timer_here(struct r2_timer *t, uint64_t deadline)
{
    if (self_io || r2_io_standing_for)
        t->io = self_io ? self_io : r2_io_standing_for;
    timer_store(t, deadline, UINT64_MAX, false);
}

void r2_timer_sooner(struct r2_timer *t, uint64_t deadline)
{
    timer_store(t, deadline, deadline, true);
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
bool r2_io_did_work(void)
{
    bool only_upkeep = upkeep && !worked;

    upkeep = worked = false;
    return !only_upkeep;
}

/* `left`: no more than a stand-in may run, and of those a few; says whether it left any. */
bool r2_io_run_tasks(struct r2_io *io, bool *left)
{
    int room = left ? R2_LENT_BATCH : INT_MAX;
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
        any |= r2_io_did_work();
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
uint64_t r2_io_wait_ns(struct r2_io *io)
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

bool r2_io_run_event(struct r2_io *io, const struct epoll_event *ev)
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
    return r2_io_did_work();
}

static bool run_events(struct r2_io *io)
{
    struct epoll_event ev[BATCH];
    bool any = false;
    int n;

    for (int i = 0; i < io->n_left; i++)
        any |= r2_io_run_event(io, &io->left[i]);
    io->n_left = 0;
    n = epoll_wait(io->epoll, ev, BATCH, 0);
    for (int i = 0; i < n; i++)
        any |= r2_io_run_event(io, &ev[i]);
    return any;
}

static void *io_main(void *arg)
{
    struct r2_io *io = arg;
    struct r2_pause pause = R2_PAUSE;

    self_io = io;
    for (;;) {
        bool any;

        atomic_store_explicit(&io->seen, r2_now_ns(), memory_order_relaxed);
        pthread_mutex_lock(&io->turn);
        any = run_events(io);
        atomic_store(&io->pending, false);
        any |= r2_io_run_tasks(io, NULL);
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
        r2_io_sleep_on(io);
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
