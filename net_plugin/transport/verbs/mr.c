/* Memory: every range is registered with all devices of the node at once, each on its command
 * thread, side by side. What is late or refused leaves no key, and then that NIC is no path for the
 * range; a late key counts from the next clear-to-send on.
 *
 * The same range is registered once, however many connections name it, and the last of them really
 * deregisters it: nothing is kept for later, so that a key is dead when its last owner says so. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;
static struct r2_list cache = {&cache, &cache};
/* Bit per device that did not answer: its next command is not waited for as long again. */
static atomic_uint late;
#define LATE_NS (UINT64_C(50) * 1000000)

/* One command for one device; the last of the two sides frees it. */
struct mr_cmd {
    struct r2_cmd cmd;
    struct mr_wait *wait;
    struct r2_mr_keys *keys;
    int hca;
};

struct mr_wait {
    pthread_mutex_t lock;
    pthread_cond_t done;
    uint32_t left; /* bit per device */
    bool failed;
    atomic_int refs;
};

static struct mr_wait *wait_new(void)
{
    struct mr_wait *w = calloc(1, sizeof(*w));
    pthread_condattr_t attr;

    if (!w)
        return NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->done, &attr);
    pthread_condattr_destroy(&attr);
    atomic_init(&w->refs, 1);
    return w;
}

static void wait_put(struct mr_wait *w)
{
    if (atomic_fetch_sub(&w->refs, 1) != 1)
        return;
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->done);
    free(w);
}

/* Waits for those of `devices`, `limit_ns` at most. Under the lock. */
static void wait_for(struct mr_wait *w, uint32_t devices, uint64_t limit_ns)
{
    struct timespec ts = {.tv_sec = (time_t)(limit_ns / 1000000000u),
                          .tv_nsec = (long)(limit_ns % 1000000000u)};
    int rc = 0;

    while ((w->left & devices) && rc == 0)
        rc = pthread_cond_timedwait(&w->done, &w->lock, &ts);
}

/* 0, or -ETIMEDOUT: some command has not come back or failed. One device that answers nothing is no
 * reason to give the others less time. */
static int wait_all(struct mr_wait *w)
{
    uint32_t known = atomic_load(&late);
    uint64_t now = r2_now_ns();
    int rc;

    pthread_mutex_lock(&w->lock);
    wait_for(w, ~known, now + R2_VERBS_COMMAND_NS);
    wait_for(w, known, now + LATE_NS);
    atomic_fetch_or(&late, w->left);
    rc = w->left || w->failed ? -ETIMEDOUT : 0;
    pthread_mutex_unlock(&w->lock);
    return rc;
}

static void keys_put(struct r2_mr_keys *keys)
{
    if (atomic_fetch_sub(&keys->refs, 1) != 1)
        return;
    if (keys->dmabuf_fd >= 0)
        close(keys->dmabuf_fd);
    free(keys);
}

static void cmd_over(struct mr_cmd *c, bool failed)
{
    pthread_mutex_lock(&c->wait->lock);
    c->wait->left &= ~(1u << c->hca);
    c->wait->failed |= failed;
    atomic_fetch_and(&late, ~(1u << c->hca)); /* under the lock: behind the mark of who waited */
    pthread_cond_signal(&c->wait->done);
    pthread_mutex_unlock(&c->wait->lock);
    wait_put(c->wait);
    keys_put(c->keys);
    free(c);
}

