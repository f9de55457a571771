/* engine/pollers: how many I/O threads are in use and may poll where processes share cores. Rung 2:
 * real I/O threads without a transport, neighbours that are processes, cores that are made up. It
 * cannot prove what polling costs others. */
#define _GNU_SOURCE
#include "await.h"
#include "check.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/loop/loop.h"
#include "holder.h"
#include "io/io.h"
#include "io/pause.h"
#include "io/pollers.h"
#include "io/sharing.h"
#include "settings/launch.h"

#define THREADS 4
#define CORES 16
#define NEIGHBOURS 7

static pid_t neighbours[NEIGHBOURS];
static bool pretends;   /* what the kernel says of cores is made up */
static bool hidden;     /* ... and nothing of neighbours' */
static int first, each; /* a neighbour's cores */

static void set_of(cpu_set_t *set, int from, int n)
{
    CPU_ZERO(set);
    for (int i = from; i < from + n; i++)
        CPU_SET(i, set);
}

/* In front of libc's: the test and its children run on made-up cores, others on none of them. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    if (!pretends) {
        memset(set, 0, size);
        return syscall(SYS_sched_getaffinity, pid, size, set) < 0 ? -1 : 0;
    }
    CPU_ZERO(set);
    if (!pid || pid == getpid())
        set_of(set, 0, CORES);
    for (int i = 0; i < NEIGHBOURS; i++) {
        if (pid == neighbours[i] && hidden)
            return -1;
        if (pid == neighbours[i])
            set_of(set, first + i * each, each ? each : CORES);
    }
    return 0;
}

int get_nprocs(void)
{
    return pretends ? CORES : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

TEST(what_a_process_may)
{
    CHECK_EQ(r2_pollers(32), 30);
    CHECK_EQ(r2_pollers(3), 1);
    CHECK_EQ(r2_pollers(2), 0);
    CHECK_EQ(r2_pollers(1), 0);
}

/* The part of a process on the first `cores`. Each of its `n` neighbours is on `own` cores of its
 * own or, with 0, on those of unknown place. */
static int part(int cores, int n, int from, int own)
{
    struct r2_sharing s = {0};
    cpu_set_t set;

    set_of(&s.mine, 0, cores);
    for (int i = 0; i < n; i++) {
        set_of(&set, from + i * own, own);
        r2_sharing_add(&s, own ? &set : NULL);
    }
    return r2_sharing_part(&s);
}

/* Each core is shared by those that may run on it: ranks that are bound to cores of their own share
 * none. */
TEST(part_of_the_cores)
{
    struct r2_sharing s = {0};
    cpu_set_t set;

    CHECK_EQ(part(32, 0, 0, 0), 32);
    CHECK_EQ(part(32, 1, 0, 0), 16);
    CHECK_EQ(part(64, 3, 0, 0), 16);
    CHECK_EQ(part(6, 2, 0, 0), 2);
    CHECK_EQ(part(2, 63, 0, 0), 1);
    CHECK_EQ(part(16, 7, 16, 16), 16);
    CHECK_EQ(part(16, 1, 0, 8), 12);
    set_of(&s.mine, 0, CPU_SETSIZE);
    set_of(&set, 0, 1);
    for (int i = 0; i < 70000; i++)
        r2_sharing_add(&s, &set); /* more than are counted */
    CHECK_EQ(r2_sharing_part(&s), CPU_SETSIZE - 1);
}

/* The part of a process on `own` cores of a machine of `cores`, of which somebody says that so many
 * like it are there. */
static int part_among(int own, int cores, int n)
{
    struct r2_sharing s = {0};

    set_of(&s.mine, 0, own);
    r2_sharing_among(&s, cores, n);
    return r2_sharing_part(&s);
}

TEST(part_by_word)
{
    struct r2_sharing s = {0};
    cpu_set_t set;

    CHECK_EQ(part_among(16, 16, 4), 4);
    CHECK_EQ(part_among(16, 16, 5), 3);
    CHECK_EQ(part_among(4, 16, 4), 4); /* on cores of its own */
    CHECK_EQ(part_among(2, 16, 4), 2);
    CHECK_EQ(part_among(8, 16, 8), 2); /* on those of its NUMA node */
    CHECK_EQ(part_among(2, 2, 64), 1);
    CHECK_EQ(part_among(16, 16, 1), 16);
    CHECK_EQ(part_among(16, 0, 4), 16);
    CHECK_EQ(part_among(16, 16, 0), 16);
    set_of(&s.mine, 0, 16); /* more are there than were named */
    set_of(&set, 0, 16);
    for (int i = 0; i < 7; i++)
        r2_sharing_add(&s, &set);
    r2_sharing_among(&s, 16, 4);
    CHECK_EQ(r2_sharing_part(&s), 2);
}

