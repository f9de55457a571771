/* Devices as they come and go. They are opened at the start (start.c) and let go of when they fail
 * or are removed. They are opened anew when they are back (a driver loaded again, firmware reset, a
 * card put in again).
 *
 * A device that is back is another one: other context, other keys, other queue pairs. It takes its
 * slot only when the old one is out of it. Every range is registered with it before its NICs are
 * said to be up. Then paths are probed and ramped up as after any failure (engine/core).
 *
 * Which is which: the library's list names devices by pointers, which stay what they are while a
 * list with them is held. So the list that a device was opened from is kept until its successor
 * holds one.
 *
 * "Removed" is the kernel's word. The device is in the list no more, and its folder in sysfs is
 * gone. The kernel deletes that folder after it has destroyed what users had made on the device
 * (ib_unregister_device). It also counts if another device of the same GUID or name is listed. It
 * stands for the confirmation of fences and deregistrations that the device cannot give any more.
 *
 * While a device is missing, one thread looks for it every now and then; it also opens nothing
 * itself, because that may block: the command thread of the new one does. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "settings/settings.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

#define LOOK_FIRST_NS (UINT64_C(20) * 1000000) /* then twice as long each time, up to ... */
#define LOOK_NS (UINT64_C(500) * 1000000)
#define REMOVED_NS (1 * UINT64_C(1000000000)) /* what a command thread waits for a removal */

static struct {
    pthread_mutex_t lock;
    bool running, again;
    uint64_t looked_at; /* when a doubt last made it look */
} look = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- users */

void r2_hca_use(struct r2_hca *hca)
{
    pthread_mutex_lock(&hca->lock);
    hca->users++;
    pthread_mutex_unlock(&hca->lock);
}

void r2_hca_unuse(struct r2_hca *hca)
{
    pthread_mutex_lock(&hca->lock);
    if (--hca->users == 0)
        pthread_cond_signal(&hca->more);
    pthread_mutex_unlock(&hca->lock);
}

/* Unless it is closed, or about to be. */
static bool use_dead(struct r2_hca *hca)
{
    bool ok;

    pthread_mutex_lock(&hca->lock);
    ok = hca->users > 0;
    hca->users += ok;
    pthread_mutex_unlock(&hca->lock);
    return ok;
}

struct r2_hca *r2_hca_at(int slot)
{
    struct r2_hca *hca;

    if (slot < 0)
        return NULL;
    pthread_mutex_lock(&r2_verbs.hca_lock);
    hca = r2_verbs.slots[slot].now;
    if (hca)
        r2_hca_use(hca);
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    return hca;
}

struct r2_hca *r2_vnic_use(const struct r2_vnic *nic)
{
    return r2_hca_at(nic->slot);
}

int r2_hcas_use(struct r2_hca *out[2 * R2_MAX_HCAS], bool dead)
{
    int n = 0;

    pthread_mutex_lock(&r2_verbs.hca_lock);
    for (int i = 0; i < r2_verbs.n_slots; i++) {
        struct r2_slot *s = &r2_verbs.slots[i];

        if (s->now) {
            r2_hca_use(s->now);
            out[n++] = s->now;
        }
        if (dead && s->dead && use_dead(s->dead))
            out[n++] = s->dead;
    }
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    return n;
}

void r2_hca_put(struct r2_hca *hca)
{
    if (!hca || atomic_fetch_sub(&hca->refs, 1) != 1)
        return;
    if (hca->list)
        r2_ibv.free_device_list(hca->list);
    for (int i = 1; i <= hca->n_ports; i++)
        r2_port_free(&hca->ports[i]);
    free(hca->ports);
    pthread_mutex_destroy(&hca->lock);
    pthread_cond_destroy(&hca->more);
    free(hca);
}

/* What the library still has of it after commands failed stays with the library: a few KiB. */
void r2_hca_close(struct r2_hca *hca)
{
    if (hca->pd)
        r2_ibv.dealloc_pd(hca->pd);
    if (hca->ctx) {
        r2_io_fd_untrack(hca->ctx->cmd_fd);
        r2_io_fd_untrack(hca->ctx->async_fd);
    }
    if (hca->ctx && r2_ibv.close_device(hca->ctx))
        R2_WARN("RDMA device %s cannot be closed (%s)", hca->name, strerror(errno));
    r2_hca_put(hca);
}

