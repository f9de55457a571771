/* The leader of a communicator of four nodes without its ranks: what they report is made up. One
 * test thread. */
#ifndef R2_TESTS_LEADER_BED_H
#define R2_TESTS_LEADER_BED_H

#include "check.h"
#include "comms/follow_inside.h"
#include "settings/settings.h"
#include "util/clock.h"

#define NODES 4
#define RANKS (2 * NODES)
#define S R2_NS_PER_S
#define FULL 65536
#define SPEED UINT64_C(1000000000)

struct bed {
    struct r2_follow f;
    struct r2_comm comm;
    struct r2_real real; /* an NCCL without functions: no ids, so nothing can be proposed */
    uint32_t words[RANKS];
    uint64_t speed; /* bytes/s of a node */
};

__attribute__((unused)) static struct bed *bed_open(void)
{
    struct r2_seconds_config config = {.nranks = RANKS};
    struct r2_policy_config policy = R2_POLICY_DEFAULT;
    struct bed *b = calloc(1, sizeof(*b));
    struct r2_follow *f = &b->f;

    config.real = b->comm.real = &b->real;
    atomic_init(&b->comm.row, &b->comm.unseen);
    atomic_init(&b->comm.row_number, -1);
    b->speed = SPEED;
    f->comm = &b->comm;
    f->nranks = RANKS;
    f->nnodes = NODES;
    f->ready = true;
    f->rank_node = calloc(RANKS, sizeof(*f->rank_node));
    f->nodes = calloc(NODES, sizeof(*f->nodes));
    for (int r = 0; r < RANKS; r++)
        f->rank_node[r] = r / 2;
    pthread_mutex_init(&f->lock, NULL);
    r2_policy_init(&f->policy, &policy);
    CHECK_EQ(r2_leader_init(f), 0);
    f->seconds = r2_seconds_new(&config);
    CHECK(f->seconds != NULL);
    return b;
}

__attribute__((unused)) static void bed_close(struct bed *b)
{
    r2_leader_free(&b->f);
    r2_seconds_end(b->f.seconds, true);
    r2_seconds_free(b->f.seconds);
    pthread_mutex_destroy(&b->f.lock);
    free(b->f.rank_node);
    free(b->f.nodes);
    free(b);
}

__attribute__((unused)) static void report(struct bed *b, int rank, uint32_t share)
{
    r2_leader_reported(
        &b->f, rank,
        &(struct r2_agree_report){.capacity = b->speed, .share = share, .flags = b->words[rank]});
}

/* All that is new has coalesced. */
__attribute__((unused)) static void turn(struct bed *b)
{
    pthread_mutex_lock(&b->f.lock); /* an id is being asked for on a thread of its own */
    r2_leader_turn(&b->f, r2_now_ns() + 2 * S);
    pthread_mutex_unlock(&b->f.lock);
}

__attribute__((unused)) static void all_whole(struct bed *b)
{
    for (int r = 0; r < RANKS; r++)
        report(b, r, FULL);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_IDLE);
}

__attribute__((unused)) static void concluded(struct bed *b, uint64_t epoch,
                                              enum r2_steer_step step, bool committed)
{
    pthread_mutex_lock(&b->f.lock);
    CHECK_EQ(b->f.steer.step, step);
    r2_steer_asked(&b->f.steer);
    r2_leader_decided(&b->f, epoch, committed);
    pthread_mutex_unlock(&b->f.lock);
}

__attribute__((unused)) static void decided(struct bed *b, uint64_t epoch, enum r2_steer_step step)
{
    concluded(b, epoch, step, true);
}

__attribute__((unused)) static void all_made(struct bed *b, uint32_t epoch)
{
    for (int r = 0; r < RANKS; r++) {
        b->words[r] = epoch;
        report(b, r, r / 2 == 1 ? FULL / 2 : FULL);
    }
    turn(b);
}

/* Half of node 1 is lost, and the plan for it runs. */
__attribute__((unused)) static struct bed *bed_with_plan_at(uint64_t speed)
{
    struct bed *b = bed_open();

    b->speed = speed;
    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    decided(b, 1, R2_STEER_MAKE);
    all_made(b, 1);
    decided(b, 2, R2_STEER_SWITCH);
    CHECK(b->f.policy.current != 0);
    return b;
}

__attribute__((unused)) static struct bed *bed_with_plan(void)
{
    return bed_with_plan_at(SPEED);
}

/* A node at an inner place of what runs, or is about to. */
__attribute__((unused)) static int inner_node(const struct r2_plan *plan)
{
    for (int node = 0; node < NODES; node++)
        if (node != 1 && node != plan->orders[0].nodes[0] &&
            node != plan->orders[0].nodes[NODES - 1])
            return node;
    CHECK(false);
    return -1;
}

/* After the hold of a plan, of which the reports have said something new meanwhile. */
__attribute__((unused)) static void turn_after_hold(struct bed *b)
{
    pthread_mutex_lock(&b->f.lock);
    r2_leader_turn(&b->f, r2_now_ns() + 20 * S);
    pthread_mutex_unlock(&b->f.lock);
}

__attribute__((unused)) static void report_node(struct bed *b, int node, uint32_t share)
{
    report(b, 2 * node, share);
    report(b, 2 * node + 1, share);
}

#endif
