/* util/ (rung 1): hash, random, CRC32C, SipHash, log, threads. */
#define _GNU_SOURCE
#include "await.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "util/crc32c.h"
#include "util/hash.h"
#include "util/log.h"
#include "util/random.h"
#include "util/ratelimit.h"
#include "util/siphash.h"
#include "util/thread.h"

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

/* ---- random ------------------------------------------------------------------------------ */

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