/* Until they are there, once, or time is over. */
TEST(how_long_a_word_counts)
{
    struct r2_sharing_word w = {.n = 4, .until = 100}, late = w, none = {.until = 100};

    CHECK_EQ(r2_sharing_word(&w, 1, 0), 4);
    CHECK_EQ(r2_sharing_word(&w, 3, 99), 4);
    CHECK_EQ(r2_sharing_word(&w, 4, 99), 0);
    CHECK_EQ(r2_sharing_word(&w, 1, 99), 0); /* some have ended */
    CHECK_EQ(r2_sharing_word(&late, 1, 100), 0);
    CHECK_EQ(r2_sharing_word(&late, 1, 99), 0);
    CHECK_EQ(r2_sharing_word(&none, 1, 0), 0);
}

/* An environment: NAME=VALUE, each with a blank after it. */
static const char *launched;

static char *variable(const char *name)
{
    static char values[8][64];
    static unsigned turn;
    char *value = values[turn++ % 8];
    size_t n = strlen(name);

    for (const char *at = launched; at && *at; at = strchr(at, ' ') + 1) {
        if (!strncmp(at, name, n) && at[n] == '=') {
            snprintf(value, 64, "%.*s", (int)strcspn(at + n + 1, " "), at + n + 1);
            return value;
        }
    }
    return NULL;
}

TEST(what_launchers_say)
{
    static const struct {
        const char *env;
        int ranks;
    } said[] = {
        {"", 0},
        {"LOCAL_WORLD_SIZE=8 ", 8},
        {"LOCAL_WORLD_SIZE=8 WORLD_SIZE=16 LOCAL_RANK=3 ", 8},
        {"LOCAL_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 ", 1},
        {"OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_SIZE=4 ", 4},
        {"MPI_LOCALNRANKS=6 PMI_SIZE=12 ", 6},
        {"MV2_COMM_WORLD_LOCAL_SIZE=2 ", 2},
        /* not what a node can have; the next one is asked */
        {"LOCAL_WORLD_SIZE=32 WORLD_SIZE=16 ", 0},
        {"LOCAL_WORLD_SIZE=32 WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_SIZE=4 ", 4},
        {"LOCAL_WORLD_SIZE=0 ", 0},
        {"LOCAL_WORLD_SIZE=-4 ", 0},
        {"LOCAL_WORLD_SIZE= ", 0},
        {"LOCAL_WORLD_SIZE=4x ", 0},
        {"LOCAL_WORLD_SIZE=+4 ", 0},
        {"LOCAL_WORLD_SIZE=0x4 ", 0},
        {"LOCAL_WORLD_SIZE=1024 ", 1024},
        {"LOCAL_WORLD_SIZE=1025 ", 0},
        {"LOCAL_WORLD_SIZE=99999999999999999999999999 ", 0},
        {"LOCAL_WORLD_SIZE=8 WORLD_SIZE=many ", 8},
        /* Slurm's word is of the step, and of the node in it */
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=8 ", 8},
        {"SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=8 ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4(x2),3 ", 4},
        {"SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2),3 ", 4},
        {"SLURM_STEP_ID=0 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3 ", 3},
        {"SLURM_STEP_ID=0 SLURM_NODEID=3 SLURM_STEP_TASKS_PER_NODE=4(x2),3 ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=1,2,5,1 ", 5},
        {"SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=4(x2) ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4(x ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4(x0) ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4(x2 ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4( ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=(x2) ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4, ", 0},
        {"SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4;3 ", 0},
        {"SLURM_STEP_ID=0 SLURM_NTASKS_PER_NODE=8 ", 8},
        {"SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=8 SLURM_NTASKS_PER_NODE=8 ", 0},
        {"LOCAL_WORLD_SIZE=4 SLURM_STEP_ID=0 SLURM_NTASKS_PER_NODE=1 ", 4},
    };

    for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
        launched = said[i].env;
        CHECK_MSG(r2_launch_local_ranks(variable) == said[i].ranks, "%s gives %d, not %d", launched,
                  r2_launch_local_ranks(variable), said[i].ranks);
    }
}

