/* Devices that are taken out and put in again, under one process's engine (verbs_bed.h says what
 * this rung cannot prove): memory, queue pairs, threads and descriptors of the old device are let
 * go of, and what is registered is registered with the new one, even if commands of the old one
 * never come back. */
#include <dirent.h>
#include <pthread.h>

#include "verbs_bed.h"

#define SIZE (256 * 1024)
#define TURNS 12

static struct bed bed;
static uint8_t out[SIZE], in[SIZE];
static struct r2_mr *smr, *dmr;

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
    for (int ms = 0; ms < BED_WAIT_MS && (key(mr, nic) != 0) != there; ms++)
        bed_ms(1);
    CHECK_EQ(key(mr, nic) != 0, there);
}

static void begin(void)
{
    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &smr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &dmr), 0);
}

static void finish(void)
{
    CHECK_EQ(r2_engine_dereg(bed.tx, smr), 0);
    CHECK_EQ(r2_engine_dereg(bed.rx, dmr), 0);
    bed_close(&bed);
}

static void message(int turn)
{
    struct r2_req *send = NULL, *recv = NULL;

    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251 + (size_t)turn * 31);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, dmr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, smr, &send), 0);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
}

/* Whatever was registered before, meanwhile or after has a key where a device is, and none where
 * there is none; the new device's keys are its own. */
static void test_keys(void)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    uint32_t old;

    begin();
    old = key(dmr, 1);
    CHECK(key(dmr, 0) && old);
    bed_script("!remove fv1");
    until_key(dmr, 1, false);
    CHECK(key(dmr, 0));
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    CHECK(key(mr, 0));
    CHECK_EQ(key(mr, 1), 0);
    message(1);
    bed_script("!restore fv1");
    until_key(dmr, 1, true);
    until_key(mr, 1, true);
    CHECK(key(dmr, 1) != old);
    bed_until_paths(bed.tx, 2);
    message(2);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    finish();
}

/* As often as you like: threads and descriptors do not grow with it. Both devices at once as well:
 * what is posted then waits for one of them, or goes by sockets. */
static void test_again_and_again(void)
{
    int before = 0, threads = 0;

    begin();
    for (int i = 0; i < TURNS; i++) {
        bed_script(i % 3 == 0 ? "!remove fv0" : i % 3 == 1 ? "!remove fv1" : "!vanish fv0");
        if (i % 4 == 3)
            bed_script("!remove fv1");
        until_key(dmr, i % 3 == 1, false);
        message(i);
        bed_script("!restore fv0");
        bed_script("!restore fv1");
        until_key(dmr, 0, true);
        until_key(dmr, 1, true);
        for (int nic = 0; nic < 2; nic++)
            r2_nicstate_forgive(nic, true); /* it flaps, and would be left alone */
        bed_until_paths(bed.tx, 2);
        message(i + 100);
        if (i == 3) {
            bed_ms(700);
            before = channels();
            threads = entries("/proc/self/task");
        }
    }
    for (int ms = 0; ms < 5000 && entries("/proc/self/task") > threads; ms += 10)
        bed_ms(10);
    CHECK_LE(entries("/proc/self/task"), threads);
    /* Paths differ in number from time to time, by a channel or two at each end. */
    CHECK_LE(channels(), before + 6);
    finish();
}

/* The old device's commands never come back: the new one is used all the same, its memory is
 * registered, and memory can be deregistered at once. Nothing waits for the old one. */
static void test_old_one_hangs(void)
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
    until_key(dmr, 1, true);
    bed_until_paths(bed.tx, 2);
    for (int i = 0; i < 20; i++)
        message(i);
    bed_script("!unhang");
    bed_ms(100); /* what it was late with does no harm now */
    until_key(dmr, 1, true);
    message(3);
    finish();
}

/* The only path's device goes while a write is under way, and its commands hang. The bytes travel
 * again when the kernel has let go of the device, and not before: not for its fatal event. */
static void test_bytes_under_way(void)
{
    struct r2_req *send = NULL, *recv = NULL;

    begin();
    bed_script("!port fv0 1 down");
    for (int ms = 0; ms < BED_WAIT_MS && bed_paths(bed.tx) > 1; ms++)
        bed_ms(1);
    bed_script("network 32768");
    memset(out, 0x5a, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, dmr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, smr, &send), 0);
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
    until_key(dmr, 1, true);
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

