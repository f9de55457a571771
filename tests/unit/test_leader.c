/* The leader of a communicator (comms/leader.c) without ranks: what it makes of their reports, and
 * how many operations it times. Rung 1; the ranks' words and what was agreed are handed to it, and
 * no proposal leaves. Nodes that change: test_leader_loss.c. What ranks do with it:
 * test_shim_exec.c, tests/py/test_shim_executor.py. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "await.h"
#include "leader_bed.h"

/* A NIC that one process has lost (an injected fault, a drain) is lost to the node, whoever else
 * reports after it; it is whole again when its last rank is. */
static void test_worst_rank_counts(void)
{
    struct bed *b = bed_open();

    all_whole(b);
    report(b, 2, FULL / 2);
    report(b, 3, FULL);
    report(b, 3, FULL * 3 / 4);
    CHECK(b->f.nodes[1].share > 0.499 && b->f.nodes[1].share < 0.501);
    report(b, 2, FULL);
    CHECK(b->f.nodes[1].share > 0.749 && b->f.nodes[1].share < 0.751);
    report(b, 3, FULL);
    for (int n = 0; n < NODES; n++)
        CHECK(b->f.nodes[n].share == 1);
    bed_close(b);
}

/* Estimates divide predictions of two states: those are for one size, whatever sizes came between.
 */
static void test_states_are_compared_at_one_size(void)
{
    struct bed *b = bed_open();
    double small;

    atomic_store(&b->f.bytes, 1 << 20);
    all_whole(b);
    small = b->f.policy.predicted;
    CHECK(small > 0);
    atomic_store(&b->f.bytes, 1 << 30);
    r2_policy_again(&b->f.policy, r2_now_ns());
    turn(b);
    CHECK(b->f.policy.predicted == small);
    bed_close(b);
}

/* Between two looks there are enough for a verdict: a plan of which every look sees one operation
 * is not withdrawn for seconds. */
static void test_enough_is_timed(void)
{
    struct bed *b = bed_open();

    for (int i = 0; i < 3 * R2_POLICY_SAMPLES; i++) {
        r2_follow_time(&b->f, 1 << 20, false, NULL);
        r2_follow_timed(&b->f, NULL, true);
    }
    turn(b);
    CHECK_GE(r2_policy_measured(&b->f.policy), 3 * R2_POLICY_LEAST);
    bed_close(b);
}

static double gain_of_stock(struct bed *b)
{
    const struct r2_plan_input input = {.nnodes = NODES,
                                        .nodes = b->f.nodes,
                                        .nranks = RANKS,
                                        .rank_node = b->f.rank_node,
                                        .bytes = atomic_load(&b->f.bytes),
                                        .min_bytes = R2_FOLLOW_ELIGIBLE,
                                        .cost = R2_PLAN_COST_DEFAULT};

    return 1 - r2_plan_ring_ns(&input) / r2_plan_tree_ns(&input, b->f.running.orders[0].nodes);
}

/* When all nodes are whole again it is NCCL's own choice again, which is what the user knows, also
 * where the plan would be as fast or faster; and not before. */
static void test_back_needs_no_gain(void)
{
    struct bed *b = bed_with_plan_at(100 * SPEED);
    uint64_t plan = b->f.policy.current;

    atomic_store(&b->f.bytes, 2 << 20); /* a tree has fewer hops, which is most of it here */
    report_node(b, 1, FULL * 99 / 100);
    turn_after_hold(b);
    CHECK_EQ(b->f.policy.current, plan);
    CHECK(!b->f.steer.stop && b->f.steer.step == R2_STEER_IDLE);
    report_node(b, 1, FULL);
    CHECK_MSG(gain_of_stock(b) < b->f.policy.config.min_gain, "%.3f", gain_of_stock(b));
    turn_after_hold(b);
    decided(b, 3, R2_STEER_BACK);
    CHECK_EQ(b->f.policy.current, 0);
    CHECK_EQ(b->f.lead.current.key, 0);
    bed_close(b);
}

