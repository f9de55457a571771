/* The leader of a communicator (comms/leader.c) without ranks: what it makes of their reports, and
 * how many operations it times. Rung 1; the ranks' words and what was agreed are handed to it, and
 * no proposal leaves. What ranks do with it: test_shim_exec.c, tests/py/test_shim_executor.py. */
#define _GNU_SOURCE
#include <dlfcn.h>

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

static struct bed *bed_open(void)
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

static void bed_close(struct bed *b)
{
    r2_leader_free(&b->f);
    r2_seconds_end(b->f.seconds, true);
    r2_seconds_free(b->f.seconds);
    pthread_mutex_destroy(&b->f.lock);
    free(b->f.rank_node);
    free(b->f.nodes);
    free(b);
}

static void report(struct bed *b, int rank, uint32_t share)
{
    r2_leader_reported(
        &b->f, rank,
        &(struct r2_agree_report){.capacity = b->speed, .share = share, .flags = b->words[rank]});
}

/* All that is new has coalesced. */
static void turn(struct bed *b)
{
    pthread_mutex_lock(&b->f.lock); /* an id is being asked for on a thread of its own */
    r2_leader_turn(&b->f, r2_now_ns() + 2 * S);
    pthread_mutex_unlock(&b->f.lock);
}

static void all_whole(struct bed *b)
{
    for (int r = 0; r < RANKS; r++)
        report(b, r, FULL);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_IDLE);
}

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

/* ---- a second loss */

static void concluded(struct bed *b, uint64_t epoch, enum r2_steer_step step, bool committed)
{
    pthread_mutex_lock(&b->f.lock);
    CHECK_EQ(b->f.steer.step, step);
    r2_steer_asked(&b->f.steer);
    r2_leader_decided(&b->f, epoch, committed);
    pthread_mutex_unlock(&b->f.lock);
}

static void decided(struct bed *b, uint64_t epoch, enum r2_steer_step step)
{
    concluded(b, epoch, step, true);
}

static void all_made(struct bed *b, uint32_t epoch)
{
    for (int r = 0; r < RANKS; r++) {
        b->words[r] = epoch;
        report(b, r, r / 2 == 1 ? FULL / 2 : FULL);
    }
    turn(b);
}

/* Half of node 1 is lost, and the plan for it runs. */
static struct bed *bed_with_plan_at(uint64_t speed)
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

static struct bed *bed_with_plan(void)
{
    return bed_with_plan_at(SPEED);
}

/* It puts another node to an inner place of the tree, where it is slower than the ring: stock at
 * once, while the next is made. */
static void test_second_loss(void)
{
    for (int node = 0; node < NODES; node++) {
        struct bed *b = bed_with_plan();
        uint64_t first = b->f.policy.current;

        if (node == b->f.running.orders[0].nodes[0] ||
            node == b->f.running.orders[0].nodes[NODES - 1]) { /* its ends: nothing to relieve */
            report(b, 2 * node, node == 1 ? FULL / 4 : FULL / 2);
            turn(b);
            CHECK_EQ(b->f.steer.step, R2_STEER_IDLE);
            bed_close(b);
            continue;
        }
        report(b, 2 * node, FULL / 2);
        turn(b);
        decided(b, 3, R2_STEER_RELIEF);
        CHECK_EQ(b->f.policy.current, 0);
        CHECK_EQ(b->f.lead.current.key, 0);
        CHECK(b->f.steer.target != 0 && b->f.steer.target != first);
        bed_close(b);
    }
}

/* A node at an inner place of what runs, or is about to. */
static int inner_node(const struct r2_plan *plan)
{
    for (int node = 0; node < NODES; node++)
        if (node != 1 && node != plan->orders[0].nodes[0] &&
            node != plan->orders[0].nodes[NODES - 1])
            return node;
    CHECK(false);
    return -1;
}

/* What was aimed at and refused does not run: it is wanted again, against what does. */
static void test_refused_relief(void)
{
    struct bed *b = bed_with_plan();

    report(b, 2 * inner_node(&b->f.running), FULL / 2);
    turn(b);
    concluded(b, 3, R2_STEER_RELIEF, false);
    CHECK(b->f.policy.current != 0);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_RELIEF);
    bed_close(b);
}

/* A loss while the plan is made makes it worse than stock before it begins: it is relieved at once
 * then, hold or not. */
