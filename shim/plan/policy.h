/* When to plan, when to switch, when to take a plan back. Pure; times are arguments.
 *
 * Health events coalesce: the first starts a window, at its end one planning round takes them all.
 * A plan in force is held for a while; a switch must promise a gain; a plan that is slower than
 * what it replaced is withdrawn and not taken again for the same state of the nodes.
 *
 * The hold is against flapping. A loss that makes the plan in force slower than stock, by its own
 * prediction, does not wait for it: what runs is then worse than no plan. A return does: the next
 * loss may be as near as the last one. Each such change is noted
 * with its cause (a node); a cause that had R2_POLICY_HASTE of them within R2_POLICY_HOLDS holds
 * flaps, and waits like everything else.
 *
 * Slower: operations are compared with operations of about their size (a class is a power of two),
 * medians of the newest 20 of a class, so that one operation that a failure held up says nothing;
 * and found so twice, with 20 operations in between: a plan runs for hours, and is looked at all
 * the time. What stock takes is measured in the same state of the nodes before the switch. Where it
 * was not measured there, what was measured in the state before stands in, times what the state
 * changed in the prediction; that is less sure and needs a larger difference.
 */
#ifndef R2_PLAN_POLICY_H
#define R2_PLAN_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define R2_POLICY_SAMPLES 20
#define R2_POLICY_LEAST 5 /* of a class; fewer say nothing */
#define R2_POLICY_CLASSES 16
#define R2_POLICY_SURE 1.05   /* slower than stock as measured: no noise */
#define R2_POLICY_UNSURE 1.15 /* slower than stock as estimated from another state */
#define R2_POLICY_HASTE 2     /* changes of one cause that need not wait */
#define R2_POLICY_HOLDS 6     /* ... within so many holds */
#define R2_POLICY_CAUSES 16   /* changes that are remembered */
#define R2_POLICY_SKIP 2      /* first operations after a switch: NCCL connects with them */

struct r2_policy_config {
    uint64_t coalesce_ns; /* 1 s */
    uint64_t hold_ns;     /* 10 s */
    double min_gain;      /* 0.05 */
};
#define R2_POLICY_DEFAULT                                                                          \
    {                                                                                              \
        .coalesce_ns = UINT64_C(1000000000), .hold_ns = UINT64_C(10000000000), .min_gain = 0.05    \
    }

/* Speeds by class of size: the newest ones, ns per byte. */
struct r2_policy_speeds {
    unsigned seen[R2_POLICY_CLASSES]; /* stays at R2_POLICY_SAMPLES */
    unsigned next[R2_POLICY_CLASSES];
    float rate[R2_POLICY_CLASSES][R2_POLICY_SAMPLES];
    uint64_t bytes[R2_POLICY_CLASSES]; /* of the newest operation */
};

struct r2_policy_ban {
    uint64_t key, state;
};

struct r2_policy_change {
    uint64_t cause, at_ns;
};

struct r2_policy {
    struct r2_policy_config config;
    bool dirty;              /* something changed since the last planning round */
    uint64_t dirty_since_ns; /* the first change of the window */
    uint64_t switched_ns;    /* when the plan in force was agreed */
    bool switched;           /* a plan was ever agreed */
    uint64_t current;        /* key of the schedule in force, 0: stock */
    uint64_t state;          /* of the nodes, as the caller told it last */
    struct r2_policy_ban banned[8];
    unsigned nbanned;
    struct r2_policy_speeds stock, plan;
    double predicted;  /* what stock would take, ns per byte; 0: not known */
    uint64_t event_ns; /* the newest event: what began before it was in another state */
    /* What stock took in the state before this one, and what was predicted for it. */
    struct r2_policy_speeds before;
    double predicted_before;
    unsigned skip;  /* so many samples still */
    uint64_t taken; /* samples of the plan in force */
    bool urgent;    /* what is in force is worse than stock, and the hold does not count */
    uint64_t cause; /* ... of that */
    struct r2_policy_change hasty[R2_POLICY_CAUSES];
    unsigned nhasty;
    bool slow_once; /* it was slower, when so many had been taken: */
    uint64_t slow_at;
};

enum r2_policy_verdict {
    R2_POLICY_WAIT,     /* nothing to do before *next_ns */
    R2_POLICY_PLAN,     /* make a plan now and ask r2_policy_judge */
    R2_POLICY_WITHDRAW, /* the plan in force is slower than stock: ban it, propose stock */
};

void r2_policy_init(struct r2_policy *p, const struct r2_policy_config *config);
/* The share of some node changed. Speeds measured so far belong to another state of the nodes. */
void r2_policy_event(struct r2_policy *p, uint64_t now_ns);
/* After an event of the node `cause`, which has lost bandwidth or got it back: what the plan in
 * force and stock are predicted to take now. */
void r2_policy_outlook(struct r2_policy *p, uint64_t cause, bool lost, double plan_ns,
                       double stock_ns, uint64_t now_ns);
/* Whether what is in force is to be given up at once. */
bool r2_policy_urgent(const struct r2_policy *p);
/* Plan again, though the nodes are as they were: an operator asked, or a step failed. */
void r2_policy_again(struct r2_policy *p, uint64_t now_ns);
/* What to do now; *next_ns is when to ask again (UINT64_MAX: only after an event or a sample). */
enum r2_policy_verdict r2_policy_poll(struct r2_policy *p, uint64_t now_ns, uint64_t *next_ns);
/* After PLAN: should `key` (0: stock) be proposed, whose predicted gain over what is in force is
 * `gain`? `why` (80 bytes) gets a reason. False also when it is in force already. */
bool r2_policy_judge(struct r2_policy *p, uint64_t key, double gain, uint64_t now_ns, char *why);
/* `key` is not to be proposed again in this state. */
void r2_policy_ban(struct r2_policy *p, uint64_t key);
/* A proposal was committed. After an abort: r2_policy_again. Going back to stock bans nothing by
 * itself: it may be an operator's wish. */
void r2_policy_committed(struct r2_policy *p, uint64_t key, uint64_t now_ns);
/* In the present state: its name, and what stock NCCL would take, ns per byte; what is not finite
 * (a node without a NIC) is not known. */
void r2_policy_state(struct r2_policy *p, uint64_t state, double stock_ns_per_byte);
/* One measured eligible operation under the schedule with this key (0: stock). */
void r2_policy_sample(struct r2_policy *p, uint64_t key, uint64_t bytes, uint64_t ns);
/* Operations of stock that were measured in this state; R2_POLICY_SAMPLES are enough. */
unsigned r2_policy_measured(const struct r2_policy *p);
enum r2_policy_known { R2_POLICY_UNKNOWN, R2_POLICY_MEASURED, R2_POLICY_ESTIMATED };

/* Of the sizes that both were measured with: ns that the plan took on average, and stock. UNKNOWN:
 * too few of them; ESTIMATED: stock was measured in the state before. */
enum r2_policy_known r2_policy_compare(const struct r2_policy *p, double *plan_ns,
                                       double *stock_ns);

#endif
