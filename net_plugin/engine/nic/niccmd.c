/* The operator's words about NICs, and injected faults. On I/O thread 0. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/nic/nics.h"

#define WEIGHT_MAX 100 /* percent */

/* ---- injected faults */

static void nudge(struct r2_ep *ep, void *unused)
{
    (void)unused;
    r2_eng.ops->nudge(ep);
}

static void fault_event(int nic, enum r2_seg_event event, const char *cause)
{
    char text[80];

    r2_fault_text(nic, text, sizeof(text));
    r2_control_nic_fault(r2_eng.ctl, r2_eng.nic_state[nic].row, text[0] ? text : NULL);
    r2_nic_journal(nic, event, cause ? cause : text);
}

static int fail_nic(const struct r2_control_cmd *cmd, char *result, size_t size)
{
    bool had = !r2_fault_none(cmd->nic);
    struct r2_fault f = {.kind = cmd->fault,
                         .rate = cmd->rate,
                         .loss_ppm = cmd->loss_ppm,
                         .after_bytes = cmd->after_bytes,
                         .after_ops = cmd->after_ops};

    f.tx = cmd->direction & R2_SEG_DIR_TX;
    f.rx = cmd->direction & R2_SEG_DIR_RX;
    f.for_ns = cmd->for_ms * R2_NS_PER_MS;
    r2_nic_inject(cmd->nic, &f);
    snprintf(result, size, "fault injected on %s%s", r2_nic_name(cmd->nic),
             had ? " in place of an earlier one" : "");
    return 0;
}

void r2_nic_inject(int nic, const struct r2_fault *fault)
{
    r2_fault_set(nic, fault);
    fault_event(nic, R2_EV_FAULT_INJECTED, NULL);
}

void r2_nic_clear_fault(int nic, const char *who, uint64_t now)
{
    bool had = !r2_fault_none(nic);

    r2_fault_clear(nic);
    if (had)
        fault_event(nic, R2_EV_FAULT_CLEARED, who);
    r2_nicstate_forgive(nic, now);
}

static int recover_nic(const struct r2_control_cmd *cmd, char *result, size_t size, uint64_t now)
{
    bool had = !r2_fault_none(cmd->nic);

    r2_nic_clear_fault(cmd->nic, "operator", now);
    snprintf(result, size,
             had ? "no fault is injected on %s any more"
                 : "no fault was injected on %s; its past failures are forgotten",
             r2_nic_name(cmd->nic));
    return 0;
}

static void tick_fault(int nic, uint64_t now)
{
    enum r2_fault_news news = r2_fault_tick(nic, now);
    char text[80];

    if (news == R2_FAULT_SAME)
        return;
    r2_fault_text(nic, text, sizeof(text));
    if (news == R2_FAULT_OVER)
        fault_event(nic, R2_EV_FAULT_CLEARED, "over");
    else
        r2_control_nic_fault(r2_eng.ctl, r2_eng.nic_state[nic].row, text[0] ? text : NULL);
    r2_nic_eps(nic, nudge, NULL);
}

/* ---- drains and weights */

/* No other NIC of ours has a path to the peer that could carry what this one does, or will again:
 * its own may be made anew just now. */
static bool is_sole_way(const struct r2_peer *p, int nic)
{
    bool here = false, elsewhere = false;

    if (p->life != R2_PEER_ALIVE || !r2_peer_has_open(p))
        return false;
    R2_FOR_EACH_PATH (path, p) {
        here |= path->lnic == nic && r2_past_carried(path->past);
        elsewhere |=
            path->lnic != nic && r2_path_may(path) >= R2_MAY_LAST_RESORT && r2_path_suffices(path);
    }
    return here && !elsewhere;
}

/* Without the NIC the job would stall; says why. A NIC that is usable, for all that is known
 * of it, need not reach anybody. */
