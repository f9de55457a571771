/* NICs of this node: link events, the operator's word, and what the engine does about them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"
#include "engine/locate/locate.h"

#define HOUSE_NS (20 * R2_NS_PER_MS)

bool r2_nic_usable(int nic)
{
    return atomic_load(&r2_eng.nic_state[nic].usable);
}

static void tell_peer(struct r2_peer *p, int nic, bool usable, int err, const char *cause)
{
    struct r2_path *via;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];

        if (path->lnic != nic)
            continue;
        if (!usable && path->ep)
            r2_path_fail(path, path->gen, err, cause);
        else if (usable)
            path->next_at = 0;
    }
    via = r2_path_for_ctrl(p, -1, -1);
    if (via)
        r2_out_nic(via, nic, err);
    if (p->resync_wanted && p->out && p->n_up)
        r2_peer_resync(p);
    r2_peer_unlock(p);
    r2_peer_wake(p);
}

static void nic_change(int nic, bool usable, int err, const char *cause)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    struct r2_control_event ev = {
        .event = usable ? R2_EV_NIC_UP : R2_EV_NIC_DOWN, .nic = r2_nic_name(nic), .cause = cause};
    struct r2_peer **peers;
    int n;

    if (atomic_load(&s->usable) == usable)
        return;
    s->epoch++;
    atomic_store(&s->usable, usable);
    r2_control_nic_state(r2_eng.ctl, s->row, usable ? R2_SEG_NIC_HEALTHY : R2_SEG_NIC_FAILED,
                         cause);
    r2_count(usable ? &r2_eng.n->nic_recoveries : &r2_eng.n->nic_failures, 1);
    r2_control_journal(r2_eng.ctl, &ev);
    R2_INFO("NIC %s is %s: %s", r2_nic_name(nic), usable ? "usable again" : "down", cause);
    r2_locate_nic_changed(nic);
    peers = r2_peer_all(&n);
    for (int i = 0; i < n; i++) {
        tell_peer(peers[i], nic, usable, err, cause);
        r2_peer_put(peers[i]);
    }
    free(peers);
}

/* Under the peer's lock: its paths on the NIC are tested now rather than when their turn comes. */
static void look_again(struct r2_peer *p, int nic)
{
    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->lnic != nic)
            continue;
        p->paths[i]->next_at = 0;
        p->paths[i]->hb_at = 0;
    }
    r2_timer_sooner(&p->timer, r2_now_ns());
}

void r2_nicstate_verdict(int nic, enum r2_verdict verdict, const char *why)
{
    struct r2_control_event ev = {.event = R2_EV_VERDICT, .nic = r2_nic_name(nic), .cause = why};
    struct r2_peer **peers;
    int n;

    r2_control_journal(r2_eng.ctl, &ev);
    peers = r2_peer_all(&n);
    for (int i = 0; i < n; i++) {
        struct r2_peer *p = peers[i];

        r2_peer_lock(p);
        for (int k = 0; k < p->n_paths && verdict == R2_VERDICT_LOCAL; k++) {
            if (p->paths[k]->lnic == nic && p->paths[k]->state == R2_PATH_UP)
                r2_path_fail(p->paths[k], p->paths[k]->gen, ENETDOWN, why);
        }
        if (verdict == R2_VERDICT_HINT)
            look_again(p, nic);
        r2_peer_unlock(p);
        r2_peer_wake(p);
        r2_peer_put(p);
    }
    free(peers);
}

void r2_nicstate_located(int nic, bool usable, int err, const char *why)
{
    if (!usable || r2_eng.nic_state[nic].link_up)
        nic_change(nic, usable, err, why);
}

bool r2_nicstate_carrier(int nic)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    if (r2_eng.nics[nic].loopback || r2_link_query(r2_eng.nics[nic].ifindex) != R2_LINK_DOWN)
        return true;
    s->link_up = false;
    r2_control_nic_link(r2_eng.ctl, s->row, R2_SEG_LINK_DOWN);
    nic_change(nic, false, ENETDOWN, "link down");
    return false;
}

static void on_link(void *arg, int ifindex, enum r2_link_event event, const struct sockaddr *addr)
{
    (void)arg;
    (void)addr;
    for (int i = 0; i < r2_eng.n_nics; i++) {
        struct r2_nic_state *s = &r2_eng.nic_state[i];

        if (r2_eng.nics[i].ifindex != ifindex || event == R2_ADDR_ADDED || event == R2_ADDR_REMOVED)
            continue;
        s->link_up = event == R2_LINK_UP;
        r2_control_nic_link(r2_eng.ctl, s->row, s->link_up ? R2_SEG_LINK_UP : R2_SEG_LINK_DOWN);
        nic_change(i, s->link_up, ENETDOWN, s->link_up ? "link up" : "link down");
    }
}

static void watch_ready(struct r2_io_fd *f, uint32_t events)
{
    (void)f;
    (void)events;
    r2_linkwatch_read(r2_eng.watch, on_link, NULL);
}

static void nudge_nic(int nic)
{
    struct r2_peer **peers;
    int n;

    peers = r2_peer_all(&n);
    for (int i = 0; i < n; i++) {
        struct r2_ep *eps[2 * R2_PATHS_MAX];
        int m;

        r2_peer_lock(peers[i]);
        m = r2_peer_eps(peers[i], eps, 2 * R2_PATHS_MAX);
        r2_peer_unlock(peers[i]);
        for (int k = 0; k < m; k++) {
            if (r2_eng.ops->params(eps[k])->local_nic == nic)
                r2_eng.ops->nudge(eps[k]);
            r2_eng.ops->put(eps[k]);
        }
        r2_peer_put(peers[i]);
    }
    free(peers);
}

