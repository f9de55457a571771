/* The progress thread: the only one that calls isend, irecv and test. It sleeps when no operation
 * is active, tests strictly the oldest request of a connection, and stops at the first error. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "nccl_abi/nccl_profiler_abi.h"
#include "profiler.h"

#define POISON ((void *)0xa5a5a5a5a5a5a5a5ull)
#define POISON_INT ((int)0xa5a5a5a5)

enum { SEND_GPU_WAIT = 8, SEND_WAIT, RECV_WAIT, RECV_GPU_WAIT = 12 }; /* the profiler's states */

static const char *const proto_names[HN_PROTOS] = {"LL", "LL128", "Simple"};

static char *slot_at(struct hn_lane *lane, uint64_t number)
{
    return lane->base + number % (uint64_t)lane->depth * lane->slot_bytes;
}

static int plugin_error(const struct hn_conn *c, const char *call, int rc)
{
    hn_util_fail((ncclResult_t)rc, "NET/%s: %s %s rank %d, channel %d, returned %d",
                 hn_net_name(c->comm->net->net), call, c->send ? "to" : "from", c->peer, c->channel,
                 rc);
    return rc;
}

static int misbehaved(const struct hn_conn *c, const char *what, uint64_t number, long detail)
{
    hn_util_fail(ncclInternalError,
                 "NET/%s broke its contract: %s (rank %d %s rank %d, channel %d, message %llu, "
                 "detail %ld)",
                 hn_net_name(c->comm->net->net), what, c->comm->rank, c->send ? "to" : "from",
                 c->peer, c->channel, (unsigned long long)number, detail);
    return ncclInternalError;
}

/* test() of the oldest request of the connection: 1 done, 0 not, else *rc is set. */
static bool oldest_done(struct hn_conn *c, struct hn_slot *slot, int *size, int *rc)
{
    int done = POISON_INT;
    *size = POISON_INT;
    if (!c->send)
        *size = 0; /* NCCL clears it for receives only */
    *rc = hn_net_test(c->comm->net, slot->request, &done, size);
    if (*rc)
        *rc = plugin_error(c, c->send ? "test of a send" : "test of a receive", *rc);
    else if (done == POISON_INT)
        *rc = misbehaved(c, "test did not write done", c->tested, 0);
    return !*rc && done;
}

static int progress_send(struct hn_pxop *op, bool *moved)
{
    struct hn_conn *c = op->conn;
    struct hn_lane *lane = &c->lanes[op->proto];
    int rc = 0, size;
    /* Pairs with the release after the GPU filled the slot. */
    uint64_t tail = atomic_load_explicit(&c->tail, memory_order_acquire);
    while (op->posted < op->total && c->posted < tail) {
        struct hn_slot *slot = &c->slots[c->posted % HN_MAX_DEPTH];
        slot->request = POISON;
        if (!op->begun) {
            hn_prof_message_begin(op, slot);
            hn_prof_message_state(op, slot, SEND_GPU_WAIT);
            hn_prof_message_state(op, slot, R2_PROF_SEND_PEER_WAIT);
        }
        op->begun = true;
        rc = hn_net_isend(c->comm->net, c->net_comm, slot_at(lane, c->posted), slot->bytes,
                          c->comm->rank, lane->mhandle, &slot->request);
        if (rc)
            return plugin_error(c, "isend", rc);
        if (slot->request == POISON)
            return misbehaved(c, "isend did not write request", c->posted, 0);
        if (!slot->request)
            break;
        hn_prof_message_state(op, slot, SEND_WAIT);
        op->begun = false;
        c->posted++;
        op->posted++;
        *moved = true;
    }
    while (c->tested < c->posted) {
        struct hn_slot *slot = &c->slots[c->tested % HN_MAX_DEPTH];
        if (!oldest_done(c, slot, &size, &rc))
            break;
        hn_scribble(slot_at(lane, c->tested), slot->bytes);
        hn_prof_message_end(slot);
        c->tested++;
        op->finished++;
        *moved = true;
        /* Pairs with the acquire before the GPU fills the slot again. */
        atomic_store_explicit(&c->head, c->tested, memory_order_release);
    }
    return rc;
}

