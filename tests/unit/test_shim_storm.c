/* Everything at once to what carries plans out, over the no-op NCCL: random operations and groups
 * on communicators and their children while random plans are made, taken, refused and given back,
 * makings fail or hang, another thread asks for asynchronous errors all the time, and communicators
 * end by destroy or by an abort of another thread in the middle of an operation.
 *
 * All ranks are threads of this process and draw the same program. Each operation must have run on
 * the same communicators, cut alike, on all of them; nothing may be left behind. Rung 3; short, and
 * as long as R2_STORM_SECONDS says, twice; under ASan and TSan it looks for what is freed or
 * changed under somebody's hands. It cannot prove anything about results:
 * tests/py/test_shim_executor.py does. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>

#include "await.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"
#include "util/clock.h"
#include "util/random.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "api/nccl.def"

#define RANKS 3
#define SLOTS 4 /* the first communicator and children of it */
#define STEPS 8000
#define BIG ((size_t)1 << 19)
#define FLOAT 7
#define FIRST_ID (1 << 20)
#define NOT_READY 600
#define POOL 3 /* orders that plans of a communicator choose from */

static struct {
    uint64_t seed;
    struct r2_nccl_id id;
    pthread_barrier_t together;
    _Atomic uint64_t ran[STEPS];        /* what a step ran on, the same on all ranks */
    atomic_int serial;                  /* of ids of plans' communicators */
    atomic_int planned, asked;          /* operations on these; questions about errors */
    void (*answer)(int slow, int what); /* of the driver, about operations on streams */
} world;

struct order {
    uint32_t ranks[RANKS];
    int id; /* 0: none yet */
};

struct rank {
    pthread_t thread, asker;
    int rank, step, relief;
    struct r2_prng program, own; /* the first draws the same on all ranks */
    r2_nccl_comm comms[SLOTS];
    struct r2_comm *entries[SLOTS]; /* held */
    struct order pool[SLOTS][POOL]; /* rank 0's */
    unsigned listed[SLOTS];         /* which of them the newest proposal had */
    atomic_bool asking;
};

static uint64_t draw(struct rank *me, uint64_t below)
{
    return r2_prng_below(&me->program, below);
}

/* ---- what ran */

