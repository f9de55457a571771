/* R2CCL_PLAN_TRACE over the no-op NCCL: what each operation ran on, recorded and replayed. Each
 * rank is a process; plans are proposed here, not by the planner. Rung 3: real sockets on loopback.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "api/call.h"
#include "await.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"
#include "settings/settings.h"
#include "util/clock.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#include "api/nccl.def"

#define RANKS 3
#define BIG ((size_t)(1 << 20)) /* floats: an operation that plans are for */
#define FLOAT 7
#define MOST 200000
#define AHEAD 20 /* operations that a rank may be ahead of another */
#define PLANS 4  /* make, run, stock, run again */

/* What processes share. */
static struct shared {
    struct r2_nccl_id id;
    atomic_int has_id, made, met;
    _Atomic uint64_t last;    /* operation; 0: not known yet */
    uint8_t ran[RANKS][MOST]; /* 1: on the application's communicator, 2: on another one */
    _Atomic uint64_t operations[RANKS];
    uint64_t epochs[RANKS]; /* of the last plan */
    uint32_t made_seconds[RANKS];
} * sh;

static uint8_t recorded[MOST]; /* of the run that was recorded */
static uint64_t recorded_last;
static char folder[] = "/tmp/r2ccl-trace-XXXXXX";

struct rank {
    int rank, group; /* operations in a group */
    r2_nccl_comm comm;
    struct r2_comm *entry;
    struct r2_follow *follow;
    uint64_t epoch; /* of the plan that came into force last */
    uint64_t next;
};

/* ---- one rank */

static void start(struct rank *me)
{
    if (me->rank == 0) {
        CHECK_EQ(ncclGetUniqueId(&sh->id), 0);
        atomic_store(&sh->has_id, 1);
    }
    AWAIT(atomic_load(&sh->has_id));
    CHECK_EQ(ncclCommInitRank(&me->comm, RANKS, sh->id, me->rank), 0);
    me->entry = r2_comms_hold(me->comm);
    CHECK(me->entry && me->entry->follow);
    me->follow = me->entry->follow;
}

static void reduce(struct rank *me)
{
    CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, FLOAT, 0, me->comm, NULL), 0);
}

