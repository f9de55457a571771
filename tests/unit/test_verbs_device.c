/* Memory of a device that no thread can touch: a DMA buffer whose address is not even mapped here,
 * so that whoever touches it dies. The stand-in reaches it through its descriptor. It shows what
 * was written only after a read by the same device, as the way to a GPU may. (Rung 3; verbs_bed.h
 * says what it cannot prove; nothing here proves anything about GPUs.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "verbs_bed.h"

#define SIZE (256 * 1024)

struct device {
    uint8_t *address; /* not mapped */
    uint8_t *view;    /* the device's side */
    struct r2_mr *mr;
};

/* Memory is registered by its address, as a peer memory module lets it, not as a DMA buffer. The
 * stand-in is told which addresses the module knows. */
static bool peer_memory;

/* Is the module loaded? */
int access(const char *name, int type)
{
    if (strcmp(name, "/sys/module/nvidia_peermem") == 0)
        return peer_memory ? 0 : -1;
    return faccessat(AT_FDCWD, name, type, 0);
}

static int kinds(void)
{
    return R2_MEMORY_HOST | R2_MEMORY_DMABUF | (peer_memory ? R2_MEMORY_DEVICE : 0);
}

static struct bed bed;
static struct device out, in;
static int driver_calls, driver_result;

/* The GPU's driver. */
__attribute__((visibility("default"))) int cuFlushGPUDirectRDMAWrites(int target, int scope);
int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    CHECK_EQ(target, 0);
    CHECK_EQ(scope, 100);
    driver_calls++;
    if (driver_result == 0)
        bed_script("show");
    return driver_result;
}

static void reg(struct r2_conn *c, struct device *d, int fd)
{
    char text[64];

    if (!peer_memory) {
        CHECK_EQ(r2_engine_reg_dmabuf(c, d->address, SIZE, 2, 4096, fd, &d->mr), 0);
        return;
    }
    snprintf(text, sizeof(text), "peer %p %d %p", (void *)d->address, SIZE, (void *)d->view);
    bed_script(text);
    CHECK_EQ(r2_engine_reg(c, d->address, SIZE, 2, &d->mr), 0);
}

static void device_new(struct r2_conn *c, struct device *d)
{
    int fd = memfd_create("device", MFD_CLOEXEC);

    CHECK_GE(fd, 0);
    CHECK_EQ(ftruncate(fd, SIZE + 8192), 0);
    d->view = mmap(NULL, SIZE + 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    d->address = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(d->view != MAP_FAILED && d->address != MAP_FAILED);
    d->view += 4096; /* an offset into the object */
    reg(c, d, fd);
    close(fd); /* as NCCL does at once */
}

static void begin(void)
{
    setenv("R2_FAKEVERBS_CHAOS", "seed=1,gpu=1", 1);
    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_memory(0), kinds());
    device_new(bed.tx, &out);
    device_new(bed.rx, &in);
    for (size_t i = 0; i < SIZE; i++)
        out.view[i] = (uint8_t)((i * 7 + i / 251) % 255 + 1);
    memset(in.view, 0, SIZE);
    driver_calls = driver_result = 0;
}

static void post(struct r2_req **send, struct r2_req **recv)
{
    *send = *recv = NULL;
    CHECK_EQ(r2_engine_irecv(bed.rx, in.address, SIZE, 0, in.mr, recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out.address, SIZE, 0, out.mr, send), 0);
    CHECK(*send && *recv);
}

static void finish(void)
{
    CHECK_EQ(r2_engine_dereg(bed.rx, in.mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out.mr), 0);
    bed_close(&bed);
}

/* 1, 0 or -errno of the flush; 1 without a request. */
static int flush(void)
{
    struct r2_req *req = NULL;
    int rc = r2_engine_iflush(bed.rx, in.address, in.mr, &req);

    if (rc || !req)
        return rc ? rc : 1;
    return bed_test(req, BED_WAIT_MS);
}

/* NCCL is told of device memory only where every NIC can reach it, and only if it was asked for. */
static int kinds_with(const char *devices, const char *setting)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct r2_ctx *ctx;

        setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
        setenv("R2_FAKEVERBS", devices, 1);
        setenv("R2CCL_GPU_MEMORY", setting, 1);
        bed_library();
        _exit(r2_engine_init(&ctx, 1, NULL) ? 99 : (int)r2_engine_memory(0));
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* This test and the next one fork: there is no engine yet. */
TEST(announced)
{
    bed_library(); /* or skip */
    for (int peer = 1; peer >= 0; peer--) {
        peer_memory = peer;
        CHECK_EQ(kinds_with("fv0=127.0.1.1,fv1=127.0.2.1", "direct"), kinds());
        CHECK_EQ(kinds_with("fv0=127.0.1.1", "direct"), R2_MEMORY_HOST);
        CHECK_EQ(kinds_with("fv0=127.0.1.1,fv1=127.0.2.1", "host"), R2_MEMORY_HOST);
    }
}

