/* Rung 1: sweeping the objects that processes left behind. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "check.h"
#include "control/impl.h"
#include "holder.h"

#define SECOND UINT64_C(1000000000)

/* An object of a process that is gone, last heard of at `last`; 0: one that has no header yet. */
static void leave(const char *prefix, int i, uint64_t last)
{
    struct r2_seg_header header = {.magic = last ? R2_SEG_MAGIC : 0, .alive_real_ns = last};
    char name[R2_CONTROL_NAME];
    int fd;

    snprintf(name, sizeof(name), "/%s%d", prefix, i);
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK_GE(fd, 0);
    CHECK_EQ(write(fd, &header, sizeof(header)), sizeof(header));
    close(fd);
}

static bool remove_left(const char *prefix, int i)
{
    char name[R2_CONTROL_NAME];

    snprintf(name, sizeof(name), "/%s%d", prefix, i);
    return shm_unlink(name) == 0;
}

TEST(sweep_spares_what_is_set_up)
{
    uint64_t now = r2_control_clock(CLOCK_REALTIME);
    char prefix[64];

    snprintf(prefix, sizeof(prefix), "r2test.%d.", (int)getpid());
    for (int i = 0; i < 18; i++) {
        leave(prefix, i, 0);
    }
    CHECK_EQ(r2_control_sweep(prefix, "r2test.own", now + 30 * SECOND), 0);
    CHECK_EQ(r2_control_sweep(prefix, "r2test.own", now + 90 * SECOND), 2);
    for (int i = 0; i < 18; i++) {
        remove_left(prefix, i);
    }
}

TEST(sweep_by_number)
{
    uint64_t now = r2_control_clock(CLOCK_REALTIME) + 10 * 3600 * SECOND;
    char prefix[64], own[80];
    int left = 0;

    snprintf(prefix, sizeof(prefix), "r2test.%d.", (int)getpid());
    snprintf(own, sizeof(own), "%s3", prefix);
    for (int i = 0; i < 20; i++) {
        leave(prefix, i, now - (uint64_t)(100 + i) * SECOND);
    }
    CHECK_EQ(r2_control_sweep(prefix, own, now), 3); /* of 19, the own one does not count */
    for (int i = 0; i < 17; i++) {
        left += remove_left(prefix, i);
    }
    CHECK_EQ(left, 17);
    for (int i = 17; i < 20; i++) {
        CHECK(!remove_left(prefix, i));
    }
}

/* A job of many processes has ended, and another one begins: its journals can be read for a while.
 */
TEST(sweep_spares_what_has_just_ended)
{
    uint64_t now = r2_control_clock(CLOCK_REALTIME) + 10 * 3600 * SECOND;
    struct statvfs fs;
    char prefix[64];

    CHECK_EQ(statvfs("/dev/shm", &fs), 0);
    snprintf(prefix, sizeof(prefix), "r2test.%d.", (int)getpid());
    for (int i = 0; i < 66; i++) {
        leave(prefix, i, now - (uint64_t)(i < 60 ? 2 : 10) * SECOND);
    }
    if (fs.f_bavail > fs.f_blocks / 4 * 3)
        CHECK_EQ(r2_control_sweep(prefix, "r2test.own", now), 2); /* the oldest */
    CHECK_EQ(r2_control_sweep(prefix, "r2test.own", now + 70 * SECOND),
             fs.f_bavail > fs.f_blocks / 4 * 3 ? 48 : 50);
    for (int i = 0; i < 66; i++) {
        remove_left(prefix, i);
    }
}

