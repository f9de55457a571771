/* util/ (rung 1): list, hash, random, clock, CRC32C, SipHash, log, threads. */
#define _GNU_SOURCE
#include "await.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "util/clock.h"
#include "util/crc32c.h"
#include "util/hash.h"
#include "util/list.h"
#include "util/log.h"
#include "util/random.h"
#include "util/ratelimit.h"
#include "util/siphash.h"
#include "util/thread.h"

/* ---- list -------------------------------------------------------------------------------- */

struct item {
    int value;
    struct r2_list link;
};

static void expect_list(struct r2_list *list, const int *values, int count)
{
    struct r2_list *it;
    int i = 0;

    R2_LIST_FOR_EACH (it, list) {
        CHECK_LT(i, count);
        CHECK_EQ(R2_CONTAINER_OF(it, struct item, link)->value, values[i]);
        CHECK(it->next->prev == it && it->prev->next == it);
        i++;
    }
    CHECK_EQ(i, count);
    CHECK(r2_list_empty(list) == (count == 0));
}

TEST(list)
{
    struct r2_list list = R2_LIST_INIT(list);
    struct r2_list other = R2_LIST_INIT(other);
    struct r2_list *it;
    struct r2_list *tmp;
    struct item x[5];

    for (int i = 0; i < 5; i++) {
        x[i].value = i;
        r2_list_init(&x[i].link);
        CHECK(r2_list_empty(&x[i].link));
    }
    CHECK(r2_list_first(&list) == NULL);
    expect_list(&list, NULL, 0);
    r2_list_add_tail(&list, &x[1].link);
    r2_list_add_tail(&list, &x[2].link);
    r2_list_add_head(&list, &x[0].link);
    expect_list(&list, (int[]){0, 1, 2}, 3);
    CHECK(r2_list_first(&list) == &x[0].link);
    r2_list_del(&x[1].link);
    r2_list_del(&x[1].link);
    CHECK(r2_list_empty(&x[1].link));
    expect_list(&list, (int[]){0, 2}, 2);
    r2_list_splice_tail(&list, &other);
    expect_list(&list, (int[]){0, 2}, 2);
    r2_list_add_tail(&other, &x[3].link);
    r2_list_add_tail(&other, &x[4].link);
    r2_list_splice_tail(&list, &other);
    expect_list(&list, (int[]){0, 2, 3, 4}, 4);
    expect_list(&other, NULL, 0);
    R2_LIST_FOR_EACH_SAFE (it, tmp, &list) {
        if (R2_CONTAINER_OF(it, struct item, link)->value % 2 == 0) {
            r2_list_del(it);
        }
    }
    expect_list(&list, (int[]){3}, 1);
}

/* ---- hash -------------------------------------------------------------------------------- */

#define KEYS 512

/* Keys that a weak hash would pile up, and the extremes. */
static uint64_t hash_key(unsigned i)
{
    switch (i % 4) {
    case 0:
        return i;
    case 1:
        return (uint64_t)i << 48;
    case 2:
        return UINT64_MAX - i;
    default:
        return (uint64_t)i * 4096;
    }
}

TEST(hash_random)
{
    static int values[KEYS];
    bool in[KEYS] = {false};
    size_t count = 0;
    struct r2_hash h;

    r2_hash_init(&h);
    CHECK(r2_hash_get(&h, 0) == NULL);
    CHECK(r2_hash_del(&h, 0) == NULL);
    CHECK_EQ(r2_hash_put(&h, 1, NULL), -EINVAL);
    for (unsigned long n = 0; n < check_rounds(200000); n++) {
        unsigned i = (unsigned)check_below(n % 20000 < 10000 ? KEYS : 24);
        uint64_t key = hash_key(i);

        switch (check_below(3)) {
        case 0:
            CHECK_EQ(r2_hash_put(&h, key, &values[i]), in[i] ? -EEXIST : 0);
            count += !in[i];
            in[i] = true;
            break;
        case 1:
            CHECK(r2_hash_del(&h, key) == (in[i] ? &values[i] : NULL));
            count -= in[i];
            in[i] = false;
            break;
        default:
            CHECK(r2_hash_get(&h, key) == (in[i] ? &values[i] : NULL));
        }
        CHECK_EQ(r2_hash_count(&h), count);
    }
    for (unsigned i = 0; i < KEYS; i++) {
        CHECK(r2_hash_get(&h, hash_key(i)) == (in[i] ? &values[i] : NULL));
    }
    r2_hash_free(&h);
    CHECK(r2_hash_get(&h, 0) == NULL);
}

/* ---- random, clock ----------------------------------------------------------------------- */

