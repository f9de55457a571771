/* Errors and what follows them: states, codes, drained receives, keys, writes that come late. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

/* In the order of posting; a flushed message shows its write and its send, with the same number. */
static bool flushed_in_order(const struct side *side)
{
    for (int i = 1; i < side->seen_count; i++)
        if (side->seen[i].wc.wr_id < side->seen[i - 1].wc.wr_id)
            return false;
    return true;
}

static void step_drain(struct bed *bed)
{
    bed_fresh(bed, &quick, 16);
    int64_t begin = now_us();
    facts(bed);
    say_int(bed, "modify", side_to_state(bed, &bed->b, IBV_QPS_ERR));
    int64_t changed = now_us();
    say_bool(bed, "all_receives_come_back", pump(bed, 1000, 0, 16));
    int64_t drained = now_us();
    pump(bed, 50, 0, 0);
    say_int(bed, "flushed", count_status(&bed->b, IBV_WC_WR_FLUSH_ERR));
    say_bool(bed, "in_order", flushed_in_order(&bed->b));
    say_events(bed, "events", &bed->b);
    bed->b.seen_count = 0;
    say_int(bed, "post_receive_in_err", post_receive(&bed->b, 99));
    pump(bed, 500, 0, 1);
    say_statuses(bed, "receive_posted_in_err", &bed->b);
    bed->b.seen_count = 0;
    struct ibv_sge sge = {(uintptr_t)bed->b.buf, 64, bed->b.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 5,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .wr.rdma = {(uintptr_t)bed->a.buf, bed->a.mr->rkey}};
    say_int(bed, "post_send_in_err", post_write_raw(&bed->b, &wr, &sge));
    pump(bed, 500, 0, 1);
    say_statuses(bed, "unsignalled_send_posted_in_err", &bed->b);
    durations(bed);
    say_ms(bed, "modify_took", changed - begin);
    say_ms(bed, "until_drained", drained - begin);
}

/* A receive that is posted in ERR: does it come back, as a marker behind all others? */
static void step_drain_marker(struct bed *bed)
{
    bed_fresh(bed, &patient, 64);
    flood_start(bed, bed->b.mr->rkey);
    pump(bed, 2000, 0, 4);
    side_to_state(bed, &bed->b, IBV_QPS_ERR);
    post_receive(&bed->b, 64);
    int64_t deadline = now_us() + 1000000;
    while (now_us() < deadline && bed->b.seen_count < 65)
        pump(bed, 1, 0, 0);
    flood_join(bed);
    pump(bed, 200, 0, 0);
    facts(bed);
    say_bool(bed, "all_posted_before_come_back", bed->b.seen_count >= 64);
    say_bool(bed, "in_order", flushed_in_order(&bed->b));
    info(bed); /* soft-RoCE forgets the marker once the queue has run empty */
    say_bool(bed, "marker_comes_back", bed->b.seen_count == 65);
    say_int(bed, "arrived", count_status(&bed->b, IBV_WC_SUCCESS));
    say_int(bed, "flushed", count_status(&bed->b, IBV_WC_WR_FLUSH_ERR));
}

/* A stream of writes runs into a queue pair that is taken away in the middle: does memory change
 * after it was drained? `how`: 0 ERR, 1 RESET, 2 destroyed. */
static void late_write(struct bed *bed, int how)
{
    int changed = 0, rounds = 12, drained = 0, cut = 0;
    int64_t took = 0;
    for (int round = 0; round < rounds; round++) {
        bed_fresh(bed, &quick, 64);
        flood_start(bed, bed->b.mr->rkey);
        pump(bed, 2000, 0, 1 + round);
        int64_t begin = now_us();
        if (how == 0) {
            side_to_state(bed, &bed->b, IBV_QPS_ERR);
            drained += pump(bed, 2000, 0, 64);
        } else if (how == 1) {
            side_to_state(bed, &bed->b, IBV_QPS_RESET);
        } else {
            side_destroy_qp(bed, &bed->b);
        }
        took = now_us() - begin > took ? now_us() - begin : took;
        uint64_t before = sum(bed->b.buf, BUF_BYTES);
        flood_join(bed);
        pump_bad(bed, &bed->a, 1000);
        pump(bed, 20, 0, 0);
        changed += sum(bed->b.buf, BUF_BYTES) != before;
        cut += count_status(&bed->a, IBV_WC_SUCCESS) < 64;
    }
    facts(bed);
    if (how != 1) /* soft-RoCE lets writes through a reset now and then */
        say_bool(bed, "memory_changed_afterwards", changed > 0);
    if (how == 0)
        say_bool(bed, "all_drained_each_time", drained == rounds);
    say_bool(bed, "cut_in_the_middle_at_times", cut > 0);
    durations(bed);
    say_ms(bed, "longest_fence", took);
    info(bed);
    say_int(bed, "rounds", rounds);
    say_int(bed, "rounds_cut_in_the_middle", cut);
    say_int(bed, "rounds_with_a_late_write", changed);
}

