/* Devices whose firmware is dead when the process starts: calls of the stand-in for libibverbs that
 * list or open devices, or ask one, do not come back; and which devices a process has open (rung 3;
 * verbs_bed.h says what it cannot prove).
 *
 * An engine starts once per process and waits 10 s for such a device. So each case is a process of
 * its own, and all of them wait side by side. */
#define _GNU_SOURCE
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "transport/verbs/verbs.h"

#define SIZE (256 * 1024)
#define BOUND_MS 10000u
#define AT_MOST_MS 30000u /* on a machine that is busy; five devices by turns would take 50 s */
#define CASE_S 55u        /* what a case may take */

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
static struct r2_ctx *first;

/* ---- what was said */

static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;
static char said[32768];

__attribute__((format(printf, 5, 6))) static void log_line(int level, unsigned long flags,
                                                           const char *file, int line,
                                                           const char *fmt, ...)
{
    size_t len;
    va_list ap;

    (void)level, (void)flags, (void)file, (void)line;
    pthread_mutex_lock(&said_lock);
    len = strlen(said);
    va_start(ap, fmt);
    vsnprintf(said + len, sizeof(said) - len, fmt, ap);
    va_end(ap);
    pthread_mutex_unlock(&said_lock);
}

static bool told(const char *text)
{
    bool found;

    r2_log_settle(10 * R2_NS_PER_S);
    pthread_mutex_lock(&said_lock);
    found = strstr(said, text) != NULL;
    pthread_mutex_unlock(&said_lock);
    return found;
}

/* One warning: which device, how long it was waited for, what to do. */
static void told_left_out(const char *device)
{
    char text[128];

    snprintf(text, sizeof(text), "RDMA device %s has not answered for 10 s", device);
    CHECK_MSG(told(text), "\"%s\" is missing in \"%s\"", text, said);
    snprintf(text, sizeof(text), "NCCL_IB_HCA=^=%s", device);
    CHECK_MSG(told(text), "\"%s\" is missing in \"%s\"", text, said);
    CHECK(r2_verbs_left_out(device));
}

/* ---- parts of cases */

/* Milliseconds that it took. */
static uint64_t init(const char *nics, const char *devices, const char *hang)
{
    uint64_t begin;

    setenv("R2CCL_NICS", nics, 1);
    setenv("R2_FAKEVERBS", devices, 1);
    setenv("R2_FAKEVERBS_HANG", hang, 1);
    begin = r2_now_ns();
    CHECK_EQ(r2_engine_init(&first, 1, log_line), 0);
    return (r2_now_ns() - begin) / R2_NS_PER_MS;
}

static void waited(uint64_t ms)
{
    CHECK_GE(ms, BOUND_MS - 500);
    CHECK_LE(ms, AT_MOST_MS);
}

static uint64_t init_two(const char *hang)
{
    return init("127.0.1.1,127.0.2.1", "fv0=127.0.1.1,fv1=127.0.2.1", hang);
}

static bool rdma(int nic)
{
    struct r2_rdma_info info;

    return r2_eng.ops->rdma(nic, &info);
}

/* A connection to ourselves that carries a message; `paths` of it are queue pairs. */
static void job(int paths)
{
    bed_open(&bed, paths);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 1);
    CHECK_EQ(bed_paths(bed.tx) > 0, paths > 0);
}

static void job_ends(void)
{
    bed_message(&bed, &memory, 2);
    bed_finish(&bed, &memory);
    CHECK_EQ(r2_engine_finalize(first), 0);
}

/* Command threads, by their name. */
static int threads(void)
{
    DIR *d = opendir("/proc/self/task");
    struct dirent *e;
    int n = 0;

    CHECK(d);
    while ((e = readdir(d))) {
        char path[300], name[32] = "";
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
        f = fopen(path, "re");
        n += f && fgets(name, sizeof(name), f) && strcmp(name, "r2ccl-verbs\n") == 0;
        if (f)
            fclose(f);
    }
    closedir(d);
    return n;
}

