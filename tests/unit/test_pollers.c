/* engine/pollers: how many I/O threads are in use and may poll where processes share cores. */
#define _GNU_SOURCE
#include "check.h"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/internal.h"
#include "engine/io.h"
#include "engine/pause.h"
#include "engine/pollers.h"
#include "engine/sharing.h"

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

static void test_what_a_process_may(void)
{
    CHECK_EQ(r2_pollers(32), 30);
    CHECK_EQ(r2_pollers(3), 1);
    CHECK_EQ(r2_pollers(2), 0);
    CHECK_EQ(r2_pollers(1), 0);
}

/* The part of a process on the first `cores`, of whose `n` neighbours each is on `own` cores
 * of its own or, with 0, on those of unknown place. */
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
static void test_part_of_the_cores(void)
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

/* Cores that the process may not run on are no use to it. */
static void test_cores_of_the_process(void)
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
static void test_places(void)
{
    struct r2_pause p[] = {R2_PAUSE, R2_PAUSE, R2_PAUSE};

    r2_pause_start(2 * THREADS, 10 * R2_NS_PER_S);
    r2_pause_let(2);
    for (int used = 2 * THREADS; used > 1; used -= 2 * THREADS - 2) {
        r2_pause_use(used);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(r2_pause_polls(&p[i]), i < 2);
        for (int i = 0; i < 3; i++)
            r2_pause_over(&p[i]);
    }
}

/* A process with a control segment, until it is killed. */
static pid_t come(void)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_control *ctl = NULL;
    int ready[2];
    char said = 0;
    pid_t pid;

    CHECK_EQ(pipe(ready), 0);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        alarm(60); /* should a check fail above */
        said = r2_control_open(&ctl, &info) == 0 && *r2_control_name(ctl);
        if (write(ready[1], &said, 1) == 1)
            pause();
        _exit(1);
    }
    CHECK_EQ(read(ready[0], &said, 1), 1);
    CHECK_EQ(said, 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

static void come_and_go(int from, int to)
{
    for (int i = from; i < to; i++)
        neighbours[i] = come();
    for (int i = to; i < from; i++) {
        CHECK_EQ(kill(neighbours[i], SIGKILL), 0);
        CHECK_EQ(waitpid(neighbours[i], NULL, 0), neighbours[i]);
        neighbours[i] = 0;
    }
}

/* A look is good for a while: the longer, the longer it took. */
static bool comes_to_use(int n)
{
    for (int i = 0; i < 4000; i++) {
        usleep(5000);
        r2_pollers_look();
        if (r2_io_used() == n)
            return true;
    }
    return false;
}

/* As many threads are in use as may poll, whoever comes and goes; all, if somebody said how many.
 */
static void test_in_use(void)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_settings set = *r2_settings_get();

    set.io_threads = 0;
    r2_eng.set = &set;
    CHECK_EQ(r2_io_start(THREADS, NULL, 0), 0);
    CHECK_EQ(r2_control_open(&r2_eng.ctl, &info), 0);
    pretends = true;
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
    for (int i = 0; i < 60; i++) {
        usleep(5000);
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

static const struct check_test tests[] = {
    {"what_a_process_may", test_what_a_process_may},
    {"part_of_the_cores", test_part_of_the_cores},
    {"cores_of_the_process", test_cores_of_the_process},
    {"places", test_places},
    {"in_use", test_in_use},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