static bool is_last(int nic, char *why, size_t size)
{
    char who[R2_PEER_WHO];
    bool sole = false;
    int left = r2_nic_others(nic);

    snprintf(why, size, "the last usable NIC of this process%s",
             r2_eng.device_memory ? " with RDMA, which memory of GPUs needs" : "");
    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        if (!sole && left && is_sole_way(p, nic)) {
            sole = true;
            snprintf(why, size, "the last usable NIC: no other one has a path to %s",
                     r2_peer_who(p, who));
        }
        r2_peer_leave(p);
    }
    return sole || !left;
}

static int drain_nic(const struct r2_control_cmd *cmd, char *result, size_t size, uint64_t now)
{
    char why[160];
    bool last = is_last(cmd->nic, why, sizeof(why));

    if (last && !cmd->force) {
        snprintf(result, size,
                 "%s is %s: without it the job would stall (--force drains it all the same)",
                 r2_nic_name(cmd->nic), why);
        return -EBUSY;
    }
    r2_nic_journal(cmd->nic, R2_EV_OPERATOR, last ? "drain-nic --force" : "drain-nic");
    r2_nicstate_drain(cmd->nic, now);
    snprintf(result, size, "%s is being drained", r2_nic_name(cmd->nic));
    return 0;
}

static int undrain_nic(const struct r2_control_cmd *cmd, char *result, size_t size, uint64_t now)
{
    enum r2_nic_word word = r2_nic_word(cmd->nic);
    bool out = word == R2_NIC_DRAINED || word == R2_NIC_DAMPED;

    r2_nic_journal(cmd->nic, R2_EV_OPERATOR, "undrain-nic");
    r2_nicstate_undrain(cmd->nic, now);
    snprintf(result, size,
             out ? "%s may be used again, once test chunks have arrived on it"
                 : "%s was neither drained nor damped; its past failures are forgotten",
             r2_nic_name(cmd->nic));
    return 0;
}

static int set_weight(const struct r2_control_cmd *cmd, char *result, size_t size)
{
    struct r2_nic_state *s = &r2_eng.nic_state[cmd->nic];
    char cause[64];

    if (cmd->weight > WEIGHT_MAX) {
        snprintf(result, size, "bad weight: %u; give 0 (warm spare) to %d (full)", cmd->weight,
                 WEIGHT_MAX);
        return -EINVAL;
    }
    atomic_store(&s->weight, cmd->weight * (R2_WEIGHT_FULL / WEIGHT_MAX));
    r2_control_nic_weight(r2_eng.ctl, s->row, cmd->weight);
    snprintf(cause, sizeof(cause), "operator: %u%s", cmd->weight,
             cmd->weight ? "" : ", a warm spare");
    r2_nic_journal(cmd->nic, R2_EV_WEIGHT, cause);
    r2_nicstate_announce(cmd->nic);
    snprintf(result, size, "%s has weight %u", r2_nic_name(cmd->nic), cmd->weight);
    return 0;
}

static int on_command(void *arg, const struct r2_control_cmd *cmd, char *result, size_t size)
{
    uint64_t now = *(const uint64_t *)arg;

    switch (cmd->verb) {
    case R2_SEG_VERB_FAIL_NIC:
        return fail_nic(cmd, result, size);
    case R2_SEG_VERB_RECOVER_NIC:
        return recover_nic(cmd, result, size, now);
    case R2_SEG_VERB_DRAIN_NIC:
        return drain_nic(cmd, result, size, now);
    case R2_SEG_VERB_UNDRAIN_NIC:
        return undrain_nic(cmd, result, size, now);
    case R2_SEG_VERB_SET_WEIGHT:
        return set_weight(cmd, result, size);
    case R2_SEG_VERB_RECORD:
        return r2_colls_record(cmd->record, result, size);
    default:
        snprintf(result, size, "this plugin does not know the command");
        return -EOPNOTSUPP;
    }
}

void r2_niccmd_tick(uint64_t now)
{
    r2_control_poll(r2_eng.ctl, on_command, &now);
    for (int i = 0; i < r2_local.n; i++)
        tick_fault(i, now);
}