TEST(random_bytes)
{
    unsigned char a[600] = {0};
    unsigned char b[600] = {0};
    unsigned zeros = 0;

    CHECK_EQ(r2_random_bytes(a, 0), 0);
    CHECK_EQ(r2_random_bytes(a, sizeof(a)), 0);
    CHECK_EQ(r2_random_bytes(b, sizeof(b)), 0);
    CHECK(memcmp(a, b, sizeof(a)) != 0);
    for (size_t i = 0; i < sizeof(a); i++) {
        zeros += a[i] == 0;
    }
    CHECK_LT(zeros, 60); /* 2.3 expected: the whole buffer was filled */
}

TEST(prng)
{
    struct r2_prng a;
    struct r2_prng b;
    unsigned seen[7] = {0};

    r2_prng_seed(&a, 0);
    r2_prng_seed(&b, 0);
    for (int i = 0; i < 100; i++) {
        CHECK(r2_prng_next(&a) == r2_prng_next(&b));
    }
    r2_prng_seed(&b, 1);
    CHECK(r2_prng_next(&a) != r2_prng_next(&b));
    for (int i = 0; i < 70000; i++) {
        seen[r2_prng_below(&a, 7)]++;
    }
    for (int i = 0; i < 7; i++) {
        CHECK_GT(seen[i], 9500);
        CHECK_LT(seen[i], 10500);
    }
    CHECK_EQ(r2_prng_below(&a, 0), 0);
    CHECK_EQ(r2_prng_below(&a, 1), 0);
}

TEST(clock)
{
    uint64_t t0 = r2_now_ns();
    uint64_t t1 = t0;

    while (t1 - t0 < 2 * R2_NS_PER_MS) {
        uint64_t next = r2_now_ns();

        CHECK_GE(next, t1);
        t1 = next;
    }
    CHECK_LT(t1 - t0, 30 * R2_NS_PER_S);
}

/* ---- CRC32C ------------------------------------------------------------------------------ */

static uint32_t crc_bitwise(uint32_t crc, const unsigned char *p, size_t len)
{
    crc = ~crc;
    for (size_t i = 0; i < len; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0);
        }
    }
    return ~crc;
}

/* RFC 3720, B.4, and the check value of the CRC catalogues. */
TEST(crc32c_known)
{
    unsigned char buf[32];

    CHECK_EQ(r2_crc32c(0, "", 0), 0);
    CHECK_EQ(r2_crc32c(0, "123456789", 9), 0xE3069283u);
    CHECK_EQ(r2_crc32c_table(0, "123456789", 9), 0xE3069283u);
    memset(buf, 0, sizeof(buf));
    CHECK_EQ(r2_crc32c(0, buf, sizeof(buf)), 0x8A9136AAu);
    memset(buf, 0xff, sizeof(buf));
    CHECK_EQ(r2_crc32c(0, buf, sizeof(buf)), 0x62A8AB43u);
    for (int i = 0; i < 32; i++) {
        buf[i] = (unsigned char)i;
    }
    CHECK_EQ(r2_crc32c(0, buf, sizeof(buf)), 0x46DD794Eu);
    for (int i = 0; i < 32; i++) {
        buf[i] = (unsigned char)(31 - i);
    }
    CHECK_EQ(r2_crc32c(0, buf, sizeof(buf)), 0x113FDB5Cu);
}

TEST(crc32c_random)
{
    static unsigned char buf[16384 + 16];

    for (size_t i = 0; i < sizeof(buf); i++) {
        buf[i] = (unsigned char)check_random();
    }
    for (unsigned long n = 0; n < check_rounds(500); n++) {
        size_t off = check_below(16);
        size_t len = n < 100 ? n : check_below(16384);
        size_t cut = len ? check_below(len) : 0;
        uint32_t seed = (uint32_t)check_random();
        uint32_t want = crc_bitwise(seed, buf + off, len);

        CHECK_EQ(r2_crc32c(seed, buf + off, len), want);
        CHECK_EQ(r2_crc32c_table(seed, buf + off, len), want);
        CHECK_EQ(r2_crc32c(r2_crc32c(seed, buf + off, cut), buf + off + cut, len - cut), want);
    }
}

/* ---- SipHash ----------------------------------------------------------------------------- */