static void run_reg(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);
    struct r2_hca *hca = &r2_verbs.hcas[c->hca];
    struct r2_mr_keys *k = c->keys;
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                 (k->device ? IBV_ACCESS_REMOTE_READ : 0); /* flush.c */
    struct ibv_mr *mr = NULL;

    if (!atomic_load(&hca->gone)) {
        if (k->dmabuf_fd >= 0)
            mr = r2_ibv.reg_dmabuf_mr
                     ? r2_ibv.reg_dmabuf_mr(hca->pd, k->dmabuf_offset, k->size,
                                            (uint64_t)(uintptr_t)k->data, k->dmabuf_fd, access)
                     : NULL;
        else
            mr = r2_ibv.reg_mr(hca->pd, k->data, k->size, access);
        if (!mr)
            R2_WARN_LIMIT("%s cannot register %zu bytes of %s memory (%s): its NICs are no path "
                          "for them",
                          hca->name, k->size, k->device ? "device" : "host", strerror(errno));
    }
    if (mr) {
        k->mr[c->hca] = mr;
        atomic_store(&k->lkey[c->hca], mr->lkey);
        atomic_store(&k->rkey[c->hca], mr->rkey);
        atomic_store(&k->has[c->hca], true);
    }
    cmd_over(c, false);
}

/* The others who named the range get a new key; a clear-to-send that carried the old one ends its
 * path with an access error, and is said again with the new one. */
static void run_rekey(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);
    struct r2_hca *hca = &r2_verbs.hcas[c->hca];
    struct r2_mr_keys *k = c->keys;
    struct ibv_mr *old = k->mr[c->hca], *mr = NULL;
    int rc = 0;

    if (old && !atomic_load(&hca->gone))
        mr = r2_ibv.reg_mr(hca->pd, k->data, k->size,
                           IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                               (k->device ? IBV_ACCESS_REMOTE_READ : 0));
    if (mr) {
        atomic_store(&k->lkey[c->hca], mr->lkey);
        atomic_store(&k->rkey[c->hca], mr->rkey);
    } else {
        atomic_store(&k->has[c->hca], false);
    }
    k->mr[c->hca] = mr;
    if (old)
        rc = r2_ibv.dereg_mr(old);
    cmd_over(c, rc && !atomic_load(&hca->gone));
}

static void run_dereg(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);
    struct ibv_mr *mr = c->keys->mr[c->hca];
    int rc = 0;

    atomic_store(&c->keys->has[c->hca], false);
    c->keys->mr[c->hca] = NULL;
    if (mr)
        rc = r2_ibv.dereg_mr(mr);
    /* A device that is gone took its keys with it: the kernel has reset it. */
    cmd_over(c, rc && !atomic_load(&r2_verbs.hcas[c->hca].gone));
}

/* Runs it on every device, in the order in which commands of the range were given. */
static int on_all(struct r2_mr_keys *keys, void (*run)(struct r2_cmd *))
{
    struct mr_wait *w = wait_new();
    int rc;

    if (!w)
        return -ENOMEM;
    for (int i = 0; i < r2_verbs.n_hcas; i++) {
        struct mr_cmd *c = calloc(1, sizeof(*c));

        pthread_mutex_lock(&w->lock);
        w->left |= c ? 1u << i : 0;
        w->failed |= !c;
        pthread_mutex_unlock(&w->lock);
        if (!c)
            continue;
        atomic_fetch_add(&w->refs, 1);
        atomic_fetch_add(&keys->refs, 1);
        *c = (struct mr_cmd){.wait = w, .keys = keys, .hca = i};
        r2_list_init(&c->cmd.node);
        c->cmd.run = run;
        r2_cmd_post(&r2_verbs.hcas[i], &c->cmd);
    }
    rc = wait_all(w);
    wait_put(w);
    return rc;
}

/* `owners` counts registrations that name it; refs also the commands under way. */
struct cached {
    struct r2_mr_keys keys;
    int owners;        /* cache_lock */
    atomic_bool ready; /* every device has answered, or is late */
};

static struct cached *find(const struct r2_memory *m)
{
    struct r2_list *n;

    R2_LIST_FOR_EACH (n, &cache) {
        struct r2_mr_keys *k = R2_CONTAINER_OF(n, struct r2_mr_keys, node);

        if (k->data == m->data && k->size == m->size && k->device == m->device &&
            k->dmabuf_fd < 0 && m->dmabuf_fd < 0)
            return R2_CONTAINER_OF(k, struct cached, keys);
    }
    return NULL;
}