static void test_flush_shows_all(void);
static void test_failed_nic(void);

/* In a process of its own: what a device can do is asked once. */
TEST(peer_memory)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        peer_memory = true;
        test_flush_shows_all();
        test_failed_nic();
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
}

/* What arrived is not to be seen before the flush, and all of it is behind it: each NIC that wrote
 * was asked. Nothing to flush: no request. */
TEST(flush_shows_all)
{
    struct r2_req *send, *recv;
    size_t hidden = 0;

    begin();
    post(&send, &recv);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    for (size_t i = 0; i < SIZE; i++)
        hidden += in.view[i] != out.view[i];
    CHECK_EQ(hidden, SIZE);
    CHECK_EQ(flush(), 1);
    CHECK_MEM(in.view, out.view, SIZE);
    CHECK_EQ(driver_calls, 0);
    CHECK_EQ(flush(), 1);
    finish();
}

/* A flush that is under way has shown nothing yet: of two messages that were in before the first
 * flush was asked for, the second one's is no sooner done. */
TEST(two_flushes)
{
    struct r2_req *send, *recv, *first = NULL, *second = NULL;

    begin();
    for (int i = 0; i < 2; i++) {
        post(&send, &recv);
        CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
        CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    }
    bed_script("!port fv0 1 blackhole"); /* it does not answer yet */
    bed_script("!port fv1 1 blackhole");
    CHECK_EQ(r2_engine_iflush(bed.rx, in.address, in.mr, &first), 0);
    CHECK_EQ(r2_engine_iflush(bed.rx, in.address, in.mr, &second), 0);
    CHECK(memcmp(in.view, out.view, SIZE) != 0);
    CHECK(first && second);
    CHECK_EQ(bed_test(second, BED_WAIT_MS), 1);
    CHECK_MEM(in.view, out.view, SIZE);
    CHECK_EQ(bed_test(first, BED_WAIT_MS), 1);
    CHECK_EQ(flush(), 1); /* nothing left to show */
    bed_script("!port fv0 1 up");
    bed_script("!port fv1 1 up");
    finish();
}

/* A NIC that wrote cannot be asked any more: the driver stands in; if it cannot, it is an error and
 * never a wrong value. */
TEST(failed_nic)
{
    struct r2_req *send, *recv;

    begin();
    for (int works = 1; works >= 0; works--) {
        post(&send, &recv);
        CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
        CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
        CHECK(memcmp(in.view, out.view, SIZE) != 0);
        bed_script("!port fv0 1 blackhole");
        bed_script("!port fv1 1 blackhole");
        driver_result = works ? 0 : 999;
        CHECK_EQ(flush(), works ? 1 : -EIO);
        CHECK_GT(driver_calls, 0);
        if (works)
            CHECK_MEM(in.view, out.view, SIZE);
        bed_script("show"); /* not only when what failed is taken apart */
        memset(in.view, 0, SIZE);
        bed_script("!port fv0 1 up");
        bed_script("!port fv1 1 up");
        bed_until_paths(bed.tx, 2);
        for (int ms = 0; ms < 2000; ms += 10) { /* flushes work again: made anew */
            post(&send, &recv);
            CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
            CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
            driver_result = 0;
            driver_calls = 0;
            CHECK_EQ(flush(), 1);
            if (!driver_calls)
                break;
            bed_ms(10);
        }
        CHECK_EQ(driver_calls, 0);
        CHECK_MEM(in.view, out.view, SIZE);
        memset(in.view, 0, SIZE);
    }
    finish();
}

/* The flush that is under way, and one behind it, while its NICs' queue pairs are made anew: by
 * `change` ("" waits until all paths have ended), after which `attr` of all queue pairs, those of
 * flushes among them, is `value`. */
