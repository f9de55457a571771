/* When to plan, when to switch, when to take a plan back. Pure; times are arguments.
 *
 * Health events coalesce: the first starts a window, at its end one planning round takes them all.
 * A plan in force is held for a while; a switch must promise a gain; a plan that is slower than
 * what it replaced is withdrawn and not taken again for the same state of the nodes.
 */
#ifndef R2_PLAN_POLICY_H
#define R2_PLAN_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define R2_POLICY_SAMPLES 20
#define R2_POLICY_SKIP 2 /* first operations after a switch: NCCL connects with them */

struct r2_policy_config {
    uint64_t coalesce_ns; /* 1 s */
    uint64_t hold_ns;     /* 10 s */
    double min_gain;      /* 0.05 */
};
#define R2_POLICY_DEFAULT                                                                          \
    {                                                                                              \
        .coalesce_ns = UINT64_C(1000000000), .hold_ns = UINT64_C(10000000000), .min_gain = 0.05    \
    }

struct r2_policy {
    struct r2_policy_config config;
    bool dirty;              /* something changed since the last planning round */
    uint64_t dirty_since_ns; /* the first change of the window */
    uint64_t switched_ns;    /* when the plan in force was agreed */
    bool switched;           /* a plan was ever agreed */
    uint64_t current;        /* key of the schedule in force, 0: stock */
    uint64_t banned[8];      /* keys withdrawn; (state of the nodes, schedule) */
    unsigned nbanned;
    /* speed of what runs, ns per byte */
    double stock_rate, plan_rate, predicted_stock_rate;
    unsigned stock_samples, plan_samples;
    unsigned skip; /* so many samples still */
};

enum r2_policy_verdict {
    R2_POLICY_WAIT,     /* nothing to do before *next_ns */
    R2_POLICY_PLAN,     /* make a plan now and ask r2_policy_judge */
    R2_POLICY_WITHDRAW, /* the plan in force is slower than stock: propose stock */
};

void r2_policy_init(struct r2_policy *p, const struct r2_policy_config *config);
/* The share of some node changed, or the operator asked. Speeds measured so far are forgotten: they
 * belong to another state of the nodes. */
void r2_policy_event(struct r2_policy *p, uint64_t now_ns);
/* What to do now; *next_ns is when to ask again (UINT64_MAX: only after an event or a sample). */
enum r2_policy_verdict r2_policy_poll(struct r2_policy *p, uint64_t now_ns, uint64_t *next_ns);
/* After PLAN: should `key` (0: stock) be proposed, whose predicted gain over what is in force is
 * `gain`? `why` (80 bytes) gets a reason. False also when it is in force already. */
bool r2_policy_judge(struct r2_policy *p, uint64_t key, double gain, uint64_t now_ns, char *why);
/* `key` is not to be proposed again. */
void r2_policy_ban(struct r2_policy *p, uint64_t key);
/* A proposal was committed. After an abort: r2_policy_event. */
void r2_policy_committed(struct r2_policy *p, uint64_t key, uint64_t now_ns);
/* What stock NCCL would take in the present state, ns per byte: stands in for measurements where
 * the switch came before R2_POLICY_SAMPLES stock operations. 0: not known, no withdrawal without
 * them. */
void r2_policy_predict(struct r2_policy *p, double stock_ns_per_byte);
/* One measured eligible operation under the schedule with this key (0: stock). */
void r2_policy_sample(struct r2_policy *p, uint64_t key, uint64_t bytes, uint64_t ns);

#endif
