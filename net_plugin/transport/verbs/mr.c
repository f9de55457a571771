/* Memory: every range is registered with all devices of the node at once, each on its command
 * thread, side by side. What is late or refused leaves no key, and then that NIC is no path for the
 * range; a late key counts from the next clear-to-send on.
 *
 * The same range is registered once, however many connections name it, and the last of them really
 * deregisters it: nothing is kept for later, so that a key is dead when its last owner says so.
 *
 * A device that is gone lets go of all of them (r2_verbs_purge), and one that is back gets all that
 * are registered then (r2_verbs_adopt). None is missed. Whoever registers puts the range into the
 * cache before it looks which devices there are. A device is there before it looks into the cache.
 * Whichever comes second does it, and both do no harm. Commands about one device run one after
 * another, on its thread.
 *
 * A key that a device did not deregister is kept (let_go), whoever asked for it. Every command that
 * is about bytes of its range asks for it again. None of the same registration's commands is
 * confirmed while the device still holds the key. What that takes is there with the key (r2_reg),
 * so that none is lost where memory is short. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;
static struct r2_list cache = {&cache, &cache};
static uint64_t serials; /* cache_lock */
/* Bit per device (struct mr_cmd) that did not answer: its next command is not waited for as long
 * again. */
static atomic_uint late;
#define LATE_NS (UINT64_C(50) * 1000000)

/* One command for one device, which it uses; the last of the two sides frees it. */
struct mr_cmd {
    struct r2_cmd cmd;
    struct mr_wait *wait; /* NULL: nobody waits */
    struct r2_mr_keys *keys;
    struct r2_hca *hca;
    uint32_t bit; /* of its slot; another one while it is gone */
};

/* A range, for when its keys are freed. */
struct whose {
    const uint8_t *data;
    size_t size;
    uint64_t serial;
};

static struct whose whose(const struct r2_mr_keys *k)
{
    return (struct whose){.data = k->data, .size = k->size, .serial = k->serial};
}

/* What one device has of a range. It uses the device. */
struct r2_reg {
    struct r2_list node; /* r2_hca.held: the device did not deregister it */
    struct r2_cmd cmd;   /* it is in no slot any more, and its device's thread has not come to it */
    struct r2_hca *hca;
    struct ibv_mr *mr;
    struct whose of; /* its bytes are compared, not touched */
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

