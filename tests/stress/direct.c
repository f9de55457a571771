/* Direct AllReduce under random failures, compared with a plain one. Rung 3: ranks are processes
 * over loopback NICs, each with another number of them, and several communicators at once.
 *
 *   direct [--seconds S] [--seed N] [--ranks P] [--comms N] [--healthy]
 *
 * Types, reductions, counts, weights, schedules and faults are drawn from the seed. Each rank knows
 * what all others give, and reduces it by itself in rank order.
 * At the end no NIC has anything in flight by its own count.
 * Exit code 0: all was right; 1: not; 2: usage. A rank without progress for a minute is a failure.
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../pause.h"
#include "direct/direct.h"
#include "engine/base/base.h"
#include "io/fault.h"
#include "nccl/nccl.h"
#include "reduce/reduce.h"
#include "util/clock.h"
#include "util/random.h"

#define RANKS 64
#define COMMS 8
#define NICS 8
#define DEPTH 4 /* operations of a communicator under way */
#define MOST ((size_t)2 << 20)
#define STALL_NS (60 * R2_NS_PER_S)

struct r2_ncclnet_v12;
extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;

static struct {
    int seconds, ranks, comms;
    bool healthy;
    uint64_t seed;
} opt = {.seconds = 10};

static struct shared {
    struct r2_links_card cards[COMMS][RANKS];
    atomic_int there[COMMS];
    atomic_bool stop, bad;
    _Atomic uint64_t operations, bytes;
    _Atomic uint64_t last[COMMS]; /* no rank begins a later one; 0: not known yet */
} * sh;

static int me;
static _Atomic uint64_t progress_ns;

struct op {
    struct r2_direct_call call;
    uint32_t weights[RANKS];
    uint64_t number;
    size_t bytes;
    uint8_t *in, *out; /* MOST and a guard; `out` may be `in` */
    uint64_t seed;
};

struct comm {
    int index;
    struct r2_direct *d;
    struct r2_prng prng; /* of all ranks alike */
    int generation;      /* of `d` */
    struct op ops[DEPTH];
    uint8_t *others[RANKS], *want;
};

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fprintf(stderr, "direct[%d]: ", me);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    atomic_store(&sh->bad, true);
    _exit(1);
}

static void *memory(size_t len)
{
    void *at = malloc(len);

    if (!at)
        die("no memory");
    return at;
}

/* ---- values */

/* Small enough that no sum, product or conversion becomes infinite or no number: the top bit of
 * each exponent is 0. */
static void fill(uint8_t *to, size_t bytes, int type, uint64_t seed, int rank)
{
    size_t elem = r2_nccl_type_size(type);
    struct r2_prng prng;

    r2_prng_seed(&prng, seed * RANKS + (uint64_t)rank);
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t value = r2_prng_next(&prng);

        memcpy(to + i, &value, bytes - i < 8 ? bytes - i : 8);
    }
    for (size_t i = elem - 1; type >= R2_NCCL_FLOAT16 && i < bytes; i += elem)
        to[i] &= 0xbf;
}

static bool is_whole(int type)
{
    return type < R2_NCCL_FLOAT16;
}

static void check(struct comm *c, const struct op *op)
{
    const void *in[RANKS];

    for (int r = 0; r < opt.ranks; r++) {
        fill(c->others[r], op->bytes, op->call.type, op->seed, r);
        in[r] = c->others[r];
    }
    r2_reduce(c->want, in, opt.ranks, op->call.count, op->call.type, op->call.op);
    for (size_t i = 0; i < op->bytes; i++) {
        if (op->out[i] != c->want[i])
            die("communicator %d, operation %" PRIu64 ": byte %zu of %zu (type %d, reduction %d, "
                "schedule %d) is %02x, not %02x",
                c->index, op->number, i, op->bytes, op->call.type, op->call.op,
                (int)op->call.schedule, op->out[i], c->want[i]);
    }
    for (size_t i = 0; i < 8; i++)
        if (op->out[op->bytes + i] != 0xa5)
            die("communicator %d, operation %" PRIu64 ": byte %zu behind the end was written",
                c->index, op->number, i);
    if (op->in != op->out && memcmp(op->in, c->others[me], op->bytes))
        die("communicator %d, operation %" PRIu64 ": the input was written", c->index, op->number);
}