/* How many communicators the ranks are told to have. */
static int listed(struct bed *b, enum r2_steer_step step)
{
    struct r2_plan_table *table;
    void *bytes = NULL;
    size_t len = 0;
    int n;

    for (int i = 0; i < b->f.lead.ncomms; i++)
        b->f.lead.comms[i].has_id = true;
    CHECK_EQ(r2_lead_encode(&b->f.lead, step, &bytes, &len), 0);
    for (int i = 0; i < b->f.lead.ncomms; i++)
        b->f.lead.comms[i].has_id = false; /* or it would be proposed */
    CHECK_EQ(r2_plan_table_decode(&table, bytes, len, RANKS), 0);
    n = table->ncomms;
    r2_plan_table_free(table);
    free(bytes);
    return n;
}

/* R2CCL_PLAN_KEEP=1 (main): of two plans that ran, the ranks keep the newer one's communicator. */
static void test_keeps_as_many_as_asked(void)
{
    struct bed *b = bed_with_plan();
    uint64_t first = b->f.lead.comms[0].key, epoch = 3;

    CHECK_EQ(b->f.lead.ncomms, 1);
    for (int node = 1; node < 3; node++) { /* it loses half in turn: another order for each */
        if (node == 2) {
            report_node(b, node, FULL / 2);
            turn_after_hold(b);
            CHECK_EQ(listed(b, R2_STEER_MAKE), 2);
            decided(b, epoch, R2_STEER_MAKE);
            for (int r = 0; r < RANKS; r++) {
                b->words[r] = (uint32_t)epoch;
                report(b, r, r / 2 == node ? FULL / 2 : FULL);
            }
            turn(b);
            epoch++;
            CHECK_EQ(listed(b, R2_STEER_SWITCH), 2); /* the one that runs, and the last */
            decided(b, epoch++, R2_STEER_SWITCH);
        }
        report_node(b, node, FULL);
        turn_after_hold(b);
        CHECK_EQ(listed(b, R2_STEER_BACK), 1);
        decided(b, epoch++, R2_STEER_BACK);
        CHECK_EQ(b->f.lead.ncomms, 1);
        CHECK_EQ(b->f.lead.comms[0].key == first, node == 1);
    }
    bed_close(b);
}

/* The switch waits for measurements of stock, and does not where they cannot come in time. */
static void test_waits_for_what_can_come(void)
{
    for (int slow = 0; slow < 2; slow++) {
        struct bed *b = bed_open();

        atomic_store(&b->f.bytes, slow ? UINT64_C(4) << 30 : 64 << 20); /* 16 s, 0.2 s */
        all_whole(b);
        report(b, 2, FULL / 2);
        turn(b);
        CHECK_EQ(b->f.steer.step, R2_STEER_MAKE);
        CHECK_EQ(r2_leader_waits(&b->f, b->f.steer.since_ns), !slow);
        bed_close(b);
    }
}

/* NICs that are slower than they say: operations take 2 s where 0.2 s were predicted. */
static void test_waits_while_they_come(void)
{
    struct bed *b = bed_open();
    uint64_t ready;

    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    r2_policy_sample(&b->f.policy, 0, 64 << 20, 2 * S); /* before it was ready */
    ready = b->f.steer.since_ns;
    CHECK(r2_leader_waits(&b->f, ready));
    CHECK(r2_leader_waits(&b->f, ready + S - 1));
    CHECK(!r2_leader_waits(&b->f, ready + S));
    r2_policy_sample(&b->f.policy, 0, 64 << 20, S);
    CHECK(r2_leader_waits(&b->f, ready + S)); /* five more of these, with the one before */
    CHECK(!r2_leader_waits(&b->f, ready + 2 * S));
    for (int i = 0; i < 4; i++)
        r2_policy_sample(&b->f.policy, 0, 64 << 20, S / 4);
    CHECK(r2_leader_waits(&b->f, ready + 4 * S));
    CHECK(!r2_leader_waits(&b->f, ready + 5 * S));
    report(b, 4, FULL / 2); /* what was measured says nothing about this state */
    b->f.steer.since_ns = ready;
    CHECK(r2_leader_waits(&b->f, ready + S / 2));
    CHECK(!r2_leader_waits(&b->f, ready + S));
    bed_close(b);
}

/* ---- what may take a while */

static atomic_int ids_asked, ids_given, ids_held;

