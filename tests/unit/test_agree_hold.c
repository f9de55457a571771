/* Plans from a given index on, and ranks that wait there before anything is promised; a leader that
 * passes the index while it chooses it. Rung 3: processes over loopback; every operation's plan is
 * compared (agree_ranks.h). */
#define _GNU_SOURCE
#include "agree_ranks.h"

#include <errno.h>
#include <pthread.h>

#define CHANGES 60

static struct r2_agree *mine;
static uint64_t target;    /* the index of the next change */
static atomic_bool asking; /* the leader's proposal is under way */
static atomic_bool over;
static uint64_t numbers;

/* The same on all ranks. */
static uint64_t random_of(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

static void decided_again(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why)
{
    on_decided(user, epoch, at, committed, why);
    atomic_store(&asking, false);
    r2_agree_nudge(mine);
}

/* The leader proposes until it is agreed: at first it may not be parked yet. */
static bool go_on(void *user)
{
    (void)user;
    if (me == 0 && !atomic_exchange(&asking, true) &&
        r2_agree_propose_at(mine, "a pla", 5, target) != 0)
        atomic_store(&asking, false);
    return true;
}

static struct r2_agree *meet(void)
{
    uint8_t id[R2_AGREE_ID];
    struct r2_agree_view view;

    ops.decided = decided_again;
    get_id(id);
    mine = member(id, me, processes);
    CHECK_EQ(r2_agree_lookup(mine, true, &view), 0);
    AWAIT(state_of(mine) == R2_AGREE_READY);
    return mine;
}

/* Every plan holds from its index on and from no other, however fast ranks are. A group may jump
 * over an index; then the plan is from the group's end on. */
static void exact(void)
{
    uint64_t state = 99, own = 7 + (uint64_t)me, epoch = 0, last = 0;
    struct r2_agree_view view;
    struct r2_agree *a = meet();

    for (int change = 0; change < CHANGES; change++) {
        target = r2_agree_index(a) + random_of(&state) % 4 + (change == 0);
        while (r2_agree_index(a) < target) {
            CHECK_EQ(operate(a, 0, &epoch), 0);
            CHECK_EQ(epoch, last);
        }
        if (random_of(&own) % 3 == 0)
            usleep((useconds_t)(random_of(&own) % 3000));
        do { /* it is aborted when a rank is neither parked nor below the index */
            CHECK_EQ(r2_agree_hold(a, target, go_on, NULL), 0);
            CHECK_EQ(r2_agree_lookup(a, true, &view), 0);
        } while (view.at != target);
        CHECK_EQ(operate(a, 0, &epoch), 0);
        CHECK_LT(last, epoch);
        last = epoch;
        r2_agree_advance(a, random_of(&state) % 3);
        AWAIT(!atomic_load(&asking));
    }
    if (me == 0)
        CHECK_EQ(atomic_load(&sh->decided_well), CHANGES);
    r2_agree_destroy(a);
}

static void test_exact(void)
{
    run_processes(3, exact);
}

/* Ranks lose patience at any moment: it is agreed or it is not, and never differently. */
static bool lose_patience(void *user)
{
    go_on(user);
    return random_of(&numbers) % 4 != 0;
}

static void *nudge(void *arg)
{
    while (!atomic_load(&over)) {
        r2_agree_nudge(arg);
        usleep(20);
    }
    return NULL;
}

static void impatient(void)
{
    struct r2_agree *a = meet();
    uint64_t epoch = 0, state = 3;
    pthread_t thread;

    numbers = 17 + (uint64_t)me;
    CHECK_EQ(pthread_create(&thread, NULL, nudge, a), 0);
    for (int i = 0; i < 1000 || atomic_load(&sh->decided_well) < 10; i++) {
        target = r2_agree_index(a) + random_of(&state) % 2;
        target = target ? target : 1;
        while (r2_agree_index(a) < target)
            CHECK_EQ(operate(a, 0, &epoch), 0);
        r2_agree_hold(a, target, lose_patience, NULL);
        CHECK_EQ(operate(a, 0, &epoch), 0);
    }
    atomic_store(&over, true);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    /* The others may still ask. */
    atomic_fetch_add(&sh->stuck, 1);
    AWAIT(atomic_load(&sh->stuck) == processes);
    r2_agree_destroy(a);
}

static void test_impatient(void)
{
    run_processes(3, impatient);
}

/* ---- how a wait ends */

static bool yes(void *user)
{
    (void)user;
    return true;
}

static bool flag(void *user)
{
    return !atomic_load((atomic_bool *)user);
}

static void *call_abort(void *arg)
{
    usleep(20000);
    r2_agree_abort(arg);
    return NULL;
}

static void *call_over(void *arg)
{
    usleep(20000);
    atomic_store(&over, true);
    r2_agree_nudge(arg);
    return NULL;
}

static void ends(void)
{
    struct r2_agree_view view;
    struct r2_agree_config config;
    uint8_t id[R2_AGREE_ID];
    pthread_t thread;
    uint64_t begin;

    get_id(id);
    config = config_of(id, me, processes);
    config.timeout_ns = 300 * R2_NS_PER_MS;
    CHECK_EQ(r2_agree_create(&mine, &config), 0);
    begin = r2_now_ns();
    CHECK_EQ(r2_agree_hold(mine, 0, yes, NULL), 0); /* there is nothing from 0 on: stock is */
    CHECK_EQ(r2_agree_hold(mine, 1, yes, NULL), -ETIMEDOUT);
    CHECK(r2_now_ns() - begin >= 300 * R2_NS_PER_MS && r2_now_ns() - begin < 5 * R2_NS_PER_S);
    CHECK_EQ(r2_agree_lookup(mine, false, &view), 0); /* it is no failure */
    CHECK_EQ(pthread_create(&thread, NULL, call_over, mine), 0);
    CHECK_EQ(r2_agree_hold(mine, 1, flag, &over), -EAGAIN);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(pthread_create(&thread, NULL, call_abort, mine), 0);
    CHECK_EQ(r2_agree_hold(mine, 1, yes, NULL), -ECANCELED);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(r2_agree_hold(mine, 1, yes, NULL), -ECANCELED);
    r2_agree_destroy(mine);
    config.id = NULL;
    CHECK_EQ(r2_agree_create(&mine, &config), 0);
    CHECK_EQ(r2_agree_hold(mine, 1, yes, NULL), -ENOTCONN);
    r2_agree_destroy(mine);
}

static void test_ends(void)
{
    run_processes(2, ends);
}

/* Another plan than the one that is waited for; and an index that is past is not proposed again. */
static void other(void)
{
    struct r2_agree *a = meet();
    uint64_t epoch = 0;

    for (int i = 0; i < 5; i++)
        CHECK_EQ(operate(a, 0, &epoch), 0);
    if (me == 0) {
        CHECK_EQ(r2_agree_propose_at(a, "a pla", 5, 3), 0);
        AWAIT(atomic_load(&sh->step) == 1);
        CHECK_EQ(atomic_load(&sh->decided_well), 0);
        CHECK_EQ(r2_agree_propose_at(a, "a pla", 5, 9), 0);
    }
    AWAIT(atomic_load(&sh->step) == 2);
    CHECK_EQ(atomic_load(&sh->decided_well), 1);
    usleep(100000); /* the decision is on its way */
    CHECK_EQ(r2_agree_hold(a, 5, yes, NULL), -ESTALE);
    for (int i = 5; i < 9; i++) {
        CHECK_EQ(operate(a, 0, &epoch), 0);
        CHECK_EQ(epoch, 0);
    }
    CHECK_EQ(operate(a, 0, &epoch), 0);
    CHECK_EQ(epoch, me == 0 ? epoch : sh->ran[0][9] - 1);
    CHECK_NE(epoch, 0);
    r2_agree_destroy(a);
}

static void test_other(void)
{
    run_processes(2, other);
}

/* ---- a leader that was idle when it was watched, and busy when it chooses the index */

#define BURSTS 12
#define BURST 300 /* groups of five */

static atomic_bool burst, bursting;

static int accept_in_burst(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    if (me == 0) { /* the leader's own look at the plan comes right before the choice */
        uint64_t begun = r2_now_ns();

        atomic_store(&burst, true);
        while (!atomic_load(&bursting)) { /* no sleep: the burst is short */
            CHECK_LT(r2_now_ns() - begun, 40 * R2_NS_PER_S);
        }
    }
    return on_accept(user, epoch, plan, len, object);
}

static void groups(struct r2_agree *a, int n, uint64_t *epoch)
{
    for (int i = 0; i < n; i++) {
        CHECK_EQ(operate(a, 0, epoch), 0);
        r2_agree_advance(a, 4);
        atomic_store(&bursting, true);
    }
}

static void burst_begins(void)
{
    uint64_t epoch = 0;
    struct r2_agree *a;

    ops.accept = accept_in_burst;
    a = meet();
    for (uint64_t i = 1; i <= BURSTS; i++) {
        if (me == 0) {
            atomic_store(&burst, false);
            atomic_store(&bursting, false);
            CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
            AWAIT(atomic_load(&burst));
        } else {
            AWAIT(atomic_load(&sh->switched) == (int)i);
        }
        groups(a, BURST, &epoch);
        if (me == 0) {
            AWAIT(atomic_load(&sh->step) == (int)i);
            CHECK_MSG(atomic_load(&sh->decided_well) == i, "burst %d: %s", (int)i, sh->why);
            atomic_fetch_add(&sh->switched, 1);
        }
        groups(a, 20, &epoch); /* N may be just behind the burst */
        CHECK_EQ(epoch, i);
    }
    r2_agree_destroy(a);
}

static void test_burst(void)
{
    run_processes(2, burst_begins);
}

static const struct check_test tests[] = {
    {"exact", test_exact}, {"impatient", test_impatient}, {"ends", test_ends},
    {"other", test_other}, {"burst", test_burst},         {0},
};

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv, tests);
}
