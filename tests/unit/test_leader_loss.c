/* The leader: nodes that change while a plan is made, in force, or taken back. Rung 1, as
 * test_leader.c. */
#include "leader_bed.h"

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

static const struct check_test tests[] = {
    {"second_loss", test_second_loss},
    {"refused_relief", test_refused_relief},
    {"return_waits", test_return_waits},
    {"return_while_made", test_return_while_it_is_made},
    {"loss_on_the_way_back", test_loss_on_the_way_back},
    {"loss_while_made", test_loss_while_it_is_made},
    {"loss_and_return_while_made", test_loss_and_return_while_it_is_made},
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
