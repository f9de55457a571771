/* NIC, peer and path rows. */
#include <string.h>

#include "control/impl.h"

static struct r2_seg_nic *nic_row(struct r2_control *ctl, int nic)
{
    return nic >= 0 && nic < R2_SEG_MAX_NICS ? &ctl->seg->nics[nic] : NULL;
}

static struct r2_seg_peer *peer_row(struct r2_control *ctl, int peer)
{
    return peer >= 0 && peer < R2_SEG_MAX_PEERS ? &ctl->seg->peers[peer] : NULL;
}

static struct r2_seg_path *path_row(struct r2_control *ctl, int path)
{
    return path >= 0 && path < R2_SEG_MAX_PATHS ? &ctl->seg->paths[path] : NULL;
}

/* Takes a free row out of a table and leaves it begun (r2_row_begin), or returns -1. Every row
 * starts with seq and used, as struct r2_seg_nic does. */
static int row_take(void *table, size_t stride, int rows)
{
    for (int i = 0; i < rows; i++) {
        struct r2_seg_nic *row = (void *)((char *)table + (size_t)i * stride);

        if (__atomic_load_n(&row->used, __ATOMIC_RELAXED))
            continue;
        r2_row_begin(&row->seq);
        if (!__atomic_load_n(&row->used, __ATOMIC_RELAXED))
            return i;
        r2_row_end(&row->seq);
    }
    return -1;
}

_Static_assert(offsetof(struct r2_seg_peer, used) == offsetof(struct r2_seg_nic, used) &&
                   offsetof(struct r2_seg_path, used) == offsetof(struct r2_seg_nic, used),
               "rows start alike");

static void set_since(uint64_t *real_ns, uint64_t *mono_ns)
{
    r2_row_u64(real_ns, r2_control_clock(CLOCK_REALTIME));
    r2_row_u64(mono_ns, r2_control_clock(CLOCK_MONOTONIC));
}

static void zero_words(void *field, size_t n)
{
    for (uint64_t *word = field; n >= 8; word++, n -= 8)
        r2_row_u64(word, 0);
}

struct r2_seg_nic_counters *r2_control_nic_counters(struct r2_control *ctl, int nic)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    return row ? &row->n : &ctl->no_nic;
}

struct r2_seg_path_counters *r2_control_path_counters(struct r2_control *ctl, int path)
{
    struct r2_seg_path *row = path_row(ctl, path);

    return row ? &row->n : &ctl->no_path;
}

int r2_control_nic_add(struct r2_control *ctl, const struct r2_control_nic *nic)
{
    int i = row_take(ctl->seg->nics, sizeof(struct r2_seg_nic), R2_SEG_MAX_NICS);
    struct r2_seg_nic *row = nic_row(ctl, i);

    if (!row)
        return -1;
    r2_row_text(row->name, sizeof(row->name), nic->name);
    r2_row_text(row->addr, sizeof(row->addr), nic->addr);
    r2_row_text(row->ifname, sizeof(row->ifname), nic->ifname);
    r2_row_text(row->pci_path, sizeof(row->pci_path), nic->pci_path);
    r2_row_text(row->cause, sizeof(row->cause), NULL);
    r2_row_text(row->fault, sizeof(row->fault), NULL);
    r2_row_u32(&row->speed_mbps, nic->speed_mbps);
    r2_row_u32((uint32_t *)&row->numa, (uint32_t)nic->numa);
    r2_row_u32(&row->weight, nic->weight);
    r2_row_u32(&row->state, (uint32_t)nic->state);
    r2_row_u32(&row->link, (uint32_t)nic->link);
    set_since(&row->since_real_ns, &row->since_mono_ns);
    zero_words(&row->n, sizeof(row->n));
    r2_row_u32(&row->used, 1);
    r2_row_end(&row->seq);
    r2_row_mark(ctl, R2_SEG_KIND_NICS, (uint32_t)i);
    return i;
}

