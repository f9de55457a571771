/* What works when nothing is broken. */
#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

static void step_device(struct bed *bed)
{
    struct ibv_device_attr attr;
    struct ibv_qp_attr qp;
    struct ibv_qp_init_attr init;
    int64_t begin = now_us();
    bed_fresh(bed, &quick, 0);
    int64_t made = now_us() - begin - 20000;
    memset(&attr, 0, sizeof(attr));
    if (bed->lib.query_device(bed->a.ctx, &attr) != 0)
        die("query_device");
    memset(&init, 0, sizeof(init));
    if (bed->lib.query_qp)
        bed->lib.query_qp(bed->a.qp, &qp, IBV_QP_CAP, &init);
    facts(bed);
    say_bool(bed, "port_active", bed->a.port.state == IBV_PORT_ACTIVE);
    say_bool(bed, "ethernet", bed->a.port.link_layer == IBV_LINK_LAYER_ETHERNET);
    say_text(bed, "state_of_connected_qp", side_state(bed, &bed->a));
    durations(bed);
    say_ms(bed, "two_connected_qps", made);
    info(bed);
    say_text(bed, "firmware", attr.fw_ver);
    say_int(bed, "active_mtu", 128 << bed->a.port.active_mtu);
    say_int(bed, "max_qp_wr", attr.max_qp_wr);
    say_int(bed, "max_sge", attr.max_sge);
    say_int(bed, "max_cqe", attr.max_cqe);
    say_int(bed, "max_mr", attr.max_mr);
    say_int(bed, "max_qp", attr.max_qp);
    say_int(bed, "max_msg_bytes", bed->a.port.max_msg_sz);
    say_int(bed, "gid_table", bed->a.port.gid_tbl_len);
    say_int(bed, "gid_index_used", bed->a.gid_index);
    say_int(bed, "inline_bytes", init.cap.max_inline_data);
    say_int(bed, "active_speed", bed->a.port.active_speed);
    say_int(bed, "active_width", bed->a.port.active_width);
}

static void step_write_imm(struct bed *bed)
{
    const size_t len = 1 << 20;
    bed_fresh(bed, &quick, 4);
    struct ibv_sge sge = {(uintptr_t)bed->a.buf, (uint32_t)len, bed->a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 7,
                             .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED,
                             .imm_data = htonl(7),
                             .wr.rdma = {(uintptr_t)bed->b.buf, bed->b.mr->rkey}};
    post_write_raw(&bed->a, &wr, &sge);
    facts(bed);
    say_bool(bed, "completed", pump(bed, 5000, 1, 1));
    const struct ibv_wc *a = &bed->a.seen[0].wc, *b = &bed->b.seen[0].wc;
    say_text(bed, "sender", status_name(a->status));
    say_text(bed, "sender_opcode", opcode_name(a->opcode));
    say_text(bed, "receiver", status_name(b->status));
    say_text(bed, "receiver_opcode", opcode_name(b->opcode));
    say_bool(bed, "receiver_len_right", b->byte_len == len);
    say_bool(bed, "imm_right", (b->wc_flags & IBV_WC_WITH_IMM) && b->imm_data == htonl(7));
    say_bool(bed, "first_receive_used", b->wr_id == 0);
    say_bool(bed, "memory_right", same_memory(bed, 0, len));
    post_write_raw(&bed->a, &wr, NULL);
    pump(bed, 1000, 2, 2);
    say_bool(bed, "empty_write_arrives", bed->b.seen_count == 2 && !bed->b.seen[1].wc.byte_len);
    durations(bed);
    say_ms(bed, "receiver_after_sender", bed->b.seen[0].us - bed->a.seen[0].us);
}