    if (!w)
        return NULL;
    pthread_mutex_init(&w->lock, NULL);
    r2_cond_init(&w->done);
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

/* On the command thread. It and its use of the device end here, or when it is asked for again.
 * False: the device still holds it. */
static bool let_go(struct r2_reg *reg)
{
    struct r2_hca *hca = reg->hca;

    if (r2_ibv.dereg_mr(reg->mr) == 0 || r2_hca_removed(hca)) {
        free(reg);
        r2_hca_unuse(hca);
        return true;
    }
    r2_list_add_tail(&hca->held, &reg->node);
    return false;
}

/* On the command thread: asks again for what was not deregistered of these bytes (NULL: of any).
 * True: the device still holds some of what the same range had there. What others had of the same
 * bytes is not this one's to answer for: they were told, and it was used beside theirs. */
static bool still_held(struct r2_hca *hca, const struct whose *of)
{
    struct r2_list *n, *next;
    bool held = false;

    for (n = hca->held.next; n != &hca->held; n = next) {
        struct r2_reg *h = R2_CONTAINER_OF(n, struct r2_reg, node);

        next = n->next;
        if (of && (h->of.data >= of->data + of->size || h->of.data + h->of.size <= of->data))
            continue;
        if (r2_ibv.dereg_mr(h->mr) && !r2_hca_removed(hca)) {
            held |= of && h->of.serial == of->serial;
            continue;
        }
        r2_list_del(&h->node);
        free(h);
        r2_hca_unuse(hca);
    }
    return held;
}

/* r2_mr_keys.reg: a leaf. A device that was late may still be at it while another has its slot. */
static pthread_mutex_t slot_lock = PTHREAD_MUTEX_INITIALIZER;

static void run_left_over(struct r2_cmd *cmd)
{
    let_go(R2_CONTAINER_OF(cmd, struct r2_reg, cmd));
}

/* Gives what the slot has, if anything, to its own device's thread. */
static void leave_over(struct r2_mr_keys *k, int at)
{
    struct r2_reg *reg = k->reg[at];

    k->reg[at] = NULL;
    atomic_store(&k->has[at], false);
    if (reg)
        r2_cmd_give(reg->hca, &reg->cmd, run_left_over);
}

/* The last reference. Of a device there is at most a command that was never given to it (memory),
 * or what belongs to one that was removed since. Nobody asks for that any more. */
static void keys_put(struct r2_mr_keys *keys)
{
    if (atomic_fetch_sub(&keys->refs, 1) != 1)
        return;
    for (int i = 0; i < R2_MAX_HCAS; i++)
        leave_over(keys, i);
    if (keys->dmabuf_fd >= 0)
        close(keys->dmabuf_fd);
    free(keys);
}

static void cmd_over(struct mr_cmd *c, bool failed)
{
    if (c->wait) {
        pthread_mutex_lock(&c->wait->lock);
        c->wait->left &= ~c->bit;
        c->wait->failed |= failed;
        atomic_fetch_and(&late, ~c->bit); /* under the lock: behind the mark of who waited */
        pthread_cond_signal(&c->wait->done);
        pthread_mutex_unlock(&c->wait->lock);
        wait_put(c->wait);
    }
    keys_put(c->keys);
    r2_hca_unuse(c->hca);
    free(c);
}

/* Under slot_lock. */
static void fill(struct r2_mr_keys *k, struct r2_reg *reg)
{
    int at = reg->hca->slot;

    k->reg[at] = reg;
    atomic_store(&k->lkey[at], reg->mr->lkey);
    atomic_store(&k->rkey[at], reg->mr->rkey);
    atomic_store(&k->has[at], true);
}

/* False: it came too late, or another one is there. A device that was removed makes room, however
 * late its thread is. */
static bool put_in(struct r2_mr_keys *k, struct r2_reg *reg)
{
    int at = reg->hca->slot;
    bool ok;

    pthread_mutex_lock(&slot_lock);
    if (k->reg[at] && atomic_load(&k->reg[at]->hca->removed))
        leave_over(k, at);
    ok = !atomic_load(&reg->hca->gone) && !k->reg[at];
    if (ok)
        fill(k, reg);
    pthread_mutex_unlock(&slot_lock);
    return ok;
}

/* What the device has of it; letting go of that is the caller's. `fresh`, unless it is NULL or the
 * device is gone, has its place from now on, and is NULL then. */
static struct r2_reg *take_out(struct r2_mr_keys *k, const struct r2_hca *hca,
                               struct r2_reg **fresh)
{
    struct r2_reg *reg;
    int at = hca->slot;

    pthread_mutex_lock(&slot_lock);
    reg = k->reg[at] && k->reg[at]->hca == hca ? k->reg[at] : NULL;
    if (reg && *fresh && !atomic_load(&hca->gone)) {
        fill(k, *fresh);
        *fresh = NULL;
    } else if (reg) {
        atomic_store(&k->has[at], false);
        k->reg[at] = NULL;
    }
    pthread_mutex_unlock(&slot_lock);
    return reg;
}

static bool has_it(struct r2_mr_keys *k, const struct r2_hca *hca)
{
    bool has;

    pthread_mutex_lock(&slot_lock);
    has = k->reg[hca->slot] && k->reg[hca->slot]->hca == hca;
    pthread_mutex_unlock(&slot_lock);
    return has;
}

static struct ibv_mr *ask_for(const struct r2_mr_keys *k, struct r2_hca *hca)
{
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                 (k->device ? IBV_ACCESS_REMOTE_READ : 0); /* flush.c */

