/* The process's engine: start, NICs, contexts, end. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/loop/loop.h"
#include "io/pollers.h"
#include "settings/launch.h"
#include "topology/device.h"
#include "util/exit.h"
#include "util/lock.h"
#include "util/random.h"

#define EXIT_NS (5 * R2_NS_PER_S) /* a process that ends waits for its copies at most so long */
#define EXIT_ACKS_NS (50 * R2_NS_PER_MS)
#define EXIT_LOOK_NS (100 * R2_NS_PER_US)

const struct r2_transport_ops *r2_engine_transport = &r2_transport_mux;

static struct r2_list contexts = R2_LIST_INIT(contexts); /* r2_eng.lock: none is ever freed */
static int start_error;                                  /* once r2_eng.started */
/* 0: not known. Written under r2_eng.lock; another communicator may be starting the engine. */
static atomic_uint nccl_version, net_api;
static uint64_t first_comm; /* r2_eng.lock */

static void in_child(void)
{
    atomic_store(&r2_eng.inert, true);
    r2_log_child();
    if (!r2_eng.started) {
        r2_io_child(); /* RDMA devices are open before */
        return;
    }
    r2_eng.ops->child();
    r2_control_child(r2_eng.ctl);
    r2_locate_child();
}

static char nics_warning[128]; /* of the choice, for `status` */

static int find_nics(void)
{
    char err[1024] = "";
    int n = r2_nics_find(r2_eng.set, r2_local.nics, R2_MAX_NICS, err, sizeof(err));

    if (n < 0)
        R2_TELL(
            "no NICs: %s; NCCL uses a transport of its own, which does not survive the loss of a "
            "NIC",
            err);
    else if (r2_eng.set->mode == R2_MODE_OFF)
        R2_WARN(
            "R2CCL_MODE is off: R2CCL offers no NICs, and NCCL uses a transport of its own that "
            "does not survive the loss of a NIC; unset R2CCL_MODE to use R2CCL");
    else if (n == 0 && r2_eng.set->nics[0])
        R2_TELL("no NICs: R2CCL_NICS=%s leaves none; NCCL uses a transport of its own",
                r2_eng.set->nics);
    else if (n == 0 && r2_eng.set->nccl_socket_ifname[0])
        R2_TELL("no NICs: NCCL_SOCKET_IFNAME=%s matches no interface that is up and has an "
                "address; name one that `ip -br addr` shows, or set R2CCL_NICS; NCCL uses a "
                "transport of its own",
                r2_eng.set->nccl_socket_ifname);
    else if (n == 0)
        R2_TELL("no NICs: this node has no interface with an address but loopback, bridges and "
                "tunnels; name one in R2CCL_NICS; NCCL uses a transport of its own");
    else if (err[0]) {
        R2_TELL("%s", err);
        snprintf(nics_warning, sizeof(nics_warning), "%.127s", err);
    }
    if (n < 0 || r2_eng.set->mode == R2_MODE_OFF)
        n = 0;
    n = r2_nic_add_ports(n);
    for (int i = 0; i < n; i++) {
        r2_eng.nic_state[i].row = -1;
        atomic_init(&r2_eng.nic_state[i].place,
                    r2_local.nics[i].link_up ? R2_PLACE_UP : R2_PLACE_DOWN);
        atomic_init(&r2_eng.nic_state[i].word,
                    r2_local.nics[i].link_up ? R2_NIC_USABLE : R2_NIC_DOWN);
    }
    return n;
}

static void tell_lines(const char *text)
{
    for (; text && *text; text += strcspn(text, "\n"), text += *text == '\n')
        R2_TELL_ONE("%.*s", (int)strcspn(text, "\n"), text);
}

static void log_once(void)
{
    tell_lines(r2_settings_error());
    tell_lines(r2_settings_warnings());
    for (int i = 0; i < r2_local.n; i++) {
        char addr[64];

        r2_nic_place_text(&r2_local.nics[i], addr, sizeof(addr));
        R2_INFO("NIC %d: %s %s, %d Mbit/s%s", i, r2_local.nics[i].name, addr,
                r2_local.nics[i].speed_mbps, r2_local.nics[i].link_up ? "" : ", no link");
        if (r2_local.nics[i].silent)
            R2_WARN("NIC %s: its driver has not answered for %d s: its speed and its RDMA device "
                    "are unknown. `ethtool %s` shows whether it answers; R2CCL_NICS without it "
                    "leaves it out",
                    r2_local.nics[i].name, R2_DEVICE_SECONDS, r2_local.nics[i].ifname);
    }
}

