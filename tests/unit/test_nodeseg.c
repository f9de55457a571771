/* The node segment (rung 1, real shared memory): rows of two processes, writers that
 * die, objects that are cut short, full of random bytes, or another node's. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"
#include "control/nodeseg.h"

static char host[64];
static struct r2_nodeseg *seg;

static struct r2_wire_addr addr(int i)
{
    return (struct r2_wire_addr){.family = 4, .ip = {10, 0, (uint8_t)(i >> 8), (uint8_t)i}};
}

static struct r2_node_row row_of(int i)
{
    struct r2_node_row row = {.state = R2_NODE_FAILED, .kind = 2, .nic = addr(i)};

    snprintf(row.name, sizeof(row.name), "nic%d", i);
    snprintf(row.why, sizeof(row.why), "because");
    return row;
}

static uint64_t polled; /* the newest epoch that `poll` has seen */

static void begin(void)
{
    snprintf(host, sizeof(host), "test-%d-%s", (int)getpid(), check_name);
    CHECK_EQ(r2_nodeseg_open(&seg, host), 0);
    polled = 0;
}

static void end(void)
{
    char name[128];

    snprintf(name, sizeof(name), "%s", r2_nodeseg_name(seg));
    r2_nodeseg_close(seg);
    shm_unlink(name);
}

/* Runs `work` in a process of its own; its exit code. */
static int elsewhere(int (*work)(void))
{
    int status;
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        alarm(20);
        _exit(work());
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int found;
static struct r2_node_row last;

static void take(void *arg, const struct r2_node_row *row)
{
    (void)arg;
    found++;
    last = *row;
}

/* Calls `each` for the rows that were written since the last call. */
static int poll(void (*each)(void *arg, const struct r2_node_row *row))
{
    uint64_t most = polled;
    int n = 0;

    for (int i = 0; i < R2_NODE_ROWS; i++) {
        struct r2_wire_addr a = addr(i);
        struct r2_node_row row;

        if (!r2_nodeseg_get(seg, &a, &row) || row.epoch <= polled)
            continue;
        each(NULL, &row);
        most = row.epoch > most ? row.epoch : most;
        n++;
    }
    polled = most;
    return n;
}

static int write_one(void)
{
    struct r2_nodeseg *own;
    struct r2_node_row row = row_of(7);

    return r2_nodeseg_open(&own, host) || r2_nodeseg_write(own, &row);
}

TEST(rows)
{
    struct r2_node_row row = row_of(1), back;
    struct r2_wire_addr a = addr(1), b = addr(2);
    struct stat st;
    char path[160];

    begin();
    snprintf(path, sizeof(path), "/dev/shm%s", r2_nodeseg_name(seg));
    CHECK_EQ(stat(path, &st), 0);
    CHECK_EQ(st.st_mode & 0777, 0600);
    CHECK_EQ(poll(take), 0);
    CHECK(!r2_nodeseg_get(seg, &a, &back));
    CHECK_EQ(r2_nodeseg_write(seg, &row), 0);
    CHECK(r2_nodeseg_get(seg, &a, &back));
    CHECK_STR(back.name, "nic1");
    CHECK_EQ(back.epoch, 1);
    CHECK_EQ(back.pid, getpid());
    CHECK(!r2_nodeseg_get(seg, &b, &back));
    found = 0;
    CHECK_EQ(elsewhere(write_one), 0); /* its death leaves the row */
    CHECK_EQ(poll(take), 2);
    CHECK_EQ(found, 2);
    CHECK_EQ(poll(take), 0);
    row = row_of(1);
    CHECK_EQ(r2_nodeseg_write(seg, &row), 0); /* in its old place */
    CHECK_EQ(poll(take), 1);
    CHECK_EQ(last.epoch, 3);
    end();
}

static int opened[2], go[2]; /* pipes: a byte from each writer; its end starts them */

/* Opening gives up if it always finds the lock taken, so both open before either writes. */
static int write_many(void)
{
    struct r2_nodeseg *own;
    char c;
    int rc;

    close(go[1]);
    if (r2_nodeseg_open(&own, host) || write(opened[1], "x", 1) != 1 || read(go[0], &c, 1))
        return 1;
    for (int i = 0; i < 3000; i++) {
        struct r2_node_row row = row_of(i % 20);

        snprintf(row.why, sizeof(row.why), "%d", i % 20);
        while ((rc = r2_nodeseg_write(own, &row)) == -EAGAIN)
            sched_yield();
        if (rc)
            return 2;
    }
    return 0;
}

static void check_whole(void *arg, const struct r2_node_row *row)
{
    char want[16];

    (void)arg;
    snprintf(want, sizeof(want), "%d", (int)row->nic.ip[3]);
    CHECK_STR(row->why, want);
    found++;
}

/* Two writers and a reader that takes no lock: it never sees half a row. */
TEST(two_writers)
{
    struct r2_node_row row;
    int left = 2;
    char c;

    begin();
    CHECK(pipe(opened) == 0 && pipe(go) == 0);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();

        CHECK_GE(pid, 0);
        if (pid == 0)
            _exit(write_many());
    }
    close(opened[1]);
    CHECK(read(opened[0], &c, 1) == 1 && read(opened[0], &c, 1) == 1);
    close(go[1]);
    found = 0;
    while (left) {
        int status;

        poll(check_whole);
        if (waitpid(-1, &status, WNOHANG) > 0) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            left--;
        }
    }
    poll(check_whole);
    CHECK_GE(found, 20);
    row = row_of(63);
    CHECK_EQ(r2_nodeseg_write(seg, &row), 0);
    CHECK_EQ(row.epoch, 2 * 3000 + 1); /* no write was lost */
    end();
}