static void test_loss_while_it_is_made(void)
{
    struct bed *b = bed_open();
    int node;

    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    node = inner_node(&b->f.next);
    decided(b, 1, R2_STEER_MAKE);
    report(b, 2 * node, FULL / 2);
    for (int r = 0; r < RANKS; r++) {
        b->words[r] = 1;
        report(b, r, r / 2 == 1 || r / 2 == node ? FULL / 2 : FULL);
    }
    turn(b);
    decided(b, 2, R2_STEER_SWITCH);
    pthread_mutex_lock(&b->f.lock);
    r2_leader_turn(&b->f, r2_now_ns() + 4 * S); /* long before the hold is over */
    pthread_mutex_unlock(&b->f.lock);
    CHECK_EQ(b->f.steer.step, R2_STEER_RELIEF);
    bed_close(b);
}

/* The same, and another node gets bandwidth back behind it. */
static void test_loss_and_return_while_it_is_made(void)
{
    struct bed *b = bed_open();
    int node, back = -1;

    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    node = inner_node(&b->f.next);
    for (int n = 0; n < NODES; n++)
        back = n != 1 && n != node ? n : back;
    decided(b, 1, R2_STEER_MAKE);
    report(b, 2 * back, FULL - FULL / 16);
    report(b, 2 * node, FULL / 2);
    report(b, 2 * back, FULL);
    CHECK(!b->f.changed_lost);
    for (int r = 0; r < RANKS; r++) {
        b->words[r] = 1;
        report(b, r, r / 2 == 1 || r / 2 == node ? FULL / 2 : FULL);
    }
    CHECK_EQ(b->f.lost_node, node);
    b->f.changed_lost = false;
    turn(b);
    decided(b, 2, R2_STEER_SWITCH);
    pthread_mutex_lock(&b->f.lock);
    r2_leader_turn(&b->f, r2_now_ns() + 4 * S);
    pthread_mutex_unlock(&b->f.lock);
    CHECK_EQ(b->f.steer.step, R2_STEER_RELIEF);
    CHECK_EQ(b->f.changed_node, node);
    bed_close(b);
}

/* ---- the way back */

/* After the hold of a plan, of which the reports have said something new meanwhile. */
static void turn_after_hold(struct bed *b)
{
    pthread_mutex_lock(&b->f.lock);
    r2_leader_turn(&b->f, r2_now_ns() + 20 * S);
    pthread_mutex_unlock(&b->f.lock);
}

static void report_node(struct bed *b, int node, uint32_t share)
{
    report(b, 2 * node, share);
    report(b, 2 * node + 1, share);
}

/* A NIC that comes back, and may go again, waits for the hold, though the ring would be faster. */
static void test_return_waits(void)
{
    struct bed *b = bed_with_plan();

    report_node(b, 1, FULL);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_IDLE);
    turn_after_hold(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_BACK);
    bed_close(b);
}

/* A NIC comes back while the plan for its loss is made: a look meanwhile finds stock in force, as
 * it is until the switch. What the switch brings is looked at again. */
static void test_return_while_it_is_made(void)
{
    struct bed *b = bed_open();

    atomic_store(&b->f.bytes, 64 << 20);
    all_whole(b);
    report(b, 2, FULL / 2);
    turn(b);
    decided(b, 1, R2_STEER_MAKE);
    for (int r = 0; r < RANKS; r++) {
        b->words[r] = 1;
        report(b, r, FULL);
    }
    turn(b);
    decided(b, 2, R2_STEER_SWITCH);
    CHECK(b->f.policy.current != 0);
    turn(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_IDLE);
    turn_after_hold(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_BACK);
    bed_close(b);
}

/* And one is lost while the way back is agreed on, by a plan that is still in force. */
static void test_loss_on_the_way_back(void)
{
    struct bed *b = bed_with_plan();

    report_node(b, 1, FULL);
    turn_after_hold(b);
    CHECK_EQ(b->f.steer.step, R2_STEER_BACK);
    report_node(b, 1, FULL / 2);
    turn_after_hold(b);
    decided(b, 3, R2_STEER_BACK);
    CHECK_EQ(b->f.policy.current, 0);
    turn_after_hold(b);
    CHECK(b->f.steer.step == R2_STEER_MAKE || b->f.steer.step == R2_STEER_SWITCH);
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
    for (int i = 0; i < 20000 && atomic_load(what) < n; i++)
        usleep(1000);
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
    {"second_loss", test_second_loss},
    {"back_needs_no_gain", test_back_needs_no_gain},
    {"keeps", test_keeps_as_many_as_asked},
    {"waits", test_waits_for_what_can_come},
    {"waits_while", test_waits_while_they_come},
    {"refused_relief", test_refused_relief},
    {"return_waits", test_return_waits},
    {"return_while_made", test_return_while_it_is_made},
    {"loss_on_the_way_back", test_loss_on_the_way_back},
    {"loss_while_made", test_loss_while_it_is_made},
    {"loss_and_return_while_made", test_loss_and_return_while_it_is_made},
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
