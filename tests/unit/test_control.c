/* Rung 1: the control segment's C side, alone in one process and with a second process or a forked
 * child. Does not prove that the Python reader agrees: tests/py/test_control.py does. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"
#include "control/control.h"
#include "control/impl.h"

static const struct r2_control_info info = {
    .process_id = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
    .host = "host-a",
    .job = "job-7",
    .rank = 3,
    .ranks = 8,
    .mode = "auto",
};

static struct r2_control *open_one(void)
{
    struct r2_control *ctl = NULL;

    CHECK_EQ(r2_control_open(&ctl, &info), 0);
    CHECK(r2_control_name(ctl)[0] == '/');
    return ctl;
}

static void close_and_remove(struct r2_control *ctl)
{
    char name[R2_CONTROL_NAME];

    snprintf(name, sizeof(name), "%s", r2_control_name(ctl));
    r2_control_close(ctl);
    CHECK_EQ(shm_unlink(name), 0);
}

static int locked_by(int fd)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};

    CHECK_EQ(fcntl(fd, F_GETLK, &lock), 0);
    return lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

/* Runs `probe` in a child; returns its exit code. */
static int in_child(int (*probe)(const char *name, pid_t parent), const char *name)
{
    pid_t parent = getpid(), pid = fork();
    int status = 0;

    CHECK_GE(pid, 0);
    if (pid == 0) {
        _exit(probe(name, parent));
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int probe_alive(const char *name, pid_t parent)
{
    int fd = shm_open(name, O_RDONLY, 0);
    struct stat st;

    if (fd < 0 || fstat(fd, &st)) {
        return 10;
    }
    if ((st.st_mode & 07777) != 0600 || st.st_size != (off_t)sizeof(struct r2_segment)) {
        return 11;
    }
    return locked_by(fd) == parent ? 1 : 0;
}

/* What others write into the object, or cut off, reaches the process nowhere and is put right. */
TEST(damaged_object_is_put_right)
{
    struct r2_control *ctl = open_one();
    struct r2_control_peer peer = {.host = "host-b", .pid = 9, .state = R2_SEG_PEER_UP};
    static struct r2_segment there;
    static uint8_t noise[sizeof(there)];
    int fd = shm_open(r2_control_name(ctl), O_RDWR, 0);

    CHECK_GE(fd, 0);
    CHECK_EQ(r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic0", .addr = "a"}), 0);
    CHECK_EQ(r2_control_peer_add(ctl, &peer), 0);
    CHECK_EQ(r2_control_path_add(ctl, 0, 0, "nic1"), 0);
    for (off_t left = sizeof(there); left >= 0; left -= sizeof(there) / 4 + 1) {
        for (size_t i = 0; i < sizeof(noise); i++)
            noise[i] = (uint8_t)check_random() | 1; /* every sequence number odd */
        CHECK_EQ(pwrite(fd, noise, sizeof(noise), 0), sizeof(noise));
        CHECK_EQ(ftruncate(fd, left), 0);
        alarm(20);
        r2_control_nic_state(ctl, 0, R2_SEG_NIC_FAILED, "link down");
        r2_control_path_state(ctl, 0, R2_SEG_PATH_DOWN, 7, "reset");
        r2_count(&r2_control_counters(ctl)->bytes_sent, 5);
        r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_NIC_DOWN});
        ctl->alive_mono_ns = 0; /* a second has passed */
        CHECK_EQ(r2_control_poll(ctl, NULL, NULL), 0);
        alarm(0);
        CHECK_EQ(pread(fd, &there, sizeof(there), 0), sizeof(there));
        CHECK_MEM(&there.header, &r2_control_segment(ctl)->header, sizeof(there.header));
        CHECK_MEM(&there.process, &r2_control_segment(ctl)->process, sizeof(there.process));
        CHECK_MEM(&there.counters, &r2_control_segment(ctl)->counters, sizeof(there.counters));
        CHECK_MEM(&there.nics[0], &r2_control_segment(ctl)->nics[0], sizeof(there.nics[0]));
        CHECK_MEM(&there.paths[0], &r2_control_segment(ctl)->paths[0], sizeof(there.paths[0]));
        CHECK_MEM(&there.events[0], &r2_control_segment(ctl)->events[0], sizeof(there.events[0]));
        CHECK_STR(there.peers[0].host, "host-b");
    }
    for (int i = 0; i < R2_SEG_MAX_COMMANDS; i++)
        CHECK_EQ(there.commands[i].state, R2_SEG_CMD_FREE);
    close_and_remove(ctl);
}

TEST(words)
{
    CHECK_EQ(r2_row_words("two words", 20), 9);
    CHECK_EQ(r2_row_words("two words", 5), 3);
    CHECK_EQ(r2_row_words("abc\xc3\xa4", 4), 3);
    CHECK_EQ(r2_row_words("", 4), 0);
    CHECK_EQ(r2_row_words("\x80\x80\x80\x80\x80\x80", 4), 4); /* who goes on from there comes on */
}

TEST(opens)
{
    struct r2_control *ctl = open_one();
    const struct r2_segment *seg = r2_control_segment(ctl);
    char name[R2_CONTROL_NAME];

    CHECK_EQ(seg->header.magic, R2_SEG_MAGIC);
    CHECK_EQ(seg->header.version, R2_SEG_VERSION);
    CHECK_EQ(seg->process.pid, getpid());
    CHECK_EQ(seg->process.rank, 3);
    CHECK_STR(seg->process.host, "host-a");
    CHECK_STR(seg->process.job, "job-7");
    CHECK(seg->process.start_ticks > 0);
    CHECK_EQ(seg->header.tables[R2_SEG_KIND_PATHS - 1].offset, offsetof(struct r2_segment, paths));
    CHECK_EQ(seg->header.tables[R2_SEG_KIND_PATHS - 1].stride, sizeof(struct r2_seg_path));
    CHECK_EQ(in_child(probe_alive, r2_control_name(ctl)), 1);

    snprintf(name, sizeof(name), "%s", r2_control_name(ctl));
    r2_control_close(ctl);
    CHECK_EQ(in_child(probe_alive, name), 0); /* readable, no longer alive */
    CHECK_EQ(shm_unlink(name), 0);
}

TEST(opens_again)
{
    struct r2_control *a = open_one(), *b = open_one();

    CHECK(strcmp(r2_control_name(a), r2_control_name(b)) != 0);
    CHECK_EQ(in_child(probe_alive, r2_control_name(a)), 1);
    CHECK_EQ(in_child(probe_alive, r2_control_name(b)), 1);
    close_and_remove(a);
    CHECK_EQ(in_child(probe_alive, r2_control_name(b)), 1);
    close_and_remove(b);
}

TEST(group)
{
    struct r2_control_info with = info;
    struct r2_control *ctl = NULL;
    char group[32];
    struct stat st;
    int fd;

    snprintf(group, sizeof(group), "%u", (unsigned)getegid());
    with.shm_group = group;
    CHECK_EQ(r2_control_open(&ctl, &with), 0);
    fd = shm_open(r2_control_name(ctl), O_RDONLY, 0);
    CHECK(fd >= 0 && !fstat(fd, &st));
    CHECK_EQ(st.st_mode & 07777, 0640);
    close(fd);
    close_and_remove(ctl);

    with.shm_group = "no-such-group-here";
    CHECK_EQ(r2_control_open(&ctl, &with), 0);
    CHECK(strstr(r2_control_segment(ctl)->process.warning, "no-such-group-here") != NULL);
    close_and_remove(ctl);
}

static int refuse_command(void *arg, const struct r2_control_cmd *cmd, char *result, size_t size)
{
    (void)arg, (void)cmd, (void)result, (void)size;
    return -EIO;
}

TEST(hidden_works)
{
    struct r2_control_info hidden = info;
    struct r2_control *ctl = NULL;
    int nic;

    hidden.hidden = 1;
    CHECK_EQ(r2_control_open(&ctl, &hidden), 0);
    CHECK_STR(r2_control_name(ctl), "");
    nic = r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic0", .numa = -1});
    CHECK_EQ(nic, 0);
    r2_count(&r2_control_nic_counters(ctl, nic)->tx_bytes, 5);
    CHECK_EQ(r2_control_poll(ctl, refuse_command, NULL), 0);
    r2_control_child(ctl);
    CHECK_EQ(r2_control_segment(ctl)->nics[0].n.tx_bytes, 5);
    r2_control_close(ctl);
}

TEST(row_minus_one)
{
    struct r2_control *ctl = open_one();
    static struct r2_segment before;

    memcpy(&before, r2_control_segment(ctl), sizeof(before));
    for (int row = -1; row < 100000; row += 100000) {
        r2_control_nic_state(ctl, row, R2_SEG_NIC_FAILED, "x");
        r2_control_nic_link(ctl, row, R2_SEG_LINK_DOWN);
        r2_control_nic_addr(ctl, row, "x", 1);
        r2_control_nic_weight(ctl, row, 1);
        r2_control_nic_fault(ctl, row, "x");
        r2_control_nic_damping(ctl, row, 1, 1);
        r2_control_peer_state(ctl, row, R2_SEG_PEER_GONE, "x");
        r2_control_peer_connections(ctl, row, 1, R2_SEG_DIR_BOTH);
        r2_control_peer_heard(ctl, row, 1);
        r2_control_peer_waits(ctl, row, R2_SEG_WAITS_FOR_PATH, 1, 1);
        r2_control_peer_remove(ctl, row);
        r2_control_path_state(ctl, row, R2_SEG_PATH_DOWN, 1, "x");
        r2_control_path_weight(ctl, row, 1, 1);
        r2_control_path_damping(ctl, row, 1, 1);
        r2_control_path_remove(ctl, row);
        r2_count(&r2_control_nic_counters(ctl, row)->tx_bytes, 1);
        r2_count(&r2_control_path_counters(ctl, row)->tx_bytes, 1);
    }
    CHECK_MEM(r2_control_segment(ctl), &before, sizeof(before));
    close_and_remove(ctl);
}

/* A bucket holds what takes as long as it says, and no longer. */
TEST(times)
{
    struct r2_seg_times times = {0};

    r2_count_time(&times, 0);
    r2_count_time(&times, UINT64_C(1000) * R2_SEG_WITHIN_1MS);
    r2_count_time(&times, UINT64_C(1000) * (R2_SEG_WITHIN_1MS + 1));
    r2_count_time(&times, UINT64_C(1000) * R2_SEG_WITHIN_30S);
    r2_count_time(&times, UINT64_C(1000) * (R2_SEG_WITHIN_30S + 1));
    CHECK_EQ(times.us, 2 * R2_SEG_WITHIN_1MS + 2 * R2_SEG_WITHIN_30S + 2);
    CHECK_EQ(times.count[0], 2);
    CHECK_EQ(times.count[1], 1);
    CHECK_EQ(times.count[R2_SEG_TIMES - 2], 1);
    CHECK_EQ(times.count[R2_SEG_TIMES - 1], 1);
}

TEST(nic_rows)
{
    struct r2_control *ctl = open_one();
    const struct r2_segment *seg = r2_control_segment(ctl);
    const struct r2_seg_nic *row = &seg->nics[1];
    char name[32], longest[200];

    for (int i = 0; i < R2_SEG_MAX_NICS; i++) {
        struct r2_control_nic nic = {.name = name, .ifname = "lo", .addr = name + 3, .numa = -1};

        snprintf(name, sizeof(name), "nic127.0.%d.1", i + 1);
        CHECK_EQ(r2_control_nic_add(ctl, &nic), i);
    }
    CHECK_EQ(r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "more"}), -1);
    CHECK_EQ(seg->header.tables[R2_SEG_KIND_NICS - 1].high, R2_SEG_MAX_NICS);
    CHECK_EQ(r2_control_nic_find(ctl, "nic127.0.2.1"), 1);
    CHECK_EQ(r2_control_nic_find(ctl, "127.0.3.1"), 2);
    CHECK_EQ(r2_control_nic_find(ctl, "lo"), 0);
    CHECK_EQ(r2_control_nic_find(ctl, "nic127.0.99.1"), -1);
    CHECK_EQ(r2_control_nic_find(ctl, ""), -1);

    r2_control_nic_state(ctl, 1, R2_SEG_NIC_HEALTHY, "start");
    CHECK_EQ(row->n.recoveries, 0);
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_FAILED, "link down");
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_FAILED, "link still down");
    CHECK_EQ(row->n.failures, 1);
    CHECK_STR(row->cause, "link still down");
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_PROBING, NULL);
    CHECK_STR(row->cause, "");
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_RAMPING, NULL);
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_HEALTHY, NULL);
    CHECK_EQ(row->n.recoveries, 1);
    CHECK_EQ(seg->counters.nic_failures, 1);
    CHECK_EQ(seg->counters.nic_recoveries, 1);
    CHECK_EQ(row->seq % 2, 0);

    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    memcpy(longest + sizeof(row->cause) - 6, "\xc3\xa9", 2); /* a two-byte letter on the cut */
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_FAILED, longest);
    CHECK_EQ(strlen(row->cause), sizeof(row->cause) - 2);
    CHECK_STR(row->cause + sizeof(row->cause) - 7, "x ...");
    longest[50] = longest[70] = longest[78] = ' '; /* a sentence is cut behind a word */
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_FAILED, longest);
    CHECK_EQ(strlen(row->cause), 74);
    CHECK_STR(row->cause + 68, "xx ...");
    longest[sizeof(row->cause) - 1] = '\0'; /* as long as the field */
    r2_control_nic_state(ctl, 1, R2_SEG_NIC_FAILED, longest);
    CHECK_STR(row->cause, longest);
    close_and_remove(ctl);
}

