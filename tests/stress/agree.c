/* Many processes, many communicators, plan changes all the time: every rank must run every
 * operation under the same plan. Prints what a change costs.
 *
 *   agree [--procs N] [--comms N] [--seconds S] [--rate OPS] [--gap MS] [--plan BYTES]
 *         [--generation OPS] [--kill] [--timeout S] [--seed N]
 *
 * --generation: communicators live for so many operations, then their successors are derived.
 * --kill: at a random moment a random process dies; the others may time out, not differ.
 * Exit code 0: all was well. Only loopback is used.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../pause.h"
#include "agree/agree.h"
#include "util/clock.h"
#include "util/crc32c.h"
#include "util/random.h"

#define COMMS 64
#define PROCS 512
#define OPS (1 << 18)     /* of one communicator */
#define SAMPLES (1 << 16) /* of each kind */
#define DRIFT 200         /* operations that a process may be ahead of its neighbour */

static struct {
    int procs, comms, seconds, rate, gap_ms, generation, kill;
    size_t plan;
    uint64_t timeout_ns, seed;
} opt = {.procs = 8,
         .comms = 4,
         .seconds = 5,
         .rate = 500,
         .gap_ms = 200,
         .plan = 4096,
         .timeout_ns = 60 * R2_NS_PER_S};

static struct shared {
    uint8_t ids[COMMS][R2_AGREE_ID];
    atomic_int arrived, bad, timeouts, off, alive, ready;
    atomic_bool stop;
    _Atomic uint64_t sent, commits, aborts, switches, operations;
    atomic_int ncommit, nwait;
    uint64_t commit_ns[SAMPLES], wait_ns[SAMPLES]; /* the lookup that switched */
    _Atomic uint64_t at[COMMS][PROCS];             /* operations done */
    _Atomic uint32_t plan[COMMS][OPS];             /* what the operation ran under */
} * sh;

static struct member {
    struct r2_agree *a;
    int comm;
    atomic_bool ready, idle;
    _Atomic uint64_t free_ns; /* when the last proposal ended */
    uint64_t epoch, done;     /* operations before this generation */
    struct r2_prng prng;
} members[COMMS];

static int me;

static void bad(const char *what, int comm, uint64_t index, uint32_t a, uint32_t b)
{
    if (atomic_fetch_add(&sh->bad, 1) < 10) {
        fprintf(stderr, "agree[%d]: %s: communicator %d, operation %" PRIu64 ": %08x, %08x\n", me,
                what, comm, index, a, b);
    }
    atomic_store(&sh->stop, true);
}

/* --- callbacks ---------------------------------------------------------------------------- */

struct plan {
    uint64_t epoch;
    uint32_t sum;
};

static void on_ready(void *user, const struct r2_agree_member *peers, int nranks)
{
    struct member *m = user;

    (void)peers;
    (void)nranks;
    atomic_store(&m->ready, true);
    atomic_store(&m->idle, true);
    atomic_fetch_add(&sh->ready, 1);
}

static void on_off(void *user, const char *why)
{
    (void)user;
    if (atomic_fetch_add(&sh->off, 1) < 3) {
        fprintf(stderr, "agree[%d]: off: %s\n", me, why);
    }
}

static int on_accept(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    struct plan *p = malloc(sizeof(*p));

    (void)user;
    if (!p) {
        return -ENOMEM;
    }
    *p = (struct plan){epoch, r2_crc32c(0, plan, len) | 1};
    *object = p;
    return 0;
}

static void on_release(void *user, void *object)
{
    (void)user;
    memset(object, 0xee, sizeof(struct plan)); /* whoever still looks at it will differ */
    free(object);
}

static void on_decided(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why)
{
    struct member *m = user;

    if (committed) {
        struct r2_agree_stats stats;
        int n = atomic_fetch_add(&sh->ncommit, 1);

        r2_agree_get_stats(m->a, &stats);
        if (n < SAMPLES) {
            sh->commit_ns[n] = stats.commit_ns;
        }
        atomic_fetch_add(&sh->commits, 1);
    } else {
        if (atomic_fetch_add(&sh->aborts, 1) < 5) {
            printf("agree[%d]: epoch %" PRIu64 " at %" PRIu64 " aborted: %s\n", me, epoch, at, why);
            fflush(stdout);
        }
    }
    atomic_store(&m->free_ns, r2_now_ns());
    atomic_store(&m->idle, true);
}