static int init_once(void)
{
    int rc;

    if (r2_eng.inited)
        return 0;
    rc = r2_random_bytes(r2_eng.process, 16);
    if (!rc)
        rc = r2_random_bytes(r2_eng.secret, 16);
    if (rc)
        return rc;
    r2_eng.set = r2_settings_get();
    r2_log_set_verbosity(r2_eng.set->log);
    r2_eng.ops = r2_engine_transport;
    r2_eng.upper = &r2_loop_upper;
    r2_eng.pid = getpid();
    gethostname(r2_eng.host, sizeof(r2_eng.host) - 1);
    if (r2_eng.set->node_name[0])
        snprintf(r2_eng.host, sizeof(r2_eng.host), "%.63s", r2_eng.set->node_name);
    pthread_atfork(NULL, NULL, in_child); /* before: RDMA devices may take seconds to be found */
    r2_local.n = find_nics();
    r2_near_find();
    log_once();
    r2_p2pchunk_start(r2_local.n ? r2_eng.set->p2p_chunk : 0, nccl_version);
    r2_eng.inited = true;
    return 0;
}

int r2_engine_init(struct r2_ctx **ctx, uint64_t comm_id, r2_log_fn log)
{
    R2_UNCANCELLED;
    struct r2_ctx *c;
    int rc;

    *ctx = NULL;
    if (atomic_load(&r2_eng.inert))
        return -EPERM;
    c = calloc(1, sizeof(*c));
    if (!c)
        return -ENOMEM;
    if (log)
        r2_log_set(log);
    pthread_mutex_lock(&r2_eng.lock);
    rc = init_once();
    if (rc == 0) {
        if (!first_comm)
            first_comm = comm_id;
        r2_list_init(&c->conns);
        r2_list_init(&c->half_made);
        r2_list_init(&c->listens);
        r2_list_add_tail(&contexts, &c->node);
        *ctx = c;
        c = NULL;
    }
    pthread_mutex_unlock(&r2_eng.lock);
    free(c);
    return rc;
}

bool r2_engine_in_child(void)
{
    return atomic_load(&r2_eng.inert);
}

void r2_engine_called_by(unsigned version, unsigned api)
{
    if (r2_engine_in_child()) /* the lock may be that of a thread which is not here */
        return;
    pthread_mutex_lock(&r2_eng.lock);
    if (version || !nccl_version) { /* the shim calls too, and says no version */
        nccl_version = version;
        net_api = api;
    }
    pthread_mutex_unlock(&r2_eng.lock);
}

void r2_engine_ask_traffic_class(int asked)
{
    if (!r2_engine_in_child())
        r2_traffic_class_ask(asked);
}

int r2_engine_devices(int *count)
{
    *count = r2_local.n;
    return 0;
}

const struct r2_nic *r2_engine_nic(int dev)
{
    return r2_local_nic(dev);
}

unsigned r2_engine_memory(int dev)
{
    unsigned kinds = R2_MEMORY_HOST | R2_MEMORY_DEVICE | R2_MEMORY_DMABUF;

    if (dev < 0 || dev >= r2_local.n || r2_eng.set->gpu_memory != R2_GPU_MEMORY_DIRECT)
        return R2_MEMORY_HOST;
    for (int i = 0; i < r2_local.n; i++)
        kinds &= r2_eng.ops->memory(i);
    return kinds | R2_MEMORY_HOST;
}

