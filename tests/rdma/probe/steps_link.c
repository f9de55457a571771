/* Links that go down and come back, packets that vanish, addresses that go away. */
#include <arpa/inet.h>
#include <string.h>

#include "probe.h"

#define LIMIT 2000u /* writes of a stream: as many receives must be posted */

/* Keeps up to 8 messages of 64 KiB on their way, a new one each millisecond, until one fails or
 * `ms` are over. Returns the number of the next message. */
static uint32_t stream(struct bed *bed, uint32_t next, int ms)
{
    int64_t deadline = now_us() + (int64_t)ms * 1000;
    while (now_us() < deadline && bad_index(&bed->a) < 0) {
        if (next < (uint32_t)bed->a.seen_count + 8 && next < LIMIT &&
            post_write(bed, (size_t)next % 128 * 65536, 65536, next) == 0)
            next++;
        pump(bed, 1, 0, 0);
    }
    return next;
}

static int64_t event_after(const struct side *side, enum ibv_event_type type, int64_t begin)
{
    for (int i = 0; i < side->event_count; i++)
        if (side->events[i].type == type)
            return side->events[i].us - begin;
    return -1;
}

static const char *port_state(struct bed *bed, struct side *side)
{
    struct ibv_port_attr port;
    memset(&port, 0, sizeof(port));
    bed->lib.query_port(side->ctx, 1, (struct _compat_ibv_port_attr *)&port);
    return port.state == IBV_PORT_ACTIVE ? "ACTIVE"
           : port.state == IBV_PORT_DOWN ? "DOWN"
                                         : "OTHER";
}

static void link_lost(struct bed *bed, const char *down, const char *up)
{
    struct ways ways = quick;
    ways.recv_wrs = LIMIT;
    bed_fresh(bed, &ways, LIMIT);
    uint32_t next = stream(bed, 0, 100);
    int sent = bed->a.seen_count;
    act_start(bed, down);
    next = stream(bed, next, 5000);
    int bad = bad_index(&bed->a);
    pump_event(bed, &bed->a, IBV_EVENT_PORT_ERR, 300);
    int64_t begin = event_after(&bed->a, IBV_EVENT_PORT_ERR, 0);
    while (!act_over(bed))
        pump(bed, 10, 0, 0);
    pump(bed, 1500, 0, 0);
    facts(bed);
    say_statuses(bed, "receiver", &bed->b);
    say_text(bed, "receiver_state", side_state(bed, &bed->b));
    say_text(bed, "sender_port", port_state(bed, &bed->a));
    say_text(bed, "receiver_port", port_state(bed, &bed->b));
    say_events(bed, "sender_events", &bed->a);
    say_events(bed, "receiver_events", &bed->b);
    int64_t receiver = event_after(&bed->b, IBV_EVENT_PORT_ERR, begin);
    const char *state = side_state(bed, &bed->a);
    int known = bed->a.seen_count;
    say_bool(bed, "sender_fails_or_waits", known >= (int)next || strcmp(state, "ERR") != 0);
    int64_t modify = now_us();
    say_int(bed, "modify_to_err_while_down", side_to_state(bed, &bed->b, IBV_QPS_ERR));
    modify = now_us() - modify;
    say_bool(bed, "all_receives_come_back", pump(bed, 5000, 0, LIMIT));
    side_to_state(bed, &bed->a, IBV_QPS_ERR);
    say_bool(bed, "all_sends_come_back", pump(bed, 5000, (int)next, 0));
    enum ibv_wc_status first = bad < 0 ? IBV_WC_SUCCESS : bed->a.seen[bad].wc.status;
    int64_t failed = bad < 0 ? -1 : bed->a.seen[bad].us - begin;
    bed->a.event_count = bed->b.event_count = 0;
    act(bed, up);
    pump_event(bed, &bed->a, IBV_EVENT_PORT_ACTIVE, 2000);
    pump(bed, 200, 0, 0);
    say_bool(bed, "port_active_again_a", event_after(&bed->a, IBV_EVENT_PORT_ACTIVE, 0) > 0);
    say_bool(bed, "port_active_again_b", event_after(&bed->b, IBV_EVENT_PORT_ACTIVE, 0) > 0);
    int active_a = bed->a.event_count, active_b = bed->b.event_count;
    bed_fresh(bed, &patient, 1);
    post_write(bed, 0, 65536, 1);
    say_bool(bed, "new_queue_pairs_work", pump(bed, 3000, 1, 1));
    durations(bed); /* after the sender's PORT_ERR */
    say_ms(bed, "sender_first_error", failed);
    say_ms(bed, "receiver_port_err", receiver);
    say_ms(bed, "modify_to_err_while_down", modify);
    info(bed);
    say_text(bed, "sender_first", bad < 0 ? "nothing" : status_name(first));
    say_text(bed, "sender_state", state);
    say_int(bed, "confirmed_before", sent);
    say_int(bed, "posted", next);
    say_int(bed, "completed_before_err", known);
    say_int(bed, "events_up_a", active_a);
    say_int(bed, "events_up_b", active_b);
}