static const struct r2_agree_ops ops = {.ready = on_ready,
                                        .off = on_off,
                                        .accept = on_accept,
                                        .release = on_release,
                                        .decided = on_decided};

/* --- one process -------------------------------------------------------------------------- */

static int rank_in(int comm)
{
    return (me + comm % 4) % opt.procs; /* four processes share the lead */
}

static void propose(struct member *m, uint64_t now)
{
    static uint8_t plan[R2_AGREE_PLAN];

    if (!atomic_load(&m->idle) || now < atomic_load(&m->free_ns) + (uint64_t)opt.gap_ms * 1000000) {
        return;
    }
    for (size_t i = 0; i + 8 <= opt.plan; i += 8) {
        uint64_t v = r2_prng_next(&m->prng);

        memcpy(plan + i, &v, 8);
    }
    atomic_store(&m->idle, false);
    if (r2_agree_propose(m->a, plan, opt.plan) != 0) {
        atomic_store(&m->idle, true);
        atomic_store(&m->free_ns, now);
    }
}

/* False: this communicator is over. */
static bool operate(struct member *m)
{
    uint64_t before = r2_now_ns();
    struct r2_agree_view view;
    uint32_t mine = 0, other = 0;
    uint64_t index;
    int rc = r2_agree_lookup(m->a, true, &view);

    if (rc != 0) {
        atomic_fetch_add(&sh->timeouts, rc == -ETIMEDOUT);
        return false;
    }
    mine = view.object ? ((struct plan *)view.object)->sum : 3;
    index = m->done + view.index;
    if (view.object && ((struct plan *)view.object)->epoch != view.epoch) {
        bad("an object of another epoch", m->comm, index, mine, (uint32_t)view.epoch);
    }
    if (!atomic_compare_exchange_strong(&sh->plan[m->comm][index % OPS], &other, mine) &&
        other != mine) {
        bad("two plans", m->comm, index, mine, other);
    }
    if (view.epoch != m->epoch) {
        int n = atomic_fetch_add(&sh->nwait, 1);

        m->epoch = view.epoch;
        atomic_fetch_add(&sh->switches, 1);
        if (n < SAMPLES) {
            sh->wait_ns[n] = r2_now_ns() - before;
        }
    }
    r2_agree_advance(m->a, 1);
    atomic_fetch_add_explicit(&sh->operations, 1, memory_order_relaxed);
    atomic_store(&sh->at[m->comm][me], index + 1);
    return true;
}

static void open_member(struct member *m, const uint8_t *id, struct r2_agree *parent)
{
    struct r2_agree_config config = {.id = id,
                                     .rank = rank_in(m->comm),
                                     .nranks = opt.procs,
                                     .node = (uint64_t)me / 8,
                                     .timeout_ns = opt.timeout_ns,
                                     .name = "stress",
                                     .ops = &ops,
                                     .user = m};
    int rc;

    atomic_store(&m->ready, false);
    atomic_store(&m->idle, false);
    m->epoch = 0;
    rc = parent ? r2_agree_derive(&m->a, parent, (uint64_t)m->comm, &config)
                : r2_agree_create(&m->a, &config);
    if (rc != 0) {
        fprintf(stderr, "agree[%d]: create: %s\n", me, strerror(-rc));
        _exit(1);
    }
}

static void close_member(struct member *m)
{
    struct r2_agree_stats stats;

    r2_agree_get_stats(m->a, &stats);
    atomic_fetch_add(&sh->sent, stats.sent);
    r2_agree_destroy(m->a);
}

static void barrier(int round)
{
    atomic_fetch_add(&sh->arrived, 1);
    UNTIL(atomic_load(&sh->arrived) >= opt.procs * round || atomic_load(&sh->stop));
}