static void fault_event(int nic, enum r2_seg_event event, const char *cause)
{
    struct r2_control_event ev = {.event = event, .nic = r2_nic_name(nic), .cause = cause};
    char text[80];

    r2_fault_text(nic, text, sizeof(text));
    r2_control_nic_fault(r2_eng.ctl, r2_eng.nic_state[nic].row, text[0] ? text : NULL);
    if (!cause)
        ev.cause = text;
    r2_control_journal(r2_eng.ctl, &ev);
}

static int fail_nic(const struct r2_control_cmd *cmd)
{
    struct r2_fault f = {
        .rate = cmd->rate, .loss_ppm = cmd->loss_ppm, .after_bytes = cmd->after_bytes};

    f.kind = cmd->fault == R2_SEG_FAULT_BLACKHOLE ? R2_FAULT_BLACKHOLE
             : cmd->fault == R2_SEG_FAULT_ERROR   ? R2_FAULT_ERROR
             : cmd->fault == R2_SEG_FAULT_SLOW    ? R2_FAULT_SLOW
                                                  : R2_FAULT_LOSS;
    f.tx = cmd->direction & R2_SEG_DIR_TX;
    f.rx = cmd->direction & R2_SEG_DIR_RX;
    if (cmd->for_ms)
        f.until_ns = r2_now_ns() + cmd->for_ms * R2_NS_PER_MS;
    r2_fault_set(cmd->nic, &f);
    fault_event(cmd->nic, R2_EV_FAULT_INJECTED, NULL);
    return 0;
}

static int on_command(void *arg, const struct r2_control_cmd *cmd, char *result, size_t size)
{
    (void)arg;
    switch (cmd->verb) {
    case R2_SEG_VERB_FAIL_NIC:
        snprintf(result, size, "fault injected on %s", r2_nic_name(cmd->nic));
        return fail_nic(cmd);
    case R2_SEG_VERB_RECOVER_NIC:
        r2_fault_clear(cmd->nic);
        fault_event(cmd->nic, R2_EV_FAULT_CLEARED, "operator");
        snprintf(result, size, "no fault is injected on %s", r2_nic_name(cmd->nic));
        return 0;
    default:
        snprintf(result, size, "this plugin does not know the command");
        return -EOPNOTSUPP;
    }
}

void r2_nicstate_house(struct r2_timer *t, uint64_t now)
{
    r2_control_poll(r2_eng.ctl, on_command, NULL);
    for (int i = 0; i < r2_eng.n_nics; i++) {
        if (r2_fault_tick(i, now)) {
            char text[80];

            r2_fault_text(i, text, sizeof(text));
            if (!text[0])
                fault_event(i, R2_EV_FAULT_CLEARED, "over");
            else
                r2_control_nic_fault(r2_eng.ctl, r2_eng.nic_state[i].row, text);
            nudge_nic(i);
        }
    }
    r2_locate_house(now);
    r2_gauge(&r2_eng.g->sockets, r2_eng.ops->sockets());
    r2_gauge(&r2_eng.g->memory_bytes, r2_mem_now());
    r2_timer_set(t, now + HOUSE_NS);
}

static void add_row(int i)
{
    const struct r2_nic *n = &r2_eng.nics[i];
    char addr[64];
    struct r2_control_nic row = {
        .name = n->name,
        .ifname = n->ifname,
        .pci_path = n->pci_path,
        .speed_mbps = (uint32_t)n->speed_mbps,
        .numa = n->numa,
        .weight = (uint32_t)n->weight,
        .state = n->link_up ? R2_SEG_NIC_HEALTHY : R2_SEG_NIC_FAILED,
        .link = n->link_up ? R2_SEG_LINK_UP : R2_SEG_LINK_DOWN,
    };

    row.addr = r2_addr_text((const struct sockaddr *)&n->addr, addr, sizeof(addr));
    r2_eng.nic_state[i].row = r2_control_nic_add(r2_eng.ctl, &row);
}

int r2_nicstate_start(void)
{
    int rc;

    for (int i = 0; i < r2_eng.n_nics; i++) {
        atomic_store(&r2_eng.nic_state[i].weight, r2_eng.nics[i].weight ? R2_WEIGHT_FULL : 0);
        add_row(i);
    }
    rc = r2_linkwatch_open(&r2_eng.watch);
    if (rc == 0) {
        r2_eng.watch_fd.fd = r2_linkwatch_fd(r2_eng.watch);
        r2_eng.watch_fd.ready = watch_ready;
        r2_io_fd_track(r2_eng.watch_fd.fd);
        rc = r2_io_add(r2_io_at(0), &r2_eng.watch_fd);
    }
    if (rc) {
        R2_WARN("no link events (%s): heartbeats have to notice dead links", strerror(-rc));
        r2_control_set_missing(r2_eng.ctl, R2_SEG_MISSING_NETLINK);
    }
    for (int i = 0; i < r2_eng.n_nics; i++) { /* what changed since the NICs were found */
        bool up = r2_link_query(r2_eng.nics[i].ifindex) != R2_LINK_DOWN;

        if (!r2_eng.nics[i].loopback)
            nic_change(i, up, ENETDOWN, up ? "link up" : "link down");
    }
    r2_locate_start();
    r2_timer_init(&r2_eng.house, r2_io_at(0), r2_nicstate_house);
    r2_timer_set(&r2_eng.house, r2_now_ns() + HOUSE_NS);
    return 0;
}
