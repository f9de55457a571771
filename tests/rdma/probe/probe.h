/* Asks a libibverbs and its devices how they behave where the verbs transport depends on it, and
 * prints what was observed. One process owns both ends: device A writes to device B.
 *
 * The library is named by the caller. So the same steps run over soft-RoCE and over the fake
 * library of the tests, and their answers can be compared. One JSON line per step:
 *     {"step": NAME, "facts": {...}, "ms": {...}, "info": {...}}
 * facts: what the transport may depend on, the same in every run; ms: durations in milliseconds;
 * info: sizes and counts that depend on the device or on chance.
 *
 * Threads: one, and the one that floods. Ownership: a bed owns both sides, a side owns its device,
 * buffer and queue pair. Every wait is bounded by the caller's milliseconds.
 */
#ifndef TESTS_RDMA_PROBE_H
#define TESTS_RDMA_PROBE_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define BUF_BYTES ((size_t)8 << 20)
#define FLOOD_BYTES 131072u
#define MAX_SEEN 8192
#define MAX_EVENTS 64

/* The functions of the library that are not inline; post, poll and notify go through the
 * context's own table. */
struct verbs_lib {
    struct ibv_device **(*get_device_list)(int *count);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *ctx);
    int (*query_device)(struct ibv_context *ctx, struct ibv_device_attr *attr);
    int (*query_port)(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *attr);
    int (*query_gid)(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *ctx);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t len, int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *ctx);
    int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
    struct ibv_cq *(*create_cq)(struct ibv_context *ctx, int entries, void *user,
                                struct ibv_comp_channel *channel, int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user);
    void (*ack_cq_events)(struct ibv_cq *cq, unsigned int count);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    /* NULL where the library lacks it: states are "not asked" then. */
    int (*query_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                    struct ibv_qp_init_attr *init);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*get_async_event)(struct ibv_context *ctx, struct ibv_async_event *event);
    void (*ack_async_event)(struct ibv_async_event *event);
};

struct seen {
    int64_t us;
    struct ibv_wc wc;
};

struct event {
    int64_t us;
    enum ibv_event_type type;
};

struct side {
    char name; /* 'a' or 'b' */
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_mr *mr; /* the whole of buf */
    uint8_t *buf;      /* BUF_BYTES */
    struct ibv_qp *qp;
    struct ibv_port_attr port;
    union ibv_gid gid;
    int gid_index;
    struct seen seen[MAX_SEEN];
    int seen_count;
    struct event events[MAX_EVENTS];
    int event_count;
};

struct bed {
    struct verbs_lib lib;
    struct side a, b;
    const char
        *act;    /* program that is run with the name of a fault; NULL: such steps are left out */
    pid_t actor; /* 0: no fault is being run */
    pthread_t flood;
    uint32_t flood_count, flood_rkey;
    int64_t begin_us;
    bool first_item; /* of the JSON object being printed */
    const char *section;
};

/* How queue pairs are connected. */
struct ways {
    uint8_t timeout; /* 4.096 us << timeout until a packet is sent again */
    uint8_t retries, rnr_retries;
    uint32_t send_wrs, recv_wrs;
};
extern const struct ways quick; /* gives up within tens of milliseconds */
extern const struct ways patient;

/* lib.c */
int lib_load(struct verbs_lib *lib, const char *name); /* 0, or -1 after a message */

/* bed.c */
int64_t now_us(void);
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void bed_open(struct bed *bed, const char *library, const char *a, const char *b);
void bed_close(struct bed *bed);
void bed_find_gids(struct bed *bed); /* their place in the tables may have changed */
/* New connected queue pairs with empty logs; `receives` are posted on B, wr_id 0, 1, ... */
void bed_fresh(struct bed *bed, const struct ways *ways, int receives);
void side_destroy_qp(struct bed *bed, struct side *side);
int side_to_state(struct bed *bed, struct side *side, enum ibv_qp_state state);
const char *side_state(struct bed *bed, struct side *side);
/* These return what the verb returned. A message is a write, whose completion nobody asks for.
 * Behind it goes an empty send with the message's number, which takes a receive of B: as the
 * transport does it. wr_id = imm in both. */
struct told {
    size_t offset, len; /* the same place in both buffers; 0: the send alone */
    uint64_t beyond;    /* added to the address at B */
    uint32_t imm, lkey, rkey;
    bool silent; /* no completion is asked for the send either */
};
int post_told(struct bed *bed, const struct told *t);
int post_write(struct bed *bed, size_t offset, size_t len, uint32_t imm);
int post_receive(struct side *side, uint64_t id);
int post_write_raw(struct side *from, struct ibv_send_wr *wr, struct ibv_sge *sge);
/* Collects completions and events of both sides until `ms` are over or one of the sides has at
 * least as many completions as wanted (0: not waited for). True if the wish came true. */
bool pump(struct bed *bed, int ms, int want_a, int want_b);
/* Until a side's completions hold one that is not a success; its index, -1 if none came. */
int pump_bad(struct bed *bed, struct side *side, int ms);
bool pump_event(struct bed *bed, struct side *side, enum ibv_event_type type, int ms);
int bad_index(const struct side *side);
int count_status(const struct side *side, enum ibv_wc_status status);
/* Runs a fault; dies if that fails. Between start and over the caller goes on pumping. */
void act(struct bed *bed, const char *what);
void act_start(struct bed *bed, const char *what);
bool act_over(struct bed *bed);
/* A second thread fills B's buffer with writes of FLOOD_BYTES, so that something is on its way
 * while the caller does something else. Joined before the queue pair of A goes. */
void flood_start(struct bed *bed, uint32_t rkey);
void flood_join(struct bed *bed);
bool same_memory(const struct bed *bed, size_t offset, size_t len);
void fill(uint8_t *to, size_t len, uint32_t seed);
uint64_t sum(const uint8_t *from, size_t len);

/* report.c */
void report_begin(struct bed *bed, const char *step);
void report_end(struct bed *bed);
void facts(struct bed *bed); /* what follows is a fact, a duration, information */
void durations(struct bed *bed);
void info(struct bed *bed);
void say_text(struct bed *bed, const char *name, const char *value);
void say_bool(struct bed *bed, const char *name, bool value);
void say_int(struct bed *bed, const char *name, long long value);
void say_ms(struct bed *bed, const char *name, int64_t us);
/* Names of all statuses seen, each once, in the order of their first sight. */
void say_statuses(struct bed *bed, const char *name, const struct side *side);
void say_events(struct bed *bed, const char *name, const struct side *side);
const char *status_name(enum ibv_wc_status status);
const char *opcode_name(enum ibv_wc_opcode opcode);
const char *event_name(enum ibv_event_type type);

struct step {
    const char *name;
    void (*run)(struct bed *bed);
    enum { ALWAYS, NEEDS_ACT, BY_NAME } when; /* BY_NAME: it can leave the kernel damaged */
};
extern const struct step basic_steps[], error_steps[], link_steps[]; /* end with a NULL name */

#endif