    if (k->dmabuf_fd < 0)
        return r2_ibv.reg_mr(hca->pd, k->data, k->size, access);
    return r2_ibv.reg_dmabuf_mr
               ? r2_ibv.reg_dmabuf_mr(hca->pd, k->dmabuf_offset, k->size,
                                      (uint64_t)(uintptr_t)k->data, k->dmabuf_fd, access)
               : NULL;
}

/* NULL: the device is gone, or does not. */
static struct r2_reg *reg_new(const struct r2_mr_keys *k, struct r2_hca *hca)
{
    struct r2_reg *reg = atomic_load(&hca->gone) ? NULL : calloc(1, sizeof(*reg));

    if (reg) {
        r2_hca_use(hca);
        *reg = (struct r2_reg){.hca = hca, .mr = ask_for(k, hca), .of = whose(k)};
        if (reg->mr)
            return reg;
    }
    if (!atomic_load(&hca->gone))
        R2_WARN_LIMIT("%s cannot register %zu bytes of %s memory (%s): its NICs cannot carry "
                      "that memory",
                      hca->name, k->size, k->device ? "device" : "host", strerror(errno));
    if (reg)
        r2_hca_unuse(hca);
    free(reg);
    return NULL;
}

static void reg_one(struct r2_mr_keys *k, struct r2_hca *hca)
{
    struct r2_reg *reg = has_it(k, hca) ? NULL : reg_new(k, hca);

    if (reg && !put_in(k, reg))
        let_go(reg);
}

/* False: the device still holds it. One that was removed took its keys with it. */
static bool dereg_one(struct r2_mr_keys *k, struct r2_hca *hca)
{
    struct r2_reg *none = NULL, *reg = take_out(k, hca, &none);

    return !reg || let_go(reg);
}

static void run_reg(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);

    reg_one(c->keys, c->hca);
    cmd_over(c, false);
}

/* The others who named the range get a new key, and are never without one; a clear-to-send that
 * carried the old one ends its path with an access error, and is said again with the new one. */
static void run_rekey(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);
    struct whose of = whose(c->keys);
    bool held = still_held(c->hca, &of);
    /* Before the old one goes, so that its key is another one. */
    struct r2_reg *fresh = has_it(c->keys, c->hca) ? reg_new(c->keys, c->hca) : NULL;
    struct r2_reg *old = take_out(c->keys, c->hca, &fresh);

    if (fresh)
        let_go(fresh);
    if (old)
        held |= !let_go(old);
    cmd_over(c, held);
}

static void run_dereg(struct r2_cmd *cmd)
{
    struct mr_cmd *c = R2_CONTAINER_OF(cmd, struct mr_cmd, cmd);
    struct whose of = whose(c->keys);
    bool held = still_held(c->hca, &of);

    held |= !dereg_one(c->keys, c->hca);
    cmd_over(c, held);
}

/* One that is gone has the bit of its slot shifted. */
static uint32_t bit_of(const struct r2_hca *hca)
{
    _Static_assert(2 * R2_MAX_HCAS <= 32, "a bit each");
    return 1u << (hca->slot + (atomic_load(&hca->gone) ? R2_MAX_HCAS : 0));
}

/* The command uses the device from now on. `w` NULL: nobody waits for it. */
static bool give(struct r2_mr_keys *keys, struct r2_hca *hca, struct mr_wait *w,
                 void (*run)(struct r2_cmd *))
{
    struct mr_cmd *c = calloc(1, sizeof(*c));

    if (!c)
        return false;
    *c = (struct mr_cmd){.wait = w, .keys = keys, .hca = hca, .bit = bit_of(hca)};
    if (w) {
        atomic_fetch_add(&w->refs, 1);
        pthread_mutex_lock(&w->lock);
        w->left |= c->bit;
        pthread_mutex_unlock(&w->lock);
    }
    atomic_fetch_add(&keys->refs, 1);
    r2_cmd_give(hca, &c->cmd, run);
    return true;
}

/* Runs it on every device, in the order in which commands of the range were given. One that is gone
 * registers nothing, but it may still have to let go of something; nobody waits for one that the
 * kernel has let go of. */