/* ---- operations: all ranks draw the same */

static void draw_weights(struct comm *c, uint32_t *weights)
{
    uint32_t left = R2_SCHEDULE_UNIT, n = (uint32_t)opt.ranks;
    uint64_t shape = r2_prng_below(&c->prng, 3), last = r2_prng_below(&c->prng, n);

    for (uint32_t r = 0; r < n; r++) {
        uint32_t most = shape == 0                        ? left
                        : left < 2 * R2_SCHEDULE_UNIT / n ? left
                                                          : 2 * R2_SCHEDULE_UNIT / n;
        uint32_t w = (uint32_t)r2_prng_below(&c->prng, most + 1);

        if (shape == 2 && r2_prng_below(&c->prng, 2))
            w = 0;
        weights[r] = r == last ? 0 : w;
        left -= weights[r];
    }
    weights[last] = left;
}

static uint64_t draw_count(struct comm *c, size_t elem)
{
    uint64_t most = UINT64_C(1) << r2_prng_below(&c->prng, 22); /* up to 2 MiB */
    uint64_t count = r2_prng_below(&c->prng, most + 1) / elem;

    return r2_prng_below(&c->prng, 30) ? count + (count == 0) : 0;
}

static void draw(struct comm *c, struct op *op)
{
    struct r2_direct_call *call = &op->call;

    *call = (struct r2_direct_call){.op = (int)r2_prng_below(&c->prng, R2_NCCL_OPS)};
    do
        call->type = (int)r2_prng_below(&c->prng, R2_NCCL_TYPES);
    while (!r2_reduce_covers(call->type, call->op));
    call->count = draw_count(c, r2_nccl_type_size(call->type));
    op->bytes = call->count * r2_nccl_type_size(call->type);
    /* Other schedules add in another order. */
    if (is_whole(call->type) && opt.ranks > 2)
        call->schedule = (enum r2_schedule_kind)r2_prng_below(&c->prng, 3);
    call->slow = (int)r2_prng_below(&c->prng, (uint64_t)opt.ranks);
    call->tail = (uint32_t)r2_prng_below(&c->prng, R2_SCHEDULE_UNIT);
    call->chunks = 1 + (unsigned)r2_prng_below(&c->prng, 20);
    if (r2_prng_below(&c->prng, 4)) {
        draw_weights(c, op->weights);
        call->weights = op->weights;
    }
    op->seed = r2_prng_next(&c->prng);
}

static void begin(struct comm *c, struct op *op, bool in_place)
{
    int rc;

    fill(op->in, op->bytes, op->call.type, op->seed, me);
    op->call.in = op->in;
    op->call.out = op->out = in_place ? op->in : op->in + MOST + 8;
    if (!in_place)
        memset(op->out, 0xdb, op->bytes);
    memset(op->out + op->bytes, 0xa5, 8);
    rc = r2_direct_allreduce(c->d, &op->call, &op->number);
    if (rc)
        die("communicator %d: an operation was refused: %s", c->index, strerror(-rc));
}

static void end(struct comm *c, struct op *op)
{
    int rc = r2_direct_wait(c->d, op->number);

    if (rc)
        die("communicator %d, operation %" PRIu64 ": %s", c->index, op->number, strerror(-rc));
    atomic_store(&progress_ns, r2_now_ns());
    check(c, op);
    atomic_store(&progress_ns, r2_now_ns());
    if (me == 0) {
        atomic_fetch_add(&sh->operations, 1);
        atomic_fetch_add(&sh->bytes, op->bytes);
    }
}

/* Rank 0 says which is the last one, far enough ahead for all. */
static bool is_over(struct comm *c, uint64_t number)
{
    if (me == 0 && atomic_load(&sh->stop) && !atomic_load(&sh->last[c->index]))
        atomic_store(&sh->last[c->index], number + 2 * DEPTH + 2);
    return atomic_load(&sh->last[c->index]) && number >= atomic_load(&sh->last[c->index]);
}

/* ---- communicators */