/* They were opened after all, and closed again, and their threads are gone. */
static void late_ones_go(int closed, int left)
{
    WHILE_MS (BED_WAIT_MS, (bed_script("closed") < closed || threads() > left))
        ;
    CHECK_EQ(bed_script("closed"), closed);
    CHECK_EQ(threads(), left);
}

/* ---- cases, each in its process */

/* Whichever call it is, of any number of devices: one bound for all. The living one carries the
 * job. They answer much later: nobody takes notice but their own threads, which let go of them. */
static void any_call(void)
{
    waited(init("127.0.1.1,127.0.2.1,127.0.3.1,127.0.4.1,127.0.5.1,127.0.6.1",
                "fv0=127.0.1.1,fv1=127.0.2.1,fv2=127.0.3.1,fv3=127.0.4.1,fv4=127.0.5.1,"
                "fv5=127.0.6.1",
                "fv0 open,fv1 pd,fv2 device,fv3 port,fv4 gid"));
    for (int i = 0; i < 5; i++)
        told_left_out((const char *[]){"fv0", "fv1", "fv2", "fv3", "fv4"}[i]);
    CHECK(!r2_verbs_left_out("fv5"));
    job(1);
    for (int nic = 0; nic < 6; nic++)
        CHECK_EQ(rdma(nic), nic == 5);
    CHECK_EQ(threads(), 6);
    CHECK(!told("too late"));
    bed_script("!unhang");
    late_ones_go(5, 1);
    CHECK(told("RDMA device fv0 has answered too late"));
    for (int nic = 0; nic < 6; nic++)
        CHECK_EQ(rdma(nic), nic == 5);
    job_ends();
}

/* The last context goes while the device hangs, which answers after that; the next one finds the
 * process as it was. */
static void finalized_meanwhile(void)
{
    waited(init_two("fv0 pd"));
    CHECK_EQ(r2_engine_finalize(first), 0);
    bed_script("!unhang");
    late_ones_go(1, 1);
    CHECK_EQ(r2_engine_init(&first, 2, log_line), 0);
    job(1);
    CHECK(!rdma(0) && rdma(1));
    job_ends();
}

/* The devices are being opened. */
static void until_begun(void)
{
    AWAIT(threads());
}

static void *answers_soon(void *arg)
{
    (void)arg;
    until_begun();
    bed_ms(1500);
    bed_script("!unhang");
    return NULL;
}

/* Slow is not dead, and nobody waits any longer than the slowest takes. */
static void slow(void)
{
    pthread_t thread;
    uint64_t ms;

    CHECK_EQ(pthread_create(&thread, NULL, answers_soon, NULL), 0);
    ms = init_two("fv0 open,fv1 port");
    pthread_join(thread, NULL);
    CHECK_LT(ms, BOUND_MS - 500);
    CHECK(!told("has not answered"));
    job(2);
    job_ends();
}

/* A port that does not answer keeps the device's only thread, and with it the device: it is left
 * out, with its other port. It is taken out of the node, and then the question returns. */
static void dead_port(void)
{
    waited(init("127.0.1.1,127.0.2.1", "fv0=127.0.1.1+127.0.2.1", "fv0 port2"));
    told_left_out("fv0");
    job(0);
    CHECK(!rdma(0) && !rdma(1));
    bed_script("!remove fv0");
    bed_script("!unhang");
    late_ones_go(1, 0);
    CHECK(told("RDMA device fv0, which this process has left out, "));
    CHECK(!told("a process that starts now uses it"));
    job_ends();
}

/* A port that is not wanted is not asked. */
static void dead_port_left_out(void)
{
    setenv("NCCL_IB_HCA", "^fv0:2", 1);
    CHECK_LT(init("127.0.1.1,127.0.2.1", "fv0=127.0.1.1+127.0.2.1", "fv0 port2"), BOUND_MS - 500);
    CHECK(!told("has not answered"));
    job(1);
    CHECK(rdma(0) && !rdma(1));
    job_ends();
}