static void compare(struct rank *me)
{
    r2_nccl_comm comms[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
    int n = noop.traced(comms, counts);
    uint64_t sum = UINT64_C(0xcbf29ce484222325), none = 0;

    for (int i = 0; i < n; i++) {
        sum = (sum ^ (uint64_t)comms[i]->id) * UINT64_C(0x100000001b3);
        sum = (sum ^ counts[i]) * UINT64_C(0x100000001b3);
    }
    for (int i = 0; i < n; i++)
        atomic_fetch_add(&world.planned, comms[i]->id >= FIRST_ID);
    sum |= 1;
    if (!atomic_compare_exchange_strong(&world.ran[me->step], &none, sum))
        CHECK_MSG(none == sum, "rank %d ran step %d otherwise than another rank did", me->rank,
                  me->step);
    noop.trace();
}

static int slot_of(struct rank *me)
{
    int slot = (int)draw(me, SLOTS);

    while (!me->comms[slot])
        slot = (slot + 1) % SLOTS;
    return slot;
}

static int operate(struct rank *me)
{
    int slot = slot_of(me);
    size_t count = draw(me, 4) ? BIG + draw(me, 1000) : 1 + draw(me, 1000);
    r2_nccl_comm comm = me->comms[slot];

    switch (draw(me, 8)) {
    case 0:
        return ncclAllGather(NULL, NULL, count, FLOAT, comm, NULL);
    case 1:
        return ncclAllReduce(NULL, NULL, count, FLOAT, 5, comm, NULL); /* an operation of its own */
    default:
        return ncclAllReduce(NULL, NULL, count, FLOAT, 0, comm, NULL);
    }
}

static void group(struct rank *me)
{
    int n = (int)draw(me, 6), nested = (int)draw(me, 2);
    bool simulated = draw(me, 8) == 0;

    CHECK_EQ(ncclGroupStart(), 0);
    for (int i = 0; i < n; i++) {
        if (nested)
            CHECK_EQ(ncclGroupStart(), 0);
        CHECK_EQ(operate(me), 0);
        if (nested)
            CHECK_EQ(ncclGroupEnd(), 0);
    }
    if (simulated)
        CHECK_EQ(ncclGroupSimulateEnd(NULL), 0);
    else
        CHECK_EQ(ncclGroupEnd(), 0);
}

/* ---- plans */

static void shuffle(struct rank *me, struct order *order)
{
    for (uint32_t r = 0; r < RANKS; r++)
        order->ranks[r] = r;
    for (uint32_t r = RANKS - 1; r > 0; r--) {
        uint32_t other = (uint32_t)r2_prng_below(&me->own, r + 1), kept = order->ranks[r];

        order->ranks[r] = order->ranks[other];
        order->ranks[other] = kept;
    }
    order->id = FIRST_ID + atomic_fetch_add(&world.serial, 1);
}

/* Rank 0 only, which needs nobody's agreement to try: whatever it proposes may be refused. */
static void propose(struct rank *me, int slot)
{
    struct r2_plan_table t = {.nranks = RANKS};
    uint8_t bytes[4096];
    uint32_t at = 0;
    bool run = r2_prng_below(&me->own, 4) > 0; /* what the proposal before had made */
    unsigned before = me->listed[slot];
    long len;

    if (!run)
        me->listed[slot] = (unsigned)r2_prng_below(&me->own, 1 << POOL);

    for (int i = 0; i < POOL; i++) {
        struct order *order = &me->pool[slot][i];

        if (!(me->listed[slot] >> i & 1))
            continue;
        if (order->id == 0 || (!run && r2_prng_below(&me->own, 4) == 0))
            shuffle(me, order);
        t.comms[t.ncomms] = (struct r2_plan_comm){.key = (uint64_t)i + 11, .ranks = order->ranks};
        memcpy(t.comms[t.ncomms].id, &order->id, sizeof(order->id));
        t.entries[0].comm[t.ncomms] = (uint32_t)t.ncomms;
        t.entries[0].boundary[t.ncomms] = at;
        at += 1 + (uint32_t)r2_prng_below(&me->own, R2_PLAN_UNIT / POOL - 1);
        t.ncomms++;
    }
    t.nentries = run && t.ncomms > 0;
    t.entries[0].coll = R2_PLAN_ALLREDUCE;
    t.entries[0].schedule = R2_PLAN_TREE;
    t.entries[0].segments = (uint8_t)t.ncomms;
    t.entries[0].from_bytes = 1 << 20;
    t.entries[0].below_bytes = UINT64_MAX;
    len = r2_plan_table_encode(&t, bytes, sizeof(bytes));
    CHECK(len > 0 && (size_t)len <= sizeof(bytes));
    if (!me->entries[slot]->follow ||
        r2_agree_propose(me->entries[slot]->follow->agree, bytes, (size_t)len))
        me->listed[slot] = before; /* another one is on its way */
}

/* ---- communicators */

static void adopt(struct rank *me, int slot)
{
    me->entries[slot] = r2_comms_hold(me->comms[slot]);
    CHECK(me->entries[slot] != NULL);
}

static void child(struct rank *me)
{
    int slot = 1 + (int)draw(me, SLOTS - 1);

    if (me->comms[slot]) {
        r2_comms_drop(me->entries[slot]);
        CHECK_EQ(ncclCommDestroy(me->comms[slot]), 0); /* maybe while a plan is made for it */
        me->comms[slot] = NULL;
        return;
    }
    CHECK_EQ(ncclCommSplit(me->comms[0], 0, me->rank, &me->comms[slot], NULL), 0);
    memset(me->pool[slot], 0, sizeof(me->pool[slot]));
    me->listed[slot] = 0;
    adopt(me, slot);
}

/* As PyTorch's watchdog: all the time, from another thread. */
static void *ask(void *arg)
{
    struct rank *me = arg;
    int error;

    while (atomic_load(&me->asking)) {
        CHECK_EQ(ncclCommGetAsyncError(me->comms[0], &error), 0);
        CHECK_EQ(error, 0);
        if (atomic_fetch_add(&world.asked, 1) % 16 == 0)
            usleep(50);
    }
    return NULL;
}

/* Makings fail or hang for a while. */
static void trouble(struct rank *me)
{
    if (world.answer && r2_prng_below(&me->own, 200) == 0)
        world.answer(0, r2_prng_below(&me->own, 2) ? NOT_READY : 0);
    if (me->step == me->relief) {
        noop.hold_inits(0);
        noop.fail_inits(0);
    }
    if (r2_prng_below(&me->own, 1000))
        return;
    me->relief = me->step + 1 + (int)r2_prng_below(&me->own, 300);
    if (r2_prng_below(&me->own, 2))
        noop.hold_inits(1);
    else
        noop.fail_inits(1 + (int)r2_prng_below(&me->own, 3));
}

static void step(struct rank *me)
{
    uint64_t what = draw(me, 100);

    if (what < 60)
        CHECK_EQ(operate(me), 0);
    else if (what < 90)
        group(me);
    else if (what < 91)
        child(me);
    else if (what < 99)
        pthread_barrier_wait(&world.together);
    if (me->rank == 0 && r2_prng_below(&me->own, 30) == 0)
        propose(me, slot_of(&(struct rank){
                        .program = me->own,
                        .comms = {me->comms[0], me->comms[1], me->comms[2], me->comms[3]}}));
    if (me->rank == 0)
        trouble(me);
    if (r2_prng_below(&me->own, 3) == 0)
        usleep((useconds_t)r2_prng_below(&me->own, 3000));
}

/* ---- the end */

static void *abort_world(void *arg)
{
    struct rank *me = arg;

    usleep((useconds_t)(20000 + r2_prng_below(&me->own, 20000)));
    CHECK_EQ(ncclCommAbort(me->comms[0]), 0);
    return NULL;
}

/* The last operation hangs, on whatever it runs; another thread aborts it there. */
static void end_by_abort(struct rank *me)
{
    pthread_t other;

    pthread_barrier_wait(&world.together);
    noop.hang(1);
    CHECK_EQ(pthread_create(&other, NULL, abort_world, me), 0);
    CHECK(ncclAllReduce(NULL, NULL, BIG, FLOAT, 0, me->comms[0], NULL) != 0);
    CHECK_EQ(pthread_join(other, NULL), 0);
    pthread_barrier_wait(&world.together);
    noop.hang(0);
    for (int s = 1; s < SLOTS; s++)
        if (me->comms[s])
            CHECK_EQ(ncclCommAbort(me->comms[s]), 0);
}

static void end_in_order(struct rank *me)
{
    for (int s = SLOTS - 1; s >= 0; s--)
        if (me->comms[s])
            CHECK_EQ((r2_prng_below(&me->own, 4) ? ncclCommDestroy : ncclCommAbort)(me->comms[s]),
                     0);
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;

    r2_prng_seed(&me->program, world.seed);
    r2_prng_seed(&me->own, world.seed + 1 + (uint64_t)me->rank);
    CHECK_EQ(ncclCommInitRank(&me->comms[0], RANKS, world.id, me->rank), 0);
    adopt(me, 0);
    pthread_barrier_wait(&world.together);
    atomic_store(&me->asking, true);
    CHECK_EQ(pthread_create(&me->asker, NULL, ask, me), 0);
    noop.trace();
    for (me->step = 0; me->step < STEPS; me->step++) {
        step(me);
        compare(me);
    }
    atomic_store(&me->asking, false);
    CHECK_EQ(pthread_join(me->asker, NULL), 0);
    for (int s = 0; s < SLOTS; s++)
        if (me->comms[s])
            r2_comms_drop(me->entries[s]);
    if (me->rank == 0 && r2_prng_below(&me->own, 4))
        noop.hold_inits(0); /* otherwise destroy waits for what is being made */
    if (draw(me, 2))
        end_by_abort(me);
    else
        end_in_order(me);
    return NULL;
}

static void generation(void)
{
    struct rank ranks[RANKS];
    int before = r2_comms_count();

    world.seed = check_random();
    memset(world.ran, 0, sizeof(world.ran));
    CHECK_EQ(pthread_barrier_init(&world.together, NULL, RANKS), 0);
    CHECK_EQ(ncclGetUniqueId(&world.id), 0);
    for (int r = 0; r < RANKS; r++) {
        memset(&ranks[r], 0, sizeof(ranks[r]));
        ranks[r].rank = r;
        CHECK_EQ(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(pthread_join(ranks[r].thread, NULL), 0);
    CHECK_EQ(r2_comms_count(), before);
    noop.hold_inits(0);
    noop.fail_inits(0);
    /* What was in the making ends by itself. */
    AWAIT(noop.live() <= 0);
    CHECK_EQ(noop.live(), 0);
    pthread_barrier_destroy(&world.together);
}

static void test_storm(void)
{
    const char *text = getenv("R2_STORM_SECONDS");
    uint64_t until = r2_now_ns() + (uint64_t)(text ? atoi(text) : 4) * R2_NS_PER_S;
    int generations = 0;

    atomic_store(&world.planned, 0);
    atomic_store(&world.asked, 0);
    do {
        generation();
        generations++;
    } while (r2_now_ns() < until ||
             (atomic_load(&world.planned) == 0 && generations < 1000)); /* a busy machine */
    printf("%d generations\n", generations);
    printf("%d operations under plans, %d questions\n", atomic_load(&world.planned),
           atomic_load(&world.asked));
    CHECK(atomic_load(&world.planned) > 0 && atomic_load(&world.asked) > 0);
}

/* With streams, on which operations are not over when a call returns: what plans have dropped waits
 * for them, and what ends meanwhile ends that, too. */
static void test_storm_on_streams(void)
{
    void *lib = dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL);
    int (*events)(void);

    CHECK_MSG(lib, "%s", dlerror());
    *(void **)&world.answer = dlsym(lib, "fake_cuda_answer");
    *(void **)&events = dlsym(lib, "fake_cuda_events");
    CHECK(world.answer && events);
    test_storm();
    world.answer(0, 0);
    AWAIT(events() <= 0);
    CHECK_EQ(events(), 0);
}

static const struct check_test tests[] = {
    {"storm", test_storm}, {"storm_on_streams", test_storm_on_streams}, {0}};

int main(int argc, char **argv)
{
    /* Stacks of threads that are over are unmapped at once: whoever still uses one is found. */
    if (!getenv("GLIBC_TUNABLES")) {
        setenv("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=0", 1);
        execv("/proc/self/exe", argv);
    }
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    return check_main(argc, argv, tests);
}