/* One step of the application: a group, or one operation. */
static void step(struct rank *me)
{
    r2_nccl_comm comms[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
    int n = me->group ? me->group : 1;

    noop.trace();
    if (me->group)
        CHECK_EQ(ncclGroupStart(), 0);
    for (int i = 0; i < n; i++)
        reduce(me);
    if (me->group)
        CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(noop.traced(comms, counts), n);
    for (int i = 0; i < n; i++, me->next++) {
        CHECK_LT(me->next, MOST);
        sh->ran[me->rank][me->next] = comms[i] == me->comm ? 1 : 2;
    }
    atomic_store(&sh->operations[me->rank], me->next);
    for (int r = 0; r < RANKS; r++) /* as collectives do, though not at once */
        AWAIT(atomic_load(&sh->operations[r]) + AHEAD >= me->next);
}

static void finish(struct rank *me)
{
    struct r2_seconds_stats stats;

    r2_seconds_stats(me->follow->seconds, &stats);
    sh->made_seconds[me->rank] = stats.made + stats.making;
    sh->epochs[me->rank] = me->follow->epoch;
    r2_comms_drop(me->entry);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* ---- recording */

static void propose(struct rank *me, int n, bool run)
{
    static const uint32_t order[RANKS] = {2, 0, 1};
    struct r2_plan_table t = {.nranks = RANKS, .ncomms = n, .nentries = run};
    uint8_t bytes[2048];
    long len;
    int rc = -1;

    t.comms[0] = (struct r2_plan_comm){.key = 11, .ranks = order};
    t.comms[0].id[0] = 1;
    t.entries[0].schedule = R2_PLAN_TREE;
    t.entries[0].segments = 1;
    t.entries[0].from_bytes = 1 << 20;
    t.entries[0].below_bytes = UINT64_MAX;
    len = r2_plan_table_encode(&t, bytes, sizeof(bytes));
    CHECK(len > 0 && (size_t)len <= sizeof(bytes));
    for (int i = 0; i < MOST / 4 && rc != 0; i++) {
        rc = r2_agree_propose(me->follow->agree, bytes, (size_t)len);
        CHECK(rc == 0 || rc == -EAGAIN || rc == -EBUSY);
        if (rc) {
            step(me);
            usleep(300);
        }
    }
    CHECK_EQ(rc, 0);
}

/* Another plan is in force, under any higher epoch: a proposal that comes too late for a rank is
 * made again by itself, under the next one. */
static void reach(struct rank *me, bool first)
{
    uint64_t before = me->epoch;
    bool failed;

    while (me->follow->epoch == before) {
        step(me);
        usleep(300);
    }
    me->epoch = me->follow->epoch;
    CHECK_GT(me->epoch, before);
    if (first) {
        AWAIT(r2_seconds_made(me->follow->seconds, &failed) == me->epoch && !failed);
        atomic_fetch_add(&sh->made, 1);
        AWAIT(atomic_load(&sh->made) == RANKS);
    }
}

static void record(struct rank *me)
{
    static const bool runs[PLANS] = {false, true, false, true};

    start(me);
    for (int i = 0; i < PLANS; i++) {
        if (me->rank == 0)
            propose(me, 1, runs[i]);
        reach(me, i == 0);
    }
    if (me->rank == 0)
        atomic_store(&sh->last, me->next + 300);
    while (!atomic_load(&sh->last) || me->next < atomic_load(&sh->last)) {
        step(me);
        usleep(300);
    }
    finish(me);
}

/* ---- replaying */

static void replay(struct rank *me)
{
    start(me);
    while (me->next < recorded_last)
        step(me);
    finish(me);
}

static void replay_slowly(struct rank *me)
{
    start(me);
    while (me->next < recorded_last) {
        step(me);
        if (me->next % 50 == (uint64_t)me->rank * 10)
            usleep(20000);
    }
    finish(me);
}

/* As agree_timeout_ns of the settings, which users cannot set. */
static void wait_for_answers(uint64_t ns)
{
    ((struct r2_settings *)(uintptr_t)r2_settings_get())->agree_timeout_ns = ns;
}

static void replay_impatiently(struct rank *me)
{
    wait_for_answers(4 * R2_NS_PER_S);
    replay(me);
}

/* Rank 1 cannot make the plan's communicator. */
static void replay_failing(struct rank *me)
{
    start(me);
    if (me->rank == 1)
        noop.fail_inits(1);
    while (me->next < recorded_last)
        step(me);
    finish(me);
}

/* It takes for ever there. */
static void replay_hanging(struct rank *me)
{
    uint64_t begin = r2_now_ns();

    wait_for_answers(4 * R2_NS_PER_S);
    start(me);
    if (me->rank == 1)
        noop.hold_inits(1);
    while (me->next < recorded_last)
        step(me);
    CHECK(r2_now_ns() - begin < 30 * R2_NS_PER_S);
    if (me->rank == 1)
        noop.hold_inits(0);
    finish(me);
}

/* ---- processes */

static void run_ranks(void (*run)(struct rank *), const char *trace, int group)
{
    pid_t pids[RANKS];

    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    fflush(stdout);
    for (int r = 0; r < RANKS; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (pids[r] == 0) {
            struct rank me = {.rank = r, .group = group};
            char number[4];

            alarm(100);
            snprintf(number, sizeof(number), "%d", r);
            setenv("RANK", number, 1);
            setenv("R2CCL_PLAN_TRACE", trace, 1);
            run(&me);
            fflush(stdout);
            _exit(0);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        int status = 0;

        CHECK(waitpid(pids[r], &status, 0) == pids[r]);
        CHECK_MSG(status == 0, "rank %d ended with status 0x%x", r, status);
    }
    for (int r = 1; r < RANKS; r++) {
        CHECK_EQ(sh->operations[r], sh->operations[0]);
        for (uint64_t i = 0; i < sh->operations[0]; i++)
            CHECK_MSG(sh->ran[r][i] == sh->ran[0][i], "rank %d, operation %d", r, (int)i);
    }
}

static void done(void)
{
    munmap(sh, sizeof(*sh));
}

static const char *path_of(const char *fmt, const char *name)
{
    static char text[300];

    snprintf(text, sizeof(text), fmt, folder, name);
    return text;
}

/* Files of a run with that name, fresh. */
static void record_as(const char *name, int group)
{
    for (int r = 0; r < RANKS; r++) {
        char path[200];

        snprintf(path, sizeof(path), "%s/%s.%d", folder, name, r);
        unlink(path);
    }
    run_ranks(record, path_of("%s/%s", name), group);
    recorded_last = sh->operations[0];
    memcpy(recorded, sh->ran[0], sizeof(recorded));
    CHECK(memchr(recorded, 2, recorded_last) != NULL);
    done();
}

/* Operations that ran as recorded, from the first on. */
static uint64_t as_recorded(void)
{
    uint64_t n = 0;

    while (n < recorded_last && sh->ran[0][n] == recorded[n])
        n++;
    return n;
}

static bool all_stock(uint64_t from)
{
    return memchr(sh->ran[0] + from, 2, recorded_last - from) == NULL;
}

static char *read_file(const char *name, int rank, size_t *len)
{
    static char text[200000];
    char path[200];
    int fd;

    snprintf(path, sizeof(path), "%s/%s.%d", folder, name, rank);
    fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    *len = (size_t)read(fd, text, sizeof(text) - 1);
    CHECK_LT(*len, sizeof(text) - 1);
    text[*len] = '\0';
    close(fd);
    return text;
}

static void write_file(const char *name, int rank, const char *text, size_t len)
{
    char path[200];
    int fd;

    snprintf(path, sizeof(path), "%s/%s.%d", folder, name, rank);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, text, len) == (ssize_t)len);
    close(fd);
}

/* Files of one run with that name, which is recorded once: what it ran is in `recorded`. */
static void base_as(const char *name)
{
    static uint8_t ran[MOST];
    static uint64_t last;
    size_t len;

    if (!last) {
        record_as("base", 0);
        last = recorded_last;
        memcpy(ran, recorded, sizeof(ran));
    }
    recorded_last = last;
    memcpy(recorded, ran, sizeof(ran));
    for (int r = 0; r < RANKS; r++) {
        const char *text = read_file("base", r, &len);

        write_file(name, r, text, len);
    }
}

static struct r2_trace *parsed(const char *name, int rank)
{
    char why[R2_TRACE_WHY], *text;
    struct r2_trace *trace;
    size_t len;

    text = read_file(name, rank, &len);
    CHECK_MSG(r2_trace_parse(&trace, text, len, why) == 0, "%s", why);
    CHECK_EQ(trace->ncomms, 1);
    CHECK_EQ(trace->comms[0].nplans, PLANS);
    return trace;
}

static void test_the_same(void)
{
    base_as("same");
    run_ranks(replay, path_of("replay:%s/%s", "same"), 0);
    CHECK_EQ(as_recorded(), recorded_last);
    done();
    run_ranks(replay_slowly, path_of("replay:%s/%s.%%r", "same"), 0);
    CHECK_EQ(as_recorded(), recorded_last);
    done();
}

/* Indices fall into groups, whose operations run as their first. */
static void test_groups(void)
{
    struct r2_trace *trace;

    record_as("groups", 7);
    trace = parsed("groups", 1);
    for (int i = 0; i < PLANS; i++)
        CHECK_EQ(trace->comms[0].plans[i].from % 7, 0); /* where a group begins */
    r2_trace_free(trace);
    run_ranks(replay, path_of("replay:%s/%s", "groups"), 7);
    CHECK_EQ(as_recorded(), recorded_last);
    done();
}

static void test_cannot_be_made(void)
{
    base_as("fails");
    run_ranks(replay_failing, path_of("replay:%s/%s", "fails"), 0);
    CHECK(all_stock(0));
    done();
    run_ranks(replay_hanging, path_of("replay:%s/%s", "fails"), 0);
    CHECK(all_stock(0));
    done();
}

/* ---- files */

/* A run that was killed: one rank has not recorded the last plan. */
static void test_one_is_shorter(void)
{
    for (int shorter = 0; shorter < 2; shorter++) {
        uint64_t good;
        size_t len;
        char *text, *cut;

        base_as("short");
        text = read_file("short", shorter ? 2 : 0, &len);
        text[len - 1] = '\0';
        cut = strrchr(text, '\n');
        CHECK(cut != NULL && strstr(cut, " plan ") != NULL);
        write_file("short", shorter ? 2 : 0, text, (size_t)(cut + 1 - text));
        run_ranks(replay, path_of("replay:%s/%s", "short"), 0);
        good = as_recorded();
        /* Up to the last plan, which runs on another communicator, and no further. */
        CHECK(good > 0 && good < recorded_last && recorded[good] == 2);
        CHECK(memchr(sh->ran[0], 2, good) != NULL && all_stock(good));
        done();
    }
}

/* Traces of two runs. */
static void test_of_two_runs(void)
{
    size_t len;
    char *text;

    base_as("one");
    record_as("two", 0);
    text = read_file("one", 1, &len);
    write_file("two", 1, text, len);
    run_ranks(replay, path_of("replay:%s/%s", "two"), 0);
    CHECK(all_stock(0));
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(sh->epochs[r], 0); /* not even begun */
    done();
}

/* A file that somebody has changed, checksums and all: the rank does not run what it does not say.
 */
static void test_of_another_order(void)
{
    static const uint32_t order[RANKS] = {1, 2, 0};
    char text[20000], *head, *comm, *line;
    struct r2_trace *trace;

    base_as("order");
    trace = parsed("order", 2);
    head = r2_trace_put_head();
    comm = r2_trace_put_comm(trace->comms);
    snprintf(text, sizeof(text), "%s%s", head, comm);
    for (int i = 0; i < PLANS; i++) {
        const struct r2_trace_plan *plan = &trace->comms[0].plans[i];

        plan->table->comms[0].ranks = order;
        line = r2_trace_put_plan(trace->comms[0].name, plan->from, plan->table);
        CHECK(line != NULL && strlen(text) + strlen(line) < sizeof(text));
        strcat(text, line);
        free(line);
    }
    free(head);
    free(comm);
    write_file("order", 2, text, strlen(text));
    run_ranks(replay_impatiently, path_of("replay:%s/%s", "order"), 0);
    CHECK(all_stock(0));
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(sh->made_seconds[r], 0);
    done();
    r2_trace_free(trace);
}

/* ---- names of files */

static void one_name(const char *pattern, const char *file, bool there)
{
    char path[300];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", folder, file);
    unlink(path);
    recorded_last = 1;
    run_ranks(replay, path_of("%s/%s", pattern), 0);
    CHECK_EQ(stat(path, &st) == 0 && st.st_size > 0, there);
    done();
}

static void test_names(void)
{
    char host[128] = "", name[200];

    gethostname(host, sizeof(host) - 1);
    one_name("plain", "plain.2", true);
    one_name("x%r.trace", "x2.trace", true);
    one_name("%%r", "%r.1", true);
    one_name("bad%q", "bad", false);
    snprintf(name, sizeof(name), "%s-0", host);
    one_name("%h-%r", name, true);
    one_name("missing/folder", "missing/folder.0", false);
}

static const struct check_test tests[] = {
    {"the_same", test_the_same},
    {"groups", test_groups},
    {"cannot_be_made", test_cannot_be_made},
    {"one_is_shorter", test_one_is_shorter},
    {"of_two_runs", test_of_two_runs},
    {"of_another_order", test_of_another_order},
    {"names", test_names},
    {0},
};

int main(int argc, char **argv)
{
    char command[300];
    int rc;

    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    setenv("R2CCL_LOG", getenv("R2T_LOG") ? getenv("R2T_LOG") : "warn", 1);
    CHECK(mkdtemp(folder) != NULL);
    rc = check_main(argc, argv, tests);
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) ? 1 : rc;
}