static int hold_id(struct r2_nccl_id *id)
{
    int number = atomic_fetch_add(&ids_asked, 1) + 1;

    while (atomic_load(&ids_held))
        usleep(1000);
    id->bytes[0] = (char)number;
    atomic_fetch_add(&ids_given, 1);
    return R2_NCCL_OK;
}

static void wait_for(atomic_int *what, int n)
{
    AWAIT(atomic_load(what) >= n);
    CHECK_EQ(atomic_load(what), n);
}

/* An id that NCCL does not give: the leader goes on, and its communicator ends without it. */
static void test_id_held(void)
{
    struct bed *b = bed_open();
    struct r2_nccl_id id;

    b->real.fn[R2_API_ncclGetUniqueId] = hold_id;
    atomic_store(&ids_held, 1);
    CHECK(!r2_leader_fetch(&b->f, &id));
    wait_for(&ids_asked, 1);
    for (int i = 0; i < 100; i++)
        CHECK(!r2_leader_fetch(&b->f, &id));
    CHECK_EQ(atomic_load(&ids_asked), 1);
    bed_close(b);
    atomic_store(&ids_held, 0);
    wait_for(&ids_given, 1);

    b = bed_open();
    b->real.fn[R2_API_ncclGetUniqueId] = hold_id;
    for (int n = 2; n < 4; n++) { /* each is another one */
        for (int i = 0; i < 20000 && !r2_leader_fetch(&b->f, &id); i++)
            usleep(1000);
        CHECK_EQ(id.bytes[0], n);
    }
    CHECK_EQ(atomic_load(&ids_given), 3);
    bed_close(b);
}

/* Of a driver that only pretends, which this process has from the first call on. */
static void drive(const char *function, int a, int b)
{
    void *driver = dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL);
    void (*fn)(int, int) = NULL;

    CHECK(driver != NULL);

    *(void **)(void *)&fn = dlsym(driver, function);
    CHECK_MSG(fn, "%s", function);
    fn(a, b);
}

/* Where the driver does not answer, reports and plans go on. */
static void test_driver_holds_nothing_up(void)
{
    struct bed *b;

    drive("fake_cuda_forbid", 0, 0);
    b = bed_open();
    CHECK_EQ(b->f.orders, 1); /* on a stream */
    drive("fake_cuda_forbid", 1, 0);
    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_MAKE);
    drive("fake_cuda_forbid", 0, 0);
    bed_close(b);
}

/* The host is ahead of its device: what it has handed over is known seconds later, at once. */
static void test_waits_for_a_device_behind(void)
{
    struct bed *b;
    uint64_t ready;

    drive("fake_cuda_answer", 0, 600); /* not over */
    b = bed_open();
    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    ready = b->f.steer.since_ns;
    CHECK(r2_leader_waits(&b->f, ready));
    for (unsigned i = 0; i < R2_POLICY_LEAST; i++) { /* enough for a verdict */
        CHECK(!r2_leader_waits(&b->f, ready + 2 * S));
        r2_follow_time(&b->f, 64 << 20, false, NULL);
        r2_follow_timed(&b->f, NULL, true);
    }
    CHECK(r2_leader_waits(&b->f, ready + 2 * S));
    CHECK(r2_leader_waits(&b->f, ready + 5 * S - 1));
    CHECK(!r2_leader_waits(&b->f, ready + 5 * S));
    drive("fake_cuda_answer", 0, 0);
    bed_close(b);
}

static const struct check_test tests[] = {
    {"worst_rank", test_worst_rank_counts},
    {"one_size", test_states_are_compared_at_one_size},
    {"enough_timed", test_enough_is_timed},
    {"back_needs_no_gain", test_back_needs_no_gain},
    {"keeps", test_keeps_as_many_as_asked},
    {"waits", test_waits_for_what_can_come},
    {"waits_while", test_waits_while_they_come},
    {"id_held", test_id_held},
    {"driver", test_driver_holds_nothing_up}, /* and from here on there is one */
    {"device_behind", test_waits_for_a_device_behind},
    {0},
};

int main(int argc, char **argv)
{
    setenv("R2CCL_PLAN", "on", 1);
    setenv("R2CCL_PLAN_ORDERS", "2", 1);
    setenv("R2CCL_PLAN_KEEP", "1", 1);
    setenv("R2CCL_SHM", "0", 1);
    return check_main(argc, argv, tests);
}
