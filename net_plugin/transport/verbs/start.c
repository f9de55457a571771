/* Devices at the start. A thread lists them. Then each is opened and asked by its own command
 * thread, side by side, because any question may wait for ever: for firmware that is dead, or for a
 * lock of the kernel that its driver holds. Who starts the transport waits for all of them
 * together, START_STEPS steps at most, and asks no device anything. What the threads have brought
 * (struct r2_port_view) decides what ports there are, and which is behind which NIC.
 *
 * No more devices are open at a time than can be used: the next one is opened when another could
 * not be.
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

#include "settings/settings.h"
#include "settings/values.h"
#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

/* Steps, so that a process that was stopped meanwhile does not hold it against its devices. */
#define START_STEPS 10
#define START_STEP_NS UINT64_C(1000000000)
#define START_TRIED (4 * R2_MAX_HCAS) /* some may not open */
#define NO_ANSWER 1

/* The lock is a leaf; it guards all of it, and r2_hca.answer of all. A device is its thread's until
 * the answer is there, and then who waited owns it; once `over` is set, without an answer, it is
 * the thread's for good. Both look under the lock, so that exactly one of them has it.
 *
 * Once `over` is set, nobody writes anything but answers: who waited, and set it, reads the rest
 * without the lock, as does who comes after. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t come; /* an answer, the end of the list, the end of waiting */
    bool over;           /* nobody waits any more */
    bool listed;         /* all that are wanted have been begun */
    bool cut_short;      /* the list was waited for in vain */
    int n_hcas;
    struct r2_hca *hcas[START_TRIED]; /* with a reference each, of who waits */
    int n_left_out;
    char left_out[START_TRIED][64]; /* that also by who waited, before the transport is started */
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
        R2_WARN("RDMA device %s, which this process has left out, does not report its ports",
                hca->name);
    else
        R2_WARN("RDMA device %s has answered too late for this process, which has left it out; a "
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
    hca->guid = r2_hca_guid(hca->dev);
    pthread_mutex_lock(&start.lock);
    late = start.over;
    hca->answer = rc;
    pthread_cond_broadcast(&start.come);
    pthread_mutex_unlock(&start.lock);
    if (!late)
        return;
    say_late(hca, rc);
    r2_hca_unuse(hca); /* closes it */
    r2_hca_put(hca);
}

/* ---- on the thread that lists them */

static bool wanted(const char *name)
{
    bool any = false;

    for (int port = 1; port <= R2_MAX_HCA_PORTS; port++)
        any |= r2_hca_match(r2_settings_get()->nccl_ib_hca, name, port);
    return any;
}

/* The caller holds the lock, or nobody adds to the list any more (start.over). */
static void note_left_out(const char *name)
{
    if (start.n_left_out < START_TRIED)
        snprintf(start.left_out[start.n_left_out++], sizeof(start.left_out[0]), "%s", name);
}

/* Firmware that is dead may let a driver say so at once, after its own time-out, or never: what
 * R2CCL_NICS says of the device means the same in each. */
static void say_not_opened(const char *name, int rc)
{
    R2_WARN("RDMA device %s cannot be opened (%s)", name, strerror(-rc));
}

/* Those that are open, or may still be. Under the lock. */
static int hopeful(void)
{
    int n = 0;

    for (int i = 0; i < start.n_hcas; i++)
        n += start.hcas[i]->answer == 0 || start.hcas[i]->answer == NO_ANSWER;
    return n;
}

static bool some_missing(void)
{
    bool missing = !start.listed;

    for (int i = 0; i < start.n_hcas; i++)
        missing |= start.hcas[i]->answer == NO_ANSWER;
    return missing;
}

/* Waits until there is room for one more. False: there will be none. Under the lock. */
static bool room(void)
{
    bool all_good = false;

    while (!start.over && !all_good && hopeful() >= R2_MAX_HCAS) {
        all_good = true;
        for (int i = 0; i < start.n_hcas; i++)
            all_good &= start.hcas[i]->answer != NO_ANSWER;
        if (!all_good)
            pthread_cond_wait(&start.come, &start.lock);
    }
    return !start.over && !all_good && start.n_hcas < START_TRIED;
}

/* Its thread runs; it was not given anything to do yet. NULL: `rc` says why. */
static struct r2_hca *new_one(struct ibv_device *dev, int *rc)
{
    struct r2_hca *hca = r2_hca_new(-1, r2_ibv.get_device_name(dev));
    int n;

    *rc = -ENOMEM;
    if (!hca)
        return NULL;
    hca->list = r2_ibv.get_device_list(&n); /* keeps `dev` */
    hca->dev = dev;
    hca->answer = NO_ANSWER;
    hca->open.run = run_start;
    *rc = r2_hca_listed(hca->list, dev) ? r2_cmd_start(hca) : -ENODEV;
    if (*rc == 0)
        return hca;
    r2_hca_put(hca); /* the slot's, the thread's */
    r2_hca_put(hca);
    return NULL;
}

/* False: no more. */
static bool begin(struct ibv_device *dev)
{
    int rc = 0;
    struct r2_hca *hca = NULL;
    bool more;

    pthread_mutex_lock(&start.lock);
    more = room();
    pthread_mutex_unlock(&start.lock);
    if (more)
        hca = new_one(dev, &rc);
    pthread_mutex_lock(&start.lock);
    more &= !start.over;
    if (more && hca) {
        atomic_fetch_add(&hca->refs, 1);
        start.hcas[start.n_hcas++] = hca;
    } else if (more) {
        note_left_out(r2_ibv.get_device_name(dev));
    }
    pthread_mutex_unlock(&start.lock);
    if (more && hca) {
        r2_cmd_post(hca, &hca->open);
    } else if (hca) {
        r2_hca_unuse(hca); /* its thread ends */
        r2_hca_put(hca);
    } else if (more) {
        say_not_opened(r2_ibv.get_device_name(dev), rc);
    }
    return more;
}