static int on_all(struct r2_mr_keys *keys, void (*run)(struct r2_cmd *))
{
    struct r2_hca *hcas[2 * R2_MAX_HCAS];
    int n = r2_hcas_use(hcas, run != run_reg), rc;
    struct mr_wait *w = wait_new();

    for (int i = 0; i < n; i++) {
        bool removed = atomic_load(&hcas[i]->removed);

        if (w && give(keys, hcas[i], removed ? NULL : w, run))
            continue;
        r2_hca_unuse(hcas[i]);
        if (w) {
            pthread_mutex_lock(&w->lock);
            w->failed = true;
            pthread_mutex_unlock(&w->lock);
        }
    }
    if (!w)
        return -ENOMEM;
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

    for (int i = 0; i < r2_verbs.n_slots; i++)
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
        c->keys.serial = ++serials;
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
    else
        atomic_fetch_add(&keys->refs, 1); /* ours is gone: others may let go of it meanwhile */
    pthread_mutex_unlock(&cache_lock);
    if (last || revoke)
        rc = on_all(keys, last ? run_dereg : run_rekey);
    if (rc)
        R2_WARN("a device does not confirm that %zu bytes at %p are deregistered", keys->size,
                keys->data);
    keys_put(keys);
    return rc;
}

/* All ranges that are registered now, each with a reference; freed by the caller. */
static struct r2_mr_keys **all_ranges(int *count)
{
    struct r2_mr_keys **out;
    struct r2_list *n;
    int cap = 0;

    *count = 0;
    pthread_mutex_lock(&cache_lock);
    R2_LIST_FOR_EACH (n, &cache)
        cap++;
    out = calloc((size_t)cap + 1, sizeof(*out));
    R2_LIST_FOR_EACH (n, &cache) {
        if (!out)
            break;
        out[*count] = R2_CONTAINER_OF(n, struct r2_mr_keys, node);
        atomic_fetch_add(&out[(*count)++]->refs, 1);
    }
    pthread_mutex_unlock(&cache_lock);
    return out;
}

void r2_verbs_adopt(struct r2_hca *hca)
{
    int n;
    struct r2_mr_keys **ranges = all_ranges(&n);

    atomic_fetch_and(&late, ~(bit_of(hca) * (1u | 1u << R2_MAX_HCAS))); /* it was not late */
    for (int i = 0; i < n; i++) {
        reg_one(ranges[i], hca);
        keys_put(ranges[i]);
    }
    free(ranges);
}

/* A range that is being deregistered meanwhile has a command of its own behind this one. */
void r2_verbs_purge(struct r2_hca *hca)
{
    int n;
    struct r2_mr_keys **ranges = all_ranges(&n);

    for (int i = 0; i < n; i++) {
        if (!dereg_one(ranges[i], hca))
            R2_WARN_LIMIT("%s does not confirm that memory is deregistered", hca->name);
        keys_put(ranges[i]);
    }
    free(ranges);
    if (atomic_load(&hca->removed))
        still_held(hca, NULL);
}

int r2_verbs_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS])
{
    int n = 0;

    for (int i = 0; i < R2_WIRE_MAX_NICS && i < R2_MAX_NICS; i++) {
        int h = r2_verbs.nics[i].slot;

        out[i] = h >= 0 && atomic_load(&keys->has[h]) ? atomic_load(&keys->rkey[h]) : 0;
        if (out[i])
            n = i + 1;
    }
    return n;
}

bool r2_verbs_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys)
{
    int h = ep->nic->slot;

    return keys && h >= 0 && atomic_load(&keys->has[h]); /* whoever sees it uses the key */
}

unsigned r2_verbs_memory(int nic)
{
    unsigned kinds = R2_MEMORY_HOST;
    struct r2_hca *hca;

    r2_verbs_prepare();
    hca = nic >= 0 && nic < R2_MAX_NICS ? r2_vnic_use(&r2_verbs.nics[nic]) : NULL;
    if (!hca)
        return kinds;
    if (hca->peermem)
        kinds |= R2_MEMORY_DEVICE;
    if (hca->dmabuf)
        kinds |= R2_MEMORY_DMABUF;
    r2_hca_unuse(hca);
    return kinds;
}
