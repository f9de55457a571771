/* A small test harness, one header.
 *
 *     static void test_adds(void) { CHECK_EQ(1 + 1, 2); }
 *     static const struct check_test tests[] = {{"adds", test_adds}, {0}};
 *     int main(int argc, char **argv) { return check_main(argc, argv, tests); }
 *
 * Usage of the program: [-s SEED] [-l] [-t SECONDS] [NAME ...]. Names are prefixes; without any all
 * tests run. The seed comes from -s, else from the environment's R2_SEED, else from the clock; it
 * is printed, and every test starts with check_rng seeded from it and from the test's name, so
 * that one test alone repeats what it did among all. R2_LONG=N in the environment multiplies what
 * check_rounds returns.
 * Exit status: 0 passed, 1 failed, 77 everything skipped. A failed check ends the program at once;
 * a test that runs longer than its time limit (60 s, 150 s under TSan, or -t) fails.
 */
#ifndef R2_TESTS_UNIT_CHECK_H
#define R2_TESTS_UNIT_CHECK_H

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK_SKIPPED 77
#ifdef __SANITIZE_THREAD__ /* computes ten times as long */
#define CHECK_SECONDS 150
#else
#define CHECK_SECONDS 60
#endif

struct check_test {
    const char *name;
    void (*run)(void);
};

static uint64_t check_seed;
static const char *check_name = "";
static char check_alarm_text[256];
static jmp_buf check_skip_to;
static uint64_t check_rng;

/* Repeatable random numbers for the running test (splitmix64); main thread only. */
__attribute__((unused)) static uint64_t check_random(void)
{
    uint64_t z = (check_rng += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* The path of `name` in the build folder that this program lies in as tests/unit/NAME, until the
 * next call. It need not exist. */
__attribute__((unused)) static const char *check_built(const char *name)
{
    static char path[PATH_MAX + 256];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);

    path[n > 0 ? n : 0] = '\0';
    for (int up = 0; up < 3 && strrchr(path, '/'); up++)
        *strrchr(path, '/') = '\0';
    snprintf(path + strlen(path), 256, "/%s", name);
    return path;
}

/* Random number in [0, bound), bound > 0. */
__attribute__((unused)) static uint64_t check_below(uint64_t bound)
{
    return check_random() % bound;
}

/* n rounds of a random test, times R2_LONG. */
__attribute__((unused)) static unsigned long check_rounds(unsigned long n)
{
    const char *env = getenv("R2_LONG");
    unsigned long times = env ? strtoul(env, NULL, 10) : 1;

    return n * (times ? times : 1);
}

__attribute__((unused, noreturn, format(printf, 3, 4))) static void check_fail(const char *file,
                                                                               int line,
                                                                               const char *fmt, ...)
{
    static int failed;
    va_list ap;

    if (__atomic_exchange_n(&failed, 1, __ATOMIC_RELAXED)) {
        for (;;) { /* another thread says why and ends the program; exit is for one of them */
            pause();
        }
    }
    fflush(stdout);
    fprintf(stderr, "FAIL %s\n  %s:%d: ", check_name, file, line);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\n  repeat with: -s 0x%" PRIx64 " %s\n", check_seed, check_name);
    exit(1);
}

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            check_fail(__FILE__, __LINE__, "CHECK(%s)", #cond);                                    \
        }                                                                                          \
    } while (0)

/* As CHECK, with a message of one's own. */
#define CHECK_MSG(cond, ...)                                                                       \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            check_fail(__FILE__, __LINE__, __VA_ARGS__);                                           \
        }                                                                                          \
    } while (0)

/* Integers of any type, compared and shown as signed 64-bit. */
#define CHECK_REL_(a, op, b)                                                                       \
    do {                                                                                           \
        long long check_a = (long long)(a);                                                        \
        long long check_b = (long long)(b);                                                        \
        if (!(check_a op check_b)) {                                                               \
            check_fail(__FILE__, __LINE__, "%s (%lld) %s %s (%lld) does not hold", #a, check_a,    \
                       #op, #b, check_b);                                                          \
        }                                                                                          \
    } while (0)

#define CHECK_EQ(a, b) CHECK_REL_(a, ==, b)
#define CHECK_NE(a, b) CHECK_REL_(a, !=, b)
#define CHECK_LT(a, b) CHECK_REL_(a, <, b)
#define CHECK_LE(a, b) CHECK_REL_(a, <=, b)
#define CHECK_GT(a, b) CHECK_REL_(a, >, b)
#define CHECK_GE(a, b) CHECK_REL_(a, >=, b)

#define CHECK_STR(a, b)                                                                            \
    do {                                                                                           \
        const char *check_a = (a);                                                                 \
        const char *check_b = (b);                                                                 \
        if (!check_a || !check_b || strcmp(check_a, check_b) != 0) {                               \
            check_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #a,                         \
                       check_a ? check_a : "(null)", check_b ? check_b : "(null)");                \
        }                                                                                          \
    } while (0)