static int post_receive(struct hn_pxop *op, bool *posted)
{
    struct hn_conn *c = op->conn;
    struct hn_lane *lane = &c->lanes[op->proto];
    uint64_t index = c->posted % (uint64_t)lane->depth;
    struct hn_slot *slot = &c->slots[c->posted % HN_MAX_DEPTH];
    char *buffer = slot_at(lane, c->posted);
    size_t size = lane->slot_bytes;
    if (op->exact_left != SIZE_MAX && op->exact_left < size)
        size = op->exact_left;
    long changed = lane->scribbled[index] ? hn_scribble_check(buffer, lane->slot_bytes) : -1;
    if (changed >= 0)
        return misbehaved(c, "a receive buffer was written after its message was done", c->posted,
                          changed);
    lane->scribbled[index] = false;
    slot->request = op->proto == HN_SIMPLE ? POISON : (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION;
    void *before = c->comm->net->net->version < 9 && slot->request != POISON ? NULL : slot->request;
    int rc = hn_net_irecv(c->comm->net, c->net_comm, buffer, size, c->peer, lane->mhandle,
                          &slot->request);
    if (rc)
        return plugin_error(c, "irecv", rc);
    if (before && slot->request == before)
        return misbehaved(c, "irecv did not write request", c->posted, 0);
    *posted = slot->request != NULL;
    if (!*posted) {
        lane->scribbled[index] = changed < 0 && hn_scribble_check(buffer, lane->slot_bytes) < 0;
        return 0;
    }
    if (op->exact_left != SIZE_MAX)
        op->exact_left -= size;
    hn_prof_message_begin(op, slot);
    hn_prof_message_state(op, slot, RECV_WAIT);
    c->posted++;
    op->posted++;
    return 0;
}

/* Slots that are both tested and consumed are checked, scribbled and free again. */
static int retire(struct hn_pxop *op, bool *moved)
{
    struct hn_conn *c = op->conn;
    struct hn_lane *lane = &c->lanes[op->proto];
    /* Pairs with the release after the GPU consumed the slot. */
    uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire);
    while (c->retired < c->tested && c->retired < head) {
        uint64_t index = c->retired % (uint64_t)lane->depth;
        struct hn_slot *slot = &c->slots[c->retired % HN_MAX_DEPTH];
        size_t want = atomic_load_explicit(&slot->want, memory_order_relaxed);
        if (slot->bytes != want)
            return misbehaved(c, "test reported another size than was sent", c->retired,
                              (long)slot->bytes - (long)want);
        if (op->proto != HN_SIMPLE) {
            hn_scribble(slot_at(lane, c->retired), lane->slot_bytes);
            lane->scribbled[index] = true;
        }
        hn_prof_message_end(slot);
        c->retired++;
        op->finished++;
        *moved = true;
    }
    return 0;
}

static int progress_recv(struct hn_pxop *op, bool *moved)
{
    struct hn_conn *c = op->conn;
    struct hn_lane *lane = &c->lanes[op->proto];
    int rc = 0, size;
    while (op->posted < op->total && c->posted - c->retired < (uint64_t)lane->depth) {
        bool posted = false;
        rc = post_receive(op, &posted);
        if (rc || !posted)
            break;
        *moved = true;
    }
    while (!rc && c->tested < c->posted) {
        struct hn_slot *slot = &c->slots[c->tested % HN_MAX_DEPTH];
        if (!oldest_done(c, slot, &size, &rc))
            break;
        slot->bytes = (size_t)size;
        hn_prof_message_state(op, slot, R2_PROF_RECV_FLUSH_WAIT);
        hn_prof_message_state(op, slot, RECV_GPU_WAIT);
        c->tested++;
        *moved = true;
        /* Pairs with the acquire before the GPU consumes a Simple slot. */
        atomic_store_explicit(&c->tail, c->tested, memory_order_release);
    }
    return rc ? rc : retire(op, moved);
}

