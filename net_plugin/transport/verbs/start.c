/* Devices at the start: opened and asked side by side, each by its own command thread, because any
 * question may wait for ever for firmware that is dead. Who starts the transport waits for all of
 * them together, START_STEPS steps at most, and asks no device anything: what ports there are, and
 * which is behind which NIC, is decided by what the threads have brought (struct r2_port_view).
 *
 * A device that has not answered by then is left out. It has no slot, so nobody but its own thread
 * knows of it any more; if the thread ever comes back it closes the device and ends. Another thread
 * for its ports would not help: it would have to use what the first one has not opened yet.
 *
 * What changes after a device was asked is told by its asynchronous events, which wait in its
 * descriptor until they are listened to (r2_hcas_watch). */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "settings/settings.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

/* Steps, so that a process that was stopped meanwhile does not hold it against its devices. */
#define START_STEPS 10
#define START_STEP_NS UINT64_C(1000000000)
#define START_TRIED (4 * R2_MAX_HCAS) /* some may not open */
#define NO_ANSWER 1

/* The lock is a leaf; it guards `over`, and r2_hca.answer of all. A device is its thread's until
 * the answer is there, and then who waited owns it; once `over` is set, without an answer, it is
 * the thread's for good. Both look under the lock, so that exactly one of them has it. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t come;
    bool over; /* nobody waits any more */
    int n_left_out;
    char left_out[START_TRIED][64]; /* written before the transport is started, then constant */
} start = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- on the command thread */

static uint64_t port_guid(const struct r2_hca *hca, int port)
{
    union ibv_gid gid = {.raw = {0}};
    uint64_t guid;

    if (r2_ibv.query_gid(hca->ctx, (uint8_t)port, 0, &gid))
        return 0;
    memcpy(&guid, gid.raw + 8, sizeof(guid));
    return be64toh(guid);
}

static bool asked(const struct r2_hca *hca, int port)
{
    return r2_hca_match(r2_settings_get()->nccl_ib_hca, hca->name, port);
}

/* A port that the user has left out is not asked: it may be the one that does not answer. */
static int read_ports(struct r2_hca *hca)
{
    int n = hca->attr.phys_port_cnt;

    hca->ports = calloc((size_t)n + 1, sizeof(*hca->ports));
    if (!hca->ports)
        return -ENOMEM;
    hca->n_ports = n;
    for (int port = 1; port <= n; port++) {
        struct r2_port_view *view = &hca->ports[port];

        if (!asked(hca, port))
            continue;
        r2_port_read(hca, port, NULL, view);
        if (view->there && view->attr.link_layer != IBV_LINK_LAYER_ETHERNET)
            view->guid = port_guid(hca, port);
    }
    return 0;
}

static bool all_ports(const struct r2_hca *hca)
{
    bool all = true;

    for (int port = 1; port <= hca->n_ports; port++)
        all &= hca->ports[port].there || !asked(hca, port);
    return all;
}

static void say_late(const struct r2_hca *hca, int rc)
{
    if (rc)
        R2_WARN("RDMA device %s, which this process has left out, cannot be opened (%s)", hca->name,
                strerror(-rc));
    else if (!all_ports(hca))
        R2_WARN("RDMA device %s, which this process has left out, cannot say how its ports are",
                hca->name);
    else
        R2_WARN("RDMA device %s has answered, too late for this process, which has left it out; a "
                "process that starts now uses it",
                hca->name);
}

static void run_start(struct r2_cmd *cmd)
{
    struct r2_hca *hca = R2_CONTAINER_OF(cmd, struct r2_hca, open);
    int rc = r2_hca_open(hca);
    bool late;

    if (rc == 0)
        rc = read_ports(hca);
    pthread_mutex_lock(&start.lock);
    late = start.over;
    hca->answer = rc;
    pthread_cond_signal(&start.come);
    pthread_mutex_unlock(&start.lock);
    if (!late)
        return;
    say_late(hca, rc);
    r2_hca_unuse(hca); /* closes it */
    r2_hca_put(hca);
}

/* ---- on the caller's */

static bool wanted(const char *name)
{
    bool any = false;

    for (int port = 1; port <= R2_MAX_HCA_PORTS; port++)
        any |= r2_hca_match(r2_settings_get()->nccl_ib_hca, name, port);
    return any;
}

static void note_left_out(const char *name)
{
    if (start.n_left_out < START_TRIED)
        snprintf(start.left_out[start.n_left_out++], sizeof(start.left_out[0]), "%s", name);
}