/* ---- opening */

static bool module_loaded(const char *name)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/module/%s", name);
    return access(path, F_OK) == 0;
}

/* The kernel refuses a descriptor of -1 in its own way where it knows DMA buffers at all. */
static bool knows_dmabuf(struct ibv_pd *pd)
{
    struct ibv_mr *mr;

    if (!r2_ibv.reg_dmabuf_mr)
        return false;
    mr = r2_ibv.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0);
    if (mr) {
        r2_ibv.dereg_mr(mr);
        return true;
    }
    return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS;
}

int r2_hca_open(struct r2_hca *hca)
{
    int flags;

    hca->ctx = r2_ibv.open_device(hca->dev);
    if (!hca->ctx)
        return -(errno ? errno : EIO);
    /* A driver that cannot take the device away from its users would wait for a child's. */
    r2_io_fd_track(hca->ctx->cmd_fd);
    r2_io_fd_track(hca->ctx->async_fd);
    hca->pd = r2_ibv.alloc_pd(hca->ctx);
    if (!hca->pd || r2_ibv.query_device(hca->ctx, &hca->attr))
        return -(errno ? errno : EIO);
    hca->dmabuf = knows_dmabuf(hca->pd);
    /* Where NCCL looks, and the modules' names. */
    hca->peermem = module_loaded("nvidia_peermem") || module_loaded("nv_peer_mem") ||
                   access("/sys/kernel/mm/memory_peers/nv_mem/version", F_OK) == 0 ||
                   access("/sys/kernel/mm/memory_peers/nv_mem_nc/version", F_OK) == 0;
    hca->shown = hca->dev->dev_path[0] && access(hca->dev->dev_path, F_OK) == 0;
    flags = fcntl(hca->ctx->async_fd, F_GETFL);
    fcntl(hca->ctx->async_fd, F_SETFL, flags | O_NONBLOCK);
    hca->async.fd = hca->ctx->async_fd;
    hca->async.ready = r2_hca_events;
    hca->async.reads = true;
    return 0;
}

static void run_open(struct r2_cmd *cmd);

static void run_purge(struct r2_cmd *cmd)
{
    struct r2_hca *hca = R2_CONTAINER_OF(cmd, struct r2_hca, purge);

    r2_verbs_purge(hca);
    r2_hca_unuse(hca);
}

static void run_forget(struct r2_cmd *cmd)
{
    struct r2_hca *hca = R2_CONTAINER_OF(cmd, struct r2_hca, forget);

    r2_verbs_purge(hca);
    r2_vflush_forget(hca);
    r2_hca_unuse(hca);
}

/* On I/O thread 0, behind the last batch of events: the slot uses it no more. */
static void leave(struct r2_task *t)
{
    r2_hca_unuse(R2_CONTAINER_OF(t, struct r2_hca, leave));
}

struct r2_hca *r2_hca_new(int slot, const char *name)
{
    struct r2_hca *hca = calloc(1, sizeof(*hca));

    if (!hca)
        return NULL;
    hca->slot = slot;
    snprintf(hca->name, sizeof(hca->name), "%s", name);
    atomic_init(&hca->refs, 2);
    hca->users = 1;
    hca->async.fd = -1;
    r2_list_init(&hca->cmds);
    r2_list_init(&hca->open.node);
    r2_list_init(&hca->purge.node);
    r2_list_init(&hca->forget.node);
    r2_list_init(&hca->held);
    r2_list_init(&hca->unflushed);
    hca->open.run = run_open;
    hca->purge.run = run_purge;
    hca->forget.run = run_forget;
    pthread_mutex_init(&hca->lock, NULL);
    pthread_cond_init(&hca->more, NULL);
    return hca;
}

uint64_t r2_hca_guid(struct ibv_device *dev)
{
    return r2_ibv.get_device_guid ? (uint64_t)r2_ibv.get_device_guid(dev) : 0;
}

static void watch(struct r2_hca *hca)
{
    r2_task_init(&hca->leave, r2_io_at(0), leave);
    r2_io_add(r2_io_at(0), &hca->async);
}

void r2_hcas_watch(void)
{
    for (int i = 0; i < r2_verbs.n_slots; i++)
        watch(r2_verbs.slots[i].now);
}

/* ---- going */