static void step_late_err(struct bed *bed)
{
    late_write(bed, 0);
}

static void step_late_reset(struct bed *bed)
{
    late_write(bed, 1);
}

static void step_late_destroy(struct bed *bed)
{
    late_write(bed, 2);
}

/* The peer's queue pair answers no more. */
static void step_peer_err(struct bed *bed)
{
    int64_t took[3];
    static const char *const names[] = {"peer_in_err", "peer_reset", "peer_destroyed"};
    facts(bed);
    for (int how = 0; how < 3; how++) {
        bed_fresh(bed, &quick, 4);
        if (how == 2)
            side_destroy_qp(bed, &bed->b);
        else
            side_to_state(bed, &bed->b, how ? IBV_QPS_RESET : IBV_QPS_ERR);
        int64_t begin = now_us();
        post_write(bed, 0, 4096, 1);
        int bad = pump_bad(bed, &bed->a, 5000);
        took[how] = (bad < 0 ? now_us() : bed->a.seen[bad].us) - begin;
        say_text(bed, names[how], bad < 0 ? "nothing" : status_name(bed->a.seen[bad].wc.status));
    }
    durations(bed);
    for (int how = 0; how < 3; how++)
        say_ms(bed, names[how], took[how]);
}

/* No receive is posted at the peer. */
static void step_rnr(struct bed *bed)
{
    struct ways endless = quick;
    endless.rnr_retries = 7;
    bed_fresh(bed, &quick, 0);
    int64_t begin = now_us();
    post_write(bed, 0, 65536, 1);
    int bad = pump_bad(bed, &bed->a, 5000);
    facts(bed);
    say_text(bed, "limited", bad < 0 ? "nothing" : status_name(bed->a.seen[bad].wc.status));
    say_text(bed, "sender_state", side_state(bed, &bed->a));
    say_text(bed, "receiver_state", side_state(bed, &bed->b));
    int64_t took = now_us() - begin;
    bed_fresh(bed, &endless, 0);
    post_write(bed, 0, 65536, 1);
    say_bool(bed, "endless_waits", !pump(bed, 300, 1, 0));
    say_bool(bed, "memory_written_while_it_waits", bed->b.buf[0] != 0);
    post_receive(&bed->b, 1);
    say_bool(bed, "then_completes", pump(bed, 2000, 1, 1));
    say_statuses(bed, "endless", &bed->a);
    say_bool(bed, "memory_right", same_memory(bed, 0, 65536));
    durations(bed);
    say_ms(bed, "limited", took);
}

static void say_outcome(struct bed *bed, const char *prefix)
{
    char name[64];
    pump_bad(bed, &bed->a, 3000);
    pump(bed, 50, 0, 0);
#define NAMED(suffix) (strcpy(name, prefix), strcat(name, suffix))
    say_statuses(bed, NAMED("_sender"), &bed->a);
    say_statuses(bed, NAMED("_receiver"), &bed->b);
    say_text(bed, NAMED("_sender_state"), side_state(bed, &bed->a));
    say_text(bed, NAMED("_receiver_state"), side_state(bed, &bed->b));
    say_events(bed, NAMED("_sender_events"), &bed->a);
    say_events(bed, NAMED("_receiver_events"), &bed->b);
#undef NAMED
}

static void write_to(struct bed *bed, uint64_t beyond, uint32_t rkey, uint32_t lkey)
{
    struct told t = {.len = 4096, .beyond = beyond, .imm = 1, .lkey = lkey, .rkey = rkey};
    post_told(bed, &t);
    post_write(bed, 0, 64, 2); /* what stands behind the one that fails */
}

static void step_access(struct bed *bed)
{
    struct verbs_lib *lib = &bed->lib;
    facts(bed);
    bed_fresh(bed, &quick, 4);
    write_to(bed, BUF_BYTES - 64, bed->b.mr->rkey, bed->a.mr->lkey);
    say_outcome(bed, "beyond");
    bed_fresh(bed, &quick, 4);
    write_to(bed, 0, bed->b.mr->rkey ^ 0x5500, bed->a.mr->lkey);
    say_outcome(bed, "bad_rkey");
    bed_fresh(bed, &quick, 4);
    write_to(bed, 0, bed->b.mr->rkey, bed->a.mr->lkey ^ 0x5500);
    say_outcome(bed, "bad_lkey");
    struct ibv_mr *mr = lib->reg_mr(bed->b.pd, bed->b.buf, 65536, IBV_ACCESS_LOCAL_WRITE);
    bed_fresh(bed, &quick, 4);
    write_to(bed, 0, mr->rkey, bed->a.mr->lkey);
    say_outcome(bed, "no_remote_write");
    lib->dereg_mr(mr);
}

