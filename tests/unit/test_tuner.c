/* The tuner of the built library, called as NCCL calls it: every version, with and without a want,
 * on the thread that left it and on others. Rung 1; it cannot prove that NCCL follows. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#include "check.h"
#include "tuner/nccl_tuner_abi.h"
#include "tuner/want.h"

#define ALGOS R2_NCCL_TUNER_ALGOS
#define PROTOS R2_NCCL_TUNER_PROTOS
#define MIB (1ul << 20)

static const char *library;
static int (*expect)(const struct r2ccl_tuner_want *want);
static atomic_int logged;

static const struct r2ccl_tuner_want tree = {sizeof(tree), R2CCL_TUNER_TREE, MIB};
static const struct r2ccl_tuner_want ring = {sizeof(ring), R2CCL_TUNER_RING, MIB};

static void count_log(int level, unsigned long flags, const char *file, int line, const char *fmt,
                      ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
    logged++;
}

static void *poison(void)
{
    return (void *)(uintptr_t)0xa5a5a5a5a5a5a5a5;
}

/* What NCCL does around one communicator, whatever the version. */
struct tuner {
    int version;
    const void *table;
};

static const char *name_of(struct tuner t)
{
    return *(const char *const *)t.table;
}

static void *tuner_init(struct tuner t)
{
    void *ctx = poison();

    if (t.version == 5) {
        const struct r2_nccltuner_v5 *v5 = t.table;
        struct r2_nccltuner_nvl_domains domains = {2, 1, 1};
        struct r2_nccltuner_constants constants, before;

        for (size_t i = 0; i < sizeof(constants) / sizeof(double); i++) {
            ((double *)&constants)[i] = (double)i;
        }
        before = constants;
        CHECK_EQ(v5->init(&ctx, 0x1234, 8, 4, count_log, &domains, &constants), 0);
        CHECK(memcmp(&before, &constants, sizeof(before)) == 0);
    } else {
        const struct r2_nccltuner_v2 *v2 = t.table; /* the same up to v4 */

        CHECK_EQ(v2->init(8, 4, count_log, &ctx), 0);
    }
    CHECK(ctx != poison());
    return ctx;
}

static void tuner_destroy(struct tuner t, void *ctx)
{
    const struct r2_nccltuner_v2 *any = t.table;

    CHECK_EQ(any->destroy(ctx), 0);
}

/* NCCL's choice after the tuner had its say: the cheapest entry, as a = algorithm, p = protocol. */
static int choose(struct tuner t, void *ctx, int func, size_t bytes, float table[ALGOS][PROTOS])
{
    int algo = -1, proto = -1, channels = 0;
    float least = 3600e6f;

    if (t.version == 2) {
        const struct r2_nccltuner_v2 *v2 = t.table;

        CHECK_EQ(v2->info(ctx, func, bytes, 0, 0, 1, &algo, &proto, &channels), 0);
        CHECK((algo < 0) == (proto < 0)); /* both or neither */
    } else if (t.version == 3) {
        const struct r2_nccltuner_v3 *v3 = t.table;

        CHECK_EQ(v3->info(ctx, func, bytes, 1, (float **)table, ALGOS, PROTOS, &channels), 0);
    } else {
        const struct r2_nccltuner_v4 *v4 = t.table;

        CHECK_EQ(v4->info(ctx, func, bytes, 1, (float **)table, ALGOS, PROTOS, 0, &channels), 0);
    }
    CHECK_EQ(channels, 0);
    for (int a = 0; algo < 0 && a < ALGOS; a++) {
        for (int p = 0; p < PROTOS; p++) {
            if (table[a][p] >= 0 && table[a][p] < least) {
                least = table[a][p];
                proto = a * 10 + p;
            }
        }
    }
    return algo < 0 ? proto : algo * 10 + proto;
}

/* Ring with LL128 is the cheapest, LL128 the cheapest tree; no collective network. */
static void costs(float table[ALGOS][PROTOS])
{
    for (int a = 0; a < ALGOS; a++) {
        for (int p = 0; p < PROTOS; p++) {
            table[a][p] = a > 1 && a < 4 ? R2_NCCL_TUNER_IGNORE : 200.0f - 10.0f * (float)(p == 1);
        }
        table[1][1] = 100;
    }
}

static struct tuner get(int version)
{
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    struct tuner t = {.version = version};
    char symbol[32];

    CHECK_MSG(h != NULL, "%s", dlerror());
    *(void **)&expect = dlsym(h, "r2ccl_tuner_expect");
    CHECK(expect != NULL);
    CHECK_EQ(expect(NULL), 0);
    snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", version);
    t.table = dlsym(h, symbol);
    CHECK_MSG(t.table != NULL, "%s", symbol);
    CHECK_STR(name_of(t), "R2CCL");
    dlclose(h); /* it stays */
    return t;
}