void r2_control_nic_state(struct r2_control *ctl, int nic, enum r2_seg_nic_state state,
                          const char *cause)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);
    uint32_t before;

    if (!row)
        return;
    r2_row_begin(&row->seq);
    before = __atomic_load_n(&row->state, __ATOMIC_RELAXED);
    r2_row_u32(&row->state, (uint32_t)state);
    r2_row_cause(row->cause, sizeof(row->cause), cause);
    if (before != (uint32_t)state)
        set_since(&row->since_real_ns, &row->since_mono_ns);
    r2_row_end(&row->seq);
    if (before == (uint32_t)state)
        return;
    if (state == R2_SEG_NIC_FAILED || state == R2_SEG_NIC_PROBING) {
        if (before == R2_SEG_NIC_FAILED || before == R2_SEG_NIC_PROBING ||
            before == R2_SEG_NIC_DAMPED || before == R2_SEG_NIC_DRAINED)
            return; /* the same failure, or none */
        r2_count(&row->n.failures, 1);
        r2_count(&ctl->seg->counters.nic_failures, 1);
    } else if (state == R2_SEG_NIC_HEALTHY && before != R2_SEG_NIC_UNKNOWN &&
               before != R2_SEG_NIC_SUSPECT) {
        r2_count(&row->n.recoveries, 1);
        r2_count(&ctl->seg->counters.nic_recoveries, 1);
    }
}

void r2_control_nic_link(struct r2_control *ctl, int nic, enum r2_seg_link link)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (row)
        r2_row_u32(&row->link, (uint32_t)link);
}

void r2_control_nic_draining(struct r2_control *ctl, int nic, uint32_t paths)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (row)
        r2_row_u32(&row->draining, paths);
}

void r2_control_nic_addr(struct r2_control *ctl, int nic, const char *addr, uint32_t speed_mbps)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    r2_row_text(row->addr, sizeof(row->addr), addr);
    r2_row_u32(&row->speed_mbps, speed_mbps);
    r2_row_end(&row->seq);
}

void r2_control_nic_weight(struct r2_control *ctl, int nic, uint32_t weight)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (row)
        r2_row_u32(&row->weight, weight);
}

void r2_control_nic_fault(struct r2_control *ctl, int nic, const char *text)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    r2_row_text(row->fault, sizeof(row->fault), text);
    r2_row_end(&row->seq);
}

/* Of a NIC's row or a path's. */
static void set_damping(uint32_t *seq, uint32_t *to, uint64_t *reuse_to, uint32_t penalty,
                        uint64_t reuse_mono_ns)
{
    if (*to == penalty && !*reuse_to == !reuse_mono_ns)
        return; /* it fades by itself: most looks find nothing new */
    r2_row_begin(seq);
    r2_row_u32(to, penalty);
    r2_row_u64(reuse_to, reuse_mono_ns);
    r2_row_end(seq);
}

void r2_control_nic_damping(struct r2_control *ctl, int nic, uint32_t penalty,
                            uint64_t reuse_mono_ns)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (row)
        set_damping(&row->seq, &row->penalty, &row->reuse_mono_ns, penalty, reuse_mono_ns);
}

/* Name, interface and address of a row are written once, before `used` (the address now and then
 * again): the acquire pairs with row_take's user storing `used`. */
int r2_control_nic_find(struct r2_control *ctl, const char *name)
{
    if (!*name)
        return -1;
    for (int i = 0; i < R2_SEG_MAX_NICS; i++) {
        struct r2_seg_nic *row = &ctl->seg->nics[i];

        if (__atomic_load_n(&row->used, __ATOMIC_ACQUIRE) &&
            !strncmp(row->name, name, sizeof(row->name) - 1))
            return i;
    }
    for (int i = 0; i < R2_SEG_MAX_NICS; i++) {
        struct r2_seg_nic *row = &ctl->seg->nics[i];
        bool same;

        if (!__atomic_load_n(&row->used, __ATOMIC_ACQUIRE))
            continue;
        r2_row_begin(&row->seq);
        same = !strncmp(row->ifname, name, sizeof(row->ifname)) ||
               !strncmp(row->addr, name, sizeof(row->addr));
        r2_row_end(&row->seq);
        if (same)
            return i;
    }
    return -1;
}