/* Cores that the process may not run on are no use to it. */
TEST(cores_of_the_process)
{
    int status;
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        cpu_set_t one, all;
        struct r2_sharing s;

        CPU_ZERO(&one);
        r2_sharing_start(&s);
        if (sched_getaffinity(0, sizeof(all), &all) || !CPU_EQUAL(&all, &s.mine))
            _exit(1);
        for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++) {
            if (CPU_ISSET(i, &all))
                CPU_SET(i, &one);
        }
        if (sched_setaffinity(0, sizeof(one), &one))
            _exit(2);
        r2_sharing_start(&s);
        _exit(CPU_EQUAL(&one, &s.mine) ? 0 : 3);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
}

/* No more poll than may, however many are in use: of those that are not, some have sockets yet. */
TEST(places)
{
    struct r2_pause p[] = {R2_PAUSE, R2_PAUSE, R2_PAUSE};

    r2_pause_start(2 * THREADS, R2_NS_PER_S);
    r2_pause_let(2);
    for (int used = 2 * THREADS; used > 1; used -= 2 * THREADS - 2) {
        r2_pause_use(used);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(r2_pause_polls(&p[i], R2_NS_PER_S), i < 2);
        for (int i = 0; i < 3; i++)
            r2_pause_over(&p[i], R2_NS_PER_S + 1);
    }
}

/* `n` idle times of `ns` each. */
static void idle(struct r2_pause *p, int n, uint64_t ns)
{
    static uint64_t now = R2_NS_PER_S;

    for (int i = 0; i < n; i++) {
        r2_pause_polls(p, now);
        now += ns;
        r2_pause_polls(p, now);
        r2_pause_over(p, now);
    }
}

/* Whether the thread would poll now. */
static bool polls(const struct r2_pause *p)
{
    struct r2_pause copy = *p;
    bool yes = r2_pause_polls(&copy, R2_NS_PER_S);

    r2_pause_over(&copy, R2_NS_PER_S);
    return yes;
}

/* Idle times that are longer than it would poll make it stop, shorter ones begin again: with four
 * threads and more it takes more of them. */
TEST(polls_while_it_pays)
{
    const uint64_t spin = 200 * R2_NS_PER_US;
    struct r2_pause p[] = {R2_PAUSE, R2_PAUSE};

    r2_pause_let(INT_MAX);
    for (int many = 0; many < 2; many++) {
        uint64_t some = many ? spin / 2 : 25 * R2_NS_PER_US;

        r2_pause_start(many ? THREADS : 1, spin);
        CHECK(polls(&p[many]));
        idle(&p[many], 4, 5 * spin); /* a few say nothing yet */
        CHECK(polls(&p[many]));
        idle(&p[many], 60, 5 * spin);
        CHECK(!polls(&p[many]));
        idle(&p[many], 60, some);
        CHECK(polls(&p[many]));
        for (int i = 0; i < 100; i++) { /* every other one: enough for few, not for many */
            idle(&p[many], 1, some);
            idle(&p[many], 1, 5 * spin);
        }
        CHECK_EQ(polls(&p[many]), !many);
    }
}

/* An idle time that two sleeping ends make longer is one that polling would have found. The same of
 * a thread that polls was too long for it. */
TEST(two_ends_that_sleep)
{
    const uint64_t spin = 200 * R2_NS_PER_US, both_slept = 270 * R2_NS_PER_US;
    struct r2_pause p = R2_PAUSE;

    r2_pause_let(INT_MAX);
    r2_pause_start(THREADS, spin);
    for (int turn = 0; turn < 3; turn++) {
        idle(&p, 60, 5 * spin);
        CHECK(!polls(&p));
        for (int i = 0; i < 60 && !polls(&p); i++)
            idle(&p, 1, both_slept);
        CHECK(polls(&p));
        idle(&p, 1, both_slept);
        CHECK_LT(p.paid, 620); /* this one did not pay */
    }
}

/* While a slow NIC is what is waited for, none of several threads polls, whatever paid before, and
 * one that does stops; it ends by itself, and while the NICs are more than one thread can carry.
 * One thread goes by its own rule. */