static void next_generation(struct member *m, struct r2_agree *base)
{
    m->done += (uint64_t)opt.generation;
    close_member(m);
    open_member(m, NULL, base);
}

static void run(struct r2_agree **bases)
{
    uint64_t period = R2_NS_PER_S / (uint64_t)opt.rate;
    bool over[COMMS] = {0};
    int left = opt.comms;

    while (left > 0) {
        uint64_t now = r2_now_ns();

        for (int c = 0; c < opt.comms; c++) {
            struct member *m = &members[c];
            uint64_t mine = atomic_load(&sh->at[c][me]);
            uint64_t his = atomic_load(&sh->at[c][(me + 1) % opt.procs]);

            if (over[c] || (mine > his + DRIFT && !atomic_load(&sh->stop))) {
                continue; /* as a GPU would hold its host back */
            }
            if (rank_in(c) == 0 && atomic_load(&m->ready)) {
                propose(m, now);
            }
            over[c] = atomic_load(&sh->stop) || mine + 1 >= OPS || !operate(m);
            left -= over[c];
            if (!over[c] && opt.generation && mine + 1 == m->done + (uint64_t)opt.generation) {
                next_generation(m, bases[c]);
            }
        }
        now = r2_now_ns() - now;
        if (now < period) {
            pause_us((unsigned long)((period - now) / 1000));
        }
    }
}

static void process(void)
{
    struct r2_agree *bases[COMMS] = {0};

    for (int c = me; c < opt.comms; c += opt.procs) {
        char why[R2_AGREE_WHY];

        for (int i = 0; i < 64; i++) {
            sh->ids[c][i] = (uint8_t)rand();
        }
        if (r2_agree_id_sign(sh->ids[c], why) != 0) {
            fprintf(stderr, "agree[%d]: sign: %s\n", me, why);
            _exit(1);
        }
    }
    barrier(1);
    for (int c = 0; c < opt.comms; c++) {
        members[c].comm = c;
        r2_prng_seed(&members[c].prng, opt.seed * 1000 + (uint64_t)(me * COMMS + c));
        open_member(&members[c], sh->ids[c], NULL);
        if (opt.generation) {
            bases[c] = members[c].a;
            open_member(&members[c], NULL, bases[c]);
        }
    }
    run(bases);
    for (int c = 0; c < opt.comms; c++) {
        close_member(&members[c]);
        r2_agree_destroy(bases[c]);
    }
    atomic_fetch_sub(&sh->alive, 1);
    /* As a job ends: all together. Those who wait may still ask. */
    (void)WITHIN_MS(10000, atomic_load(&sh->alive) <= 0 || !opt.kill);
    _exit(0);
}