int r2_control_peer_add(struct r2_control *ctl, const struct r2_control_peer *peer)
{
    int i = row_take(ctl->seg->peers, sizeof(struct r2_seg_peer), R2_SEG_MAX_PEERS);
    struct r2_seg_peer *row = peer_row(ctl, i);

    if (!row) {
        r2_count(&ctl->seg->counters.rows_refused, 1);
        return -1;
    }
    r2_row_bytes(row->process_id, peer->process_id, sizeof(row->process_id));
    r2_row_text(row->host, sizeof(row->host), peer->host);
    r2_row_text(row->cause, sizeof(row->cause), NULL);
    r2_row_u32(&row->pid, peer->pid);
    r2_row_u32(&row->state, (uint32_t)peer->state);
    r2_row_u32(&row->direction, R2_SEG_DIR_NONE);
    r2_row_u32(&row->serial, row->serial + 1);
    r2_row_u64(&row->connections, 0);
    r2_row_u64(&row->heard_mono_ns, 0);
    r2_row_u64(&row->waits_mono_ns, 0);
    r2_row_u64(&row->gives_up_mono_ns, 0);
    r2_row_u32(&row->waits_for, R2_SEG_WAITS_FOR_PATH);
    r2_row_u32(&row->rank, 0);
    set_since(&row->since_real_ns, &row->since_mono_ns);
    r2_row_u32(&row->used, 1);
    r2_row_end(&row->seq);
    r2_row_mark(ctl, R2_SEG_KIND_PEERS, (uint32_t)i);
    r2_gauge_add(&ctl->seg->gauges.peers, 1);
    return i;
}

void r2_control_peer_state(struct r2_control *ctl, int peer, enum r2_seg_peer_state state,
                           const char *cause)
{
    struct r2_seg_peer *row = peer_row(ctl, peer);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    if (__atomic_load_n(&row->state, __ATOMIC_RELAXED) != (uint32_t)state)
        set_since(&row->since_real_ns, &row->since_mono_ns);
    r2_row_u32(&row->state, (uint32_t)state);
    r2_row_cause(row->cause, sizeof(row->cause), cause);
    r2_row_end(&row->seq);
}

void r2_control_peer_connections(struct r2_control *ctl, int peer, uint32_t open,
                                 enum r2_seg_direction direction)
{
    struct r2_seg_peer *row = peer_row(ctl, peer);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    r2_row_u64(&row->connections, open);
    r2_row_u32(&row->direction, (uint32_t)direction);
    r2_row_end(&row->seq);
}

void r2_control_peer_waits(struct r2_control *ctl, int peer, enum r2_seg_waits_for what,
                           uint64_t since_mono_ns, uint64_t gives_up_mono_ns)
{
    struct r2_seg_peer *row = peer_row(ctl, peer);

    if (!row)
        return;
    __atomic_store_n(&row->waits_for, (uint32_t)what, __ATOMIC_RELAXED);
    r2_gauge(&row->gives_up_mono_ns, gives_up_mono_ns);
    r2_gauge(&row->waits_mono_ns, since_mono_ns);
}

void r2_control_peer_heard(struct r2_control *ctl, int peer, uint64_t mono_ns)
{
    struct r2_seg_peer *row = peer_row(ctl, peer);

    if (row)
        r2_gauge(&row->heard_mono_ns, mono_ns);
}