static void step_write_plain(struct bed *bed)
{
    bed_fresh(bed, &quick, 1);
    struct ibv_sge sge = {(uintptr_t)bed->a.buf, 65536, bed->a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {(uintptr_t)bed->b.buf, bed->b.mr->rkey}};
    post_write_raw(&bed->a, &wr, &sge);
    pump(bed, 2000, 1, 0);
    pump(bed, 50, 0, 0);
    facts(bed);
    say_int(bed, "sender_completions", bed->a.seen_count);
    say_int(bed, "receiver_completions", bed->b.seen_count);
    say_bool(bed, "memory_right", same_memory(bed, 0, 65536));
}

static void step_order(struct bed *bed)
{
    bool ordered = true;
    bed_fresh(bed, &patient, 64);
    for (uint32_t i = 0; i < 64; i++) {
        struct told t = {.offset = i * 8192u,
                         .len = 8192,
                         .imm = i,
                         .lkey = bed->a.mr->lkey,
                         .rkey = bed->b.mr->rkey,
                         .silent = i % 8 != 7};
        post_told(bed, &t);
    }
    facts(bed);
    say_bool(bed, "completed", pump(bed, 10000, 8, 64));
    for (int i = 0; i < bed->b.seen_count; i++)
        ordered &= bed->b.seen[i].wc.wr_id == (uint64_t)i &&
                   bed->b.seen[i].wc.imm_data == htonl((uint32_t)i);
    say_bool(bed, "receives_in_order", ordered);
    pump(bed, 50, 0, 0);
    say_int(bed, "completions_of_64_signalled_each_8th", bed->a.seen_count);
    say_bool(bed, "memory_right", same_memory(bed, 0, 64 * 8192));
}

/* Does the last byte ever show before those in front of it? Read by the CPU while they land. */
static void step_placement(struct bed *bed)
{
    const size_t len = 1 << 20;
    int early = 0;
    volatile uint8_t *to = bed->b.buf;
    for (int round = 0; round < 8; round++) {
        bed_fresh(bed, &patient, 1);
        post_write(bed, 0, len, 1);
        int64_t deadline = now_us() + 3000000;
        while (!to[len - 1] && now_us() < deadline)
            ;
        for (size_t i = 0; i < len; i += 128)
            early += to[i] == 0;
        pump(bed, 3000, 1, 1);
    }
    facts(bed);
    say_bool(bed, "memory_right", same_memory(bed, 0, len));
    info(bed);
    say_int(bed, "lines_missing_when_the_last_byte_shows", early);
}

static void step_notify(struct bed *bed)
{
    struct ibv_cq *cq;
    void *user;
    bed_fresh(bed, &quick, 4);
    while (bed->lib.get_cq_event(bed->b.channel, &cq, &user) == 0)
        bed->lib.ack_cq_events(cq, 1);
    facts(bed);
    say_int(bed, "arm", ibv_req_notify_cq(bed->b.cq, 0));
    post_write(bed, 0, 64, 1);
    struct pollfd fd = {.fd = bed->b.channel->fd, .events = POLLIN};
    say_bool(bed, "descriptor_readable", poll(&fd, 1, 2000) == 1);
    say_bool(bed, "event", bed->lib.get_cq_event(bed->b.channel, &cq, &user) == 0);
    bed->lib.ack_cq_events(bed->b.cq, 1);
    pump(bed, 100, 0, 0);
    post_write(bed, 0, 64, 2);
    say_bool(bed, "readable_unarmed", poll(&fd, 1, 100) == 1);
    pump(bed, 500, 2, 2);
    /* Armed after the completion lies in the queue: nothing tells of it. */
    post_write(bed, 0, 64, 3);
    poll(NULL, 0, 100);
    ibv_req_notify_cq(bed->b.cq, 0);
    say_bool(bed, "readable_armed_late", poll(&fd, 1, 100) == 1);
    pump(bed, 500, 3, 3);
}

/* A flush reads a byte; the stand-in gives eight at most. */
#define READ_BYTES 8

static int post_read(struct bed *bed, size_t to, size_t from, uint64_t id)
{
    struct ibv_sge sge = {(uintptr_t)bed->a.buf + to, READ_BYTES, bed->a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = id,
                             .opcode = IBV_WR_RDMA_READ,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {(uintptr_t)bed->b.buf + from, bed->b.mr->rkey}};
    return post_write_raw(&bed->a, &wr, &sge);
}