TEST(peers_and_paths)
{
    struct r2_control *ctl = open_one();
    const struct r2_segment *seg = r2_control_segment(ctl);
    struct r2_control_peer peer = {.host = "host-b", .pid = 9, .state = R2_SEG_PEER_UP};
    int first, rows[R2_SEG_MAX_PATHS];

    for (int i = 0; i < R2_SEG_MAX_PEERS; i++) {
        CHECK_EQ(r2_control_peer_add(ctl, &peer), i);
    }
    CHECK_EQ(r2_control_peer_add(ctl, &peer), -1);
    CHECK_EQ(seg->counters.rows_refused, 1);
    r2_control_peer_waits(ctl, 1, R2_SEG_WAITS_FOR_DEVICE_PATH, 5, 6);
    CHECK_EQ(seg->peers[1].waits_for, R2_SEG_WAITS_FOR_DEVICE_PATH);
    CHECK_EQ(seg->peers[1].waits_mono_ns, 5);
    CHECK_EQ(seg->peers[1].gives_up_mono_ns, 6);
    CHECK_EQ(seg->gauges.peers, R2_SEG_MAX_PEERS);
    CHECK_EQ(r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic0"}), 0);
    for (int i = 0; i < R2_SEG_MAX_PATHS; i++) {
        rows[i] = r2_control_path_add(ctl, i % 2, 0, "nic3");
        CHECK_EQ(rows[i], i);
        r2_control_path_state(ctl, i, R2_SEG_PATH_UP, 1, NULL);
    }
    CHECK_EQ(r2_control_path_add(ctl, 0, 0, "nic3"), -1);
    CHECK_EQ(seg->gauges.paths_up, R2_SEG_MAX_PATHS);
    r2_count(&r2_control_path_counters(ctl, 5)->tx_bytes, 77);
    r2_control_path_damping(ctl, 1, 2950, 123456789);
    r2_control_path_spare(ctl, 1, true);
    CHECK_EQ(seg->paths[1].spare, 1);
    r2_control_path_state(ctl, 5, R2_SEG_PATH_DOWN, 2, "reset");
    r2_control_path_state(ctl, 5, R2_SEG_PATH_DOWN, 3, "reset");
    CHECK_EQ(seg->paths[5].n.failures, 1);
    CHECK_EQ(seg->nics[0].n.errors, 1);
    CHECK_EQ(seg->paths[5].generation, 3);
    r2_control_path_state(ctl, 5, R2_SEG_PATH_CONNECTING, 4, NULL);
    r2_control_path_state(ctl, 5, R2_SEG_PATH_UP, 4, NULL);
    CHECK_EQ(seg->counters.path_recoveries, 1);
    CHECK_EQ(seg->gauges.paths_up, R2_SEG_MAX_PATHS);

    r2_control_peer_remove(ctl, 1);
    r2_control_peer_remove(ctl, 1);
    CHECK_EQ(seg->gauges.peers, R2_SEG_MAX_PEERS - 1);
    CHECK_EQ(seg->gauges.paths_total, R2_SEG_MAX_PATHS / 2);
    CHECK_EQ(seg->gauges.paths_up, R2_SEG_MAX_PATHS / 2);
    CHECK_EQ(seg->paths[5].used, 0);
    CHECK_EQ(seg->nics[0].n.errors, 1); /* outlives the path */
    first = r2_control_path_add(ctl, 0, 1, "nic4");
    CHECK_EQ(first, 1);
    CHECK_EQ(seg->paths[1].serial, 2);
    CHECK_EQ(seg->paths[1].n.tx_bytes, 0);
    CHECK_EQ(seg->paths[1].penalty, 0);
    CHECK_EQ(seg->paths[1].reuse_mono_ns, 0);
    CHECK_EQ(seg->paths[1].spare, 0);
    CHECK_EQ(r2_control_peer_add(ctl, &peer), 1);
    CHECK_EQ(seg->peers[1].waits_for, R2_SEG_WAITS_FOR_PATH);
    close_and_remove(ctl);
}

TEST(journal_wraps)
{
    struct r2_control *ctl = open_one();
    const struct r2_segment *seg = r2_control_segment(ctl);
    const struct r2_seg_journal_entry *e;
    int total = R2_SEG_MAX_EVENTS * 2 + 10;

    CHECK_EQ(seg->header.event_head, 1);
    CHECK_EQ(seg->events[0].event, R2_EV_STARTED);
    for (int i = 1; i < total; i++) {
        r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_REPLAY,
                                                           .nic = "nic0",
                                                           .peer_host = "host-b",
                                                           .bytes = (uint64_t)i,
                                                           .cause = "test"});
    }
    CHECK_EQ(seg->header.event_head, total);
    e = &seg->events[(total - 1) % R2_SEG_MAX_EVENTS];
    CHECK_EQ(e->stamp, 2 * (uint64_t)(total - 1) + 2);
    CHECK_EQ(e->bytes, total - 1);
    CHECK_STR(e->nic, "nic0");
    CHECK_EQ(seg->counters.journal_dropped, 0);
    close_and_remove(ctl);
}