void r2_control_peer_remove(struct r2_control *ctl, int peer)
{
    struct r2_seg_peer *row = peer_row(ctl, peer);
    uint32_t paths =
        __atomic_load_n(&ctl->seg->header.tables[R2_SEG_KIND_PATHS - 1].high, __ATOMIC_ACQUIRE);
    uint32_t was;

    if (!row)
        return;
    for (uint32_t i = 0; i < paths && i < R2_SEG_MAX_PATHS; i++) {
        struct r2_seg_path *path = &ctl->seg->paths[i];

        if (__atomic_load_n(&path->used, __ATOMIC_ACQUIRE) &&
            __atomic_load_n(&path->peer, __ATOMIC_RELAXED) == (uint32_t)peer)
            r2_control_path_remove(ctl, (int)i);
    }
    r2_row_begin(&row->seq);
    was = __atomic_load_n(&row->used, __ATOMIC_RELAXED);
    r2_row_u32(&row->used, 0);
    r2_row_end(&row->seq);
    if (was)
        r2_gauge_add(&ctl->seg->gauges.peers, -1);
}

static bool carries(uint32_t state)
{
    return state == R2_SEG_PATH_UP || state == R2_SEG_PATH_RAMPING;
}

void r2_control_nic_rdma(struct r2_control *ctl, int nic, const struct r2_control_rdma *rdma)
{
    struct r2_seg_nic *row = nic_row(ctl, nic);

    if (!row || (row->rdma_port == rdma->port && row->rdma_state == rdma->state &&
                 row->rdma_phys == rdma->phys && row->rdma_link == rdma->link &&
                 row->rdma_gbps == rdma->gbps && row->queue_pairs == rdma->queue_pairs &&
                 row->rdma_lid == rdma->lid && memcmp(row->gid, rdma->gid, sizeof(row->gid)) == 0))
        return;
    r2_row_begin(&row->seq);
    r2_row_text(row->rdma_device, sizeof(row->rdma_device), rdma->device);
    r2_row_u32(&row->rdma_port, rdma->port);
    r2_row_u32(&row->rdma_state, rdma->state);
    r2_row_u32(&row->rdma_phys, rdma->phys);
    r2_row_u32(&row->rdma_link, rdma->link);
    r2_row_u32(&row->rdma_gbps, rdma->gbps);
    r2_row_u32(&row->rdma_lid, rdma->lid);
    r2_row_u32(&row->queue_pairs, rdma->queue_pairs);
    r2_row_bytes(row->gid, rdma->gid, sizeof(row->gid));
    r2_row_end(&row->seq);
}

void r2_control_path_via(struct r2_control *ctl, int path, enum r2_seg_via via)
{
    struct r2_seg_path *row = path_row(ctl, path);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    r2_row_u32(&row->via, (uint32_t)via);
    r2_row_end(&row->seq);
}

int r2_control_path_add(struct r2_control *ctl, int peer, int nic, const char *remote_nic)
{
    int i = row_take(ctl->seg->paths, sizeof(struct r2_seg_path), R2_SEG_MAX_PATHS);
    struct r2_seg_path *row = path_row(ctl, i);

    if (!row) {
        r2_count(&ctl->seg->counters.rows_refused, 1);
        return -1;
    }
    r2_row_u32(&row->peer, (uint32_t)peer);
    r2_row_u32(&row->nic, (uint32_t)nic);
    r2_row_u32(&row->state, R2_SEG_PATH_NEVER_REACHED);
    r2_row_u32(&row->serial, row->serial + 1);
    r2_row_u64(&row->generation, 0);
    r2_row_u32(&row->weight, 0);
    r2_row_u32(&row->streams, 0);
    r2_row_u32(&row->via, R2_SEG_VIA_TCP);
    r2_row_u32(&row->penalty, 0);
    r2_row_u64(&row->reuse_mono_ns, 0);
    r2_row_u32(&row->spare, 0);
    r2_row_u32(&row->loss_ppm, 0);
    r2_row_u64(&row->retransmits, 0);
    r2_row_text(row->remote_nic, sizeof(row->remote_nic), remote_nic);
    r2_row_text(row->cause, sizeof(row->cause), NULL);
    set_since(&row->since_real_ns, &row->since_mono_ns);
    zero_words(&row->n, sizeof(row->n));
    r2_row_u32(&row->used, 1);
    r2_row_end(&row->seq);
    r2_row_mark(ctl, R2_SEG_KIND_PATHS, (uint32_t)i);
    r2_gauge_add(&ctl->seg->gauges.paths_total, 1);
    return i;
}