/* Sweeps all that has the parent's name, in a later hour. */
static int sweep_in_child(const char *name)
{
    int status = 0;
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        _exit(
            r2_control_sweep(name + 1, "none", r2_control_clock(CLOCK_REALTIME) + 36000 * SECOND));
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(sweep_spares_the_living)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_control *ctl = NULL;
    char name[R2_CONTROL_NAME];

    CHECK_EQ(r2_control_open(&ctl, &info), 0);
    snprintf(name, sizeof(name), "%s", r2_control_name(ctl));
    CHECK_EQ(sweep_in_child(name), 0);
    r2_control_close(ctl);
    CHECK_EQ(sweep_in_child(name), 1);
    CHECK(shm_unlink(name) != 0);
}

/* An object, as control.c holds its own. */
static bool hold(void *arg)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    int fd = shm_open(arg, O_RDWR, 0);

    return fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0;
}

static pid_t hold_one(const char *prefix, int i)
{
    char name[R2_CONTROL_NAME];

    leave(prefix, i, 1);
    snprintf(name, sizeof(name), "/%s%d", prefix, i);
    return holder_start(hold, name);
}

TEST(counts_the_living)
{
    char prefix[64], own[80];
    pid_t a, b;

    snprintf(prefix, sizeof(prefix), "r2test.%d.", (int)getpid());
    snprintf(own, sizeof(own), "%s7", prefix);
    CHECK_EQ(r2_control_count_held(prefix, own, NULL, NULL), 0);
    leave(prefix, 0, 1); /* held by nobody */
    a = hold_one(prefix, 1);
    b = hold_one(prefix, 2);
    CHECK_EQ(r2_control_count_held(prefix, own, NULL, NULL), 2);
    snprintf(own, sizeof(own), "%s2", prefix);
    CHECK_EQ(r2_control_count_held(prefix, own, NULL, NULL), 1);
    holder_end(a);
    holder_end(b);
    snprintf(own, sizeof(own), "%s7", prefix);
    CHECK_EQ(r2_control_count_held(prefix, own, NULL, NULL), 0);
    for (int i = 0; i < 3; i++)
        CHECK(remove_left(prefix, i));
}

/* Counting must not lose the own lock, which closing any descriptor of the object would. */
TEST(counting_leaves_the_own_alone)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1}, hidden = {.hidden = true};
    struct r2_control *ctl = NULL, *second = NULL, *unseen = NULL;
    char name[R2_CONTROL_NAME];

    CHECK_EQ(r2_control_open(&ctl, &info), 0);
    CHECK_EQ(r2_control_open(&second, &info), 0);
    CHECK_EQ(r2_control_open(&unseen, &hidden), 0);
    CHECK_GE(r2_control_neighbours(ctl, NULL, NULL), 0);
    CHECK_EQ(r2_control_neighbours(unseen, NULL, NULL), 0);
    snprintf(name, sizeof(name), "%s", r2_control_name(ctl));
    CHECK_EQ(sweep_in_child(name), 0); /* neither, so both are held */
    r2_control_close(unseen);
    r2_control_close(second);
    r2_control_close(ctl);
    CHECK_EQ(sweep_in_child(name), 2);
}

/* Whether anybody still holds it, as another process sees that. */
static bool held_for_others(const char *name)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    int status, fd;
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        fd = shm_open(name, O_RDWR, 0);
        _exit(fd < 0 || fcntl(fd, F_GETLK, &lock) ? 2 : lock.l_type != F_UNLCK);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status);
}

/* Nor when nothing of /proc can be read at that moment, so that the process would not know its own
 * name. Needs the right to mount. */
TEST(counting_without_proc)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_control *ctl = NULL;
    int status;
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
            _exit(77);
        CHECK_EQ(r2_control_open(&ctl, &info), 0);
        CHECK(held_for_others(r2_control_name(ctl)));
        if (mount("none", "/proc", "tmpfs", 0, NULL))
            _exit(77);
        CHECK_GE(r2_control_neighbours(ctl, NULL, NULL), 0);
        CHECK(held_for_others(r2_control_name(ctl)));
        r2_control_close(ctl);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        printf("skipped: no right to mount\n");
    else
        CHECK_EQ(WEXITSTATUS(status), 0);
}