static void *list_main(void *arg)
{
    int n = 0;
    struct ibv_device **devs;
    bool more = true, late;

    (void)arg;
    pthread_setname_np(pthread_self(), "r2ccl-list");
    devs = r2_ibv.get_device_list(&n);
    for (int i = 0; devs && i < n && more; i++) {
        if (wanted(r2_ibv.get_device_name(devs[i])))
            more = begin(devs[i]);
    }
    if (devs)
        r2_ibv.free_device_list(devs);
    pthread_mutex_lock(&start.lock);
    late = start.over;
    if (!late)
        start.listed = true;
    pthread_cond_broadcast(&start.come);
    pthread_mutex_unlock(&start.lock);
    if (late)
        R2_WARN("the list of RDMA devices has come too late for this process, which does not "
                "use those that were missing; a process that starts now uses them");
    return NULL;
}

/* ---- on the caller's */

/* What each has answered by the end of the time. */
static void wait_for(int *answers)
{
    int steps = 0;

    pthread_mutex_lock(&start.lock);
    while (steps < START_STEPS && some_missing()) {
        uint64_t until = r2_now_ns() + START_STEP_NS;
        struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u),
                              .tv_nsec = (long)(until % 1000000000u)};
        int rc = 0;

        while (rc == 0 && some_missing())
            rc = pthread_cond_timedwait(&start.come, &start.lock, &ts);
        steps++;
    }
    start.over = true;
    for (int i = 0; i < start.n_hcas; i++)
        answers[i] = start.hcas[i]->answer;
    pthread_cond_broadcast(&start.come);
    pthread_mutex_unlock(&start.lock);
}

/* A port that cannot be asked is no NIC, and no reason to have none. */
static void say_ports(const struct r2_hca *hca)
{
    if (all_ports(hca))
        return;
    note_left_out(hca->name);
    R2_WARN("RDMA device %s does not report its ports: they are left out", hca->name);
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
    s->guid = hca->guid;
    s->now = hca;
}

static void take_answers(const int *answers)
{
    for (int i = 0; i < start.n_hcas; i++) {
        struct r2_hca *hca = start.hcas[i];

        if (answers[i] == NO_ANSWER) {
            leave_out(hca);
        } else if (answers[i] == 0) {
            say_ports(hca);
            take_in(hca);
        } else {
            note_left_out(hca->name);
            say_not_opened(hca->name, answers[i]);
            r2_hca_unuse(hca); /* its thread closes it */
            r2_hca_put(hca);
        }
        r2_hca_put(hca);
    }
}

/* Opens all that the user wants. Returns how many there are. Once per process. */
static int open_devices(void)
{
    int answers[START_TRIED], rc;

    r2_cond_init(&start.come);
    rc = r2_thread_start(list_main, NULL);
    if (rc) {
        R2_WARN("RDMA devices cannot be listed: no thread (%s)", strerror(rc));
        return 0;
    }
    wait_for(answers);
    start.cut_short = !start.listed;
    if (start.cut_short)
        R2_WARN(
            "the list of RDMA devices has not come for %d s: a driver or its firmware may be "
            "dead, and hold up the kernel. Devices that are missing are left out, the job goes "
            "on over other NICs, or sockets where none is left. `ibv_devices` shows whether the "
            "list comes; NCCL_IB_DISABLE=1 saves the %d s",
            START_STEPS, START_STEPS);
    take_answers(answers);
    return r2_verbs.n_slots;
}

/* Where the list has not come to its end, a device that is not in it may be there. */
bool r2_verbs_left_out(const char *device)
{
    bool found = start.cut_short;

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
    uint8_t ip[16];

    if (n->bare)
        return strcmp(n->rdma, hca->name) == 0 && n->rdma_port == port ? 1000 : -1;
    if (!view->there)
        return -1;
    r2_nic_ip(n, ip);
    if (view->attr.link_layer == IBV_LINK_LAYER_ETHERNET) {
        if (r2_port_has(view, ip))
            return 1000;
        if (strcmp(n->rdma, hca->name) == 0 && view->n_gids)
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

    n = r2_local.n;
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];
        struct r2_hca *hca;
        struct r2_nic nic;
        uint8_t ip[16];

        pthread_mutex_init(&v->lock, NULL);
        v->slot = i < n ? r2_vnic_best(r2_local_nic(i), &v->port) : -1;
        if (v->slot < 0)
            continue;
        hca = r2_verbs.slots[v->slot].now;
        r2_local_now(i, &nic);
        r2_nic_ip(&nic, ip);
        r2_vnic_take(v, hca, ip, &hca->ports[v->port]);
        found++;
        R2_INFO("NIC %s: RDMA device %s port %d, %s, %s", r2_local_nic(i)->name, hca->name, v->port,
                v->link == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand",
                r2_port_state_text(v->state));
    }
    return found;
}

static int open_library(void)
{
    const struct r2_settings *set = r2_settings_get();
    char why[256] = "";

    if (r2_value_nccl(set->nccl_ib_disable, 0))
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