void r2_control_path_state(struct r2_control *ctl, int path, enum r2_seg_path_state state,
                           uint64_t generation, const char *cause)
{
    struct r2_seg_path *row = path_row(ctl, path);
    uint32_t before;

    if (!row)
        return;
    r2_row_begin(&row->seq);
    before = __atomic_load_n(&row->state, __ATOMIC_RELAXED);
    r2_row_u32(&row->state, (uint32_t)state);
    r2_row_u64(&row->generation, generation);
    r2_row_cause(row->cause, sizeof(row->cause), cause);
    if (before != (uint32_t)state)
        set_since(&row->since_real_ns, &row->since_mono_ns);
    r2_row_end(&row->seq);
    if (carries(state) != carries(before))
        r2_gauge_add(&ctl->seg->gauges.paths_up, carries(state) ? 1 : -1);
    if (state == R2_SEG_PATH_DOWN && before != R2_SEG_PATH_DOWN) {
        struct r2_seg_nic *nic = nic_row(ctl, (int)__atomic_load_n(&row->nic, __ATOMIC_RELAXED));

        r2_count(&row->n.failures, 1);
        r2_count(&ctl->seg->counters.path_failures, 1);
        if (nic) /* the path's row goes with its peer, this one stays */
            r2_count(&nic->n.errors, 1);
    } else if (state == R2_SEG_PATH_UP && before != R2_SEG_PATH_UP &&
               before != R2_SEG_PATH_SUSPECT &&
               __atomic_load_n(&row->n.failures, __ATOMIC_RELAXED) > 0) {
        r2_count(&ctl->seg->counters.path_recoveries, 1);
    }
}

void r2_control_path_weight(struct r2_control *ctl, int path, uint32_t weight, uint32_t streams)
{
    struct r2_seg_path *row = path_row(ctl, path);

    if (!row || (__atomic_load_n(&row->weight, __ATOMIC_RELAXED) == weight &&
                 __atomic_load_n(&row->streams, __ATOMIC_RELAXED) == streams))
        return;
    r2_row_begin(&row->seq);
    r2_row_u32(&row->weight, weight);
    r2_row_u32(&row->streams, streams);
    r2_row_end(&row->seq);
}

void r2_control_path_spare(struct r2_control *ctl, int path, bool spare)
{
    struct r2_seg_path *row = path_row(ctl, path);

    if (!row)
        return;
    r2_row_begin(&row->seq);
    r2_row_u32(&row->spare, spare);
    r2_row_end(&row->seq);
}

void r2_control_path_resent(struct r2_control *ctl, int path, uint64_t resent, uint32_t ppm)
{
    struct r2_seg_path *row = path_row(ctl, path);

    if (!row)
        return;
    r2_row_u64(&row->retransmits, resent);
    r2_row_u32(&row->loss_ppm, ppm);
}

void r2_control_path_damping(struct r2_control *ctl, int path, uint32_t penalty,
                             uint64_t reuse_mono_ns)
{
    struct r2_seg_path *row = path_row(ctl, path);

    if (row)
        set_damping(&row->seq, &row->penalty, &row->reuse_mono_ns, penalty, reuse_mono_ns);
}

void r2_control_path_remove(struct r2_control *ctl, int path)
{
    struct r2_seg_path *row = path_row(ctl, path);
    uint32_t was, state;

    if (!row)
        return;
    r2_row_begin(&row->seq);
    was = __atomic_load_n(&row->used, __ATOMIC_RELAXED);
    state = __atomic_load_n(&row->state, __ATOMIC_RELAXED);
    r2_row_u32(&row->used, 0);
    r2_row_u32(&row->state, R2_SEG_PATH_NEVER_REACHED);
    r2_row_end(&row->seq);
    if (was)
        r2_gauge_add(&ctl->seg->gauges.paths_total, -1);
    if (was && carries(state))
        r2_gauge_add(&ctl->seg->gauges.paths_up, -1);
}