TEST(journal_slot_taken)
{
    struct r2_control *ctl = open_one();
    struct r2_segment *seg = r2_control_segment(ctl);
    struct r2_control_event event = {.event = R2_EV_ERROR};

    /* A writer one ring behind never finished: its slot is given up, the others go on. */
    seg->events[1].stamp = 1;
    r2_control_journal(ctl, &event);
    CHECK_EQ(seg->counters.journal_dropped, 1);
    r2_control_journal(ctl, &event);
    CHECK_EQ(seg->counters.journal_dropped, 1);
    CHECK_EQ(seg->events[2].stamp, 6);
    close_and_remove(ctl);
}

TEST(journal_keeps_the_newer)
{
    struct r2_control *ctl = open_one();
    struct r2_segment *seg = r2_control_segment(ctl);
    uint64_t newer = 2 * (1 + (uint64_t)R2_SEG_MAX_EVENTS) + 2;

    /* A writer that slept for a whole ring finds the event of the next round in its slot. */
    seg->events[1].stamp = newer;
    seg->events[1].bytes = 99;
    r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_ERROR});
    CHECK_EQ(seg->events[1].stamp, newer);
    CHECK_EQ(seg->events[1].bytes, 99);
    CHECK_EQ(seg->counters.journal_dropped, 1);
    close_and_remove(ctl);
}

