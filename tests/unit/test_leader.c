/* Rank 0 of a communicator of four nodes with two ranks each, without the others: what they report,
 * and what becomes of a proposal, is made up. Rung 1. */
#include "../../shim/comms/leader.c"
#include "check.h"

#define NODES 4
#define RANKS (2 * NODES)
#define FULL 65536
#define SPEED UINT64_C(1250000000)
#define S R2_NS_PER_S
#define MIB (UINT64_C(1) << 20)

/* ---- what the leader uses */

static struct {
    int proposals, invitations, refuse;
    struct r2_plan plan; /* the last one */
    enum r2_vote_state vote;
    char plan_text[64], cause[R2_PLAN_WHY];
    int broken, failed;
    char error[200];
} seen;

void r2_comms_broken(struct r2_comm *c, const char *cause)
{
    (void)c, (void)cause;
    seen.broken++;
}

void r2_vote_failed(struct r2_vote *v)
{
    (void)v;
    seen.failed++;
}

void r2_watch_journal_failed(const char *text)
{
    snprintf(seen.error, sizeof(seen.error), "%s", text);
}

int r2_agree_propose(struct r2_agree *a, const void *plan, size_t len)
{
    (void)a;
    if (seen.refuse)
        return -EBUSY;
    seen.proposals++;
    return r2_plan_read(&seen.plan, plan, len, NODES);
}

int r2_agree_invite(struct r2_agree *a)
{
    (void)a;
    seen.invitations++;
    return 0;
}

enum r2_vote_state r2_vote_state(struct r2_vote *v)
{
    (void)v;
    return seen.vote;
}

void r2_comm_row_plan(struct r2_comm *comm, const char *plan, const char *cause)
{
    (void)comm;
    if (plan)
        snprintf(seen.plan_text, sizeof(seen.plan_text), "%s", plan);
    if (cause)
        snprintf(seen.cause, sizeof(seen.cause), "%s", cause);
}

uint64_t r2_comms_id(const struct r2_comm *c)
{
    (void)c;
    return 1;
}

void r2_watch_journal(const char *text)
{
    (void)text;
}

void r2_watch_wake(void) {}

/* ---- the bed */

static const int rank_node[RANKS] = {0, 1, 2, 3, 0, 1, 2, 3};
static struct r2_comm comm;
static int dummy;

static uint64_t epochs;

static void decided(struct r2_leader *l, bool committed)
{
    r2_leader_decided(l, ++epochs, committed);
}

/* What a rank has measured of operations in the class of 2 MiB, or of 64 MiB. */
static void times(struct r2_leader *l, int rank, bool planned, uint64_t bytes, float median)
{
    struct r2_agree_report report = {.share = FULL};
    struct r2_leader_word word = {.epoch = epochs};

    word.medians.of[planned][bytes == 2 * MIB ? 1 : 6] = median;
    memcpy(report.words, &word, sizeof(word));
    r2_leader_reported(l, rank, &report);
}

static void report(struct r2_leader *l, int rank, uint32_t share, uint32_t flags)
{
    r2_leader_reported(
        l, rank, &(struct r2_agree_report){.capacity = SPEED, .share = share, .flags = flags});
}

/* All that is new has coalesced; holds are over. */
static void turn(struct r2_leader *l)
{
    static uint64_t later;

    later += 20 * S;
    r2_leader_turn(l, r2_now_ns() + later);
}

static struct r2_leader *start_without(void)
{
    struct r2_leader *l;

    memset(&seen, 0, sizeof(seen));
    l = r2_leader_new(&comm, (struct r2_vote *)&dummy, RANKS);
    CHECK(l != NULL && r2_leader_ready(l, rank_node, NODES));
    for (int r = 0; r < RANKS; r++)
        report(l, r, FULL, 0);
    turn(l);
    CHECK_EQ(seen.proposals, 0); /* healthy: nothing is proposed */
    return l;
}

static struct r2_leader *start(void)
{
    struct r2_leader *l = start_without();

    r2_leader_saw(l, 64 * MIB);
    return l;
}

/* Ranks of a communicator that makes no large AllReduce do not connect at a loss. */
TEST(no_allreduce_yet)
{
    struct r2_leader *l = start_without();

    report(l, 1, FULL / 2, 0);
    turn(l);
    CHECK_EQ(seen.invitations, 0);
    CHECK(strstr(seen.cause, "no AllReduce of 1 MiB or more yet"));
    r2_leader_saw(l, MIB);
    turn(l);
    CHECK_EQ(seen.invitations, 1);
    r2_leader_free(l);
}