/* --- report ------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void quantiles(const char *what, uint64_t *ns, int n)
{
    n = n < SAMPLES ? n : SAMPLES;
    qsort(ns, (size_t)n, sizeof(*ns), compare);
    if (n > 0) {
        printf("%s: median %.3f ms, p99 %.3f ms, max %.3f ms (%d samples)\n", what,
               (double)ns[n / 2] / 1e6, (double)ns[n * 99 / 100] / 1e6, (double)ns[n - 1] / 1e6, n);
    }
}

static int report(int failed)
{
    uint64_t commits = atomic_load(&sh->commits);
    struct rusage usage;

    getrusage(RUSAGE_CHILDREN, &usage);
    printf("%d processes x %d communicators, %d ready of %d first joins, %" PRIu64
           " operations, %.1f s of CPU\n",
           opt.procs, opt.comms, atomic_load(&sh->ready), opt.procs * opt.comms,
           atomic_load(&sh->operations),
           (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
               (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
    printf("%" PRIu64 " plans committed, %" PRIu64 " aborted; %" PRIu64 " switches of ranks\n",
           commits, atomic_load(&sh->aborts), atomic_load(&sh->switches));
    if (commits > 0) {
        printf("messages per committed plan and rank: %.2f\n",
               (double)atomic_load(&sh->sent) / (double)commits / opt.procs);
    }
    quantiles("proposal to commit", sh->commit_ns, atomic_load(&sh->ncommit));
    quantiles("lookup at the switch", sh->wait_ns, atomic_load(&sh->nwait));
    printf("wrong: %d; timeouts: %d; off: %d; processes failed: %d\n", atomic_load(&sh->bad),
           atomic_load(&sh->timeouts), atomic_load(&sh->off), failed);
    if (atomic_load(&sh->bad) > 0 || failed > 0 || (!opt.kill && commits == 0)) {
        return 1;
    }
    return !opt.kill && (atomic_load(&sh->timeouts) > 0 || atomic_load(&sh->off) > 0);
}

static void parse(int argc, char **argv)
{
    static const struct option options[] = {{"procs", 1, NULL, 'p'},
                                            {"comms", 1, NULL, 'c'},
                                            {"seconds", 1, NULL, 's'},
                                            {"rate", 1, NULL, 'r'},
                                            {"gap", 1, NULL, 'g'},
                                            {"plan", 1, NULL, 'b'},
                                            {"kill", 0, NULL, 'k'},
                                            {"timeout", 1, NULL, 't'},
                                            {"generation", 1, NULL, 'G'},
                                            {"seed", 1, NULL, 'S'},
                                            {0}};
    int o;

    opt.seed = r2_now_ns();
    while ((o = getopt_long(argc, argv, "", options, NULL)) != -1) {
        long v = optarg ? atol(optarg) : 0;

        switch (o) {
        case 'p':
            opt.procs = (int)v;
            break;
        case 'c':
            opt.comms = (int)v;
            break;
        case 's':
            opt.seconds = (int)v;
            break;
        case 'r':
            opt.rate = (int)v;
            break;
        case 'g':
            opt.gap_ms = (int)v;
            break;
        case 'b':
            opt.plan = (size_t)v;
            break;
        case 'k':
            opt.kill = 1;
            break;
        case 't':
            opt.timeout_ns = (uint64_t)v * R2_NS_PER_S;
            break;
        case 'G':
            opt.generation = (int)v;
            break;
        case 'S':
            opt.seed = (uint64_t)v;
            break;
        default:
            exit(2);
        }
    }
    if (opt.procs < 2 || opt.procs > PROCS || opt.comms < 1 || opt.comms > COMMS ||
        opt.plan > R2_AGREE_PLAN || opt.rate < 1) {
        fprintf(stderr, "agree: 2..%d processes, 1..%d communicators, plans up to %d bytes\n",
                PROCS, COMMS, R2_AGREE_PLAN);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    pid_t pids[PROCS];
    int failed = 0;
    int victim = -1;
    uint64_t end;

    parse(argc, argv);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (sh == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    printf("agree: seed %" PRIu64 "\n", opt.seed);
    fflush(stdout);
    srand((unsigned)opt.seed);
    atomic_store(&sh->alive, opt.procs);
    for (me = 0; me < opt.procs; me++) {
        pids[me] = fork();
        if (pids[me] == 0) {
            process();
        }
    }
    if (!WITHIN_MS(30000, atomic_load(&sh->arrived) >= opt.procs))
        fprintf(stderr, "agree: %d of %d processes have begun after 30 s\n",
                atomic_load(&sh->arrived), opt.procs);
    end = r2_now_ns() + (uint64_t)opt.seconds * R2_NS_PER_S;
    if (opt.kill) {
        victim = rand() % opt.procs;
        pause_us((unsigned long)(rand() % (opt.seconds * 500000) + opt.seconds * 500000));
        kill(pids[victim], SIGKILL);
        atomic_fetch_sub(&sh->alive, 1);
        printf("killed process %d\n", victim);
    }
    UNTIL(r2_now_ns() >= end || atomic_load(&sh->stop));
    if (opt.kill) { /* whoever waits for the dead one must get out by itself */
        pause_us((unsigned long)(opt.timeout_ns / 1000) + 1000000);
    }
    atomic_store(&sh->stop, true);
    for (int i = 0; i < opt.procs; i++) {
        int status = 0;

        waitpid(pids[i], &status, 0);
        failed += i != victim && status != 0;
    }
    return report(failed);
}