static void look_for_it(void);

void r2_hca_gone(struct r2_hca *hca, const char *why)
{
    struct r2_slot *s = &r2_verbs.slots[hca->slot];

    if (atomic_exchange(&hca->gone, true))
        return;
    r2_hca_use(hca); /* the command's */
    R2_WARN("RDMA device %s: %s; it is used again when it is back", hca->name, why);
    r2_vnics_down(hca->slot, why); /* before another one can have its place, and bring them up */
    pthread_mutex_lock(&r2_verbs.hca_lock);
    s->now = NULL;
    s->dead = hca;
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    r2_veps_fail(hca, EIO);
    r2_cmd_post(hca, &hca->purge);
    r2_io_del(&hca->async);
    r2_task_kick(&hca->leave);
    look_for_it();
}

bool r2_hca_removed(struct r2_hca *hca)
{
    uint64_t until = r2_now_ns() + REMOVED_NS;

    if (!atomic_load(&hca->gone) || atomic_load(&hca->doubted))
        return atomic_load(&hca->removed);
    while (!atomic_load(&hca->removed) && r2_now_ns() < until)
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    atomic_store(&hca->doubted, true);
    return atomic_load(&hca->removed);
}

/* ---- coming back */

/* The device in the list that belongs to the slot: by its GUID, else by its name. */
static struct ibv_device *find(struct ibv_device **list, const struct r2_slot *s)
{
    struct ibv_device *same_name = NULL;

    for (; list && *list; list++) {
        if (s->guid && r2_hca_guid(*list) == s->guid)
            return *list;
        if (strcmp(r2_ibv.get_device_name(*list), s->name) == 0)
            same_name = *list;
    }
    return same_name;
}

bool r2_hca_listed(struct ibv_device **list, const struct ibv_device *dev)
{
    for (; list && *list; list++) {
        if (*list == dev)
            return true;
    }
    return false;
}

static bool in_sysfs(const struct r2_hca *hca)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/class/infiniband/%s", hca->name);
    return access(path, F_OK) == 0 ||
           (hca->dev->ibdev_path[0] && access(hca->dev->ibdev_path, F_OK) == 0);
}

/* Its memory is registered before anybody hears of it. It may be gone again at any moment from
 * `now` on, so that its events are listened to before somebody else sees it. */
static void installed(struct r2_hca *hca)
{
    struct r2_slot *s = &r2_verbs.slots[hca->slot];
    struct r2_hca *dead;

    pthread_mutex_lock(&r2_verbs.hca_lock);
    dead = s->dead;
    s->dead = NULL;
    s->coming = NULL;
    s->now = hca;
    memcpy(s->name, hca->name, sizeof(s->name));
    watch(hca);
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    r2_hca_put(dead);
    r2_verbs_adopt(hca);
    R2_INFO("RDMA device %s is back", hca->name);
    r2_vnics_up(hca);
}

/* It may be another one than was seen, or be gone again: then it is tried once more later. */
static void run_open(struct r2_cmd *cmd)
{
    struct r2_hca *hca = R2_CONTAINER_OF(cmd, struct r2_hca, open);
    struct r2_slot *s = &r2_verbs.slots[hca->slot];
    int n, rc;

    hca->list = r2_ibv.get_device_list(&n);
    pthread_mutex_lock(&r2_verbs.hca_lock);
    hca->dev = find(hca->list, s);
    if (s->dead && hca->dev == s->dead->dev)
        hca->dev = NULL;
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    if (hca->dev)
        snprintf(hca->name, sizeof(hca->name), "%s", r2_ibv.get_device_name(hca->dev));
    rc = hca->dev ? r2_hca_open(hca) : -ENODEV;
    if (rc == 0) {
        installed(hca);
        return;
    }
    R2_WARN_LIMIT("RDMA device %s is back but cannot be opened yet (%s)", hca->name, strerror(-rc));
    pthread_mutex_lock(&r2_verbs.hca_lock);
    s->coming = NULL;
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    r2_hca_unuse(hca); /* closes it */
    r2_hca_put(hca);
}