/* Ranks connect, then they take a plan. */
TEST(a_loss_and_a_return)
{
    struct r2_leader *l = start();

    report(l, 1, FULL / 2, 0);
    turn(l);
    CHECK_EQ(seen.invitations, 1);
    turn(l);
    CHECK_EQ(seen.proposals, 0); /* they connect */
    seen.vote = R2_VOTE_YES;
    turn(l);
    CHECK_EQ(seen.proposals, 1);
    turn(l);
    CHECK_EQ(seen.proposals, 1); /* it is not decided */
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    CHECK_EQ(seen.plan.weights[1], 0);
    CHECK(strstr(seen.cause, "direct: 1 of 4 nodes degraded, node 1 keeps 50 %"));
    CHECK(strstr(seen.cause, "ring 188.0,")); /* over all ranks: 1.75 times the data */
    decided(l, true);
    turn(l);
    CHECK_EQ(seen.proposals, 1);
    report(l, 2, FULL / 2, 0); /* another one: other weights, and no connecting */
    turn(l);
    CHECK_EQ(seen.proposals, 2);
    CHECK_EQ(seen.plan.weights[2], seen.plan.weights[1]);
    decided(l, true);
    report(l, 1, FULL, 0);
    report(l, 2, FULL, 0);
    turn(l);
    CHECK_EQ(seen.proposals, 3);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_STOCK);
    decided(l, true);
    turn(l);
    CHECK_EQ(seen.proposals, 3);
    CHECK(seen.invitations <= 2);
    r2_leader_free(l);
}

TEST(what_is_refused_is_proposed_again)
{
    struct r2_leader *l = start();

    seen.vote = R2_VOTE_YES;
    report(l, 1, FULL / 2, 0);
    seen.refuse = 1;
    turn(l);
    CHECK_EQ(seen.proposals, 0);
    seen.refuse = 0;
    turn(l);
    CHECK_EQ(seen.proposals, 1);
    decided(l, false);
    CHECK_EQ(l->force.schedule, R2_PLAN_STOCK);
    turn(l);
    CHECK_EQ(seen.proposals, 2);
    decided(l, true);
    CHECK_EQ(l->force.schedule, R2_PLAN_DIRECT);
    r2_leader_free(l);
}

/* A rank that cannot has said why; the leader does not speak over it, and does not ask again. */
TEST(a_vote_against)
{
    struct r2_leader *l = start();

    seen.vote = R2_VOTE_NO;
    snprintf(seen.cause, sizeof(seen.cause), "rank 2: no NICs");
    report(l, 1, FULL / 2, 0);
    turn(l);
    turn(l);
    CHECK_EQ(seen.proposals, 0);
    CHECK(strstr(seen.cause, "rank 2"));
    r2_leader_free(l);
}

static struct r2_leader *with_plan(void)
{
    struct r2_leader *l = start();

    seen.vote = R2_VOTE_YES;
    report(l, 1, FULL / 2, 0);
    turn(l);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    decided(l, true);
    turn(l);
    return l;
}

TEST(plan_off)
{
    struct r2_leader *l = with_plan();

    report(l, 3, FULL, R2_LEADER_STOP);
    turn(l);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(seen.cause, "plan off"));
    decided(l, true);
    report(l, 3, FULL, 0);
    turn(l);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    r2_leader_free(l);
}

/* All have times, but for a size that does not come again: the plan returns after a while. */
TEST(a_trial_has_an_end)
{
    struct r2_leader *l = with_plan();
    uint64_t now;

    for (int r = 0; r < RANKS; r++)
        times(l, r, true, 64 * MIB, 200);
    now = r2_now_ns();
    r2_leader_turn(l, now);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_STOCK);
    decided(l, true);
    for (int i = 0; i <= 120; i++)
        r2_leader_turn(l, now + (uint64_t)i * S / 10);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    r2_leader_free(l);
}

/* The same plan for what is another state: it is agreed once more, so that its times count. */
TEST(the_same_plan_again)
{
    struct r2_leader *l = with_plan();
    int before = seen.proposals;

    report(l, 1 + NODES, FULL / 2, 0); /* the node's other rank has seen it later */
    turn(l);
    CHECK_EQ(seen.proposals, before + 1);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    decided(l, true);
    turn(l);
    CHECK_EQ(seen.proposals, before + 1);
    for (int r = 0; r < RANKS; r++)
        times(l, r, true, 64 * MIB, 200);
    CHECK(r2_policy_trial(&l->policy));
    r2_leader_free(l);
}

static void all_times(struct r2_leader *l, bool planned, uint64_t bytes, float median)
{
    for (int r = 0; r < RANKS; r++)
        times(l, r, planned, bytes, median);
}

/* The plan makes way for stock, which takes `median`; then it, or another, is in force. */
static void compare_with(struct r2_leader *l, uint64_t bytes, float median, float slowest)
{
    turn(l);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(seen.cause, "timed beside direct"));
    decided(l, true);
    for (int r = 0; r < RANKS; r++)
        times(l, r, false, bytes, r == 5 ? slowest : median);
    turn(l);
    decided(l, true);
    turn(l);
}

