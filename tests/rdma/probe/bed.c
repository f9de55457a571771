#define _GNU_SOURCE
#include "../../pause.h"
#include "probe.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* 4.2 ms and 4 tries; 67 ms and 8 tries. */
const struct ways quick = {
    .timeout = 10, .retries = 3, .rnr_retries = 3, .send_wrs = 256, .recv_wrs = 256};
const struct ways patient = {
    .timeout = 14, .retries = 7, .rnr_retries = 7, .send_wrs = 256, .recv_wrs = 256};

int64_t now_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
}

void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("probe: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static bool ipv4_mapped(const union ibv_gid *gid)
{
    static const uint8_t head[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return memcmp(gid->raw, head, sizeof(head)) == 0;
}

/* An IPv4 address stands in the table once per RoCE version; soft-RoCE speaks v2 alone. */
static void find_gid(struct bed *bed, struct side *side)
{
    for (side->gid_index = 0; side->gid_index < side->port.gid_tbl_len; side->gid_index++)
        if (bed->lib.query_gid(side->ctx, 1, side->gid_index, &side->gid) == 0 &&
            ipv4_mapped(&side->gid))
            return;
    die("device %c has no IPv4 GID", side->name);
}

void bed_find_gids(struct bed *bed)
{
    find_gid(bed, &bed->a);
    find_gid(bed, &bed->b);
}

static void side_open(struct bed *bed, struct side *side, char name, const char *device)
{
    struct verbs_lib *lib = &bed->lib;
    int count = 0;
    struct ibv_device **list = lib->get_device_list(&count);
    side->name = name;
    for (int i = 0; i < count && !side->ctx; i++)
        if (strcmp(lib->get_device_name(list[i]), device) == 0)
            side->ctx = lib->open_device(list[i]);
    if (list)
        lib->free_device_list(list);
    if (!side->ctx)
        die("no device %s among %d: %s", device, count, strerror(errno));
    memset(&side->port, 0, sizeof(side->port));
    if (lib->query_port(side->ctx, 1, (struct _compat_ibv_port_attr *)&side->port) != 0)
        die("%s: query_port: %s", device, strerror(errno));
    find_gid(bed, side);
    side->pd = lib->alloc_pd(side->ctx);
    side->channel = lib->create_comp_channel(side->ctx);
    side->cq = lib->create_cq(side->ctx, MAX_SEEN, NULL, side->channel, 0);
    side->buf = mmap(NULL, BUF_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!side->pd || !side->channel || !side->cq || side->buf == MAP_FAILED)
        die("%s: %s", device, strerror(errno));
    side->mr =
        lib->reg_mr(side->pd, side->buf, BUF_BYTES,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    if (!side->mr)
        die("%s: reg_mr: %s", device, strerror(errno));
    fcntl(side->ctx->async_fd, F_SETFL, O_NONBLOCK);
    fcntl(side->channel->fd, F_SETFL, O_NONBLOCK);
}

static void side_close(struct bed *bed, struct side *side)
{
    struct verbs_lib *lib = &bed->lib;
    side_destroy_qp(bed, side);
    if (side->mr)
        lib->dereg_mr(side->mr);
    lib->destroy_cq(side->cq);
    lib->destroy_comp_channel(side->channel);
    lib->dealloc_pd(side->pd);
    lib->close_device(side->ctx);
    munmap(side->buf, BUF_BYTES);
}

void bed_open(struct bed *bed, const char *library, const char *a, const char *b)
{
    if (lib_load(&bed->lib, library) != 0)
        exit(1);
    side_open(bed, &bed->a, 'a', a);
    side_open(bed, &bed->b, 'b', b);
}

void bed_close(struct bed *bed)
{
    side_close(bed, &bed->a);
    side_close(bed, &bed->b);
}

void side_destroy_qp(struct bed *bed, struct side *side)
{
    if (side->qp)
        bed->lib.destroy_qp(side->qp);
    side->qp = NULL;
}

int side_to_state(struct bed *bed, struct side *side, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    return bed->lib.modify_qp(side->qp, &attr, IBV_QP_STATE);
}

const char *side_state(struct bed *bed, struct side *side)
{
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (!bed->lib.query_qp)
        return "not asked";
    memset(&attr, 0, sizeof(attr));
    if (bed->lib.query_qp(side->qp, &attr, IBV_QP_STATE, &init) != 0)
        return "query refused";
    return attr.qp_state <= IBV_QPS_ERR ? names[attr.qp_state] : "UNKNOWN";
}

static void make_qp(struct bed *bed, struct side *side, const struct ways *ways)
{
    struct ibv_qp_init_attr init = {
        .send_cq = side->cq,
        .recv_cq = side->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 2 * ways->send_wrs,
                .max_recv_wr = ways->recv_wrs,
                .max_send_sge = 1,
                .max_recv_sge = 1},
    };
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    side->qp = bed->lib.create_qp(side->pd, &init);
    if (!side->qp)
        die("side %c: create_qp: %s", side->name, strerror(errno));
    if (bed->lib.modify_qp(side->qp, &attr,
                           IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        die("side %c: INIT: %s", side->name, strerror(errno));
}

static void connect_qp(struct bed *bed, struct side *side, struct side *peer,
                       const struct ways *ways)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = side->port.active_mtu,
        .dest_qp_num = peer->qp->qp_num,
        .rq_psn = 7,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12, /* 0.64 ms */
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .dlid = peer->port.lid,
                    .grh = {.dgid = peer->gid,
                            .sgid_index = (uint8_t)side->gid_index,
                            .hop_limit = 64}},
    };
    if (bed->lib.modify_qp(side->qp, &attr,
                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        die("side %c: RTR: %s", side->name, strerror(errno));
    memset(&attr, 0, sizeof(attr));
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = ways->timeout;
    attr.retry_cnt = ways->retries;
    attr.rnr_retry = ways->rnr_retries;
    attr.sq_psn = 7;
    attr.max_rd_atomic = 1;
    if (bed->lib.modify_qp(side->qp, &attr,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                               IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        die("side %c: RTS: %s", side->name, strerror(errno));
}

void bed_fresh(struct bed *bed, const struct ways *ways, int receives)
{
    side_destroy_qp(bed, &bed->a);
    side_destroy_qp(bed, &bed->b);
    pump(bed, 20, 0, 0);
    make_qp(bed, &bed->a, ways);
    make_qp(bed, &bed->b, ways);
    connect_qp(bed, &bed->b, &bed->a, ways);
    connect_qp(bed, &bed->a, &bed->b, ways);
    bed->a.seen_count = bed->b.seen_count = 0;
    bed->a.event_count = bed->b.event_count = 0;
    fill(bed->a.buf, BUF_BYTES, (uint32_t)now_us());
    memset(bed->b.buf, 0, BUF_BYTES);
    for (int i = 0; i < receives; i++)
        if (post_receive(&bed->b, (uint64_t)i) != 0)
            die("post_recv %d", i);
}

int post_receive(struct side *side, uint64_t id)
{
    struct ibv_recv_wr wr = {.wr_id = id}, *bad;
    return ibv_post_recv(side->qp, &wr, &bad);
}

int post_write_raw(struct side *from, struct ibv_send_wr *wr, struct ibv_sge *sge)
{
    struct ibv_send_wr *bad;
    wr->sg_list = sge;
    wr->num_sge = sge && sge->length ? 1 : 0;
    return ibv_post_send(from->qp, wr, &bad);
}

int post_told(struct bed *bed, const struct told *t)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)(bed->a.buf + t->offset), .length = (uint32_t)t->len, .lkey = t->lkey};
    struct ibv_send_wr write = {
        .wr_id = t->imm,
        .opcode = IBV_WR_RDMA_WRITE,
        .wr.rdma = {.remote_addr = (uintptr_t)(bed->b.buf + t->offset) + t->beyond,
                    .rkey = t->rkey},
    };
    struct ibv_send_wr send = {
        .wr_id = t->imm,
        .opcode = IBV_WR_SEND_WITH_IMM,
        .send_flags = t->silent ? 0 : IBV_SEND_SIGNALED,
        .imm_data = htonl(t->imm),
    };
    int rc = t->len ? post_write_raw(&bed->a, &write, &sge) : 0;
    return rc ? rc : post_write_raw(&bed->a, &send, NULL);
}

int post_write(struct bed *bed, size_t offset, size_t len, uint32_t imm)
{
    struct told t = {
        .offset = offset, .len = len, .imm = imm, .lkey = bed->a.mr->lkey, .rkey = bed->b.mr->rkey};
    return post_told(bed, &t);
}

static void collect(struct bed *bed, struct side *side)
{
    struct ibv_wc wc[16];
    struct ibv_async_event event;
    int n = ibv_poll_cq(side->cq, 16, wc);
    for (int i = 0; i < n && side->seen_count < MAX_SEEN; i++)
        side->seen[side->seen_count++] = (struct seen){now_us(), wc[i]};
    while (side->event_count < MAX_EVENTS && bed->lib.get_async_event(side->ctx, &event) == 0) {
        side->events[side->event_count++] = (struct event){now_us(), event.event_type};
        bed->lib.ack_async_event(&event);
    }
}

static bool saw(struct bed *bed, int want_a, int want_b)
{
    collect(bed, &bed->a);
    collect(bed, &bed->b);
    return (want_a || want_b) && bed->a.seen_count >= want_a && bed->b.seen_count >= want_b;
}

bool pump(struct bed *bed, int ms, int want_a, int want_b)
{
    return WITHIN_MS(ms, saw(bed, want_a, want_b));
}

int bad_index(const struct side *side)
{
    for (int i = 0; i < side->seen_count; i++)
        if (side->seen[i].wc.status != IBV_WC_SUCCESS)
            return i;
    return -1;
}

int pump_bad(struct bed *bed, struct side *side, int ms)
{
    int64_t deadline = now_us() + (int64_t)ms * 1000;
    while (bad_index(side) < 0 && now_us() < deadline)
        pump(bed, 1, 0, 0);
    return bad_index(side);
}

bool pump_event(struct bed *bed, struct side *side, enum ibv_event_type type, int ms)
{
    int64_t deadline = now_us() + (int64_t)ms * 1000;
    for (;;) {
        for (int i = 0; i < side->event_count; i++)
            if (side->events[i].type == type)
                return true;
        if (now_us() >= deadline)
            return false;
        pump(bed, 1, 0, 0);
    }
}

int count_status(const struct side *side, enum ibv_wc_status status)
{
    int count = 0;
    for (int i = 0; i < side->seen_count; i++)
        count += side->seen[i].wc.status == status;
    return count;
}

void act_start(struct bed *bed, const char *what)
{
    bed->actor = fork();
    if (bed->actor == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO);
        execl(bed->act, bed->act, what, (char *)NULL);
        _exit(127);
    }
    if (bed->actor < 0)
        die("fork: %s", strerror(errno));
}

bool act_over(struct bed *bed)
{
    int status;
    if (bed->actor && waitpid(bed->actor, &status, WNOHANG) == bed->actor) {
        if (status != 0)
            die("%s failed", bed->act);
        bed->actor = 0;
    }
    return bed->actor == 0;
}

void act(struct bed *bed, const char *what)
{
    int64_t deadline = now_us() + 60000000;
    act_start(bed, what);
    while (!act_over(bed)) {
        if (now_us() > deadline)
            die("%s %s: still running after 60 s", bed->act, what);
        pump(bed, 1, 0, 0);
    }
}

static void *post_all(void *of)
{
    struct bed *bed = of;
    for (uint32_t i = 0; i < bed->flood_count; i++) {
        struct told t = {.offset = i * FLOOD_BYTES,
                         .len = FLOOD_BYTES,
                         .imm = i,
                         .lkey = bed->a.mr->lkey,
                         .rkey = bed->flood_rkey};
        if (post_told(bed, &t) != 0)
            break;
    }
    return NULL;
}

void flood_start(struct bed *bed, uint32_t rkey)
{
    bed->flood_count = BUF_BYTES / FLOOD_BYTES;
    bed->flood_rkey = rkey;
    if (pthread_create(&bed->flood, NULL, post_all, bed) != 0)
        die("pthread_create");
}

void flood_join(struct bed *bed)
{
    pthread_join(bed->flood, NULL);
}

bool same_memory(const struct bed *bed, size_t offset, size_t len)
{
    return memcmp(bed->a.buf + offset, bed->b.buf + offset, len) == 0;
}

void fill(uint8_t *to, size_t len, uint32_t seed)
{
    uint32_t x = seed | 1;
    for (size_t i = 0; i + 4 <= len; i += 4) {
        x = x * 1664525u + 1013904223u;
        uint32_t y = x | 0x01010101u; /* no byte is zero: unwritten ones stand out */
        memcpy(to + i, &y, 4);
    }
}

uint64_t sum(const uint8_t *from, size_t len)
{
    uint64_t x = 1469598103934665603ull;
    for (size_t i = 0; i + 8 <= len; i += 8) {
        uint64_t word;
        memcpy(&word, from + i, 8);
        x = (x ^ word) * 1099511628211ull;
    }
    return x;
}