/* Published with the reference implementation: key 00 01 .. 0f, message 00 01 .. len-1. */
static const struct {
    size_t len;
    uint8_t tag[16];
} sip_vectors[] = {
    {0,
     {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02,
      0x93}},
    {1,
     {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc,
      0x45}},
    {2,
     {0x81, 0x77, 0x22, 0x8d, 0xa4, 0xa4, 0x5d, 0xc7, 0xfc, 0xa3, 0x8b, 0xde, 0xf6, 0x0a, 0xff,
      0xe4}},
    {3,
     {0x9c, 0x70, 0xb6, 0x0c, 0x52, 0x67, 0xa9, 0x4e, 0x5f, 0x33, 0xb6, 0xb0, 0x29, 0x85, 0xed,
      0x51}},
    {15,
     {0x54, 0x93, 0xe9, 0x99, 0x33, 0xb0, 0xa8, 0x11, 0x7e, 0x08, 0xec, 0x0f, 0x97, 0xcf, 0xc3,
      0xd9}},
};

TEST(siphash_known)
{
    uint8_t key[16];
    uint8_t msg[64];
    uint8_t out[16];

    for (int i = 0; i < 64; i++) {
        key[i % 16] = (uint8_t)(i % 16);
        msg[i] = (uint8_t)i;
    }
    for (size_t i = 0; i < sizeof(sip_vectors) / sizeof(sip_vectors[0]); i++) {
        r2_siphash128(key, msg, sip_vectors[i].len, out);
        CHECK_MEM(out, sip_vectors[i].tag, 16);
        CHECK(r2_tag_equal(out, sip_vectors[i].tag));
    }
}

/* Every bit of key and message counts, and so does the length. */
TEST(siphash_bits)
{
    uint8_t key[16] = {1};
    uint8_t msg[24] = {2};
    uint8_t base[16];
    uint8_t out[16];

    for (size_t len = 0; len < sizeof(msg); len++) {
        r2_siphash128(key, msg, len, base);
        for (size_t bit = 0; bit < 128 + len * 8; bit++) {
            uint8_t *at = bit < 128 ? &key[bit / 8] : &msg[(bit - 128) / 8];

            *at ^= (uint8_t)(1 << (bit % 8));
            r2_siphash128(key, msg, len, out);
            *at ^= (uint8_t)(1 << (bit % 8));
            CHECK(!r2_tag_equal(base, out));
        }
        r2_siphash128(key, msg, len + 1, out);
        CHECK(!r2_tag_equal(base, out));
    }
}

/* ---- log --------------------------------------------------------------------------------- */

static struct {
    unsigned lines;
    int level;
    unsigned long flags;
    char text[2048];
} logged;
static pthread_mutex_t logged_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((format(printf, 5, 6))) static void capture(int level, unsigned long flags,
                                                          const char *file, int line,
                                                          const char *fmt, ...)
{
    va_list ap;

    CHECK(file && line > 0);
    pthread_mutex_lock(&logged_lock);
    logged.lines++;
    logged.level = level;
    logged.flags = flags;
    va_start(ap, fmt);
    vsnprintf(logged.text, sizeof(logged.text), fmt, ap);
    va_end(ap);
    pthread_mutex_unlock(&logged_lock);
    errno = 0;
}

TEST(log_logger)
{
    char longer[3000];

    memset(longer, 'x', sizeof(longer));
    longer[sizeof(longer) - 1] = 0;
    logged.lines = 0;
    r2_log_set_verbosity(0);
    r2_log_set(NULL);
    R2_WARN("nobody %d", 1);
    CHECK_EQ(logged.lines, 0);
    r2_log_set(capture);
    errno = EBUSY;
    R2_WARN("NIC %s lost: %d", "eth0", 7);
    CHECK_EQ(errno, EBUSY);
    CHECK_EQ(logged.lines, 1);
    CHECK_EQ(logged.level, 2);
    CHECK_STR(logged.text, "NET/R2CCL: NIC eth0 lost: 7");
    R2_INFO("100%%");
    CHECK_EQ(logged.level, 3);
    CHECK_EQ(logged.flags, 17);
    CHECK_STR(logged.text, "NET/R2CCL: 100%");
    R2_TRACE("not asked for");
    CHECK_EQ(logged.lines, 2);
    r2_log_set_verbosity(3);
    R2_TRACE("asked for");
    CHECK_EQ(logged.lines, 3);
    CHECK_EQ(logged.level, 5);
    R2_WARN("%s", longer);
    CHECK_EQ(strlen(logged.text), 1023 + strlen("NET/R2CCL: "));
    r2_log_set(NULL);
}

TEST(log_limit)
{
    struct r2_log_limit limit = {0};
    uint64_t t = R2_NS_PER_S;
    uint32_t dropped;
    unsigned passed = 0;

    for (int i = 0; i < 1000; i++) {
        passed += r2_log_limit_pass(&limit, t + (uint64_t)i * R2_NS_PER_MS, &dropped);
    }
    CHECK_EQ(passed, 5);
    CHECK(r2_log_limit_pass(&limit, t + 5 * R2_NS_PER_S, &dropped));
    CHECK_EQ(dropped, 995);
    CHECK(r2_log_limit_pass(&limit, t + 5 * R2_NS_PER_S, &dropped));
    CHECK_EQ(dropped, 0);

    logged.lines = 0;
    r2_log_set(capture);
    for (int i = 0; i < 100; i++) {
        R2_WARN_LIMIT("again %d", i);
    }
    r2_log_set(NULL);
    CHECK_EQ(logged.lines, 5);
    CHECK_STR(logged.text, "NET/R2CCL: again 4");
}