static void step_down_sender(struct bed *bed)
{
    link_lost(bed, "down_a", "up_a");
}

static void step_down_receiver(struct bed *bed)
{
    link_lost(bed, "down_b", "up_b");
}

/* Nothing is on its way while the link is away. */
static void step_idle_flap(struct bed *bed)
{
    bed_fresh(bed, &patient, 4);
    act(bed, "down_a");
    pump(bed, 500, 0, 0);
    facts(bed);
    say_text(bed, "sender_state_down", side_state(bed, &bed->a));
    act(bed, "up_a");
    pump(bed, 300, 0, 0);
    post_write(bed, 0, 65536, 1);
    say_bool(bed, "old_queue_pairs_work", pump(bed, 3000, 1, 1));
    say_statuses(bed, "sender", &bed->a);
    say_bool(bed, "memory_right", same_memory(bed, 0, 65536));
}

/* A write is posted while the link is away, with patience enough to wait for it. */
static void step_busy_flap(struct bed *bed)
{
    struct ways ways = patient;
    ways.recv_wrs = LIMIT;
    bed_fresh(bed, &ways, LIMIT);
    uint32_t next = stream(bed, 0, 50);
    act_start(bed, "down_a");
    next = stream(bed, next, 1000);
    while (!act_over(bed))
        pump(bed, 10, 0, 0);
    act(bed, "up_a");
    next = stream(bed, next, 500);
    pump(bed, 3000, (int)next, (int)next);
    bool ordered = true;
    for (int i = 0; i < bed->b.seen_count; i++)
        ordered &= bed->b.seen[i].wc.status != IBV_WC_SUCCESS ||
                   bed->b.seen[i].wc.imm_data == htonl((uint32_t)i);
    facts(bed);
    say_statuses(bed, "receiver", &bed->b);
    say_bool(bed, "immediates_once_and_in_order", ordered);
    say_bool(bed, "sender_never_knows_more",
             count_status(&bed->b, IBV_WC_SUCCESS) >= count_status(&bed->a, IBV_WC_SUCCESS));
    info(bed);
    say_statuses(bed, "sender", &bed->a);
    say_int(bed, "arrived", count_status(&bed->b, IBV_WC_SUCCESS));
    say_int(bed, "confirmed", count_status(&bed->a, IBV_WC_SUCCESS));
}