/* Firmware that is dead may let a driver say so at once, after its own time-out, or never: what
 * R2CCL_NICS says of the device means the same in each. */
static void cannot_open(const char *name, int rc)
{
    note_left_out(name);
    R2_WARN("RDMA device %s cannot be opened (%s)", name, strerror(-rc));
}

/* With one reference more, the caller's. NULL: it was told why. */
static struct r2_hca *begin(struct ibv_device *dev)
{
    const char *name = r2_ibv.get_device_name(dev);
    struct r2_hca *hca = r2_hca_new(-1, name);
    int rc, n;

    if (!hca) {
        cannot_open(name, -ENOMEM);
        return NULL;
    }
    hca->list = r2_ibv.get_device_list(&n); /* keeps `dev` */
    hca->dev = dev;
    hca->answer = NO_ANSWER;
    hca->open.run = run_start;
    atomic_fetch_add(&hca->refs, 1);
    rc = r2_hca_listed(hca->list, dev) ? r2_cmd_start(hca) : -ENODEV;
    if (rc) {
        cannot_open(name, rc);
        for (int i = 0; i < 3; i++) /* the slot's, the thread's, ours */
            r2_hca_put(hca);
        return NULL;
    }
    r2_cmd_post(hca, &hca->open);
    return hca;
}

static bool some_missing(struct r2_hca *const *hcas, int n)
{
    bool missing = false;

    for (int i = 0; i < n; i++)
        missing |= hcas[i]->answer == NO_ANSWER;
    return missing;
}

/* What each has answered by the end of the time. */
static void wait_for(struct r2_hca *const *hcas, int n, int *answers)
{
    int steps = 0;

    pthread_mutex_lock(&start.lock);
    while (steps < START_STEPS && some_missing(hcas, n)) {
        uint64_t until = r2_now_ns() + START_STEP_NS;
        struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u),
                              .tv_nsec = (long)(until % 1000000000u)};
        int rc = 0;

        while (rc == 0 && some_missing(hcas, n))
            rc = pthread_cond_timedwait(&start.come, &start.lock, &ts);
        steps++;
    }
    start.over = true;
    for (int i = 0; i < n; i++)
        answers[i] = hcas[i]->answer;
    pthread_mutex_unlock(&start.lock);
}

/* A port that cannot be asked is no NIC, and no reason to have none. */
static void say_ports(const struct r2_hca *hca)
{
    if (all_ports(hca))
        return;
    note_left_out(hca->name);
    R2_WARN("RDMA device %s cannot say how its ports are: those are left out", hca->name);
}

static void leave_out(const struct r2_hca *hca)
{
    note_left_out(hca->name);
    R2_WARN("RDMA device %s has not answered for %d s (opening it, or a question about a port): "
            "its firmware may be dead. It is left out, the job goes on over other NICs, or sockets "
            "where none is left. Reset the device or reboot the node, or leave it out by "
            "NCCL_IB_HCA (NCCL_IB_HCA=^=%s, or a list without it), which also saves the %d s",
            hca->name, START_STEPS, hca->name, START_STEPS);
}

static void take_in(struct r2_hca *hca)
{
    struct r2_slot *s = &r2_verbs.slots[r2_verbs.n_slots];

    hca->slot = r2_verbs.n_slots++;
    memcpy(s->name, hca->name, sizeof(s->name));
    s->guid = r2_hca_guid(hca->dev);
    s->now = hca;
}

static void take_answers(struct r2_hca *const *hcas, int n, const int *answers)
{
    for (int i = 0; i < n; i++) {
        struct r2_hca *hca = hcas[i];

        if (answers[i] == NO_ANSWER) {
            leave_out(hca);
        } else if (answers[i] == 0 && r2_verbs.n_slots < R2_MAX_HCAS) {
            say_ports(hca);
            take_in(hca);
        } else {
            if (answers[i])
                cannot_open(hca->name, answers[i]);
            r2_hca_unuse(hca); /* its thread closes it */
            r2_hca_put(hca);
        }
        r2_hca_put(hca);
    }
}

