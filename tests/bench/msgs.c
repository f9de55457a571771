/* Messages through the engine between two processes, measured as rawsock measures raw TCP.
 *
 *   R2CCL_NICS=nic0,nic1 msgs --listen 10.250.0.2:7000
 *   R2CCL_NICS=nic0,nic1 msgs --dial 10.250.0.2:7000 --bytes 256M
 *
 * The receiver listens, the sender dials and says what to do: --size N per message (1M);
 * --outstanding N messages per connection (4); --conns N connections, homes in turn (1);
 * --bytes N per iteration; --iters N (3); --warmup N bytes before (16M); --poll-us N that the
 * caller sleeps when nothing moved (50; 0: yields and tries again, as NCCL does).
 * --seconds N runs one iteration until then, or until SIGTERM, instead.
 * --log FILE (receiver): when each message was done, 64-bit ns of CLOCK_MONOTONIC, in order.
 *
 * One thread drives all connections and tests the oldest message of each, as NCCL's proxy does.
 * Every 4096th byte carries a word that the receiver checks; exit code 1 when one is wrong.
 * The sender prints a line of JSON per iteration, as rawsock does. --stall N: exit code 3 after N
 * seconds without a message (30).
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include "engine/engine.h"
#include "harness.h"

#define MAX_CONNS 64
#define STRIDE 4096
#define LOG_MAX (64u << 20) /* entries; untouched pages cost nothing */

static struct order {
    uint64_t size, bytes, warmup;
    uint64_t outstanding, conns, iters, poll_us;
    double seconds; /* 0: bytes and iters hold */
} order = {.size = 1 << 20,
           .bytes = 256 << 20,
           .warmup = 16 << 20,
           .outstanding = 4,
           .conns = 1,
           .iters = 3,
           .poll_us = 50};

struct slot {
    struct r2_req *req;
    uint8_t *buf;
};

struct flow {
    struct r2_conn *conn;
    struct r2_mr *mr;
    uint8_t *memory;
    struct slot slots[R2_MAX_REQUESTS];
    uint64_t head, tail; /* messages done and posted since the start */
    uint64_t end;        /* messages to post in all, as far as is known */
};

static struct r2_ctx *ctx;
static struct flow flows[MAX_CONNS];
static int control, ndev;
static const char *where, *log_path;
static bool dial;
static uint64_t wrong, stall_s = 30, *log_times, log_count;
static volatile sig_atomic_t told_to_stop;

static uint64_t word(uint64_t flow, uint64_t seq, uint64_t at)
{
    return (seq + 1) * 0x9e3779b97f4a7c15u + flow * 0xbf58476d1ce4e5b9u + at;
}

static void stamp(uint8_t *buf, uint64_t flow, uint64_t seq)
{
    for (uint64_t at = 0; at + 8 <= order.size; at += STRIDE) {
        uint64_t w = word(flow, seq, at);

        memcpy(buf + at, &w, 8);
    }
}

static uint64_t check(const uint8_t *buf, uint64_t flow, uint64_t seq)
{
    uint64_t bad = 0;

    for (uint64_t at = 0; at + 8 <= order.size; at += STRIDE) {
        uint64_t w = word(flow, seq, at);

        bad += memcmp(buf + at, &w, 8) != 0;
    }
    return bad;
}

static void write_log(void)
{
    FILE *file = log_path && !dial ? fopen(log_path, "wb") : NULL;

    if (file && (fwrite(log_times, 8, log_count, file) != log_count || fclose(file)))
        bench_die("cannot write %s: %s", log_path, strerror(errno));
}

static struct r2_conn *make_conn(int index)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;
    struct r2_conn *c = NULL;
    int rc = 0;

    if (dial) {
        bench_get(control, handle, sizeof(handle));
    } else {
        rc = r2_engine_listen(ctx, index % ndev, handle, &l);
        if (rc)
            bench_die("listen: %s", strerror(-rc));
        bench_put(control, handle, sizeof(handle));
    }
    if (!WITHIN_MS(BENCH_MEET_S * 1000,
                   (rc = dial ? r2_engine_connect(ctx, index % ndev, handle, &c)
                              : r2_engine_accept(l, &c)) ||
                       c) ||
        rc)
        bench_die("connection %d: %s", index, strerror(rc ? -rc : ETIMEDOUT));
    if (l)
        r2_engine_close_listen(l);
    return c;
}