/* Packets vanish, carriers stay. How long until the sender knows, by its settings? */
static void step_black_hole(struct bed *bed)
{
    static const struct {
        const char *name;
        uint8_t timeout, retries;
    } table[] = {{"timeout_8_retry_3", 8, 3},   {"timeout_10_retry_1", 10, 1},
                 {"timeout_10_retry_3", 10, 3}, {"timeout_10_retry_6", 10, 6},
                 {"timeout_10_retry_7", 10, 7}, {"timeout_12_retry_3", 12, 3},
                 {"timeout_14_retry_3", 14, 3}};
    enum { ROWS = sizeof(table) / sizeof(table[0]) };
    int64_t took[ROWS];
    facts(bed);
    for (int i = 0; i < ROWS; i++) {
        struct ways ways = quick;
        ways.timeout = table[i].timeout;
        ways.retries = table[i].retries;
        bed_fresh(bed, &ways, 4);
        act(bed, "hole_a");
        int64_t begin = now_us();
        post_write(bed, 0, 4096, 1);
        int bad = pump_bad(bed, &bed->a, 3000);
        took[i] = bad < 0 ? -1 : bed->a.seen[bad].us - begin;
        act(bed, "fill_a");
        say_text(bed, table[i].name, bad < 0 ? "nothing" : status_name(bed->a.seen[bad].wc.status));
    }
    say_events(bed, "sender_events", &bed->a);
    say_events(bed, "receiver_events", &bed->b);
    say_text(bed, "receiver_state", side_state(bed, &bed->b));
    durations(bed);
    for (int i = 0; i < ROWS; i++)
        say_ms(bed, table[i].name, took[i]);
}

/* Only what the receiver answers vanishes: it has everything, the sender is told of a failure. */
static void step_lost_acks(struct bed *bed)
{
    bed_fresh(bed, &quick, 4);
    act(bed, "hole_b");
    post_write(bed, 0, 65536, 1);
    int bad = pump_bad(bed, &bed->a, 5000);
    facts(bed);
    say_text(bed, "sender", bad < 0 ? "nothing" : status_name(bed->a.seen[bad].wc.status));
    say_statuses(bed, "receiver", &bed->b);
    say_int(bed, "receiver_completions", bed->b.seen_count);
    say_bool(bed, "memory_right", same_memory(bed, 0, 65536));
    say_text(bed, "receiver_state", side_state(bed, &bed->b));
    act(bed, "fill_b");
    pump(bed, 100, 0, 0);
}

/* A hole shorter than the sender's patience (8 s: its two ends are processes that have to start).
 */
static void step_short_hole(struct bed *bed)
{
    struct ways ways = patient;
    ways.timeout = 18;
    ways.recv_wrs = LIMIT;
    bed_fresh(bed, &ways, LIMIT);
    uint32_t next = 0;
    act_start(bed, "hole_a");
    while (!act_over(bed))
        next = stream(bed, next, 5);
    next = stream(bed, next, 50);
    act_start(bed, "fill_a");
    while (!act_over(bed))
        next = stream(bed, next, 5);
    facts(bed);
    say_bool(bed, "all_arrived", pump(bed, 8000, (int)next, (int)next));
    bool ordered = true;
    for (int i = 0; i < bed->b.seen_count; i++)
        ordered &= bed->b.seen[i].wc.imm_data == htonl((uint32_t)i);
    say_bool(bed, "once_and_in_order", ordered && bed->b.seen_count == (int)next);
    say_statuses(bed, "sender", &bed->a);
}

static void step_loss(struct bed *bed)
{
    int64_t took[2];
    bool right = true, done = true;
    for (int lossy = 0; lossy < 2; lossy++) {
        bed_fresh(bed, &patient, 200);
        if (lossy)
            act(bed, "loss");
        int64_t begin = now_us();
        for (uint32_t i = 0; i < 64; i++)
            post_write(bed, i * 65536u, 65536, i);
        done &= pump(bed, 30000, 64, 64);
        took[lossy] = now_us() - begin;
        right &= same_memory(bed, 0, 64 * 65536);
    }
    act(bed, "clean");
    facts(bed);
    say_bool(bed, "all_arrived", done);
    say_bool(bed, "memory_right", right);
    say_statuses(bed, "sender", &bed->a);
    durations(bed);
    say_ms(bed, "4_MiB_without_loss", took[0]);
    say_ms(bed, "4_MiB_with_loss", took[1]);
}