/* A read that is posted behind a write on its queue pair, with nobody waiting in between, brings
 * what the write has put there: its last bytes, which land last if any do. Each round writes other
 * bytes. */
static void step_read_behind_write(struct bed *bed)
{
    enum { ROUNDS = 16, LEN = 1 << 20 };
    const size_t spare = BUF_BYTES - READ_BYTES; /* of A: nothing is written from there */
    int seen = 0, succeeded = 0;
    bool in_order = true;
    bed_fresh(bed, &patient, 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct ibv_sge sge = {(uintptr_t)bed->a.buf, LEN, bed->a.mr->lkey};
        struct ibv_send_wr wr = {.wr_id = 2 * round,
                                 .opcode = IBV_WR_RDMA_WRITE,
                                 .send_flags = IBV_SEND_SIGNALED,
                                 .wr.rdma = {(uintptr_t)bed->b.buf, bed->b.mr->rkey}};
        int first = bed->a.seen_count;
        fill(bed->a.buf, LEN, 77 + round);
        memset(bed->a.buf + spare, 0, READ_BYTES);
        if (post_write_raw(&bed->a, &wr, &sge) ||
            post_read(bed, spare, LEN - READ_BYTES, 2 * round + 1) ||
            !pump(bed, 10000, first + 2, 0))
            break;
        for (int i = 0; i < 2; i++) {
            const struct ibv_wc *wc = &bed->a.seen[first + i].wc;
            in_order &= wc->wr_id == 2 * round + (uint64_t)i;
            succeeded += wc->status == IBV_WC_SUCCESS;
        }
        seen += memcmp(bed->a.buf + spare, bed->a.buf + LEN - READ_BYTES, READ_BYTES) == 0;
    }
    facts(bed);
    say_bool(bed, "all_succeed", succeeded == 2 * ROUNDS);
    say_bool(bed, "in_order", in_order);
    say_bool(bed, "read_sees_the_write", seen == ROUNDS);
    say_bool(bed, "memory_right", same_memory(bed, 0, LEN));
}

static void step_read_self(struct bed *bed)
{
    bed_fresh(bed, &quick, 1);
    memset(bed->a.buf, 0, READ_BYTES);
    facts(bed);
    say_int(bed, "post", post_read(bed, 0, 0, 1));
    say_bool(bed, "completed", pump(bed, 2000, 1, 0));
    say_text(bed, "status", status_name(bed->a.seen[0].wc.status));
    say_text(bed, "opcode", opcode_name(bed->a.seen[0].wc.opcode));
    say_bool(bed, "memory_right", same_memory(bed, 0, READ_BYTES));
}