/* Opens all that the user wants. Returns how many there are. Once per process. */
static int open_devices(void)
{
    struct ibv_device **devs;
    struct r2_hca *hcas[START_TRIED];
    int answers[START_TRIED], n = 0, opened = 0;

    r2_cond_init(&start.come);
    devs = r2_ibv.get_device_list(&n);
    for (int i = 0; devs && i < n && opened < START_TRIED; i++) {
        if (wanted(r2_ibv.get_device_name(devs[i])))
            hcas[opened] = begin(devs[i]);
        else
            continue;
        opened += hcas[opened] != NULL;
    }
    if (devs)
        r2_ibv.free_device_list(devs);
    wait_for(hcas, opened, answers);
    take_answers(hcas, opened, answers);
    return r2_verbs.n_slots;
}

bool r2_verbs_left_out(const char *device)
{
    bool found = false;

    for (int i = 0; i < start.n_left_out; i++)
        found |= strcmp(start.left_out[i], device) == 0;
    return found;
}

/* ---- which port is behind which NIC */

/* The port whose address is the NIC's; for InfiniBand and ports without addresses, that of the
 * NIC's own PCI device. */
static int match_score(const struct r2_nic *n, const struct r2_hca *hca, int port)
{
    const struct r2_port_view *view = &hca->ports[port];
    uint8_t gid[16], ip[16];
    int score, index;

    if (n->bare)
        return strcmp(n->rdma, hca->name) == 0 && n->rdma_port == port ? 1000 : -1;
    if (!view->there)
        return -1;
    r2_nic_ip(n, ip);
    index = r2_port_gid(view, ip, gid, &score);
    if (view->attr.link_layer == IBV_LINK_LAYER_ETHERNET) {
        if (index >= 0 && memcmp(gid, ip, 16) == 0)
            return 1000;
        if (strcmp(n->rdma, hca->name) == 0 && index >= 0)
            return 100;
        return -1;
    }
    if (strcmp(n->rdma, hca->name) != 0)
        return -1;
    return n->rdma_port == port ? 500 : n->rdma_port ? -1 : 50;
}

int r2_vnic_best(const struct r2_nic *n, uint8_t *at)
{
    int best = -1, slot = -1;

    for (int h = 0; h < r2_verbs.n_slots; h++) {
        const struct r2_hca *hca = r2_verbs.slots[h].now;

        for (int port = 1; port <= hca->n_ports; port++) {
            int score = r2_hca_match(r2_settings_get()->nccl_ib_hca, hca->name, port)
                            ? match_score(n, hca, port)
                            : -1;

            if (score > best) {
                best = score;
                slot = h;
                *at = (uint8_t)port;
            }
        }
    }
    return slot;
}

/* Before the transport is started: no device comes or goes yet. */
static int vnics_match(void)
{
    int n, found = 0;

    r2_engine_devices(&n);
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];
        struct r2_hca *hca;
        struct r2_nic nic;
        uint8_t ip[16];

        pthread_mutex_init(&v->lock, NULL);
        v->slot = i < n ? r2_vnic_best(r2_engine_nic(i), &v->port) : -1;
        if (v->slot < 0)
            continue;
        hca = r2_verbs.slots[v->slot].now;
        r2_engine_nic_now(i, &nic);
        r2_nic_ip(&nic, ip);
        r2_vnic_take(v, hca, ip, &hca->ports[v->port]);
        found++;
        R2_INFO("NIC %s: RDMA device %s port %d, %s, %s", r2_engine_nic(i)->name, hca->name,
                v->port, v->link == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand",
                r2_port_state_text(v->state));
    }
    return found;
}

static int open_library(void)
{
    const struct r2_settings *set = r2_settings_get();
    char why[256] = "";

    if (!set->rdma || strcmp(set->nccl_ib_disable, "1") == 0)
        return -ENODEV;
    if (r2_ibv_load(set->ibverbs_lib, why, sizeof(why))) {
        R2_INFO("no RDMA: %s", why);
        return -ENODEV;
    }
    if (r2_ibv.fork_init)
        r2_ibv.fork_init();
    return open_devices() == 0 ? -ENODEV : 0;
}

static int match(void)
{
    return r2_verbs_library() || vnics_match() == 0 ? -ENODEV : 0;
}

static int once(pthread_mutex_t *lock, int *rc, int (*what)(void))
{
    int found;

    pthread_mutex_lock(lock);
    if (*rc == 1)
        *rc = what();
    found = *rc;
    pthread_mutex_unlock(lock);
    return found;
}

int r2_verbs_library(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int rc = 1;

    return once(&lock, &rc, open_library);
}

int r2_verbs_prepare(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int rc = 1;

    return once(&lock, &rc, match);
}