static void *log_thread(void *arg)
{
    for (int i = 0; i < 2000; i++) {
        R2_WARN("thread %s line %d", (const char *)arg, i);
        R2_WARN_LIMIT("limited %d", i);
    }
    return NULL;
}

TEST(log_threads)
{
    pthread_t t[3];

    logged.lines = 0;
    r2_log_set(capture);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(pthread_create(&t[i], NULL, log_thread, "x"), 0);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(pthread_join(t[i], NULL), 0);
    }
    r2_log_set(NULL);
    CHECK_GE(logged.lines, 6000 + 5);
    CHECK_LE(logged.lines, 6000 + 20);
}

/* A burst, then one in a minute; what was left out is counted; nothing is left out of the first
 * words about something. */
TEST(told)
{
    struct r2_ratelimit t = {0};
    uint64_t now = 7 * R2_NS_PER_S;
    unsigned untold = 99;

    for (int i = 0; i < R2_RATELIMIT_BURST; i++) {
        CHECK(r2_ratelimit_pass(&t, false, now, &untold));
        CHECK_EQ(untold, 0);
    }
    for (int i = 0; i < 5; i++)
        CHECK(!r2_ratelimit_pass(&t, false, now + R2_RATELIMIT_EACH_NS - 1, &untold));
    CHECK(r2_ratelimit_pass(&t, true, now, &untold));
    CHECK_EQ(untold, 5);
    CHECK(!r2_ratelimit_pass(&t, false, now, &untold));
    CHECK(r2_ratelimit_pass(&t, false, now + R2_RATELIMIT_EACH_NS, &untold));
    CHECK_EQ(untold, 1);
    CHECK(!r2_ratelimit_pass(&t, false, now + R2_RATELIMIT_EACH_NS, &untold));
    now += 1000 * R2_RATELIMIT_EACH_NS; /* a quiet day: the burst is there again */
    for (int i = 0; i < R2_RATELIMIT_BURST; i++)
        CHECK(r2_ratelimit_pass(&t, false, now, &untold));
    CHECK(!r2_ratelimit_pass(&t, false, now, &untold));
}

/* ---- thread ------------------------------------------------------------------------------ */

static struct {
    atomic_int over;
    sigset_t blocked;
    cpu_set_t cpus;
    int detached;
} seen;

static void *look_around(void *arg)
{
    pthread_attr_t attr;

    CHECK(arg == &seen);
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, NULL, &seen.blocked), 0);
    CHECK_EQ(pthread_getattr_np(pthread_self(), &attr), 0);
    CHECK_EQ(pthread_attr_getdetachstate(&attr, &seen.detached), 0);
    pthread_attr_destroy(&attr);
    CHECK_EQ(sched_getaffinity(0, sizeof(seen.cpus), &seen.cpus), 0);
    atomic_fetch_add(&seen.over, 1);
    return NULL;
}

/* A thread of ours takes no signal of the application's, whose own mask stays as it was. */
TEST(thread)
{
    sigset_t mask, after;
    pthread_t thread;
    cpu_set_t cpus, all;
    int first = 0;

    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, &mask, NULL), 0);
    CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&cpus);
    CPU_SET(first, &cpus);
    for (int i = 0; i < 3; i++) {
        if (i == 2)
            CPU_ZERO(&cpus); /* which the kernel refuses */
        CHECK_EQ(i ? r2_thread_start_on(&thread, &cpus, look_around, &seen)
                   : r2_thread_start(look_around, &seen),
                 0);
        AWAIT(atomic_load(&seen.over) != i);
        CHECK_EQ(atomic_load(&seen.over), i + 1);
        for (int s = 1; s < 32; s++)
            CHECK(s == SIGKILL || s == SIGSTOP || sigismember(&seen.blocked, s) == 1);
        CHECK_EQ(seen.detached, PTHREAD_CREATE_DETACHED);
        CHECK(CPU_EQUAL(&seen.cpus, i == 1 ? &cpus : &all));
    }
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, NULL, &after), 0);
    CHECK(sigismember(&after, SIGUSR2) == 1 && sigismember(&after, SIGUSR1) == 0);
    sigemptyset(&mask);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
}