static void changed_meanwhile(const char *const *change, const char *attr, int value)
{
    struct r2_req *send, *recv, *first = NULL, *second = NULL;

    post(&send, &recv);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    bed_script("!chaos late_cqe=1000,late_us=300000"); /* it answers late */
    CHECK_EQ(r2_engine_iflush(bed.rx, in.address, in.mr, &first), 0);
    CHECK(first);
    for (; *change; change++) {
        bed_script(*change);
        AWAIT(**change || !bed_paths(bed.tx));
    }
    bed_ms(50);
    CHECK_EQ(r2_engine_iflush(bed.rx, in.address, in.mr, &second), 0);
    bed_script("!chaos late_cqe=0");
    if (second)
        CHECK_EQ(bed_test(second, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(first, BED_WAIT_MS), 1);
    CHECK_EQ(driver_calls, 0);
    CHECK_MEM(in.view, out.view, SIZE);
    memset(in.view, 0, SIZE);
    AWAIT(bed_attr(attr) == value);
    r2_nicstate_forgive(0, r2_now_ns());
    r2_nicstate_forgive(1, r2_now_ns());
    bed_until_paths(bed.tx, 2);
}

static void shown(void)
{
    struct r2_req *send, *recv;

    memset(in.view, 0, SIZE);
    post(&send, &recv);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_EQ(flush(), 1);
    CHECK_EQ(driver_calls, 0);
    CHECK_MEM(in.view, out.view, SIZE);
}

/* A port has another partition key, or its address is another entry of the table: the queue pair of
 * its flushes is made anew with that, like those of paths, and no flush fails for it. */
TEST(port_is_another)
{
    static const char *const keys[] = {"!pkey fv0 1 0 0x8003", "!pkey fv1 1 0 0x8003", NULL};
    static const char *const entries[] = {"!gid fv0 1 1 0.0.0.0",   "!gid fv1 1 1 0.0.0.0",   "",
                                          "!gid fv0 1 3 127.0.1.1", "!gid fv1 1 3 127.0.2.1", NULL};
    static const char *const back[] = {"!gid fv0 1 1 127.0.1.1", "!gid fv1 1 1 127.0.2.1", NULL};

    begin();
    changed_meanwhile(keys, "pkey", 0x8003);
    changed_meanwhile(entries, "sgid_index", 3);
    shown();
    for (int i = 0; back[i]; i++)
        bed_script(back[i]);
    finish();
}

/* The address stands in two entries, then only in the second: paths leave the first. */
TEST(address_in_another_entry)
{
    static const char *const moves[] = {"!gid fv0 1 3 127.0.1.1", "!gid fv1 1 3 127.0.2.1",
                                        "!gid fv0 1 1 0.0.0.0", "!gid fv1 1 1 0.0.0.0", NULL};
    static const char *const back[] = {"!gid fv0 1 1 127.0.1.1", "!gid fv1 1 1 127.0.2.1",
                                       "!gid fv0 1 3 0.0.0.0", "!gid fv1 1 3 0.0.0.0", NULL};

    begin();
    for (int i = 0; moves[i]; i++)
        bed_script(moves[i]);
    AWAIT(bed_attr("sgid_index") == 3);
    bed_until_paths(bed.tx, 2);
    shown();
    for (int i = 0; back[i]; i++)
        bed_script(back[i]);
    AWAIT(bed_attr("sgid_index") == 1);
    finish();
}

static void pkeys(int key)
{
    char text[64];

    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof(text), "!pkey fv%d 1 0 %d", i, key);
        bed_script(text);
    }
}

static void until_attr(const char *name, int value)
{
    AWAIT(bed_attr(name) == value);
}

static void paths_again(void)
{
    r2_nicstate_forgive(0, r2_now_ns());
    r2_nicstate_forgive(1, r2_now_ns());
    bed_until_paths(bed.tx, 2);
}

/* The answer of a NIC's flush never comes, and its port changes before that is known: the driver
 * stands in for that one, and the NIC answers the next ones. */
TEST(answer_never_comes)
{
    struct r2_req *send, *recv, *first = NULL;

    begin();
    for (int key = 0x8003; key < 0x8005; key++) {
        post(&send, &recv);
        CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
        CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
        bed_script("!chaos lost_cqe=1000000");
        CHECK_EQ(r2_engine_iflush(bed.rx, in.address, in.mr, &first), 0);
        CHECK(first);
        bed_ms(30);
        bed_script("!chaos lost_cqe=0");
        pkeys(key);
        CHECK_EQ(bed_test(first, BED_WAIT_MS), 1);
        CHECK_EQ(driver_calls, 1);
        driver_calls = 0;
        until_attr("pkey", key);
        paths_again();
        shown();
    }
    finish();
}

/* There are some, and none was given anything that it choked on. */
static void sockets_stand_by(void)
{
    struct r2_peer *p = bed.tx->peer;
    int up = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->transport != R2_VIA_TCP)
            continue;
        up += r2_path_is_up(p->paths[i]);
        CHECK_EQ(p->paths[i]->attempt.err, 0);
    }
    r2_peer_unlock(p);
    CHECK_GT(up, 0);
}

/* All ports gone: sockets come up as the last resort, and this memory is not for them. It waits; a
 * port that comes back carries it. */
