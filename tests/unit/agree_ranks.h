/* Ranks of a communicator as forked processes over loopback, for the tests of the agreement: they
 * meet in shared memory, where every operation's plan is compared. Include once, first. */
#ifndef R2_TESTS_UNIT_AGREE_RANKS_H
#define R2_TESTS_UNIT_AGREE_RANKS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "agree/agree.h"
#include "agree/wire.h"
#include "await.h"
#include "check.h"
#include "util/clock.h"

#define MOST 8
#define OPS 100000

static struct shared {
    uint8_t id[R2_AGREE_ID];
    atomic_int signed_, ready, off, reports, switched, refuse, step, stuck;
    atomic_int accepted, released;
    _Atomic uint64_t switch_at, decided_well;
    pid_t pids[MOST];
    char why[R2_AGREE_WHY];
    _Atomic uint64_t ran[2][OPS];
} * sh;

static int me, processes;

/* --- harness ------------------------------------------------------------------------------ */

static void run_processes(int n, void (*run)(void))
{
    bool killed = false;

    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    processes = n;
    fflush(stdout);
    for (int i = 0; i < n; i++) {
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            alarm(100);
            me = i;
            run();
            fflush(stdout);
            _exit(0);
        }
        sh->pids[i] = pid;
    }
    for (int i = 0; i < n; i++) {
        int status = 0;

        CHECK(waitpid(sh->pids[i], &status, 0) == sh->pids[i]);
        killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; /* by a test's own hand */
        CHECK_MSG(status == 0 || killed, "process %d ended with status 0x%x", i, status);
    }
    munmap(sh, sizeof(*sh));
}

/* A test of `n` processes: the body of each follows. */
#define PROCESSES(name, n)                                                                         \
    static void each_of_##name(void);                                                              \
    TEST(name)                                                                                     \
    {                                                                                              \
        run_processes(n, each_of_##name);                                                          \
    }                                                                                              \
    static void each_of_##name(void)

static void get_id(uint8_t id[R2_AGREE_ID])
{
    if (me == 0) {
        char why[R2_AGREE_WHY];

        memset(sh->id, 0, sizeof(sh->id));
        memset(sh->id, 0x5a, 64);
        CHECK_MSG(r2_agree_id_sign(sh->id, why) == 0, "%s", why);
        atomic_store(&sh->signed_, 1);
    }
    AWAIT(atomic_load(&sh->signed_));
    memcpy(id, sh->id, R2_AGREE_ID);
}

static void on_ready(void *user, const struct r2_agree_member *members, int nranks)
{
    (void)user;
    CHECK(members != NULL);
    for (int r = 0; r < nranks; r++) {
        CHECK_EQ(members[r].node, 100 + r % processes);
    }
    atomic_fetch_add(&sh->ready, 1);
}

static void on_off(void *user, const char *why)
{
    (void)user;
    memcpy(sh->why, why, strlen(why) + 1);
    atomic_fetch_add(&sh->off, 1);
}

static int on_accept(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    (void)user;
    CHECK_EQ(len, 5);
    CHECK_MEM(plan, "a plan", 5);
    if (atomic_load(&sh->refuse) == me + 1) {
        return -ENOMEM;
    }
    *object = malloc(8);
    memcpy(*object, &epoch, 8);
    atomic_fetch_add(&sh->accepted, 1);
    return 0;
}

static void on_release(void *user, void *object)
{
    (void)user;
    free(object);
    atomic_fetch_add(&sh->released, 1);
}

static void on_decided(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why)
{
    (void)user;
    (void)epoch;
    if (committed) {
        atomic_store(&sh->switch_at, at);
        atomic_fetch_add(&sh->decided_well, 1);
    } else {
        memcpy(sh->why, why, strlen(why) + 1);
    }
    atomic_fetch_add(&sh->step, 1);
}

static void on_reported(void *user, int rank, const struct r2_agree_report *report)
{
    (void)user;
    CHECK_EQ(report->share, 1000 + rank);
    CHECK_EQ(report->capacity, 7);
    atomic_fetch_add(&sh->reports, 1);
}

static struct r2_agree_ops ops = {.ready = on_ready,
                                  .off = on_off,
                                  .accept = on_accept,
                                  .release = on_release,
                                  .decided = on_decided,
                                  .reported = on_reported};

static struct r2_agree_config config_of(const uint8_t *id, int rank, int nranks)
{
    return (struct r2_agree_config){.id = id,
                                    .rank = rank,
                                    .nranks = nranks,
                                    .node = 100 + (uint64_t)me,
                                    .timeout_ns = 30 * R2_NS_PER_S,
                                    .name = "test",
                                    .ops = &ops};
}

static struct r2_agree *member(const uint8_t *id, int rank, int nranks)
{
    struct r2_agree_config config = config_of(id, rank, nranks);
    struct r2_agree *a;

    CHECK_EQ(r2_agree_create(&a, &config), 0);
    return a;
}

/* One operation, compared with what the other ranks ran. */
static int operate(struct r2_agree *a, int comm, uint64_t *epoch)
{
    struct r2_agree_view view;
    uint64_t none = 0;
    int rc = r2_agree_lookup(a, true, &view);

    if (rc != 0) {
        return rc;
    }
    CHECK_LT(view.index, OPS);
    CHECK_EQ(view.object ? *(uint64_t *)view.object : 0, view.epoch);
    CHECK(view.epoch == 0 || view.index >= view.at);
    if (!atomic_compare_exchange_strong(&sh->ran[comm][view.index], &none, view.epoch + 1)) {
        CHECK_EQ(none, view.epoch + 1);
    }
    r2_agree_advance(a, 1);
    *epoch = view.epoch;
    return 0;
}

static enum r2_agree_state state_of(struct r2_agree *a)
{
    struct r2_agree_stats stats;

    r2_agree_get_stats(a, &stats);
    return stats.state;
}

/* A rank that has met the others. */
__attribute__((unused)) static struct r2_agree *meet(void)
{
    uint8_t id[R2_AGREE_ID];
    struct r2_agree *a;
    uint64_t epoch;

    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes);
    return a;
}

/* Operations until the plan of epoch `want` or a later one is in force; returns which. A proposal
 * that comes too late for a rank is made again under the next epoch. */
__attribute__((unused)) static uint64_t change(struct r2_agree **members, int n, int comm,
                                               uint64_t want)
{
    uint64_t epoch = 0, low = 0;

    WHILE_MS (40000, low < want) {
        low = UINT64_MAX;
        for (int k = 0; k < n; k++) {
            CHECK_EQ(operate(members[k], comm, &epoch), 0);
            low = epoch < low ? epoch : low;
        }
    }
    CHECK_GE(low, want);
    return low;
}

#endif