/* One round over the active operations; finished ones are taken out. */
static int round_of(struct ncclComm *comm, struct hn_pxop **active, bool *moved, int *finished)
{
    for (struct hn_pxop **link = active; *link;) {
        struct hn_pxop *op = *link;
        if (op->conn->current && op->conn->current != op) { /* one by one on a connection */
            link = &op->next;
            continue;
        }
        if (!op->conn->current) {
            op->conn->current = op;
            hn_net_set_attr(comm->net, 1u << op->func, 1u << op->proto);
        }
        int rc = op->conn->send ? progress_send(op, moved) : progress_recv(op, moved);
        if (rc)
            return rc;
        if (op->finished == op->total) {
            op->conn->current = NULL;
            hn_prof_work_end(op);
            *link = op->next;
            free(op);
            (*finished)++;
        } else {
            link = &op->next;
        }
    }
    if (hn_net_profiler_misused())
        return hn_util_fail(ncclInternalError, "the plugin called the profiler without a handle");
    return 0;
}

/* Takes what is new; sleeps while nothing is active. False: time to end. */
static bool fetch(struct ncclComm *comm, struct hn_pxop **active, int finished,
                  struct hn_idle *idle)
{
    pthread_mutex_lock(&comm->lock);
    comm->px_active -= finished;
    if (finished && !comm->px_active)
        pthread_cond_broadcast(&comm->cond);
    while (!comm->quit_progress && !atomic_load(&comm->stop) && !*active && !comm->px_new) {
        pthread_cond_wait(&comm->cond, &comm->lock);
        idle->since = 0;
    }
    struct hn_pxop **end = active;
    while (*end)
        end = &(*end)->next;
    struct hn_pxop *fresh = *end = comm->px_new;
    comm->px_new = NULL;
    bool go_on = !comm->quit_progress && !atomic_load(&comm->stop);
    pthread_mutex_unlock(&comm->lock);
    for (; fresh; fresh = fresh->next)
        hn_prof_work_begin(fresh);
    return go_on;
}

static void *progress_main(void *arg)
{
    struct ncclComm *comm = arg;
    struct hn_pxop *active = NULL;
    struct hn_idle idle = {0};
    int finished = 0;
    while (fetch(comm, &active, finished, &idle)) {
        bool moved = false;
        finished = 0;
        int rc = round_of(comm, &active, &moved, &finished);
        if (rc) {
            hn_comm_fail(comm, (ncclResult_t)rc);
            break;
        }
        hn_util_idle(&idle, moved);
    }
    while (active) {
        HN_INFO("rank %d: %s operation with rank %d, channel %d ends unfinished: %llu of %llu",
                comm->rank, proto_names[active->proto], active->conn->peer, active->conn->channel,
                (unsigned long long)active->finished, (unsigned long long)active->total);
        struct hn_pxop *op = active;
        active = op->next;
        free(op);
    }
    return NULL;
}

void hn_progress_add(struct ncclComm *comm, struct hn_pxop *ops)
{
    pthread_mutex_lock(&comm->lock);
    struct hn_pxop **end = &comm->px_new;
    while (*end)
        end = &(*end)->next;
    *end = ops;
    for (; ops; ops = ops->next)
        comm->px_active++;
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
}

int hn_progress_start(struct ncclComm *comm)
{
    if (pthread_create(&comm->progress, NULL, progress_main, comm))
        return -1;
    comm->threads_started |= 2;
    return 0;
}

void hn_progress_stop(struct ncclComm *comm)
{
    if (!(comm->threads_started & 2))
        return;
    pthread_mutex_lock(&comm->lock);
    comm->quit_progress = true;
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->progress, NULL);
    comm->threads_started &= ~2;
    while (comm->px_new) {
        struct hn_pxop *op = comm->px_new;
        comm->px_new = op->next;
        free(op);
    }
}