/* Measured slower: given up; a size above that keeps it. */
TEST(slower)
{
    struct r2_leader *l = with_plan();

    all_times(l, true, 2 * MIB, 200);
    compare_with(l, 2 * MIB, 100, 100);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    CHECK_EQ(seen.plan.from_bytes, 4 * MIB);
    r2_leader_free(l);

    l = with_plan();
    all_times(l, true, 64 * MIB, 200);
    compare_with(l, 64 * MIB, 100, 100);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(seen.cause, "was slower"));
    r2_leader_free(l);
}

/* It is slower only if it is so for the slowest rank, and nothing is known before all have told. */
TEST(the_slowest_rank_counts)
{
    struct r2_leader *l = with_plan();
    int before = seen.proposals;

    for (int r = 0; r < RANKS - 1; r++)
        times(l, r, true, 64 * MIB, 200);
    turn(l);
    CHECK_EQ(seen.proposals, before);
    times(l, RANKS - 1, true, 64 * MIB, 200);
    compare_with(l, 64 * MIB, 100, 250);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    CHECK_EQ(seen.plan.from_bytes, R2_LEADER_FROM);
    r2_leader_free(l);
}

/* After a change of the nodes the plan in force is that of the state before: its times say nothing,
 * and no more do those of a plan that was proposed before the change. */
TEST(times_of_another_state)
{
    struct r2_leader *l = with_plan();
    int before = seen.proposals;

    report(l, 1, FULL * 3 / 4, 0);
    r2_leader_turn(l, r2_now_ns()); /* the return waits: the old plan goes on */
    all_times(l, true, 64 * MIB, 200);
    r2_leader_turn(l, r2_now_ns());
    CHECK_EQ(seen.proposals, before);
    turn(l);
    CHECK_EQ(seen.proposals, before + 1);
    report(l, 2, FULL / 2, 0);
    decided(l, true);
    all_times(l, true, 64 * MIB, 200);
    CHECK(!r2_policy_trial(&l->policy));
    turn(l);
    CHECK_EQ(seen.plan.schedule, R2_PLAN_DIRECT);
    decided(l, true);
    all_times(l, true, 64 * MIB, 200);
    CHECK(r2_policy_trial(&l->policy));
    r2_leader_free(l);
}

/* Before all have said what they have nothing is planned; a rank that says nothing new, and one
 * that does not exist, change nothing. */
/* A rank that has given operation 7 this many bytes. */
static void stands(struct r2_leader *l, int rank, uint64_t bytes)
{
    struct r2_agree_report report = {.share = FULL};
    struct r2_calls calls = {.of = {{8, bytes, bytes >= R2_VOTE_FROM}}};

    memcpy(report.words, &calls, sizeof(calls));
    r2_leader_reported(l, rank, &report);
}

TEST(unequal_calls_end_it_once)
{
    struct r2_leader *l = start();

    for (int r = RANKS; r-- > 0;)
        stands(l, r, r == 5 ? R2_VOTE_FROM - 4 : R2_VOTE_FROM);
    turn(l);
    turn(l);
    CHECK_EQ(seen.broken, 1);
    CHECK_EQ(seen.failed, 1);
    CHECK_STR(seen.error,
              "operation 7 is not the same AllReduce on all ranks: 262144 bytes on rank "
              "0 use R2CCL, 262140 bytes on rank 5 use NCCL");
    stands(l, 3, R2_VOTE_FROM - 4);
    turn(l);
    CHECK_EQ(seen.broken, 1);
    r2_leader_free(l);
}

TEST(equal_calls_are_no_error)
{
    struct r2_leader *l = start();

    for (int r = 0; r < RANKS; r++)
        stands(l, r, R2_VOTE_FROM);
    turn(l);
    CHECK_EQ(seen.broken, 0);
    r2_leader_free(l);
}

TEST(reports)
{
    struct r2_leader *l = r2_leader_new(&comm, (struct r2_vote *)&dummy, RANKS);
    uint32_t events, rounds;

    CHECK(l != NULL && r2_leader_ready(l, rank_node, NODES));
    memset(&seen, 0, sizeof(seen));
    r2_leader_saw(l, MIB);
    report(l, 1, FULL / 2, 0);
    report(l, -1, FULL / 2, 0);
    report(l, RANKS, FULL / 2, 0);
    turn(l);
    r2_leader_counts(l, &events, &rounds);
    CHECK_EQ(events, 1);
    CHECK_EQ(rounds, 0);
    for (int r = 0; r < RANKS; r++)
        report(l, r, r == 1 ? FULL / 2 : FULL, 0);
    turn(l);
    r2_leader_counts(l, &events, &rounds);
    CHECK_EQ(events, RANKS);
    CHECK_EQ(rounds, 1);
    CHECK_EQ(seen.invitations, 1);
    r2_leader_free(l);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_PLAN", "auto", 1);
    return check_main(argc, argv);
}
