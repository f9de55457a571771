/* util/copy (rung 1): exact for every alignment, and ordered for a reader that polls the flags. It
 * cannot prove the order on another processor than this one. */
#include "check.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "util/clock.h"
#include "util/copy.h"

#if defined(__SANITIZE_THREAD__)
#define RACY __attribute__((no_sanitize_thread))
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RACY __attribute__((no_sanitize("thread")))
#endif
#endif
#ifndef RACY
#define RACY
#endif

static void fill_random(unsigned char *p, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        p[i] = (unsigned char)check_random();
    }
}

/* Copies into the middle of a guarded buffer; nothing outside may change. */
static void try_copy(size_t dst_at, size_t src_at, size_t len, size_t msg_offset)
{
    static unsigned char src[8192];
    static unsigned char dst[8192];
    static unsigned char want[8192];

    fill_random(src + src_at, len);
    memset(dst, 0xa5, sizeof(dst));
    memset(want, 0xa5, sizeof(want));
    memcpy(want + dst_at, src + src_at, len);
    r2_copy_lines(dst + dst_at, src + src_at, len, msg_offset);
    if (memcmp(dst, want, sizeof(dst)) != 0) {
        check_fail(__FILE__, __LINE__, "dst+%zu src+%zu len %zu at %zu", dst_at, src_at, len,
                   msg_offset);
    }
}

TEST(exact_small)
{
    for (size_t len = 0; len <= 300; len++) {
        for (size_t at = 0; at < 136; at += (at % 8 == 0 || at % 8 == 7) ? 1 : 3) {
            try_copy(64 + at % 16, 64 + (len + at) % 16, len, at);
        }
    }
}

TEST(exact_random)
{
    for (unsigned long n = 0; n < check_rounds(10000); n++) {
        try_copy(check_below(256), check_below(256), check_below(7000), check_below(1u << 20));
    }
}

/* ---- A reader that polls ----------------------------------------------------------------- */

#define OUT_OF_ORDER 3 /* no busy machine does that: no second try (mk/run-c-tests) */
#define LINES 64
#define LINE_WORDS 16
#define WORDS (LINES * LINE_WORDS)

static uint64_t shared_buf[WORDS] __attribute__((aligned(128)));
static uint64_t source_buf[WORDS];
static uint32_t reader_round; /* last round that the reader has finished */
static uint32_t reader_bad;
static bool race_over; /* the writer has written its last round */

static bool race_is_over(void)
{
    return __atomic_load_n(&race_over, __ATOMIC_ACQUIRE);
}

static uint64_t data_word(uint32_t round, unsigned word)
{
    return ((uint64_t)round << 32 | word) * UINT64_C(0x9e3779b97f4a7c15);
}