static int child_writes(struct r2_control *ctl)
{
    struct r2_seg_nic_counters *n = r2_control_nic_counters(ctl, 0);

    r2_control_child(ctl);
    r2_count(&n->tx_bytes, 1000);
    r2_control_nic_state(ctl, 0, R2_SEG_NIC_FAILED, "child");
    r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_ERROR});
    r2_control_child(ctl);
    r2_control_close(ctl);
    return 0;
}

TEST(fork_child_is_inert)
{
    struct r2_control *ctl = open_one();
    struct r2_segment *seg = r2_control_segment(ctl);
    int status = 0;
    pid_t pid;

    r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic0"});
    r2_row_begin(&seg->nics[0].seq); /* as if another thread were writing at fork */
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        _exit(child_writes(ctl));
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    r2_row_end(&seg->nics[0].seq);
    CHECK_EQ(seg->nics[0].n.tx_bytes, 0);
    CHECK_EQ(seg->nics[0].state, R2_SEG_NIC_UNKNOWN);
    CHECK_EQ(seg->header.event_head, 1);
    CHECK_EQ(seg->header.ended_real_ns, 0);
    CHECK_EQ(in_child(probe_alive, r2_control_name(ctl)), 1);
    close_and_remove(ctl);
}

/* The lock dies with its process, whatever a forked child holds. */
TEST(lock_dies_with_process)
{
    int name_pipe[2], hold[2], status = 0, fd;
    char name[R2_CONTROL_NAME] = {0};
    pid_t pid;

    CHECK(!pipe(name_pipe) && !pipe(hold));
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        struct r2_control *ctl = NULL;
        char byte;

        if (r2_control_open(&ctl, &info)) {
            _exit(1);
        }
        if (fork() == 0) { /* keeps the inherited descriptor until the test is over */
            close(hold[1]);
            _exit(read(hold[0], &byte, 1) < 0);
        }
        _exit(write(name_pipe[1], r2_control_name(ctl), strlen(r2_control_name(ctl))) < 0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_GT(read(name_pipe[0], name, sizeof(name) - 1), 0);
    fd = shm_open(name, O_RDONLY, 0);
    CHECK_GE(fd, 0);
    CHECK_EQ(locked_by(fd), 0);
    close(fd);
    CHECK_EQ(shm_unlink(name), 0);
    close(hold[0]), close(hold[1]), close(name_pipe[0]), close(name_pipe[1]);
}

static uint64_t ended_of(const char *name)
{
    struct r2_seg_header header = {0};
    int fd = shm_open(name, O_RDONLY, 0);

    CHECK_GE(fd, 0);
    CHECK_EQ(read(fd, &header, sizeof(header)), sizeof(header));
    close(fd);
    return header.ended_real_ns;
}

/* A process that opens and ends by exit(), or by _exit(): the name of its object. */
static void end_by(bool in_order, char *name, size_t size)
{
    int out[2], status = 0;
    ssize_t n;
    pid_t pid;

    CHECK(!pipe(out));
    fflush(stdout);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        struct r2_control *ctl = open_one();

        if (write(out[1], r2_control_name(ctl), strlen(r2_control_name(ctl))) < 0) {
            _exit(1);
        }
        if (in_order) {
            exit(0);
        }
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    n = read(out[0], name, size - 1);
    CHECK_GT(n, 0);
    name[n] = '\0';
    close(out[0]);
    close(out[1]);
}

TEST(exit_is_an_end)
{
    char name[R2_CONTROL_NAME];

    end_by(true, name, sizeof(name));
    CHECK_GT(ended_of(name), 0);
    CHECK_EQ(shm_unlink(name), 0);
    end_by(false, name, sizeof(name));
    CHECK_EQ(ended_of(name), 0);
    CHECK_EQ(shm_unlink(name), 0);
}

/* A child that does not even know that it is one. */
TEST(exit_of_a_child_is_none)
{
    struct r2_control *ctl = open_one();
    int status = 0;
    pid_t pid;

    fflush(stdout);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(r2_control_segment(ctl)->header.ended_real_ns, 0);
    close_and_remove(ctl);
}

TEST(ended_object_is_small)
{
    struct r2_control *ctl = open_one();
    char name[R2_CONTROL_NAME];
    struct r2_seg_header header;
    struct stat st;
    int fd;

    for (int i = 0; i < 100; i++) {
        r2_control_path_add(ctl, 0, 0, "nic1");
    }
    snprintf(name, sizeof(name), "%s", r2_control_name(ctl));
    r2_control_close(ctl);
    fd = shm_open(name, O_RDONLY, 0);
    CHECK_GE(fd, 0);
    CHECK_EQ(fstat(fd, &st), 0);
    CHECK_EQ(st.st_size, sizeof(struct r2_segment));
    CHECK_LT(st.st_blocks * 512, 128 * 1024);
    CHECK_EQ(pread(fd, &header, sizeof(header), 0), sizeof(header));
    CHECK_EQ(header.event_head, 2);
    close(fd);
    CHECK_EQ(shm_unlink(name), 0);
}