/* Some device has it. Memory of a device that none has is out of everybody's reach. */
static int usable(struct r2_mr_keys *keys, struct r2_mr_keys **out)
{
    bool any = !keys->device;

    for (int i = 0; i < r2_verbs.n_hcas; i++)
        any |= atomic_load(&keys->has[i]);
    if (!any) {
        r2_verbs_dereg(keys, false);
        return -EOPNOTSUPP;
    }
    *out = keys;
    return 0;
}

int r2_verbs_reg(const struct r2_memory *m, struct r2_mr_keys **out)
{
    int fd = m->dmabuf_fd < 0 ? -1 : fcntl(m->dmabuf_fd, F_DUPFD_CLOEXEC, 3);
    struct cached *c;

    *out = NULL;
    if (!m->size || (m->dmabuf_fd >= 0 && fd < 0))
        return m->size ? -EBADF : 0;
    pthread_mutex_lock(&cache_lock);
    c = find(m);
    if (c) {
        c->owners++;
        pthread_mutex_unlock(&cache_lock);
        while (!atomic_load(&c->ready)) /* bounded: whoever registers it waits with a limit */
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        return usable(&c->keys, out);
    }
    c = calloc(1, sizeof(*c));
    if (c) {
        c->owners = 1;
        atomic_init(&c->keys.refs, 1);
        c->keys.data = m->data;
        c->keys.size = m->size;
        c->keys.device = m->device;
        /* NCCL closes its own as soon as it is back, and a device may be late. */
        c->keys.dmabuf_fd = fd;
        c->keys.dmabuf_offset = m->dmabuf_offset;
        r2_list_add_tail(&cache, &c->keys.node);
    }
    pthread_mutex_unlock(&cache_lock);
    if (!c) {
        if (fd >= 0)
            close(fd);
        return -ENOMEM;
    }
    on_all(&c->keys, run_reg);
    atomic_store(&c->ready, true);
    return usable(&c->keys, out);
}

int r2_verbs_dereg(struct r2_mr_keys *keys, bool revoke)
{
    struct cached *c = R2_CONTAINER_OF(keys, struct cached, keys);
    bool last;
    int rc = 0;

    pthread_mutex_lock(&cache_lock);
    last = --c->owners == 0;
    if (last)
        r2_list_del(&keys->node);
    pthread_mutex_unlock(&cache_lock);
    if (!last)
        return revoke ? on_all(keys, run_rekey) : 0;
    rc = on_all(keys, run_dereg);
    if (rc)
        R2_WARN("a device does not confirm that %zu bytes at %p are deregistered", keys->size,
                keys->data);
    keys_put(keys);
    return rc;
}

static int hca_of(int nic)
{
    return r2_verbs.nics[nic].hca ? r2_verbs.nics[nic].hca_index : -1;
}

int r2_verbs_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS])
{
    int n = 0;

    for (int i = 0; i < R2_WIRE_MAX_NICS && i < R2_MAX_NICS; i++) {
        int h = hca_of(i);

        out[i] = h >= 0 && atomic_load(&keys->has[h]) ? atomic_load(&keys->rkey[h]) : 0;
        if (out[i])
            n = i + 1;
    }
    return n;
}

bool r2_verbs_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys)
{
    int h = hca_of(ep->params.local_nic);

    return keys && h >= 0 && atomic_load_explicit(&keys->has[h], memory_order_relaxed);
}

unsigned r2_verbs_memory(int nic)
{
    unsigned kinds = R2_MEMORY_HOST;
    struct r2_hca *hca;

    r2_verbs_prepare();
    hca = nic >= 0 && nic < R2_MAX_NICS ? r2_verbs.nics[nic].hca : NULL;

    if (hca && hca->peermem)
        kinds |= R2_MEMORY_DEVICE;
    if (hca && hca->dmabuf)
        kinds |= R2_MEMORY_DMABUF;
    return kinds;
}
