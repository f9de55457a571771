/* A small test harness.
 *
 *     TEST(adds)
 *     {
 *         CHECK_EQ(1 + 1, 2);
 *     }
 *
 * Tests run in the order of their lines. A program whose tests need something first has a main of
 * its own, which ends with check_main.
 *
 * Usage of the program: [-s SEED] [-l] [-t SECONDS] [NAME ...]. Names are prefixes; without any all
 * tests run. The seed comes from -s, else from the environment's R2_SEED, else from the clock; it
 * is printed. Every test starts with check_rng seeded from it and from the test's name. So one test
 * alone repeats what it did among all. R2_LONG=N in the environment multiplies what check_rounds
 * returns.
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

struct check_test {
    const char *name;
    void (*run)(void);
    int line;
    struct check_test *next;
};

/* A test of this program: the function's body follows. */
#define TEST(name_)                                                                                \
    static void test_##name_(void);                                                                \
    __attribute__((constructor)) static void check_add_##name_(void)                               \
    {                                                                                              \
        static struct check_test test = {#name_, test_##name_, __LINE__, NULL};                    \
        check_add(&test);                                                                          \
    }                                                                                              \
    static void test_##name_(void)

void check_add(struct check_test *test);
int check_main(int argc, char **argv);

/* The running test. */
extern const char *check_name;
extern jmp_buf check_skip_to;

/* Repeatable random numbers for the running test (splitmix64); main thread only. */
uint64_t check_random(void);

/* Random number in [0, bound), bound > 0. */
uint64_t check_below(uint64_t bound);

/* n rounds of a random test, times R2_LONG. */
unsigned long check_rounds(unsigned long n);

/* The path of `name` in the build folder that this program lies in as tests/unit/NAME, until the
 * next call. It need not exist. */
const char *check_built(const char *name);

__attribute__((noreturn, format(printf, 3, 4))) void check_fail(const char *file, int line,
                                                                const char *fmt, ...);

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

#endif