/* The address behind the GID is taken away and given back. */
static void step_address(struct bed *bed)
{
    union ibv_gid gid;
    bed_fresh(bed, &quick, 8);
    act(bed, "gidoff_a");
    pump_event(bed, &bed->a, IBV_EVENT_GID_CHANGE, 1000);
    pump(bed, 200, 0, 0);
    facts(bed);
    say_events(bed, "events_off", &bed->a);
    bool same = bed->lib.query_gid(bed->a.ctx, 1, bed->a.gid_index, &gid) == 0 &&
                memcmp(&gid, &bed->a.gid, sizeof(gid)) == 0;
    say_bool(bed, "gid_still_in_table_while_used", same);
    post_write(bed, 0, 4096, 1);
    pump(bed, 2000, 1, 0);
    say_statuses(bed, "old_queue_pair_off", &bed->a);
    say_text(bed, "sender_state_off", side_state(bed, &bed->a));
    bed->a.event_count = 0;
    act(bed, "gidon_a");
    pump_event(bed, &bed->a, IBV_EVENT_GID_CHANGE, 1000);
    pump(bed, 200, 0, 0);
    say_events(bed, "events_on", &bed->a);
    int64_t until = now_us() + 2000000;
    do {
        same = bed->lib.query_gid(bed->a.ctx, 1, bed->a.gid_index, &gid) == 0 &&
               memcmp(&gid, &bed->a.gid, sizeof(gid)) == 0;
    } while (!same && now_us() < until);
    say_bool(bed, "same_index_again", same);
    bed_find_gids(bed);
}

/* B's device is taken out of the machine. The last step: B is not usable afterwards. */
static void step_removal(struct bed *bed)
{
    struct ibv_port_attr port;
    struct ibv_wc wc;
    bed_fresh(bed, &quick, 8);
    post_write(bed, 0, 4096, 1);
    pump(bed, 1000, 1, 1);
    int64_t begin = now_us();
    act_start(bed, "remove_b");
    bool told = pump_event(bed, &bed->b, IBV_EVENT_DEVICE_FATAL, 3000);
    int64_t after = event_after(&bed->b, IBV_EVENT_DEVICE_FATAL, begin);
    pump(bed, 200, 0, 0);
    int before = bed->b.seen_count;
    post_write(bed, 0, 4096, 3);
    pump(bed, 500, 2, 2);
    bool works = bed->b.seen_count > before;
    facts(bed);
    say_bool(bed, "works_on", works);
    say_bool(bed, "told", told);
    say_events(bed, "events", &bed->b);
    say_int(bed, "poll", ibv_poll_cq(bed->b.cq, 1, &wc));
    say_text(bed, "modify", strerror(side_to_state(bed, &bed->b, IBV_QPS_ERR)));
    int rc = bed->lib.query_port(bed->b.ctx, 1, (struct _compat_ibv_port_attr *)&port);
    say_text(bed, "query_port", strerror(rc));
    say_int(bed, "receives_flushed", count_status(&bed->b, IBV_WC_WR_FLUSH_ERR));
    post_write(bed, 0, 4096, 2);
    int bad = pump_bad(bed, &bed->a, 3000);
    say_text(bed, "peer", bad < 0 ? "nothing" : status_name(bed->a.seen[bad].wc.status));
    say_bool(bed, "removal_waits_for_us", !act_over(bed));
    int64_t gone = now_us();
    say_text(bed, "destroy_qp", strerror(bed->lib.destroy_qp(bed->b.qp)));
    bed->b.qp = NULL;
    say_text(bed, "dereg_mr", strerror(bed->lib.dereg_mr(bed->b.mr)));
    bed->b.mr = NULL;
    gone = now_us() - gone;
    durations(bed);
    say_ms(bed, "command_until_told", after);
    say_ms(bed, "destroy_and_dereg", gone);
}

const struct step link_steps[] = {
    {"down_sender", step_down_sender, NEEDS_ACT},
    {"down_receiver", step_down_receiver, NEEDS_ACT},
    {"idle_flap", step_idle_flap, NEEDS_ACT},
    {"busy_flap", step_busy_flap, NEEDS_ACT},
    {"black_hole", step_black_hole, NEEDS_ACT},
    {"lost_acks", step_lost_acks, NEEDS_ACT},
    {"short_hole", step_short_hole, NEEDS_ACT},
    {"loss", step_loss, NEEDS_ACT},
    {"address", step_address, NEEDS_ACT},
    {"removal", step_removal, NEEDS_ACT},
    {NULL, NULL, ALWAYS},
};