static void open_flow(int index)
{
    struct flow *f = &flows[index];
    size_t whole = order.size * order.outstanding;
    int rc;

    f->conn = make_conn(index);
    f->memory = aligned_alloc(4096, (whole + 4095) & ~(size_t)4095);
    if (!f->memory)
        bench_die("no memory for %zu bytes", whole);
    memset(f->memory, 0, whole);
    rc = r2_engine_reg(f->conn, f->memory, whole, 1, &f->mr);
    if (rc)
        bench_die("register: %s", strerror(-rc));
    for (uint64_t i = 0; i < order.outstanding; i++)
        f->slots[i].buf = f->memory + i * order.size;
}

static bool post(struct flow *f)
{
    struct slot *s = &f->slots[f->tail % order.outstanding];
    int rc;

    if (dial)
        stamp(s->buf, (uint64_t)(f - flows), f->tail);
    rc = dial ? r2_engine_isend(f->conn, s->buf, order.size, 0, f->mr, &s->req)
              : r2_engine_irecv(f->conn, s->buf, order.size, 0, f->mr, &s->req);
    if (rc)
        bench_die("post: %s", strerror(-rc));
    return s->req != NULL;
}

/* Posts what may be posted and takes what is done; true: something moved. */
static bool step(struct flow *f)
{
    struct slot *s = &f->slots[f->head % order.outstanding];
    bool any = false;
    size_t got = 0;
    int done = 0, rc;

    while (f->tail < f->end && f->tail - f->head < order.outstanding && post(f)) {
        f->tail++;
        any = true;
    }
    if (f->head == f->tail)
        return any;
    rc = r2_engine_test(s->req, &done, &got);
    if (rc)
        bench_die("message %llu: %s", (unsigned long long)f->head, strerror(-rc));
    if (!done)
        return any;
    if (!dial) {
        if (got != order.size)
            wrong++;
        wrong += check(s->buf, (uint64_t)(f - flows), f->head);
        if (log_times && log_count < LOG_MAX)
            log_times[log_count++] = bench_now();
    }
    f->head++;
    return true;
}

static void rest(uint64_t moved_at)
{
    if (bench_now() - moved_at > stall_s * UINT64_C(1000000000)) {
        fprintf(stderr, "msgs: no message for %llu s\n", (unsigned long long)stall_s);
        write_log();
        exit(3);
    }
    if (order.poll_us)
        pause_us((unsigned long)order.poll_us);
    else
        sched_yield();
}

/* Moves every flow up to its end. */
static void run_flows(void)
{
    uint64_t moved_at = bench_now();

    for (bool left = true; left;) {
        bool any = false;

        left = false;
        for (uint64_t i = 0; i < order.conns; i++) {
            any |= step(&flows[i]);
            left |= flows[i].head < flows[i].end;
        }
        if (any)
            moved_at = bench_now();
        else if (left)
            rest(moved_at);
    }
}

static uint64_t head_sum(void)
{
    uint64_t sum = 0;

    for (uint64_t i = 0; i < order.conns; i++)
        sum += flows[i].head;
    return sum;
}

static void extend(uint64_t bytes)
{
    uint64_t messages = (bytes + order.size - 1) / order.size;

    for (uint64_t i = 0; i < order.conns; i++)
        flows[i].end += messages / order.conns + (i < messages % order.conns);
}

/* iteration 0 is the warm-up. */
static void iterate(uint64_t iteration)
{
    uint64_t before = head_sum(), begin, wrong_before = wrong;
    struct bench_result r = {0};
    double cpu = bench_cpu();
    char go = 1;

    extend(iteration ? order.bytes : order.warmup);
    if (dial) {
        bench_get(control, &go, 1);
        run_flows();
        bench_get(control, &r, sizeof(r));
        if (iteration)
            bench_print((int)iteration, &r, bench_cpu() - cpu);
        wrong += r.wrong;
        return;
    }
    begin = bench_now();
    bench_put(control, &go, 1);
    run_flows();
    r.ns = bench_now() - begin;
    r.bytes = (head_sum() - before) * order.size;
    r.wrong = wrong - wrong_before;
    r.cpu_s = bench_cpu() - cpu;
    bench_put(control, &r, sizeof(r));
}

/* The sender stops by itself and says how many messages there were on each connection; what the
 * receiver has posted beyond that ends with the connections. */