/* A port that the user names is no NIC then; that is no reason to have none. */
static void named_port(void)
{
    int n;

    waited(init("127.0.1.1,fvib:1", "fvib=ib:127.0.3.1", "fvib port1"));
    told_left_out("fvib");
    CHECK_EQ(r2_engine_devices(&n), 0);
    CHECK_EQ(n, 1);
    CHECK(!told("no NICs"));
    job(0);
    job_ends();
}

/* Nor is it where the driver says at once that the device is dead. */
static void named_failed_port(void)
{
    int n;

    CHECK_LT(init("127.0.1.1,fvib:1", "fvib=ib:127.0.3.1", "fvib ports-fail"), BOUND_MS - 500);
    CHECK(told("RDMA device fvib does not report its ports"));
    CHECK_EQ(r2_engine_devices(&n), 0);
    CHECK_EQ(n, 1);
    CHECK(!told("no NICs"));
    job(0);
    job_ends();
}

/* The list of devices does not come, which a thread of its own asks for: the job has sockets. The
 * list comes much later, and nobody takes notice. */
static void no_list(void)
{
    waited(init_two("list 1"));
    CHECK_MSG(told("the list of RDMA devices has not come for 10 s"), "%s", said);
    CHECK(r2_verbs_left_out("fv0"));
    job(0);
    CHECK(!rdma(0) && !rdma(1));
    bed_script("!unhang");
    AWAIT(told("the list of RDMA devices has come too late"));
    CHECK_EQ(threads(), 0);
    job_ends();
}

/* Each device keeps a list of its own (hca.c): the second one's does not come. What there was until
 * then is used. */
static void half_a_list(void)
{
    waited(init_two("list 3"));
    CHECK_MSG(told("the list of RDMA devices has not come for 10 s"), "%s", said);
    bed_script("!unhang"); /* who looks for a device later asks for lists, too */
    job(1);
    CHECK(rdma(0) && !rdma(1));
    late_ones_go(0, 1);
    job_ends();
}

/* More devices than are used, of which some fail: no more are opened than that takes. */
static void many(void)
{
    char text[1024];
    int len = 0;

    for (int i = 0; i < R2_MAX_HCAS + 4; i++)
        len += snprintf(text + len, sizeof(text) - (size_t)len, "%sfv%d=127.0.%d.1", i ? "," : "",
                        i, i + 1);
    CHECK_LT(init("127.0.18.1,127.0.19.1", text, "fv0 fail,fv1 fail"), BOUND_MS - 500);
    CHECK(told("RDMA device fv1 cannot be opened") && !told("RDMA device fv2 cannot be opened"));
    CHECK_EQ(r2_verbs.n_slots, R2_MAX_HCAS);
    job(1);
    CHECK(rdma(0) && !rdma(1)); /* fv17 is the last one of them */
    late_ones_go(0, R2_MAX_HCAS);
    job_ends();
}

/* Waits for a child's end, and makes one at that time. */
static bool ended(pid_t pid, int *status, uint64_t until)
{
    pid_t found = 0;

    while (found == 0 && r2_now_ns() < until) {
        bed_ms(1);
        found = waitpid(pid, status, WNOHANG);
    }
    if (found == 0) {
        kill(pid, SIGKILL);
        waitpid(pid, status, 0);
    }
    return found == pid;
}

/* In a child: what its parent has open of devices. */
static int devices_open(void)
{
    int n = 0;

    for (int i = 0; i < r2_verbs.n_slots; i++) {
        const struct ibv_context *ctx = r2_verbs.slots[i].now->ctx;

        n += fcntl(ctx->cmd_fd, F_GETFD) >= 0;
        n += fcntl(ctx->async_fd, F_GETFD) >= 0;
    }
    return n;
}

static void child_has_none(void)
{
    int status = -1;
    pid_t pid = fork();

    if (pid == 0)
        _exit(devices_open());
    CHECK_GT(pid, 0);
    CHECK(ended(pid, &status, r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS));
    CHECK_EQ(status, 0);
    CHECK_EQ(devices_open(), 4);
}

