#include "../check.h"
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <time.h>
#include <unistd.h>

#ifdef __SANITIZE_THREAD__ /* computes ten times as long */
#define CHECK_SECONDS 150
#else
#define CHECK_SECONDS 60
#endif

const char *check_name = "";
jmp_buf check_skip_to;

static struct check_test *tests;
static uint64_t check_seed;
static uint64_t check_rng;
static char check_alarm_text[256];

void check_add(struct check_test *test)
{
    struct check_test **at = &tests;

    while (*at && (*at)->line < test->line)
        at = &(*at)->next;
    test->next = *at;
    *at = test;
}

uint64_t check_random(void)
{
    uint64_t z = (check_rng += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

const char *check_built(const char *name)
{
    static char path[PATH_MAX + 256];
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);

    path[n > 0 ? n : 0] = '\0';
    for (int up = 0; up < 3 && strrchr(path, '/'); up++)
        *strrchr(path, '/') = '\0';
    snprintf(path + strlen(path), 256, "/%s", name);
    return path;
}

uint64_t check_below(uint64_t bound)
{
    return check_random() % bound;
}

unsigned long check_rounds(unsigned long n)
{
    const char *env = getenv("R2_LONG");
    unsigned long times = env ? strtoul(env, NULL, 10) : 1;

    return n * (times ? times : 1);
}

void check_fail(const char *file, int line, const char *fmt, ...)
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

int check_main(int argc, char **argv)
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
    if (!tests) {
        printf("this build has none of these tests\n");
        return CHECK_SKIPPED;
    }
    check_seed = check_pick_seed(seed);
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, check_on_alarm);
    if (!list) {
        printf("# seed 0x%" PRIx64 "\n", check_seed);
    }
    for (const struct check_test *test = tests; test; test = test->next) {
        if (!check_wanted(test->name, argv + optind, argc - optind)) {
            continue;
        }
        if (list) {
            printf("%s\n", test->name);
            continue;
        }
        ran++;
        skipped += check_run(test, seconds) ? 0 : 1;
    }
    if (!list && ran == 0) {
        fprintf(stderr, "no test of that name; -l lists them\n");
        return 1;
    }
    return ran > 0 && ran == skipped ? CHECK_SKIPPED : 0;
}