/* A key that was given away is taken back, at rest. */
static void step_dereg(struct bed *bed)
{
    struct verbs_lib *lib = &bed->lib;
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr = lib->reg_mr(bed->b.pd, bed->b.buf, 65536, access);
    bed_fresh(bed, &quick, 4);
    uint32_t rkey = mr->rkey;
    facts(bed);
    say_int(bed, "dereg", lib->dereg_mr(mr));
    write_to(bed, 0, rkey, bed->a.mr->lkey);
    say_outcome(bed, "written_with_the_old_key");
    say_bool(bed, "memory_untouched", bed->b.buf[0] == 0);
}

/* A key is taken back while the peer writes with it. */
static void step_dereg_busy(struct bed *bed)
{
    struct verbs_lib *lib = &bed->lib;
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    int changed = 0, refused = 0, rounds = 12, cut = 0;
    int64_t took = 0;
    for (int round = 0; round < rounds; round++) {
        struct ibv_mr *mr = lib->reg_mr(bed->b.pd, bed->b.buf, BUF_BYTES, access);
        bed_fresh(bed, &quick, 64);
        flood_start(bed, mr->rkey);
        pump(bed, 2000, 0, 1 + round);
        int64_t begin = now_us();
        int rc = lib->dereg_mr(mr);
        took = now_us() - begin > took ? now_us() - begin : took;
        uint64_t before = sum(bed->b.buf, BUF_BYTES);
        flood_join(bed);
        pump_bad(bed, &bed->a, 1000);
        pump(bed, 20, 0, 0);
        changed += rc == 0 && sum(bed->b.buf, BUF_BYTES) != before;
        cut += count_status(&bed->a, IBV_WC_SUCCESS) < 64;
        refused += rc != 0;
        for (int tries = 0; rc != 0 && tries < 100; tries++) {
            pump(bed, 10, 0, 0);
            rc = lib->dereg_mr(mr);
        }
    }
    facts(bed);
    say_bool(bed, "refused", refused > 0);
    say_bool(bed, "memory_changed_after_it_returned", changed > 0);
    say_bool(bed, "cut_in_the_middle_at_times", cut > 0);
    durations(bed);
    say_ms(bed, "longest_dereg", took);
    info(bed);
    say_int(bed, "rounds_cut_in_the_middle", cut);
    say_int(bed, "rounds_with_a_late_write", changed);
    say_int(bed, "rounds_refused", refused);
}

static void step_send_too_long(struct bed *bed)
{
    bed_fresh(bed, &quick, 0);
    struct ibv_sge to = {(uintptr_t)bed->b.buf, 64, bed->b.mr->lkey};
    struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad;
    ibv_post_recv(bed->b.qp, &receive, &bad);
    struct ibv_sge sge = {(uintptr_t)bed->a.buf, 128, bed->a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    post_write_raw(&bed->a, &wr, &sge);
    facts(bed);
    say_outcome(bed, "too_long");
}

static void step_sender_err(struct bed *bed)
{
    bed_fresh(bed, &quick, 64);
    flood_start(bed, bed->b.mr->rkey);
    pump(bed, 2000, 8, 0);
    facts(bed);
    say_int(bed, "modify", side_to_state(bed, &bed->a, IBV_QPS_ERR));
    flood_join(bed);
    say_bool(bed, "all_sends_come_back", pump(bed, 2000, 64, 0));
    say_bool(bed, "in_order", flushed_in_order(&bed->a));
    pump(bed, 300, 0, 0);
    say_text(bed, "receiver_state", side_state(bed, &bed->b));
    say_bool(bed, "receiver_sees_an_error", bad_index(&bed->b) >= 0);
    say_bool(bed, "sender_never_knows_less",
             count_status(&bed->b, IBV_WC_SUCCESS) >= count_status(&bed->a, IBV_WC_SUCCESS));
    info(bed);
    say_int(bed, "sent", count_status(&bed->a, IBV_WC_SUCCESS));
    say_int(bed, "arrived", count_status(&bed->b, IBV_WC_SUCCESS));
}

const struct step error_steps[] = {
    {"drain", step_drain, ALWAYS},
    {"drain_marker", step_drain_marker, ALWAYS},
    {"late_write_err", step_late_err, ALWAYS},
    {"late_write_reset", step_late_reset, BY_NAME},
    {"late_write_destroy", step_late_destroy, ALWAYS},
    {"peer_gone", step_peer_err, ALWAYS},
    {"rnr", step_rnr, ALWAYS},
    {"access", step_access, ALWAYS},
    {"dereg", step_dereg, ALWAYS},
    {"dereg_busy", step_dereg_busy, ALWAYS},
    {"send_too_long", step_send_too_long, ALWAYS},
    {"sender_err", step_sender_err, ALWAYS},
    {NULL, NULL, ALWAYS},
};