TEST(waits_for_a_nic)
{
    struct r2_req *send, *recv;

    begin();
    bed_script("!port fv0 1 down");
    bed_script("!port fv1 1 down");
    AWAIT(!bed_paths(bed.tx));
    r2_peer_lock(bed.tx->peer); /* from an outage long ago, whose end nobody looked at */
    bed.tx->stuck_since = r2_now_ns() - 10 * R2_NS_PER_S;
    r2_peer_unlock(bed.tx->peer);
    post(&send, &recv);
    CHECK_EQ(bed_test(recv, 700), 0);
    sockets_stand_by();
    bed_script("!port fv1 1 up");
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_EQ(flush(), 1);
    CHECK_MEM(in.view, out.view, SIZE);
    bed_script("!port fv0 1 up");
    finish();
}

/* ... and if none comes back, both sides get an error. */
TEST(no_nic_comes_back)
{
    struct r2_req *send, *recv;
    uint64_t begun;

    begin();
    bed_script("!port fv0 1 down");
    bed_script("!port fv1 1 down");
    begun = r2_now_ns();
    post(&send, &recv);
    CHECK_LT(bed_test(send, BED_WAIT_MS), 0);
    CHECK_GE(r2_now_ns() - begun, 2 * R2_NS_PER_S);
    CHECK_LT(bed_test(recv, BED_WAIT_MS), 0);
    finish();
    bed_script("!port fv0 1 up");
    bed_script("!port fv1 1 up");
}

/* Both NICs' queue pairs failed too often to be tried soon; sockets stand in, which are nothing for
 * this memory: so they are tried all the same. */
TEST(none_is_left_alone)
{
    struct r2_req *send, *recv;

    begin();
    for (int turn = 0; turn < 5; turn++) {
        bed_script("!port fv0 1 down");
        bed_script("!port fv1 1 down");
        AWAIT(!bed_paths(bed.tx));
        bed_ms(100);
        bed_script("!port fv0 1 up");
        bed_script("!port fv1 1 up");
        AWAIT(bed_paths(bed.tx));
        post(&send, &recv);
        CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
        CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
        CHECK_EQ(flush(), 1);
        CHECK_MEM(in.view, out.view, SIZE);
        memset(in.view, 0, SIZE);
    }
    paths_again();
    finish();
}

/* A device that registers late finds the descriptor that its caller has closed long ago. */
TEST(late_registration)
{
    uint32_t keys[R2_WIRE_MAX_NICS];
    struct device more;

    begin();
    bed_script("!hang fv0 1");
    device_new(bed.rx, &more);
    CHECK_EQ(r2_eng.ops->remote_keys(more.mr->keys, keys), 2);
    CHECK_EQ(keys[0], 0);
    bed_script("!hang fv0 0");
    AWAIT((r2_eng.ops->remote_keys(more.mr->keys, keys), keys[0]));
    CHECK(keys[1]);
    CHECK_EQ(r2_engine_dereg(bed.rx, more.mr), 0);
    finish();
}

static void *answers_later(void *arg)
{
    (void)arg;
    bed_ms(300);
    bed_script("!hang fv1 0");
    return NULL;
}

/* A device whose firmware is dead takes no time from the others: these register as long as they
 * need, and the memory is theirs. */
TEST(one_dead_device)
{
    uint32_t keys[R2_WIRE_MAX_NICS] = {0};
    struct device first, second;
    pthread_t thread;

    begin();
    bed_script("!hang fv0 1");
    device_new(bed.rx, &first); /* it is known to be late from now on */
    bed_script("!hang fv1 1");
    CHECK_EQ(pthread_create(&thread, NULL, answers_later, NULL), 0);
    device_new(bed.rx, &second);
    pthread_join(thread, NULL);
    CHECK_EQ(r2_eng.ops->remote_keys(second.mr->keys, keys), 2);
    CHECK(!keys[0] && keys[1]);
    bed_script("!hang fv0 0");
    AWAIT((r2_eng.ops->remote_keys(second.mr->keys, keys), keys[0]));
    CHECK_EQ(r2_engine_dereg(bed.rx, first.mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.rx, second.mr), 0);
    finish();
}

/* A device that failed destroys no queue pair of flushes. When it is taken out of the node at last,
 * nothing of it is kept, so that it is closed. */
TEST(let_go_when_removed)
{
    begin();
    bed_script("!refuse fv0 destroy 1000");
    bed_script("!fatal fv0");
    bed_ms(1500); /* longer than its removal is waited for */
    CHECK_EQ(bed_script("closed"), 0);
    bed_script("!remove fv0");
    AWAIT(bed_script("closed") == 1);
    bed_script("!restore fv0");
    finish();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NO_PATH_TIMEOUT", "3s", 1);
    setenv("R2CCL_GPU_MEMORY", "direct", 1);
    return check_main(argc, argv);
}