static void connect_all(struct comm *c)
{
    struct r2_direct_config config = {
        .net = &ncclNetPlugin_v12, .id = opt.seed + (uint64_t)c->index, .rank = me, .p = opt.ranks};
    int rc = r2_direct_new(&c->d, &config), error = 0;

    if (rc)
        die("no communicator: %s", strerror(-rc));
    sh->cards[c->index][me] = *r2_direct_card(c->d);
    atomic_fetch_add(&sh->there[c->index], 1);
    c->generation++;
    UNTIL(atomic_load(&sh->there[c->index]) >= opt.ranks * c->generation);
    for (int r = 0; r < opt.ranks; r++) {
        const struct r2_links_card *card = &sh->cards[c->index][r];

        if (r2_direct_meet(c->d, r, card, r2_links_card_bytes(card)))
            die("rank %d's card is damaged", r);
    }
    r2_direct_connect(c->d);
    UNTIL(r2_direct_state(c->d, &error) != R2_DIRECT_CONNECTING);
    if (r2_direct_state(c->d, &error) != R2_DIRECT_READY)
        die("no connections: %s", strerror(-error));
}

/* Now and then the communicator ends and has a successor, also while NICs fail. */
static uint64_t succeed(struct comm *c)
{
    if (c->d) {
        r2_direct_finish(c->d);
        r2_direct_free(c->d);
    }
    connect_all(c);
    atomic_store(&progress_ns, r2_now_ns());
    return 20 + r2_prng_below(&c->prng, 400);
}

static void run_all(struct comm *c)
{
    uint64_t begun = 0, ended = 0, until = 0, own = opt.seed + (uint64_t)me;
    struct r2_prng mine;

    r2_prng_seed(&mine, own);
    while (!is_over(c, begun) || ended < begun) {
        uint64_t depth = 1 + r2_prng_below(&mine, DEPTH);

        if (begun == until && ended == begun)
            until += succeed(c);
        if (!is_over(c, begun) && begun < until && begun - ended < depth) {
            struct op *op = &c->ops[begun++ % DEPTH];

            draw(c, op);
            begin(c, op, r2_prng_below(&mine, 2));
            if (r2_prng_below(&mine, 20) == 0)
                pause_us(r2_prng_below(&mine, 20000));
        } else {
            end(c, &c->ops[ended++ % DEPTH]);
        }
    }
}

static void *comm_main(void *arg)
{
    struct comm *c = arg;

    for (int i = 0; i < DEPTH; i++)
        c->ops[i].in = memory(2 * (MOST + 8));
    for (int r = 0; r < opt.ranks; r++)
        c->others[r] = memory(MOST);
    c->want = memory(MOST);
    r2_prng_seed(&c->prng, opt.seed * COMMS + (uint64_t)c->index);
    run_all(c);
    r2_direct_finish(c->d);
    r2_direct_free(c->d);
    return NULL;
}

/* ---- faults, of each rank by itself */

static void *faults_main(void *arg)
{
    struct r2_prng prng;
    int nics = *(const int *)arg;

    r2_prng_seed(&prng, ~opt.seed * RANKS + (uint64_t)me);
    while (!atomic_load(&sh->stop)) {
        struct r2_fault f = {.kind =
                                 (enum r2_seg_fault)(1 + r2_prng_below(&prng, R2_SEG_FAULT_LAST)),
                             .for_ns = r2_prng_below(&prng, 3 * R2_NS_PER_S),
                             .loss_ppm = 1 + (uint32_t)r2_prng_below(&prng, 100000),
                             .rate = 1000000 + r2_prng_below(&prng, 50000000)};
        uint64_t ways = 1 + r2_prng_below(&prng, 3);

        f.tx = ways & 1;
        f.rx = ways & 2;
        f.for_ns += 1;
        pause_us(r2_prng_below(&prng, 1000000));
        if (!atomic_load(&sh->stop))
            r2_fault_set((int)r2_prng_below(&prng, (uint64_t)nics), &f);
    }
    for (int nic = 0; nic < nics; nic++)
        r2_fault_clear(nic);
    return NULL;
}

/* ---- ranks */

