/* What a healthy job pays (invariant "a healthy job pays nothing it can notice"). The numbers do
 * not depend on how busy the machine is. An engine is connected to itself by real sockets on
 * loopback (rung 3). It counts what it does while nothing happens and while messages move. The
 * bounds are a few times what it takes. So they fail when something begins to poll, to send too
 * often or twice, or to grow. Seconds and bytes per second are the benchmarks'.
 */
#define _GNU_SOURCE
#include <dirent.h>

#include "tcp_bed.h"
#include "util/mem.h"

#define MSG (256u * 1024)
#define SMALL 1024u
#define CHUNK (64u * 1024)
#define MESSAGES 200
#define IDLE_MS 3000
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CLANG_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(CLANG_SANITIZER)
#define IDLE_CPU_PERCENT 10
#else
#define IDLE_CPU_PERCENT 1 /* of a core, for all threads of the engine */
#endif
#define CHUNKS (MESSAGES * (MSG / CHUNK))
#define IDLE_SWITCHES_S 150 /* times a second that a thread of the engine wakes */

static uint8_t out[MSG], in[MSG];

static void begin(void)
{
    bed_listen();
    bed_connect();
}

static void move(uint32_t size)
{
    struct r2_req *s = NULL, *r = NULL;

    CHECK_EQ(r2_engine_irecv(rx, in, size, 0, NULL, &r), 0);
    CHECK_EQ(r2_engine_isend(tx, out, size, 0, NULL, &s), 0);
    CHECK(r && s);
    AWAIT(bed_over(&s));
    AWAIT(bed_over(&r));
}

/* How often threads of the engine have gone to sleep. */
static uint64_t switches(void)
{
    DIR *d = opendir("/proc/self/task");
    uint64_t sum = 0;

    CHECK(d);
    for (struct dirent *e; (e = readdir(d));) {
        char path[300], line[128];
        bool ours = false;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
        f = fopen(path, "re");
        while (f && fgets(line, sizeof(line), f)) {
            unsigned long n;

            ours |= strncmp(line, "Name:\tr2ccl-io", 14) == 0;
            if (ours && sscanf(line, "voluntary_ctxt_switches: %lu", &n) == 1)
                sum += n;
        }
        if (f)
            fclose(f);
    }
    closedir(d);
    return sum;
}

static uint64_t counter(const uint64_t *c)
{
    return __atomic_load_n(c, __ATOMIC_RELAXED);
}

/* Nothing is posted: the engine sleeps, but for heartbeats and a look now and then. */
TEST(idle)
{
    uint64_t cpu, woken, acks;

    CHECK_SKIP_EMULATED("its processor time is the emulator's");
    begin();
    move(MSG);
    AWAIT(counter(&r2_eng.g->paths_up) == 4); /* two NICs, both ends: making them would count */
    cpu = r2_io_cpu_ns();
    woken = switches();
    acks = counter(&r2_eng.n->acks_sent);
    pause_us(IDLE_MS * 1000);
    cpu = r2_io_cpu_ns() - cpu;
    woken = switches() - woken;
    printf("# idle: %.3f %% of a core, %.0f wake-ups a second\n",
           (double)cpu / (IDLE_MS * 1e6) * 100, (double)woken * 1000 / IDLE_MS);
    CHECK_LT(cpu, (uint64_t)IDLE_MS * R2_NS_PER_MS / 100 * IDLE_CPU_PERCENT);
    CHECK_LT(woken * 1000 / IDLE_MS, IDLE_SWITCHES_S);
    CHECK_EQ(counter(&r2_eng.n->acks_sent), acks);
    end();
}

struct sums {
    uint64_t chunks, acks, again, twice, eager;
};

static struct sums look(void)
{
    const struct r2_seg_counters *n = r2_eng.n;

    return (struct sums){.chunks = counter(&n->chunks_sent),
                         .acks = counter(&n->acks_sent),
                         .again = counter(&n->replayed_bytes) + counter(&n->failovers),
                         .twice = counter(&n->duplicate_chunks) + counter(&n->stale_chunks),
                         .eager = counter(&n->eager_messages)};
}

/* Every byte goes once, in chunks as large as they may be; acknowledgements are no more than
 * chunks; nothing is kept of messages that are over. */
TEST(messages)
{
    struct sums before, after;
    uint64_t memory;

    begin();
    for (int i = 0; i < 50; i++)
        move(MSG);
    before = look();
    memory = r2_mem_now();
    for (int i = 0; i < MESSAGES; i++)
        move(MSG);
    after = look();
    CHECK_GE(after.chunks - before.chunks, CHUNKS);
    CHECK_LE(after.chunks - before.chunks, CHUNKS + CHUNKS / 4); /* a path may look slow a while */
    CHECK_LE(after.acks - before.acks, after.chunks - before.chunks);
    CHECK_EQ(after.again, before.again);
    CHECK_EQ(after.twice, before.twice);
    CHECK_LE(r2_mem_now(), memory + 64 * 1024);
    for (int i = 0; i < MESSAGES; i++)
        move(SMALL);
    before = look();
    CHECK_EQ(before.eager - after.eager, MESSAGES); /* none waits to be cleared to send */
    CHECK_EQ(before.chunks, after.chunks);
    CHECK_LE(before.acks - after.acks, MESSAGES);
    CHECK_EQ(before.twice, after.twice);
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_CHUNK", "64K", 1);
    setenv("R2CCL_GREY", "0", 1); /* a busy machine's path may look slow */
    return check_main(argc, argv);
}