static void begin_open(int slot, const char *name)
{
    struct r2_slot *s = &r2_verbs.slots[slot];
    struct r2_hca *hca = r2_hca_new(slot, name);

    if (!hca)
        return;
    pthread_mutex_lock(&r2_verbs.hca_lock);
    s->coming = hca;
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    if (r2_cmd_start(hca)) {
        pthread_mutex_lock(&r2_verbs.hca_lock);
        s->coming = NULL;
        pthread_mutex_unlock(&r2_verbs.hca_lock);
        r2_hca_put(hca);
        r2_hca_put(hca);
        return;
    }
    r2_cmd_post(hca, &hca->open);
}

/* True while something is missing. */
static bool look_at(int slot, struct ibv_device **list)
{
    struct r2_slot *s = &r2_verbs.slots[slot];
    struct r2_hca *hca, *dead;
    struct ibv_device *dev;
    bool coming;

    pthread_mutex_lock(&r2_verbs.hca_lock);
    hca = s->now;
    if (hca)
        r2_hca_use(hca);
    dead = s->dead;
    coming = s->coming != NULL;
    if (dead && !coming)
        atomic_fetch_add(&dead->refs, 1);
    dev = find(list, s);
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    if (hca) {
        if (!r2_hca_listed(list, hca->dev))
            r2_hca_gone(hca, "the device was removed");
        r2_hca_unuse(hca);
        return atomic_load(&hca->gone);
    }
    if (!dead || coming)
        return true;
    if (!atomic_load(&dead->removed) && !r2_hca_listed(list, dead->dev) &&
        (dev || !in_sysfs(dead))) {
        atomic_store(&dead->removed, true);
        r2_fence_removed(dead);
        if (use_dead(dead)) /* who holds what it did not confirm lets go of that, and of it */
            r2_cmd_post(dead, &dead->forget);
    }
    if (dev && dev != dead->dev && atomic_load(&dead->removed))
        begin_open(slot, r2_ibv.get_device_name(dev));
    r2_hca_put(dead);
    return true;
}

static void *look_main(void *arg)
{
    uint64_t pause = LOOK_FIRST_NS;
    bool missing = true;

    (void)arg;
    while (missing) {
        struct ibv_device **list = r2_ibv.get_device_list(NULL);
        struct timespec ts = {.tv_nsec = (long)pause};

        missing = false;
        for (int i = 0; list && i < r2_verbs.n_slots; i++)
            missing |= look_at(i, list);
        if (list)
            r2_ibv.free_device_list(list);
        pthread_mutex_lock(&look.lock);
        missing |= look.again || !list;
        pause = look.again ? LOOK_FIRST_NS : 2 * pause < LOOK_NS ? 2 * pause : LOOK_NS;
        look.again = false;
        look.running = missing;
        pthread_mutex_unlock(&look.lock);
        if (missing)
            nanosleep(&ts, NULL);
    }
    return NULL;
}

static void look_for_it(void)
{
    sigset_t all, old;
    pthread_t thread;

    pthread_mutex_lock(&look.lock);
    look.again = true;
    if (!look.running) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        look.running = pthread_create(&thread, NULL, look_main, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        if (look.running) {
            pthread_setname_np(thread, "r2ccl-look");
            pthread_detach(thread);
        }
    }
    pthread_mutex_unlock(&look.lock);
}

/* Drivers that cannot take a device away from its users (soft-RoCE) tell nobody and let everything
 * on it work on. Whoever removes it waits until the last user has let go. What shows is that the
 * device's entry for users is gone. */
void r2_hcas_glance(void)
{
    static _Atomic uint64_t next;
    uint64_t now = r2_now_ns(), due = atomic_load(&next);
    bool gone = false;

    if (now < due || !atomic_compare_exchange_strong(&next, &due, now + LOOK_NS))
        return;
    pthread_mutex_lock(&r2_verbs.hca_lock);
    for (int i = 0; i < r2_verbs.n_slots; i++) {
        const struct r2_hca *hca = r2_verbs.slots[i].now;

        gone |= hca && hca->shown && access(hca->dev->dev_path, F_OK) < 0 && errno == ENOENT;
    }
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    if (gone)
        look_for_it();
}

void r2_hcas_doubt(void)
{
    uint64_t now = r2_now_ns();
    bool due;

    pthread_mutex_lock(&look.lock);
    due = !look.running && now - look.looked_at > LOOK_NS;
    if (due)
        look.looked_at = now;
    pthread_mutex_unlock(&look.lock);
    if (due)
        look_for_it();
}