TEST(slow_nics_limit)
{
    const uint64_t spin = R2_NS_PER_S, at = 100 * R2_NS_PER_S;
    struct r2_pause p = R2_PAUSE;

    r2_pause_let(INT_MAX);
    for (int threads = 1; threads <= THREADS; threads++) {
        bool several = threads > 1;
        uint64_t now = at * (uint64_t)threads;

        r2_pause_start(threads, spin);
        CHECK(r2_pause_polls(&p, now));
        r2_pause_limit(now, 0);
        CHECK_EQ(r2_pause_limited(now + R2_NS_PER_MS), several);
        CHECK_EQ(r2_pause_polls(&p, now + 10 * R2_NS_PER_US), !several);
        r2_pause_over(&p, now + R2_NS_PER_MS);
        CHECK_EQ(r2_pause_polls(&p, now + R2_NS_PER_MS), !several);
        r2_pause_over(&p, now + 2 * R2_NS_PER_MS);
        now += 25 * R2_NS_PER_MS;
        CHECK(!r2_pause_limited(now));
        CHECK(r2_pause_polls(&p, now));
        r2_pause_over(&p, now);
        r2_pause_limit(now, 0);
        r2_pause_crowd(now);
        CHECK(!r2_pause_limited(now));
        CHECK(r2_pause_polls(&p, now));
        r2_pause_over(&p, now);
        now += 51 * R2_NS_PER_MS;
        r2_pause_limit(now, 0);
        CHECK_EQ(r2_pause_limited(now), several);
    }
}

/* What many peers' slow paths carry together may be more than one thread can. */
TEST(many_are_a_crowd)
{
    uint64_t now = 10000 * R2_NS_PER_S;

    r2_pause_start(THREADS, R2_NS_PER_S);
    for (int much = 0; much < 2; much++) {
        bool crowded = false;
        int told = 0; /* of its beginning: 20 ms of this are one crowd */

        for (int i = 0; i < 1000; i++, now += 20 * R2_NS_PER_US) {
            told += r2_pause_limit(now, much ? 80000 : 40000); /* 4 and 2 GB/s */
            crowded |= i > 200 && !r2_pause_limited(now);
        }
        CHECK_EQ(crowded, much);
        CHECK_EQ(told, much);
    }
}

static void come_and_go(int from, int to)
{
    for (int i = from; i < to; i++)
        neighbours[i] = holder_start(holder_segment, NULL);
    for (int i = to; i < from; i++) {
        holder_end(neighbours[i]);
        neighbours[i] = 0;
    }
}

/* A look is good for a while: the longer, the longer it took. */
static bool comes_to_use(int n)
{
    return WITHIN_MS(20000, (r2_pollers_look(), r2_io_used() == n));
}

/* As many threads are in use as may poll, whoever comes and goes; all, if somebody said how many.
 */
TEST(in_use)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_settings set = *r2_settings_get();

    set.io_threads = 0;
    r2_eng.set = &set;
    CHECK_EQ(r2_io_start(THREADS, NULL, 0), 0);
    CHECK_EQ(r2_control_open(&r2_eng.ctl, &info), 0);
    pretends = true;
    r2_pollers_start(r2_eng.ctl, &set);
    CHECK(comes_to_use(THREADS));
    come_and_go(0, 3);
    CHECK(comes_to_use(2));
    come_and_go(3, NEIGHBOURS);
    CHECK(comes_to_use(1));
    first = CORES;
    each = 2; /* on cores of their own */
    CHECK(comes_to_use(THREADS));
    first = each = 0;
    CHECK(comes_to_use(1));
    hidden = true; /* they may be on other cores */
    CHECK(comes_to_use(THREADS));
    hidden = false;
    CHECK(comes_to_use(1));
    set.io_threads = THREADS;
    r2_io_use(THREADS);
    WHILE_MS (300, true) {
        r2_pollers_look();
        CHECK_EQ(r2_io_used(), THREADS);
    }
    set.io_threads = 0;
    come_and_go(NEIGHBOURS, 3);
    CHECK(comes_to_use(2));
    come_and_go(3, 0);
    CHECK(comes_to_use(THREADS));
    pretends = false;
}

int main(int argc, char **argv)
{
    unsetenv("LOCAL_WORLD_SIZE"); /* of who runs the tests */
    unsetenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    unsetenv("MPI_LOCALNRANKS");
    unsetenv("MV2_COMM_WORLD_LOCAL_SIZE");
    unsetenv("SLURM_STEP_ID");
    return check_main(argc, argv);
}
