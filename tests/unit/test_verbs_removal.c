/* Devices that are taken out and put in again, under one process's engine (rung 3; verbs_bed.h says
 * what it cannot prove). Memory, queue pairs, threads and descriptors of the old device are let go
 * of. What is registered is registered with the new one, even if commands of the old one never come
 * back. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (256 * 1024)
#define TURNS 12

static struct bed bed;
static uint8_t out[SIZE], in[SIZE];
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};

static int entries(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;

    CHECK(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* Channels of completion queues and of devices' events: the stand-in's are event descriptors. */
static int channels(void)
{
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    int n = 0;

    CHECK(d);
    while ((e = readdir(d))) {
        char path[300], to[64] = "";

        snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
        n += readlink(path, to, sizeof(to) - 1) > 0 && strstr(to, "eventfd") != NULL;
    }
    closedir(d);
    return n;
}

static uint32_t key(const struct r2_mr *mr, int nic)
{
    uint32_t keys[R2_WIRE_MAX_NICS];

    r2_eng.ops->remote_keys(mr->keys, keys);
    return keys[nic];
}

static void until_key(const struct r2_mr *mr, int nic, bool there)
{
    AWAIT((key(mr, nic) != 0) == there);
}

static void begin(void)
{
    bed_open(&bed, 2);
    bed_register(&bed, &memory);
}

static void finish(void)
{
    bed_finish(&bed, &memory);
}

static void message(int turn)
{
    bed_message(&bed, &memory, turn);
}

static bool there(int slot)
{
    struct r2_hca *hca = r2_hca_at(slot);

    if (hca)
        r2_hca_unuse(hca);
    return hca != NULL;
}

/* Whatever was registered before, meanwhile or after has a key where a device is, and none where
 * there is none; the new device's keys are its own. */
TEST(keys)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    uint32_t old;

    begin();
    old = key(memory.in_mr, 1);
    CHECK(key(memory.in_mr, 0) && old);
    bed_script("!remove fv1");
    until_key(memory.in_mr, 1, false);
    CHECK(key(memory.in_mr, 0));
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    CHECK(key(mr, 0));
    CHECK_EQ(key(mr, 1), 0);
    message(1);
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    until_key(mr, 1, true);
    CHECK(key(memory.in_mr, 1) != old);
    bed_until_paths(bed.tx, 2);
    message(2);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    finish();
}

/* As often as you like: threads and descriptors do not grow with it. Both devices at once as well:
 * what is posted then waits for one of them, or goes by sockets. */
TEST(again_and_again)
{
    int before = 0, threads = 0;

    begin();
    for (int i = 0; i < TURNS; i++) {
        bed_script(i % 3 == 0 ? "!remove fv0" : i % 3 == 1 ? "!remove fv1" : "!vanish fv0");
        if (i % 4 == 3)
            bed_script("!remove fv1");
        until_key(memory.in_mr, i % 3 == 1, false);
        message(i);
        bed_script("!restore fv0");
        bed_script("!restore fv1");
        until_key(memory.in_mr, 0, true);
        until_key(memory.in_mr, 1, true);
        for (int nic = 0; nic < 2; nic++)
            r2_nicstate_forgive(nic, r2_now_ns()); /* it flaps, and would be left alone */
        bed_until_paths(bed.tx, 2);
        message(i + 100);
        if (i == 3) {
            bed_ms(700);
            before = channels();
            threads = entries("/proc/self/task");
        }
    }
    AWAIT(entries("/proc/self/task") <= threads);
    /* Paths differ in number from time to time, by a channel or two at each end. */
    CHECK_LE(channels(), before + 6);
    finish();
}

/* The old device's commands never come back: the new one is used all the same, its memory is
 * registered, and memory can be deregistered at once. Nothing waits for the old one. */
TEST(old_one_hangs)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    uint64_t begun;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    bed_script("!hang fv1 1");
    bed_script("!remove fv1");
    bed_ms(200); /* the kernel's word is there */
    begun = r2_now_ns();
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    CHECK_LT(r2_now_ns() - begun, R2_NS_PER_S);
    message(1);
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    bed_until_paths(bed.tx, 2);
    for (int i = 0; i < 20; i++)
        message(i);
    bed_script("!unhang");
    bed_ms(100); /* what it was late with does no harm now */
    until_key(memory.in_mr, 1, true);
    message(3);
    finish();
}