/* Chunks as the transport may send them: plain writes, then a send that tells of them. */
static void step_write_then_send(struct bed *bed)
{
    enum { CHUNKS = 16, LEN = 65536 };
    bool ordered = true, complete = true;
    bed_fresh(bed, &patient, 0);
    for (uint64_t i = 0; i < CHUNKS; i++) {
        struct ibv_sge sge = {(uintptr_t)bed->b.buf + BUF_BYTES - 4096 + i * 64, 64,
                              bed->b.mr->lkey};
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
        ibv_post_recv(bed->b.qp, &wr, &bad);
    }
    for (uint64_t i = 0; i < CHUNKS; i++) {
        struct ibv_sge sge = {(uintptr_t)bed->a.buf + i * LEN, LEN, bed->a.mr->lkey};
        struct ibv_send_wr wr = {.wr_id = i,
                                 .opcode = IBV_WR_RDMA_WRITE,
                                 .wr.rdma = {(uintptr_t)bed->b.buf + i * LEN, bed->b.mr->rkey}};
        post_write_raw(&bed->a, &wr, &sge);
        struct ibv_sge head = {(uintptr_t)bed->a.buf, 64, bed->a.mr->lkey};
        struct ibv_send_wr send = {
            .wr_id = i, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
        post_write_raw(&bed->a, &send, &head);
    }
    int64_t deadline = now_us() + 5000000;
    for (int known = 0; known < CHUNKS && now_us() < deadline;) {
        pump(bed, 1, 0, 0);
        for (; known < bed->b.seen_count; known++) {
            ordered &= bed->b.seen[known].wc.wr_id == (uint64_t)known;
            complete &= same_memory(bed, (size_t)known * LEN, LEN);
        }
    }
    facts(bed);
    say_int(bed, "received", bed->b.seen_count);
    say_text(bed, "receiver_opcode", opcode_name(bed->b.seen[0].wc.opcode));
    say_bool(bed, "in_order", ordered);
    say_bool(bed, "chunk_complete_when_told", complete);
    say_int(bed, "sender_completions", bed->a.seen_count);
}

static void step_register(struct bed *bed)
{
    const size_t len = (size_t)64 << 20;
    uint8_t *memory = aligned_alloc(4096, len);
    memset(memory, 1, len);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    int64_t begin = now_us();
    struct ibv_mr *first = bed->lib.reg_mr(bed->a.pd, memory, len, access);
    int64_t made = now_us();
    struct ibv_mr *second = bed->lib.reg_mr(bed->a.pd, memory, len, access);
    struct ibv_mr *other = bed->lib.reg_mr(bed->b.pd, memory, len, access);
    facts(bed);
    say_bool(bed, "same_memory_twice", first && second);
    say_bool(bed, "same_memory_on_both_devices", first && other);
    say_bool(bed, "keys_of_one_device_differ", first && second && first->rkey != second->rkey);
    uint32_t old = first ? first->rkey : 0;
    int64_t before = now_us();
    say_int(bed, "dereg", bed->lib.dereg_mr(first));
    int64_t gone = now_us() - before;
    struct ibv_mr *again = bed->lib.reg_mr(bed->a.pd, memory, len, access);
    say_bool(bed, "key_used_again_at_once", again && again->rkey == old);
    durations(bed);
    say_ms(bed, "register_64_MiB", made - begin);
    say_ms(bed, "deregister_64_MiB", gone);
    bed->lib.dereg_mr(second);
    bed->lib.dereg_mr(other);
    bed->lib.dereg_mr(again);
    free(memory);
}

static void step_full_queue(struct bed *bed)
{
    struct ways small = patient;
    small.send_wrs = small.recv_wrs = 16;
    bed_fresh(bed, &small, 0);
    int sends = 0, receives = 0, rc_send = 0, rc_receive = 0;
    while (receives < 1000 && (rc_receive = post_receive(&bed->b, 0)) == 0)
        receives++;
    while (sends < 1000 && (rc_send = post_write(bed, 0, 1 << 20, 1)) == 0)
        sends++;
    facts(bed);
    say_bool(bed, "sends_bounded", sends >= 16 && sends < 1000);
    say_bool(bed, "receives_bounded", receives >= 16 && receives < 1000);
    say_text(bed, "send_refused_with", strerror(rc_send));
    say_text(bed, "receive_refused_with", strerror(rc_receive));
    info(bed);
    say_int(bed, "sends", sends);
    say_int(bed, "receives", receives);
}

const struct step basic_steps[] = {
    {"device", step_device, ALWAYS},
    {"write_imm", step_write_imm, ALWAYS},
    {"write_plain", step_write_plain, ALWAYS},
    {"order", step_order, ALWAYS},
    {"write_then_send", step_write_then_send, ALWAYS},
    {"placement", step_placement, ALWAYS},
    {"notify", step_notify, ALWAYS},
    {"read", step_read_self, ALWAYS},
    {"read_behind_write", step_read_behind_write, ALWAYS},
    {"register", step_register, ALWAYS},
    {"full_queue", step_full_queue, ALWAYS},
    {NULL, NULL, ALWAYS},
};