static void rank_main(void)
{
    pthread_t threads[COMMS], faults;
    struct comm *comms = calloc((size_t)opt.comms, sizeof(*comms));
    char nics[NICS * 16] = "";
    int n = 1 + (int)((opt.seed / 7 + (uint64_t)me * 5) % NICS);

    for (int i = 1; i <= n; i++)
        snprintf(nics + strlen(nics), sizeof(nics) - strlen(nics), "%s127.0.%d.1", i > 1 ? "," : "",
                 i);
    setenv("R2CCL_NICS", nics, 1);
    atomic_store(&progress_ns, r2_now_ns());
    for (int i = 0; comms && i < opt.comms; i++) {
        comms[i].index = i;
        if (pthread_create(&threads[i], NULL, comm_main, &comms[i]))
            die("no thread");
    }
    if (!comms || (!opt.healthy && pthread_create(&faults, NULL, faults_main, &n)))
        die("no thread");
    for (int i = 0; i < opt.comms;) {
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        if (pthread_timedjoin_np(threads[i], NULL, &until) == 0)
            i++;
        else if (r2_now_ns() - atomic_load(&progress_ns) > STALL_NS)
            die("nothing moved for a minute");
        else if (atomic_load(&sh->bad))
            _exit(1);
    }
    if (!opt.healthy)
        pthread_join(faults, NULL);
    for (int i = 0; i < n; i++)
        if (atomic_load(&r2_eng.inflight[i]))
            die("NIC %d still has %llu bytes in flight", i,
                (unsigned long long)atomic_load(&r2_eng.inflight[i]));
    _exit(0);
}

static int usage(void)
{
    fprintf(stderr,
            "usage: direct [--seconds S] [--seed N] [--ranks 2..%d] [--comms 1..%d] "
            "[--healthy]\n",
            RANKS, COMMS);
    return 2;
}

static bool parse(int argc, char **argv)
{
    static const struct option options[] = {{"seconds", 1, NULL, 's'}, {"seed", 1, NULL, 'e'},
                                            {"ranks", 1, NULL, 'r'},   {"comms", 1, NULL, 'c'},
                                            {"healthy", 0, NULL, 'h'}, {0}};
    int c;

    opt.seed = r2_now_ns() % 1000000;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 's')
            opt.seconds = atoi(optarg);
        else if (c == 'e')
            opt.seed = strtoull(optarg, NULL, 10);
        else if (c == 'r')
            opt.ranks = atoi(optarg);
        else if (c == 'c')
            opt.comms = atoi(optarg);
        else if (c == 'h')
            opt.healthy = true;
        else
            return false;
    }
    opt.ranks = opt.ranks ? opt.ranks : 2 + (int)(opt.seed % 5);
    opt.comms = opt.comms ? opt.comms : 1 + (int)(opt.seed / 5 % 3);
    return optind == argc && opt.seconds > 0 && opt.ranks >= 2 && opt.ranks <= RANKS &&
           opt.comms >= 1 && opt.comms <= COMMS;
}

int main(int argc, char **argv)
{
    pid_t pids[RANKS];
    int bad = 0;

    if (!parse(argc, argv))
        return usage();
    setenv("R2CCL_SHM", "0", 0);
    setenv("R2CCL_LOG", "none", 0);
    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (sh == MAP_FAILED)
        return 1;
    for (me = 0; me < opt.ranks; me++) {
        pids[me] = fork();
        if (pids[me] == 0)
            rank_main();
    }
    sleep((unsigned)opt.seconds);
    atomic_store(&sh->stop, true);
    for (int r = 0; r < opt.ranks; r++) {
        int status = 0;

        if (pids[r] < 0 || waitpid(pids[r], &status, 0) != pids[r] || status) {
            fprintf(stderr, "direct: rank %d ended with status 0x%x\n", r, (unsigned)status);
            bad++;
        }
    }
    printf("direct: seed %" PRIu64 ", %d ranks, %d communicators: %" PRIu64 " operations, %" PRIu64
           " MiB, %d ranks failed\n",
           opt.seed, opt.ranks, opt.comms, atomic_load(&sh->operations),
           atomic_load(&sh->bytes) >> 20, bad);
    return bad || !atomic_load(&sh->operations);
}