/* The second NIC's path to itself carries chunks. */
static bool second_carries(void)
{
    struct r2_peer *p = bed.tx->peer;
    const struct r2_path *path;
    bool does;

    r2_peer_lock(p);
    path = r2_path_find(p, 1, 1, R2_VIA_VERBS);
    does = path && r2_path_may(path) >= R2_MAY_STAND_BY;
    r2_peer_unlock(p);
    return does;
}

static void until_second(bool carries)
{
    AWAIT((r2_nicstate_forgive(1, r2_now_ns()), second_carries() == carries));
}

/* Where the second NIC's address is in its port's table. */
static void until_entry(int index)
{
    struct r2_vnic *v = &r2_verbs.nics[1];
    int is = -1;

    WHILE_MS (1000, is != index) {
        pthread_mutex_lock(&v->lock);
        is = v->gid_index;
        pthread_mutex_unlock(&v->lock);
    }
    CHECK_EQ(is, index);
}

/* The old device was asked about its port, and answers (an error, or what was so once) when another
 * one has its place: that is no word about the new one, whose paths are made anew as ever. */
TEST(old_one_answers_late)
{
    static const char *const ways[] = {"!remove fv1", "!vanish fv1"};
    char text[32];

    begin();
    until_second(true);
    for (int i = 0; i < 2; i++) {
        uint64_t from;

        bed_script("!hang fv1 2");
        snprintf(text, sizeof(text), "!event fv1 %d 1", IBV_EVENT_SM_CHANGE);
        bed_script(text);
        AWAIT(bed_script("hung fv1"));
        bed_script(ways[i]);
        until_second(false);
        bed_script("!restore fv1");
        until_second(true);
        bed_script(i ? "!gid fv1 1 3 127.0.2.1" : "");
        bed_script(i ? "!gid fv1 1 1 0.0.0.0" : "");
        until_entry(i ? 3 : 1);
        bed_script("!unhang");
        bed_ms(100);
        until_entry(i ? 3 : 1);
        from = bed_journal();
        snprintf(text, sizeof(text), "!queue fv1 %d 0", IBV_EVENT_QP_FATAL);
        bed_script(text);
        AWAIT(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL));
        until_second(true);
        message(i);
    }
    bed_script("!gid fv1 1 1 127.0.2.1");
    finish();
}

/* The only path's device goes while a write is under way, and its commands hang. The bytes travel
 * again when the kernel has let go of the device, and not before: not for its fatal event. */
TEST(bytes_under_way)
{
    struct r2_req *send = NULL, *recv = NULL;

    begin();
    bed_script("!port fv0 1 down");
    AWAIT(bed_paths(bed.tx) <= 1);
    bed_script("network 32768");
    memset(out, 0x5a, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, memory.in_mr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, memory.out_mr, &send), 0);
    bed_until_script(1);
    bed_script("!hang fv1 1");
    bed_script("!fatal fv1");
    bed_script("!port fv0 1 up");
    bed_until_paths(bed.tx, 1);
    CHECK_EQ(bed_test(recv, 1500), 0);
    bed_script("!remove fv1");
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
    bed_script("!unhang");
    bed_script("release");
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

/* A device fails and stays in the list: nobody takes it for a new one, and none of its fences or
 * keys is taken for dead but by its own word. Taken out and put in, it is used again. */
TEST(fatal_is_not_removed)
{
    begin();
    bed_script("!fatal fv1");
    until_key(memory.in_mr, 1, false);
    bed_ms(1200);
    CHECK_EQ(key(memory.in_mr, 1), 0);
    message(1);
    bed_script("!remove fv1");
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    bed_until_paths(bed.tx, 2);
    message(2);
    finish();
}

/* Keys of a device that fails and does not let go of them: not said to be gone because they were
 * asked for before, only when the kernel has let go of the device. */
TEST(keys_are_not_confirmed)
{
    static uint8_t more[8192];
    struct r2_mr *mr;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    bed_script("!port fv1 1 down");
    AWAIT(bed_paths(bed.tx) <= 1);
    bed_ms(200); /* the path's own memory is not what is asked for first */
    bed_script("!refuse fv1 dereg 1000000");
    bed_script("!fatal fv1");
    until_key(mr, 1, false);
    bed_ms(100); /* it has been asked for all, and waited for in vain */
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), -ETIMEDOUT);
    CHECK_EQ(r2_engine_dereg(bed.tx, memory.out_mr), -ETIMEDOUT);
    bed_script("!remove fv1");
    bed_ms(700); /* the kernel's word is there */
    CHECK_EQ(r2_engine_dereg(bed.rx, memory.in_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &memory.in_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &memory.out_mr), 0);
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    r2_nicstate_forgive(1, r2_now_ns()); /* it flapped in the tests before this one */
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