static void open_control(uint64_t comm)
{
    static const char *const modes[] = {"off",     "migrate", "balance", "r2ccl-allreduce",
                                        "optimal", "auto"};
    struct r2_control_info info = {
        .host = r2_eng.host,
        .job = r2_eng.set->job,
        .rank = -1,
        .comm = comm,
        .mode = modes[r2_eng.set->mode],
        .verify = r2_eng.set->verify,
        .nccl_version = nccl_version,
        .net_api = net_api,
        .shm_group = r2_eng.set->shm_group,
        .hidden = !r2_eng.set->shm,
        .plan = r2_eng.set->allreduce == R2_ALLREDUCE_DIRECT
                    ? R2_SEG_PLAN_DIRECT
                    : (enum r2_seg_plan)(R2_SEG_PLAN_OFF + (int)r2_eng.set->plan),
    };
    int rc;

    memcpy(info.process_id, r2_eng.process, 16);
    rc = r2_control_open(&r2_eng.ctl, &info);
    if (rc)
        R2_TELL("no control segment (%zu KiB in /dev/shm: %s): r2ccl-ctl cannot see or steer this "
                "process; give /dev/shm room, and this user the right to write there",
                sizeof(struct r2_segment) / 1024, strerror(-rc));
    else if (r2_control_segment(r2_eng.ctl)->process.warning[0])
        R2_TELL("R2CCL_SHM_GROUP=%s: %s", r2_eng.set->shm_group,
                r2_control_segment(r2_eng.ctl)->process.warning);
    else if (nics_warning[0])
        r2_control_set_warning(r2_eng.ctl, nics_warning);
    r2_eng.n = r2_control_counters(r2_eng.ctl);
    r2_eng.g = r2_control_gauges(r2_eng.ctl);
}

static int start_locked(void)
{
    int threads = r2_settings_io_threads(r2_eng.set, r2_local.n), rc;

    r2_io_fds_raise();
    rc = r2_io_start(threads, r2_eng.set->cpus, r2_eng.set->spin_ns);
    if (rc) {
        R2_WARN("cannot start I/O threads: %s", strerror(-rc));
        return rc;
    }
    if (r2_log_defer()) /* lines are said under peers' locks, and by threads that must not wait */
        R2_WARN("cannot start a thread for log lines: a slow reader of the log delays paths");
    open_control(first_comm);
    r2_pollers_start(r2_eng.ctl, r2_eng.set);
    r2_gauge(&r2_eng.g->threads, (uint64_t)r2_io_count());
    rc = r2_eng.ops->start(&r2_engine_events, r2_eng.process);
    if (rc) {
        R2_TELL("no NIC can be used (%s): NCCL ends with a system error", strerror(-rc));
        return rc;
    }
    r2_eng.device_memory = r2_local.n && r2_engine_memory(0) != R2_MEMORY_HOST;
    r2_nicstate_start(r2_now_ns());
    r2_nicfaults_start(r2_now_ns());
    r2_locate_start();
    r2_housekeeping_start();
    return 0;
}

int r2_engine_start(void)
{
    R2_UNCANCELLED;
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    int rc;

    if (atomic_load(&r2_eng.inert))
        return -EPERM;
    pthread_mutex_lock(&once);
    if (!r2_eng.started) {
        start_error = start_locked();
        r2_eng.started = true;
    }
    rc = start_error;
    pthread_mutex_unlock(&once);
    return rc;
}

/* ---- the end of the process */

static void wait_until_none(int (*left)(void), uint64_t until)
{
    while (left() > 0 && r2_now_ns() < until)
        nanosleep(&(struct timespec){.tv_nsec = EXIT_LOOK_NS}, NULL);
}

/* What was done for the application must not be lost with the process while a NIC fails. The I/O
 * threads go on meanwhile; no lock is waited for, whoever calls exit may hold one. */
__attribute__((destructor(R2_EXIT_ENGINE))) static void at_exit(void)
{
    uint64_t ns = EXIT_NS;

    if (atomic_load(&r2_eng.inert) || r2_eng.pid != getpid())
        return;
    for (uint64_t until = r2_now_ns() + EXIT_ACKS_NS; r2_acks_unsaid() && r2_now_ns() < until;)
        nanosleep(&(struct timespec){.tv_nsec = EXIT_LOOK_NS}, NULL);
    if (r2_buffered_unacked() <= 0 && r2_buffered_lingering() <= 0)
        return;
    if (r2_eng.set->no_path_timeout_ns < ns)
        ns = r2_eng.set->no_path_timeout_ns;
    ns += r2_now_ns();
    wait_until_none(r2_buffered_unacked, ns);
    if (r2_buffered_unacked() > 0)
        R2_WARN("%d small messages were not acknowledged before this process ended",
                r2_buffered_unacked());
    else
        wait_until_none(r2_buffered_lingering, ns);
}
