/* The mailbox: what operators ask. Anyone who may write the object can put anything there, at any
 * time: a slot is copied once into the process's own memory, checked and carried out there, and the
 * answer is copied out. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "control/impl.h"

#define ALIVE_NS UINT64_C(1000000000)
#define PUBLISH_NS UINT64_C(100000000)
#define FORGET_NS UINT64_C(30000000000) /* an answer that nobody fetches */
#define MAX_WEIGHT 1000000u
#define PPM 1000000u
#define MAX_FOR_MS (UINT64_C(365) * 24 * 3600 * 1000)

static void copy_words(void *to, const void *from, size_t n)
{
    const uint64_t *word = from;

    for (size_t i = 0; i < n / 8; i++) {
        uint64_t value = __atomic_load_n(&word[i], __ATOMIC_RELAXED);

        memcpy((char *)to + i * 8, &value, 8);
    }
}

static int refuse(char *result, size_t size, const char *what, uint64_t value)
{
    snprintf(result, size, "bad %s: %llu", what, (unsigned long long)value);
    return -EINVAL;
}

static int check_fault(const struct r2_seg_command *raw, char *result, size_t size)
{
    if (raw->fault == R2_SEG_FAULT_NONE || raw->fault > R2_SEG_FAULT_LAST)
        return refuse(result, size, "kind of fault", raw->fault);
    if (raw->direction == R2_SEG_DIR_NONE || raw->direction > R2_SEG_DIR_BOTH)
        return refuse(result, size, "direction", raw->direction);
    if (raw->fault == R2_SEG_FAULT_SLOW && raw->rate == 0)
        return refuse(result, size, "rate", raw->rate);
    if (raw->fault == R2_SEG_FAULT_LOSS && (raw->loss_ppm == 0 || raw->loss_ppm > PPM))
        return refuse(result, size, "loss", raw->loss_ppm);
    if (raw->for_ms > MAX_FOR_MS)
        return refuse(result, size, "duration in ms", raw->for_ms);
    return 0;
}

static int unknown_nic(struct r2_control *ctl, const char *name, char *result, size_t size)
{
    int n = snprintf(result, size, "no NIC '%s'; NICs:", name);

    for (int i = 0; i < R2_SEG_MAX_NICS && n > 0 && (size_t)n < size; i++) {
        const struct r2_seg_nic *row = &ctl->seg->nics[i];

        if (__atomic_load_n(&row->used, __ATOMIC_ACQUIRE))
            n += snprintf(result + n, size - (size_t)n, " %s", row->name);
    }
    return -ENODEV;
}

/* From the raw copy to the checked command. */
static int check(struct r2_control *ctl, struct r2_seg_command *raw, struct r2_control_cmd *cmd,
                 char *result, size_t size)
{
    int rc = 0;

    raw->nic[sizeof(raw->nic) - 1] = '\0';
    if (raw->verb == R2_SEG_VERB_NONE || raw->verb > R2_SEG_VERB_RECORD) {
        snprintf(result, size, "this process knows no command number %u", raw->verb);
        return -EOPNOTSUPP;
    }
    *cmd = (struct r2_control_cmd){
        .request_id = raw->request_id,
        .verb = (enum r2_seg_verb)raw->verb,
        .nic = -1,
        .client_pid = raw->client_pid,
    };
    if (raw->verb == R2_SEG_VERB_PING)
        return 0;
    if (raw->verb == R2_SEG_VERB_PLAN) {
        cmd->plan = raw->plan == 1;
        return raw->plan > 1 ? refuse(result, size, "plan", raw->plan) : 0;
    }
    if (raw->verb == R2_SEG_VERB_RECORD) {
        cmd->record = raw->record == 1;
        return raw->record > 1 ? refuse(result, size, "record", raw->record) : 0;
    }
    cmd->nic = r2_control_nic_find(ctl, raw->nic);
    if (cmd->nic < 0)
        return unknown_nic(ctl, raw->nic, result, size);
    if (raw->verb == R2_SEG_VERB_FAIL_NIC) {
        rc = check_fault(raw, result, size);
        cmd->fault = (enum r2_seg_fault)raw->fault;
        cmd->direction = (enum r2_seg_direction)raw->direction;
        cmd->loss_ppm = raw->fault == R2_SEG_FAULT_LOSS ? raw->loss_ppm : 0;
        cmd->rate = raw->fault == R2_SEG_FAULT_SLOW ? raw->rate : 0;
        cmd->after_bytes = raw->after_bytes;
        cmd->after_ops = raw->after_ops;
        cmd->for_ms = raw->for_ms;
    } else if (raw->verb == R2_SEG_VERB_SET_WEIGHT) {
        if (raw->weight > MAX_WEIGHT)
            return refuse(result, size, "weight", raw->weight);
        cmd->weight = raw->weight;
    } else if (raw->verb == R2_SEG_VERB_DRAIN_NIC) {
        if (raw->force > 1)
            return refuse(result, size, "force", raw->force);
        cmd->force = raw->force == 1;
    }
    return rc;
}

/* The shim looks at it, if there is one (shim/comms/watch.c). */
static void set_plan(struct r2_control *ctl, bool on, char *result, size_t size)
{
    r2_row_u32(&ctl->seg->process.plan_stop, !on);
    r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_OPERATOR,
                                                       .cause = on ? "plan on" : "plan off"});
    snprintf(result, size, "%s",
             on ? "plans may be taken again"
                : "back to NCCL's own choice at the next operation that the ranks agree on");
}