/* The device is put in again and carries. */
static void ends_well(void)
{
    bed_script("!restore fv1");
    until_key(memory.in_mr, 1, true);
    r2_nicstate_forgive(1, r2_now_ns());
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

/* The device that came in place of one cannot register what that one had: the old one is closed all
 * the same. */
TEST(old_one_is_closed)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    int before;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    message(1);
    before = bed_script("closed");
    bed_script("!refuse fv1 dereg 1000000");
    bed_script("!fatal fv1");
    until_key(mr, 1, false);
    bed_ms(1300); /* the kernel's word has been waited for in vain */
    bed_script("!refuse fv1 reg 3");
    bed_script("!remove fv1");
    bed_script("!restore fv1");
    AWAIT(there(1));
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    finish();
    AWAIT(bed_script("closed") != before);
    CHECK_EQ(bed_script("closed"), before + 1);
}

static void *removes_soon(void *arg)
{
    (void)arg;
    AWAIT(thread_waits(getpid()));
    bed_script("!remove fv1");
    return NULL;
}

/* The kernel's word comes while somebody waits for the device's: it stands for it. */
TEST(word_comes_late)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    pthread_t thread;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    bed_script("!refuse fv1 dereg 1000000");
    bed_script("!fatal fv1");
    AWAIT(bed_paths(bed.tx) <= 1);
    CHECK_EQ(pthread_create(&thread, NULL, removes_soon, NULL), 0);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    pthread_join(thread, NULL);
    ends_well();
}

/* A driver that waits for its users (soft-RoCE): nobody is told, everything on the device works on.
 * It is let go of all the same, so that whoever removes it does not wait for the end of the job,
 * and taken again. The stand-in ignores `restore` while somebody has the old one open. */
TEST(driver_waits_for_us)
{
    begin();
    message(1);
    bed_script("!unload fv1");
    until_key(memory.in_mr, 1, false);
    message(2);
    AWAIT((bed_script("!restore fv1"), key(memory.in_mr, 1)));
    r2_nicstate_forgive(1, r2_now_ns()); /* it flapped in the tests before this one */
    bed_until_paths(bed.tx, 2);
    message(3);
    finish();
}

static atomic_bool caught; /* commands that make an endpoint's queue pairs are held back */
static atomic_int waiting;

/* The first that such a command does; the second device's are held back. */
int madvise(void *at, size_t len, int advice)
{
    struct r2_hca *hca = advice == MADV_DONTFORK ? r2_hca_at(1) : NULL;
    bool its_own = hca && pthread_equal(hca->thread, pthread_self());

    if (hca)
        r2_hca_unuse(hca);
    if (its_own && atomic_load(&caught)) {
        atomic_fetch_add(&waiting, 1);
        while (atomic_load(&caught))
            bed_ms(1);
    }
    return (int)syscall(SYS_madvise, at, len, advice);
}

/* Endpoints of the second NIC that were let go of while a command of theirs was under way, which is
 * not over yet. Others that are let go of meanwhile do not count: they are there for a moment. */
static int fenced(void)
{
    struct r2_ep *eps[64];
    struct r2_list *n;
    int count = 0, done = 0;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (ep->nic != &r2_verbs.nics[1] || count == 64)
            continue;
        r2_vep_get(ep);
        eps[count++] = ep;
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    for (int i = 0; i < count; i++) {
        pthread_mutex_lock(&eps[i]->lock);
        done += eps[i]->fence == R2_FENCE_DONE && eps[i]->commands > 0;
        r2_vep_unlock(eps[i]);
        r2_vep_put(eps[i]);
    }
    return done;
}

/* The device goes when a command has begun to make queue pairs on it, and nothing is there yet to
 * tell that by: what it makes afterwards is let go of all the same. */
TEST(made_meanwhile)
{
    begin();
    bed_script("!remove fv1");
    until_key(memory.in_mr, 1, false);
    atomic_store(&caught, true);
    bed_script("!restore fv1");
    AWAIT((r2_nicstate_forgive(1, r2_now_ns()), atomic_load(&waiting)));
    bed_script("!vanish fv1"); /* its commands succeed */
    AWAIT(fenced());
    bed_ms(100); /* whoever lets go too early has done so */
    atomic_store(&caught, false);
    AWAIT(!fenced() && !atomic_load(&r2_verbs.nics[1].qps));
    CHECK_EQ(fenced(), 0);
    CHECK_EQ(atomic_load(&r2_verbs.nics[1].qps), 0);
    ends_well();
}

#endif