static void test_found_only_when_announced(void)
{
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);

    CHECK_MSG(h != NULL, "%s", dlerror());
    for (int v = 2; v <= 5; v++) {
        char symbol[32];

        snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", v);
        CHECK(dlsym(h, symbol) == NULL);
    }
    for (int v = 2; v <= 5; v++) {
        get(v);
    }
    dlclose(h);
}

static void test_silent_without_a_want(void)
{
    for (int v = 2; v <= 5; v++) {
        struct tuner t = get(v);
        void *ctx = tuner_init(t);
        float table[ALGOS][PROTOS], before[ALGOS][PROTOS];

        for (int func = 0; func < 8; func++) {
            costs(table);
            costs(before);
            CHECK_EQ(choose(t, ctx, func, 64 * MIB, table), 11);
            CHECK(memcmp(table, before, sizeof(table)) == 0);
        }
        tuner_destroy(t, ctx);
    }
    CHECK_EQ(logged, 0);
}

static void test_forces(void)
{
    for (int v = 2; v <= 5; v++) {
        struct tuner t = get(v);
        const int simple_or_ll128 = v == 2 ? 2 : 1;
        float table[ALGOS][PROTOS];
        void *ctx, *other;

        CHECK_EQ(expect(&tree), 0);
        ctx = tuner_init(t);
        CHECK_EQ(expect(NULL), 1);
        other = tuner_init(t); /* after the want was taken back */
        for (int func = 0; func < 8; func++) {
            costs(table);
            CHECK_EQ(choose(t, ctx, func, MIB, table), func == 4 ? simple_or_ll128 : 11);
            costs(table);
            CHECK_EQ(choose(t, ctx, func, MIB - 1, table), 11);
            costs(table);
            CHECK_EQ(choose(t, other, func, 64 * MIB, table), 11);
        }
        tuner_destroy(t, ctx);
        tuner_destroy(t, other);
        CHECK_EQ(expect(&ring), 0);
        ctx = tuner_init(t);
        CHECK_EQ(expect(NULL), 1);
        costs(table);
        table[0][2] = 1; /* cheaper than any ring */
        CHECK_EQ(choose(t, ctx, 4, MIB, table), 10 + simple_or_ll128);
        tuner_destroy(t, ctx);
    }
    CHECK_EQ(logged, 0);
}

/* What NCCL ruled out stays out, and something is always left to choose. */
static void test_never_leaves_nothing(void)
{
    for (int v = 3; v <= 5; v++) {
        struct tuner t = get(v);
        float table[ALGOS][PROTOS];
        void *ctx;

        CHECK_EQ(expect(&tree), 0);
        ctx = tuner_init(t);
        CHECK_EQ(expect(NULL), 1);
        costs(table);
        for (int p = 0; p < PROTOS; p++) {
            table[0][p] = R2_NCCL_TUNER_IGNORE;
        }
        CHECK_EQ(choose(t, ctx, 4, MIB, table), 11);
        costs(table);
        table[0][1] = table[0][0] = R2_NCCL_TUNER_IGNORE;
        CHECK_EQ(choose(t, ctx, 4, MIB, table), 2);
        CHECK(table[0][1] == R2_NCCL_TUNER_IGNORE);
        tuner_destroy(t, ctx);
    }
}

/* v2 is not told what the user ruled out. */
static void test_users_choice_v2(void)
{
    static const char *const variables[] = {"NCCL_ALGO", "NCCL_PROTO"};
    struct tuner t = get(2);

    for (int i = 0; i < 2; i++) {
        float table[ALGOS][PROTOS];
        void *ctx;

        setenv(variables[i], "x", 1);
        CHECK_EQ(expect(&tree), 0);
        ctx = tuner_init(t);
        expect(NULL);
        unsetenv(variables[i]);
        costs(table);
        CHECK_EQ(choose(t, ctx, 4, MIB, table), 11);
        tuner_destroy(t, ctx);
    }
}

static void test_bad_wants(void)
{
    struct r2ccl_tuner_want want = tree;

    get(5);
    want.size = sizeof(want) - 1;
    CHECK_EQ(expect(&want), -EINVAL);
    want.size = 4 * sizeof(want); /* a newer shim */
    CHECK_EQ(expect(&want), 0);
    want.algo = 3;
    CHECK_EQ(expect(&want), -EINVAL);
    want.algo = R2CCL_TUNER_NONE;
    CHECK_EQ(expect(&want), 0);
    expect(NULL);
}

struct maker { /* one communicator made on another thread */
    pthread_t thread;
    struct tuner tuner;
    int choice, depth;
};

static void *make(void *arg)
{
    struct maker *m = arg;
    float table[ALGOS][PROTOS];
    void *ctx;

    if (m->depth > 0) { /* as a group that does not block: a thread of a thread */
        struct maker deeper = {.tuner = m->tuner, .depth = m->depth - 1};

        CHECK_EQ(pthread_create(&deeper.thread, NULL, make, &deeper), 0);
        pthread_join(deeper.thread, NULL);
        m->choice = deeper.choice;
        return NULL;
    }
    ctx = tuner_init(m->tuner);
    costs(table);
    m->choice = choose(m->tuner, ctx, 4, MIB, table);
    tuner_destroy(m->tuner, ctx);
    return NULL;
}