static void take(struct r2_control *ctl, struct r2_seg_command *slot, r2_control_handler handler,
                 void *arg)
{
    struct r2_seg_command raw;
    struct r2_control_cmd cmd;
    char result[sizeof(slot->result)] = {0};
    uint32_t state = R2_SEG_CMD_POSTED;
    int rc;

    /* Acquire: pairs with the client, which stores POSTED after the rest. */
    if (!__atomic_compare_exchange_n(&slot->state, &state, R2_SEG_CMD_RUNNING, false,
                                     __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    copy_words(&raw, slot, sizeof(raw));
    rc = check(ctl, &raw, &cmd, result, sizeof(result));
    if (rc == 0 && cmd.verb == R2_SEG_VERB_PING)
        snprintf(result, sizeof(result), "pong");
    else if (rc == 0 && cmd.verb == R2_SEG_VERB_PLAN)
        set_plan(ctl, cmd.plan, result, sizeof(result));
    else if (rc == 0)
        rc = handler(arg, &cmd, result, sizeof(result));
    result[sizeof(result) - 1] = '\0';
    if (rc < 0 && !result[0])
        snprintf(result, sizeof(result), "%s", strerror(-rc));

    r2_count(&ctl->seg->counters.commands, 1);
    r2_row_u32((uint32_t *)&slot->code, (uint32_t)rc);
    r2_row_text(slot->result, sizeof(slot->result), result);
    r2_row_u64(&slot->answered_id, raw.request_id);
    r2_row_u64(&slot->answered_mono_ns, r2_control_clock(CLOCK_MONOTONIC));
    /* Release: the client that sees DONE or FAILED sees the answer. It fails when the client has
     * given up and freed the slot: then the answer is nobody's. */
    state = R2_SEG_CMD_RUNNING;
    __atomic_compare_exchange_n(&slot->state, &state, rc < 0 ? R2_SEG_CMD_FAILED : R2_SEG_CMD_DONE,
                                false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

static size_t slot_at(int i)
{
    return offsetof(struct r2_segment, commands) + (size_t)i * sizeof(struct r2_seg_command);
}

static void set_state(struct r2_control *ctl, int i, uint32_t state)
{
    if (ctl->fd >= 0)
        (void)!pwrite(ctl->fd, &state, sizeof(state), (off_t)slot_at(i));
}

/* What clients have written, into the process's own slots. */
static void fetch(struct r2_control *ctl)
{
    struct r2_seg_command there[R2_SEG_MAX_COMMANDS];

    if (ctl->fd < 0 || pread(ctl->fd, there, sizeof(there), (off_t)slot_at(0)) != sizeof(there))
        return;
    for (int i = 0; i < R2_SEG_MAX_COMMANDS; i++) {
        if (there[i].state == R2_SEG_CMD_POSTED)
            ctl->seg->commands[i] = there[i];
        else if (there[i].state > R2_SEG_CMD_FAILED)
            set_state(ctl, i, R2_SEG_CMD_FREE); /* damaged */
    }
}

/* The state comes last: who sees it sees the answer. A client that has given up meanwhile has freed
 * the slot or posted something else: the answer is nobody's. */
static void answer(struct r2_control *ctl, int i)
{
    const struct r2_seg_command *own = &ctl->seg->commands[i];
    struct r2_seg_command there;
    size_t code = offsetof(struct r2_seg_command, code);

    if (ctl->fd < 0 || pread(ctl->fd, &there, sizeof(there), (off_t)slot_at(i)) != sizeof(there) ||
        there.state != R2_SEG_CMD_POSTED || there.request_id != own->answered_id)
        return;
    (void)!pwrite(ctl->fd, (const char *)own + code, sizeof(*own) - code,
                  (off_t)(slot_at(i) + code));
    set_state(ctl, i, own->state);
}

static void forget(struct r2_control *ctl, int i, uint32_t state, uint64_t now)
{
    struct r2_seg_command *slot = &ctl->seg->commands[i];
    uint32_t there;

    if (now - __atomic_load_n(&slot->answered_mono_ns, __ATOMIC_RELAXED) <= FORGET_NS)
        return;
    if (ctl->fd >= 0 && pread(ctl->fd, &there, sizeof(there), (off_t)slot_at(i)) == sizeof(there) &&
        there == state)
        set_state(ctl, i, R2_SEG_CMD_FREE);
    __atomic_compare_exchange_n(&slot->state, &state, R2_SEG_CMD_FREE, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}

static int serve(struct r2_control *ctl, r2_control_handler handler, void *arg, uint64_t now)
{
    int taken = 0;

    for (int i = 0; i < R2_SEG_MAX_COMMANDS; i++) {
        struct r2_seg_command *slot = &ctl->seg->commands[i];
        uint32_t state = __atomic_load_n(&slot->state, __ATOMIC_RELAXED);

        if (state == R2_SEG_CMD_POSTED) {
            take(ctl, slot, handler, arg);
            r2_control_publish(ctl, false); /* who has the answer sees what has changed */
            answer(ctl, i);
            taken++;
        } else if (state == R2_SEG_CMD_DONE || state == R2_SEG_CMD_FAILED) {
            forget(ctl, i, state, now);
        }
    }
    return taken;
}

int r2_control_poll(struct r2_control *ctl, r2_control_handler handler, void *arg)
{
    uint64_t now = r2_control_clock(CLOCK_MONOTONIC);
    bool whole = now - ctl->alive_mono_ns > ALIVE_NS;

    if (whole) {
        ctl->alive_mono_ns = now;
        r2_gauge(&ctl->seg->header.alive_mono_ns, now);
        r2_gauge(&ctl->seg->header.alive_real_ns, r2_control_clock(CLOCK_REALTIME));
    }
    if (whole || now - ctl->published_mono_ns >= PUBLISH_NS || r2_control_has_news(ctl)) {
        ctl->published_mono_ns = now;
        r2_control_publish(ctl, whole);
    }
    fetch(ctl);
    return serve(ctl, handler, arg, now);
}