/* Same bytes; names the first that differs. */
#define CHECK_MEM(a, b, len)                                                                       \
    do {                                                                                           \
        const unsigned char *check_a = (const void *)(a);                                          \
        const unsigned char *check_b = (const void *)(b);                                          \
        for (size_t check_i = 0; check_i < (size_t)(len); check_i++) {                             \
            if (check_a[check_i] != check_b[check_i]) {                                            \
                check_fail(__FILE__, __LINE__, "%s[%zu] is 0x%02x, not 0x%02x", #a, check_i,       \
                           check_a[check_i], check_b[check_i]);                                    \
            }                                                                                      \
        }                                                                                          \
    } while (0)

/* For what no emulator of a processor has (mk/run-c-tests): a program that starts itself anew, what
 * the kernel says of a TCP connection, signal masks that are all ours, time. Main thread only. */
#define CHECK_SKIP_EMULATED(why)                                                                   \
    do {                                                                                           \
        if (getenv("R2_TEST_EMULATED"))                                                            \
            CHECK_SKIP("under an emulator: %s", why);                                              \
    } while (0)

/* Ends the running test without a verdict. Main thread only. */
#define CHECK_SKIP(...)                                                                            \
    do {                                                                                           \
        printf("skip %s: ", check_name);                                                           \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
        longjmp(check_skip_to, 1);                                                                 \
    } while (0)

static void check_on_alarm(int sig)
{
    (void)sig;
    if (write(STDERR_FILENO, check_alarm_text, strlen(check_alarm_text)) < 0) {
        _exit(1);
    }
    _exit(1);
}

static uint64_t check_pick_seed(const char *text)
{
    struct timespec ts;

    if (!text) {
        text = getenv("R2_SEED");
    }
    if (text && *text) {
        return strtoull(text, NULL, 0);
    }
    clock_gettime(CLOCK_REALTIME, &ts);
    check_rng = (uint64_t)ts.tv_sec * 1000003 + (uint64_t)ts.tv_nsec + (uint64_t)getpid();
    return check_random() & 0xffffffff;
}

static bool check_wanted(const char *name, char **names, int count)
{
    for (int i = 0; i < count; i++) {
        if (strncmp(name, names[i], strlen(names[i])) == 0) {
            return true;
        }
    }
    return count == 0;
}

/* Runs one test. Returns false when it skipped itself. */
static bool check_run(const struct check_test *test, unsigned seconds)
{
    struct timespec t0;
    struct timespec t1;

    check_name = test->name;
    check_rng = check_seed;
    for (const char *p = test->name; *p; p++) {
        check_rng = (check_rng ^ (unsigned char)*p) * UINT64_C(0x100000001b3);
    }
    snprintf(check_alarm_text, sizeof(check_alarm_text),
             "FAIL %s\n  ran longer than %u s\n  repeat with: -s 0x%" PRIx64 " %s\n", test->name,
             seconds, check_seed, test->name);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    alarm(seconds);
    if (setjmp(check_skip_to) != 0) {
        alarm(0);
        return false;
    }
    test->run();
    alarm(0);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    printf("ok   %s (%.3f s)\n", test->name,
           (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) / 1e9);
    return true;
}

/* `tests` ends with an entry without a name. */
__attribute__((unused)) static int check_main(int argc, char **argv, const struct check_test *tests)
{
    const char *seed = NULL;
    unsigned seconds = CHECK_SECONDS;
    bool list = false;
    int ran = 0;
    int skipped = 0;
    int opt;

    while ((opt = getopt(argc, argv, "s:t:l")) != -1) {
        switch (opt) {
        case 's':
            seed = optarg;
            break;
        case 't':
            seconds = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'l':
            list = true;
            break;
        default:
            fprintf(stderr, "usage: %s [-s SEED] [-t SECONDS] [-l] [NAME ...]\n", argv[0]);
            return 2;
        }
    }
    check_seed = check_pick_seed(seed);
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, check_on_alarm);
    if (!list) {
        printf("# seed 0x%" PRIx64 "\n", check_seed);
    }
    for (; tests->name; tests++) {
        if (!check_wanted(tests->name, argv + optind, argc - optind)) {
            continue;
        }
        if (list) {
            printf("%s\n", tests->name);
            continue;
        }
        ran++;
        skipped += check_run(tests, seconds) ? 0 : 1;
    }
    if (!list && ran == 0) {
        fprintf(stderr, "no test of that name; -l lists them\n");
        return 1;
    }
    return ran > 0 && ran == skipped ? CHECK_SKIPPED : 0;
}

#endif