static void run_until_told(void)
{
    uint64_t until = bench_now() + (uint64_t)(order.seconds * 1e9), ends[MAX_CONNS];
    uint64_t moved_at = bench_now();

    for (uint64_t i = 0; i < order.conns; i++)
        flows[i].end = UINT64_MAX;
    while (dial ? bench_now() < until && !told_to_stop
                : recv(control, ends, 1, MSG_PEEK | MSG_DONTWAIT) < 0) {
        bool any = false;

        for (uint64_t i = 0; i < order.conns; i++)
            any |= step(&flows[i]);
        if (any)
            moved_at = bench_now();
        else
            rest(moved_at);
    }
    for (uint64_t i = 0; i < order.conns && dial; i++)
        ends[i] = flows[i].tail;
    if (dial)
        bench_put(control, ends, sizeof(ends));
    else
        bench_get(control, ends, sizeof(ends));
    for (uint64_t i = 0; i < order.conns; i++)
        flows[i].end = ends[i];
    run_flows();
}

static void parse_one(int o)
{
    switch (o) {
    case 'l':
    case 'd':
        where = optarg;
        dial = o == 'd';
        break;
    case 'z':
        order.size = bench_number("--size", optarg, 1, 1 << 28);
        break;
    case 'o':
        order.outstanding = bench_number("--outstanding", optarg, 1, R2_MAX_REQUESTS);
        break;
    case 'c':
        order.conns = bench_number("--conns", optarg, 1, MAX_CONNS);
        break;
    case 'b':
        order.bytes = bench_number("--bytes", optarg, 1, UINT64_C(1) << 50);
        break;
    case 'w':
        order.warmup = bench_number("--warmup", optarg, 0, UINT64_C(1) << 40);
        break;
    case 'i':
        order.iters = bench_number("--iters", optarg, 1, 1000000);
        break;
    case 'p':
        order.poll_us = bench_number("--poll-us", optarg, 0, 1000000);
        break;
    case 'S':
        order.seconds = (double)bench_number("--seconds", optarg, 1, 86400);
        break;
    case 't':
        stall_s = bench_number("--stall", optarg, 1, 86400);
        break;
    case 'L':
        log_path = optarg;
        break;
    default:
        exit(2);
    }
}

static void parse(int argc, char **argv)
{
    static const struct option longs[] = {{"listen", 1, 0, 'l'},
                                          {"dial", 1, 0, 'd'},
                                          {"size", 1, 0, 'z'},
                                          {"outstanding", 1, 0, 'o'},
                                          {"conns", 1, 0, 'c'},
                                          {"bytes", 1, 0, 'b'},
                                          {"warmup", 1, 0, 'w'},
                                          {"iters", 1, 0, 'i'},
                                          {"stall", 1, 0, 't'},
                                          {"log", 1, 0, 'L'},
                                          {"seconds", 1, 0, 'S'},
                                          {"poll-us", 1, 0, 'p'},
                                          {0}};
    int o;

    while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1)
        parse_one(o);
    if (optind < argc)
        bench_usage("not an option:", argv[optind]);
    if (!where)
        bench_usage("needed: --listen or --dial; given", "neither");
}

static void on_term(int number)
{
    told_to_stop = number;
}

/* The sender closes first and the receiver takes note before either leaves: a process that exits
 * takes what it has not acknowledged with it. */
static void close_all(void)
{
    bench_barrier(control);
    for (uint64_t i = 0; i < order.conns; i++) {
        r2_engine_dereg(flows[i].conn, flows[i].mr);
        r2_engine_close(flows[i].conn);
        free(flows[i].memory);
    }
    bench_barrier(control);
    r2_engine_finalize(ctx);
}

int main(int argc, char **argv)
{
    int rc;

    parse(argc, argv);
    signal(SIGTERM, on_term);
    prctl(PR_SET_TIMERSLACK, 1000);
    control = bench_meet(where, dial);
    if (dial)
        bench_put(control, &order, sizeof(order));
    else
        bench_get(control, &order, sizeof(order));
    if (log_path)
        log_times = calloc(LOG_MAX, 8);
    rc = r2_engine_init(&ctx, 1, NULL);
    if (rc)
        bench_die("init: %s", strerror(-rc));
    r2_engine_devices(&ndev);
    if (ndev < 1)
        bench_die("no NIC: set R2CCL_NICS");
    for (int i = 0; i < (int)order.conns; i++)
        open_flow(i);
    if (order.seconds > 0)
        run_until_told();
    for (uint64_t i = 0; i <= order.iters && order.seconds <= 0; i++)
        iterate(i);
    close_all();
    write_log();
    if (wrong)
        fprintf(stderr, "msgs: %llu wrong words\n", (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