/* A device fails and stays in the list: nobody takes it for a new one, and none of its fences or
 * keys is taken for dead but by its own word. Taken out and put in, it is used again. */
static void test_fatal_is_not_removed(void)
{
    begin();
    bed_script("!fatal fv1");
    until_key(dmr, 1, false);
    bed_ms(1200);
    CHECK_EQ(key(dmr, 1), 0);
    message(1);
    bed_script("!remove fv1");
    bed_script("!restore fv1");
    until_key(dmr, 1, true);
    bed_until_paths(bed.tx, 2);
    message(2);
    finish();
}

/* Keys of a device that fails and does not let go of them: not said to be gone because they were
 * asked for before, only when the kernel has let go of the device. */
static void test_keys_are_not_confirmed(void)
{
    static uint8_t more[8192];
    struct r2_mr *mr;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    bed_script("!port fv1 1 down");
    for (int ms = 0; ms < BED_WAIT_MS && bed_paths(bed.tx) > 1; ms++)
        bed_ms(1);
    bed_ms(200); /* the path's own memory is not what is asked for first */
    bed_script("!refuse fv1 dereg 1000000");
    bed_script("!fatal fv1");
    until_key(mr, 1, false);
    bed_ms(100); /* it has been asked for all, and waited for in vain */
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), -ETIMEDOUT);
    CHECK_EQ(r2_engine_dereg(bed.tx, smr), -ETIMEDOUT);
    bed_script("!remove fv1");
    bed_ms(700); /* the kernel's word is there */
    CHECK_EQ(r2_engine_dereg(bed.rx, dmr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &dmr), 0);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &smr), 0);
    bed_script("!restore fv1");
    until_key(dmr, 1, true);
    r2_nicstate_forgive(1, true); /* it flapped in the tests before this one */
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

static void *removes_soon(void *arg)
{
    (void)arg;
    bed_ms(300);
    bed_script("!remove fv1");
    return NULL;
}

/* The kernel's word comes while somebody waits for the device's: it stands for it. */
static void test_word_comes_late(void)
{
    static uint8_t more[8192];
    struct r2_mr *mr;
    pthread_t thread;

    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, more, sizeof(more), 1, &mr), 0);
    bed_script("!refuse fv1 dereg 1000000");
    bed_script("!fatal fv1");
    for (int ms = 0; ms < BED_WAIT_MS && bed_paths(bed.tx) > 1; ms++)
        bed_ms(1);
    CHECK_EQ(pthread_create(&thread, NULL, removes_soon, NULL), 0);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr), 0);
    pthread_join(thread, NULL);
    bed_script("!restore fv1");
    until_key(dmr, 1, true);
    r2_nicstate_forgive(1, true);
    bed_until_paths(bed.tx, 2);
    message(1);
    finish();
}

/* A driver that waits for its users (soft-RoCE): nobody is told, everything on the device works on.
 * It is let go of all the same, so that whoever removes it does not wait for the end of the job,
 * and taken again. The stand-in ignores `restore` while somebody has the old one open. */
static void test_driver_waits_for_us(void)
{
    begin();
    message(1);
    bed_script("!unload fv1");
    until_key(dmr, 1, false);
    message(2);
    for (int ms = 0; ms < BED_WAIT_MS && !key(dmr, 1); ms += 10) {
        bed_script("!restore fv1");
        bed_ms(10);
    }
    CHECK(key(dmr, 1));
    r2_nicstate_forgive(1, true); /* it flapped in the tests before this one */
    bed_until_paths(bed.tx, 2);
    message(3);
    finish();
}

static const struct check_test tests[] = {
    {"keys", test_keys},
    {"again_and_again", test_again_and_again},
    {"old_one_hangs", test_old_one_hangs},
    {"bytes_under_way", test_bytes_under_way},
    {"fatal_is_not_removed", test_fatal_is_not_removed},
    {"keys_are_not_confirmed", test_keys_are_not_confirmed},
    {"word_comes_late", test_word_comes_late},
    {"driver_waits_for_us", test_driver_waits_for_us},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