/* A writer that dies with the lock in hand and half a row written. */
static int die_writing(void)
{
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = 1};
    struct r2_node_row row = row_of(1);
    char path[160];
    int fd;

    snprintf(path, sizeof(path), "/dev/shm%s", r2_nodeseg_name(seg));
    fd = open(path, O_RDWR);
    if (fd < 0 || fcntl(fd, F_SETLK, &l))
        return 1;
    r2_node_row_seal(&row);
    memset(row.why, 'x', sizeof(row.why) - 1);
    return pwrite(fd, &row, sizeof(row), sizeof(struct r2_node_header)) != sizeof(row);
}

TEST(writer_dies)
{
    struct r2_node_row row = row_of(1), back;
    struct r2_wire_addr a = addr(1);

    begin();
    CHECK_EQ(elsewhere(die_writing), 0);
    CHECK(!r2_nodeseg_get(seg, &a, &back));
    CHECK_EQ(r2_nodeseg_write(seg, &row), 0);
    CHECK(r2_nodeseg_get(seg, &a, &back));
    end();
}

TEST(full)
{
    struct r2_node_row row, back;
    struct r2_wire_addr a;

    begin();
    for (int i = 0; i < R2_NODE_ROWS + 10; i++) {
        row = row_of(i);
        CHECK_EQ(r2_nodeseg_write(seg, &row), 0);
    }
    a = addr(5);
    CHECK(!r2_nodeseg_get(seg, &a, &back)); /* the oldest gave way */
    a = addr(R2_NODE_ROWS + 9);
    CHECK(r2_nodeseg_get(seg, &a, &back));
    end();
}

TEST(other_node)
{
    struct r2_nodeseg *other;
    char name[128];

    begin();
    CHECK_EQ(r2_nodeseg_open(&other, "another-host"), 0);
    CHECK(strcmp(r2_nodeseg_name(seg), r2_nodeseg_name(other)) != 0);
    snprintf(name, sizeof(name), "%s", r2_nodeseg_name(other));
    r2_nodeseg_close(other);
    shm_unlink(name);
    end();
}

static int open_again(void)
{
    struct r2_nodeseg *own;

    return r2_nodeseg_open(&own, host) ? 2 : 0;
}

/* Whatever the object holds: no crash, no row that is not sound; a process that starts makes it
 * anew if nobody uses it, and does without it otherwise. */
TEST(hostile)
{
    char path[160], name[128];
    int fd;

    begin();
    snprintf(name, sizeof(name), "%s", r2_nodeseg_name(seg));
    snprintf(path, sizeof(path), "/dev/shm%s", name);
    for (unsigned long i = check_rounds(120); i; i--) {
        struct r2_node_row row = row_of((int)check_below(90)), back;
        struct r2_wire_addr a = row.nic;

        /* In a child: closing a descriptor here would drop our locks. */
        pid_t pid = fork();

        if (pid == 0) {
            size_t len = check_below(3) ? 8 + check_below(64) * 8 : 4096;
            uint64_t junk[512];

            fd = open(path, O_RDWR);
            for (size_t k = 0; k < 512; k++)
                junk[k] = check_random();
            if (check_below(10) == 0)
                _exit(ftruncate(fd, (off_t)check_below(40000)));
            _exit(pwrite(fd, junk, len, (off_t)check_below(33000)) < 0);
        }
        CHECK_GE(pid, 0);
        waitpid(pid, NULL, 0);
        check_random(); /* the child's bytes differ from the last child's */
        poll(take);
        if (r2_nodeseg_get(seg, &a, &back))
            CHECK(r2_node_row_sound(&back));
        r2_nodeseg_write(seg, &row);
        if (i % 20 == 0) {
            int rc = elsewhere(open_again);

            CHECK(rc == 0 || rc == 2);
        }
    }
    r2_nodeseg_close(seg);
    fd = open(path, O_RDWR | O_TRUNC);
    CHECK_GE(fd, 0);
    CHECK_EQ(write(fd, "nonsense", 8), 8);
    close(fd);
    CHECK_EQ(r2_nodeseg_open(&seg, host), 0); /* nobody holds it: made anew */
    CHECK_EQ(poll(take), 0);
    end();
}

TEST(sound)
{
    struct r2_node_row row = {0};

    CHECK(!r2_node_row_sound(&row));
    row = row_of(1);
    r2_node_row_seal(&row);
    CHECK(r2_node_row_sound(&row));
    for (unsigned long i = check_rounds(5000); i; i--) {
        struct r2_node_row bad = row;

        ((uint8_t *)&bad)[check_below(sizeof(bad))] ^= (uint8_t)(1 + check_below(255));
        CHECK(!r2_node_row_sound(&bad));
    }
    for (int what = 0; what < 5; what++) { /* sealed nonsense */
        struct r2_node_row bad = row;

        if (what == 0)
            bad.state = 9;
        else if (what == 1)
            bad.kind = 99;
        else if (what == 2)
            bad.n_others = R2_NODE_OTHERS + 1;
        else if (what == 3)
            bad.nic.family = 5;
        else
            memset(bad.why, 'x', sizeof(bad.why));
        r2_node_row_seal(&bad);
        CHECK(!r2_node_row_sound(&bad));
    }
}

int main(int argc, char **argv)
{
    struct r2_nodeseg *probe;

    if (r2_nodeseg_open(&probe, "probe")) {
        printf("no shared memory here\n");
        return CHECK_SKIPPED;
    }
    shm_unlink(r2_nodeseg_name(probe));
    r2_nodeseg_close(probe);
    return check_main(argc, argv);
}