/* A child holds no device: a driver that waits for its users would wait for it. Before the engine
 * is started, and after. */
static void forked(void)
{
    init_two("");
    child_has_none();
    job(2);
    child_has_none();
    job_ends();
}

static void *init_thread(void *ms)
{
    *(uint64_t *)ms = init_two("fv0 open");
    return NULL;
}

/* Another thread forks while the first one waits: the child is told at once that the engine is not
 * for it. */
static void forked_meanwhile(void)
{
    uint64_t ms = 0;
    pthread_t thread;
    int status = -1;
    pid_t pid;

    CHECK_EQ(pthread_create(&thread, NULL, init_thread, &ms), 0);
    until_begun();
    pid = fork();
    if (pid == 0) {
        struct r2_ctx *ctx;

        r2_engine_called_by(0, 0); /* as NCCL's first call does */
        _exit(r2_engine_init(&ctx, 1, NULL) == -EPERM ? 0 : 1);
    }
    CHECK_GT(pid, 0);
    CHECK(ended(pid, &status, r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS));
    CHECK_EQ(status, 0);
    pthread_join(thread, NULL);
    waited(ms);
    job(1);
    job_ends();
}

/* ---- all of them at once */

struct one {
    void (*run)(void);
    const char *name;
    pid_t pid;
    int done; /* read end: a byte at the end of the case, before that of its process */
};

static struct one cases[] = {
    {any_call, "any_call", 0, -1},
    {finalized_meanwhile, "finalized_meanwhile", 0, -1},
    {slow, "slow", 0, -1},
    {dead_port, "dead_port", 0, -1},
    {dead_port_left_out, "dead_port_left_out", 0, -1},
    {named_port, "named_port", 0, -1},
    {named_failed_port, "named_failed_port", 0, -1},
    {no_list, "no_list", 0, -1},
    {half_a_list, "half_a_list", 0, -1},
    {many, "many", 0, -1},
    {forked, "forked", 0, -1},
    {forked_meanwhile, "forked_meanwhile", 0, -1},
};
#define CASES (sizeof(cases) / sizeof(cases[0]))

static void begin(struct one *c)
{
    int ends[2];

    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    fflush(NULL);
    c->pid = fork();
    CHECK_GE(c->pid, 0);
    if (c->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(0);
        check_name = c->name;
        c->run();
        CHECK_EQ(write(ends[1], "d", 1), 1);
        exit(0);
    }
    close(ends[1]);
    c->done = ends[0];
}

/* Within the time: 1 its end was written, 0 it ended without, -1 neither. */
static int read_end(const struct one *c, uint64_t until)
{
    struct pollfd p = {.fd = c->done, .events = POLLIN};
    uint64_t now = r2_now_ns();
    char byte;

    if (poll(&p, 1, now < until ? (int)((until - now) / R2_NS_PER_MS) : 0) <= 0)
        return -1;
    return read(c->done, &byte, 1) == 1;
}

TEST(at_once)
{
    uint64_t until;
    int bad = 0;

    bed_library(); /* or skip; the processes have it from here */
    for (size_t i = 0; i < CASES; i++)
        begin(&cases[i]);
    until = r2_now_ns() + CASE_S * R2_NS_PER_S;
    for (size_t i = 0; i < CASES; i++) {
        struct one *c = &cases[i];
        int end = read_end(c, until), status = -1;
        uint64_t exits = r2_now_ns() + (end < 0 ? 0 : BED_WAIT_MS * R2_NS_PER_MS);

        if (ended(c->pid, &status, exits) && end == 1 && status == 0)
            continue;
        fprintf(stderr, "%s: %s, status 0x%x\n", c->name,
                end < 0    ? "did not come to its end"
                : end == 0 ? "failed"
                           : "its process did not end well",
                (unsigned)status);
        bad++;
    }
    CHECK_EQ(bad, 0);
}

#endif