static bool slack_inherited(void)
{
    return prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0) > 0;
}

/* NCCL up to 2.27 makes every communicator on a thread of its own. */
static void test_threads_of_the_thread(void)
{
    struct maker m[3] = {0};
    int before;

    if (!slack_inherited()) {
        CHECK_SKIP("this kernel has no timer slack");
    }
    before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    for (int v = 2; v <= 5; v++) {
        int forced = v == 2 ? 2 : 1;

        for (int i = 0; i < 3; i++) {
            m[i] = (struct maker){.tuner = get(v), .depth = i};
        }
        CHECK_EQ(expect(&tree), 0);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(pthread_create(&m[i].thread, NULL, make, &m[i]), 0);
        }
        for (int i = 0; i < 3; i++) {
            pthread_join(m[i].thread, NULL);
            CHECK_EQ(m[i].choice, forced);
        }
        CHECK_EQ(expect(NULL), 3);
        CHECK_EQ(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), before);
        CHECK_EQ(pthread_create(&m[0].thread, NULL, make, &m[0]), 0);
        pthread_join(m[0].thread, NULL);
        CHECK_EQ(m[0].choice, 11);
    }
}

static atomic_int stage;

static void *late(void *arg)
{
    while (stage < 1) {
        sched_yield();
    }
    return make(arg);
}

/* A thread that inherited a want which was taken back since, while others are in force. */
static void test_stale_mark(void)
{
    struct maker m = {.tuner = get(5)};

    CHECK_EQ(expect(&tree), 0);
    CHECK_EQ(pthread_create(&m.thread, NULL, late, &m), 0);
    CHECK_EQ(expect(NULL), 0);
    CHECK_EQ(expect(&tree), 0); /* the same slot, another mark */
    stage = 1;
    pthread_join(m.thread, NULL);
    CHECK_EQ(m.choice, 11);
    CHECK_EQ(expect(NULL), 0);
}

static pthread_barrier_t together;

static void *maker_with_want(void *arg)
{
    struct maker *m = arg, child = {.tuner = m->tuner};
    const struct r2ccl_tuner_want *want = m->depth ? m->depth == 1 ? &tree : &ring : NULL;

    for (int round = 0; round < 200; round++) {
        if (want) {
            CHECK_EQ(expect(want), 0);
        }
        pthread_barrier_wait(&together);
        CHECK_EQ(pthread_create(&child.thread, NULL, make, &child), 0);
        pthread_join(child.thread, NULL);
        CHECK_EQ(child.choice, m->depth == 1 ? 1 : 11);
        CHECK_EQ(expect(NULL), want ? 1 : 0);
    }
    return NULL;
}

/* Wants of several threads do not mix, and reach nobody else. */
static void test_threads_apart(void)
{
    struct maker m[6];

    if (!slack_inherited()) {
        CHECK_SKIP("this kernel has no timer slack");
    }
    pthread_barrier_init(&together, NULL, 6);
    for (int i = 0; i < 6; i++) {
        m[i] = (struct maker){.tuner = get(5), .depth = i % 3};
    }
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(pthread_create(&m[i].thread, NULL, maker_with_want, &m[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(m[i].thread, NULL);
    }
    pthread_barrier_destroy(&together);
}

static void *hold(void *arg)
{
    *(int *)arg = expect(&tree);
    pthread_barrier_wait(&together);
    pthread_barrier_wait(&together);
    expect(NULL);
    return NULL;
}

static void test_too_many(void)
{
    enum { HOLDERS = 64 };
    pthread_t threads[HOLDERS];
    int results[HOLDERS];

    get(5);
    pthread_barrier_init(&together, NULL, HOLDERS + 1);
    for (int i = 0; i < HOLDERS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, hold, &results[i]), 0);
    }
    pthread_barrier_wait(&together);
    CHECK_EQ(expect(&tree), -EBUSY);
    pthread_barrier_wait(&together);
    for (int i = 0; i < HOLDERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(results[i], 0);
    }
    CHECK_EQ(expect(&tree), 0);
    CHECK_EQ(expect(NULL), 0);
    pthread_barrier_destroy(&together);
}

static const struct check_test tests[] = {
    {"found_only_when_announced", test_found_only_when_announced},
    {"silent_without_a_want", test_silent_without_a_want},
    {"forces", test_forces},
    {"never_leaves_nothing", test_never_leaves_nothing},
    {"users_choice_v2", test_users_choice_v2},
    {"bad_wants", test_bad_wants},
    {"threads_of_the_thread", test_threads_of_the_thread},
    {"stale_mark", test_stale_mark},
    {"threads_apart", test_threads_apart},
    {"too_many", test_too_many},
    {0},
};

int main(int argc, char **argv)
{
    library = check_built("libnccl-net-r2ccl.so");
    return check_main(argc, argv, tests);
}