RACY static uint64_t peek(const uint64_t *p)
{
    uint64_t v = *(const volatile uint64_t *)p;

    /* Loads stay in order: the flag was read before the data. Pairs with the copy's barrier. */
#if defined(__x86_64__)
    __asm__ volatile("" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
    return v;
}

/* LL128: once the last word of a line is the round's flag, the other 15 are the round's data. */
static bool read_ll128(uint32_t round)
{
    for (unsigned line = 0; line < LINES; line++) {
        const uint64_t *p = shared_buf + line * LINE_WORDS;

        while (peek(p + LINE_WORDS - 1) != round) {
            if (race_is_over()) {
                return true;
            }
        }
        /* Downwards: the words stored last are looked at first. */
        for (int w = LINE_WORDS - 2; w >= 0; w--) {
            if (peek(p + w) != data_word(round, line * LINE_WORDS + (unsigned)w)) {
                return false;
            }
        }
    }
    return true;
}

/* LL: a word whose upper half is the round's flag has the round's data in its lower half. */
static bool read_ll(uint32_t round)
{
    for (unsigned w = 0; w < WORDS; w++) {
        uint64_t v;

        do {
            v = peek(shared_buf + w);
        } while (v >> 32 != round && !race_is_over());
        if (v >> 32 != round) {
            return true;
        }
        if ((uint32_t)v != (uint32_t)data_word(round, w)) {
            return false;
        }
    }
    return true;
}

static void *reader(void *arg)
{
    const bool *ll128 = arg;

    for (uint32_t round = 1; !race_is_over(); round++) {
        if (!(*ll128 ? read_ll128(round) : read_ll(round))) {
            __atomic_store_n(&reader_bad, round, __ATOMIC_RELEASE);
        }
        __atomic_store_n(&reader_round, round, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void fill_source(bool ll128, uint32_t round)
{
    for (unsigned w = 0; w < WORDS; w++) {
        if (!ll128) {
            source_buf[w] = (uint64_t)round << 32 | (uint32_t)data_word(round, w);
        } else if (w % LINE_WORDS == LINE_WORDS - 1) {
            source_buf[w] = round;
        } else {
            source_buf[w] = data_word(round, w);
        }
    }
}

/* Pieces of random size, as a socket would hand them over. */
static void write_round(void)
{
    size_t at = 0;

    while (at < sizeof(shared_buf)) {
        size_t len = check_below(3) ? 8 * (1 + check_below(200)) : sizeof(shared_buf);

        len = len < sizeof(shared_buf) - at ? len : sizeof(shared_buf) - at;
        r2_copy_lines((char *)shared_buf + at, (char *)source_buf + at, len, at);
        at += len;
    }
}

/* 100000 rounds, or what a busy machine manages in a second, and at least some. */
static void run_race(bool ll128)
{
    uint64_t deadline = r2_now_ns() + check_rounds(1) * R2_NS_PER_S;
    uint32_t rounds = (uint32_t)check_rounds(100000);
    uint32_t round = 0;
    pthread_t thread;

    memset(shared_buf, 0, sizeof(shared_buf));
    reader_round = 0;
    reader_bad = 0;
    race_over = false;
    CHECK_EQ(pthread_create(&thread, NULL, reader, &ll128), 0);
    while (round < rounds && (round <= 100 || r2_now_ns() < deadline)) {
        unsigned spins = 0;

        fill_source(ll128, ++round);
        write_round();
        while (__atomic_load_n(&reader_round, __ATOMIC_ACQUIRE) != round) {
            if (++spins % 4096 == 0) {
                sched_yield(); /* one core: let the reader run */
            }
        }
        if (__atomic_load_n(&reader_bad, __ATOMIC_ACQUIRE)) {
            printf("round %u: the reader saw flags before their data\n", round);
            exit(OUT_OF_ORDER);
        }
    }
    __atomic_store_n(&race_over, true, __ATOMIC_RELEASE);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

TEST(ll128_reader)
{
    run_race(true);
}

TEST(ll_reader)
{
    run_race(false);
}

/* ---- What is in place after every single instruction ------------------------------------- */

#define STEP_LINES 8
#define STEP_WORDS (STEP_LINES * LINE_WORDS)
#define STEPS_MOST 5000000

static void step_source(bool ll128)
{
    for (unsigned w = 0; w < STEP_WORDS; w++) {
        bool flag = w % LINE_WORDS == LINE_WORDS - 1;

        source_buf[w] = !ll128 ? UINT64_C(1) << 32 | (uint32_t)data_word(1, w)
                        : flag ? 1
                               : data_word(1, w);
    }
}

static bool in_order(const uint64_t *buf, bool ll128)
{
    for (unsigned w = 0; w < STEP_WORDS; w++) {
        unsigned flag = w | (LINE_WORDS - 1);

        if (ll128 ? buf[flag] && buf[w] != source_buf[w] : buf[w] && buf[w] != source_buf[w])
            return false;
    }
    return true;
}

/* The child copies, in pieces that end at `cut`; the parent looks after each of its instructions.
 */
static void step_through(bool ll128, size_t cut)
{
    size_t len = STEP_WORDS * sizeof(uint64_t);
    uint64_t *buf = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status = 0, steps = 0;
    pid_t pid;

    CHECK(buf != MAP_FAILED);
    step_source(ll128);
    fflush(stdout);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
            _exit(77);
        raise(SIGSTOP);
        r2_copy_lines(buf, source_buf, cut, 0);
        r2_copy_lines((char *)buf + cut, (char *)source_buf + cut, len - cut, cut);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    for (; WIFSTOPPED(status) && steps < STEPS_MOST; steps++) {
        if (!in_order(buf, ll128)) {
            printf("cut %zu, step %d: a flag before its data\n", cut, steps);
            kill(pid, SIGKILL);
            exit(OUT_OF_ORDER);
        }
        CHECK_EQ(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
        CHECK_EQ(waitpid(pid, &status, 0), pid);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        CHECK_SKIP("ptrace is not allowed here");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_GE(steps, STEP_LINES);
    CHECK_MEM(buf, source_buf, len);
    munmap(buf, len);
}

TEST(every_instruction)
{
    for (int ll128 = 0; ll128 < 2; ll128++) {
        step_through(ll128, STEP_WORDS * sizeof(uint64_t));
        for (int i = 0; i < 2; i++)
            step_through(ll128, 8 * check_below(STEP_WORDS));
    }
}
