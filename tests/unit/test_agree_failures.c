/* The agreement when a leader dies, strangers connect and processes fork: waits end, nobody
 * guesses. Rung 3: processes over loopback. It cannot prove anything between hosts. */
#define _GNU_SOURCE
#include "agree_ranks.h"
#include "await.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>

/* --- waits end ---------------------------------------------------------------------------- */

/* Rank 2 kills the leader while it looks at the proposal, then promises or refuses it: rank 1 has
 * promised, and the leader will never say. */
static int accept_and_kill(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    if (me == 2) {
        AWAIT(atomic_load(&sh->step) == 100); /* rank 1 has promised */
        kill(sh->pids[0], SIGKILL);
        AWAIT(process_ended(sh->pids[0]) && atomic_load(&sh->stuck));
        if (atomic_load(&sh->refuse)) {
            return -ENOMEM;
        }
    } else if (me == 1) {
        atomic_store(&sh->step, 100);
    }
    return on_accept(user, epoch, plan, len, object);
}

static bool has_promised(struct r2_agree *a)
{
    struct r2_agree_stats stats;

    r2_agree_get_stats(a, &stats);
    return stats.promised;
}

static void *abort_later(void *a)
{
    struct r2_agree_stats stats = {.waiting = false};

    for (; !stats.waiting; await_nap())
        r2_agree_get_stats(a, &stats);
    r2_agree_abort(a);
    return NULL;
}

enum { SETTLED_BY_REFUSAL, TIMED_OUT, ABORTED };

static void leader_dies(int end)
{
    struct r2_agree_config config;
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch, before;
    pthread_t thread;
    int rc;

    ops.accept = accept_and_kill;
    atomic_store(&sh->refuse, end == SETTLED_BY_REFUSAL ? MOST + 1 : 0);
    get_id(id);
    config = config_of(id, me, processes);
    config.timeout_ns = (end == TIMED_OUT ? 2 : 50) * R2_NS_PER_S;
    CHECK_EQ(r2_agree_create(&a, &config), 0);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    if (me == 0) {
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
        pause(); /* until it is killed */
    }
    AWAIT(process_ended(sh->pids[0]));
    if (me == 1 || end != SETTLED_BY_REFUSAL)
        AWAIT(has_promised(a));
    atomic_fetch_add(&sh->stuck, me == 1);
    before = r2_now_ns();
    if (end == ABORTED) {
        CHECK_EQ(pthread_create(&thread, NULL, abort_later, a), 0);
    }
    for (int i = 0; i < 500; i++) { /* far beyond any index that was proposed */
        rc = operate(a, 0, &epoch);
        if (rc != 0) {
            break;
        }
        CHECK_EQ(epoch, 0);
    }
    CHECK_EQ(rc, end == TIMED_OUT ? -ETIMEDOUT : end == ABORTED ? -ECANCELED : 0);
    CHECK(r2_now_ns() - before < 20 * R2_NS_PER_S);
    if (end == TIMED_OUT) {
        CHECK(r2_now_ns() - before >= 2 * R2_NS_PER_S);
        CHECK_EQ(operate(a, 0, &epoch), -ETIMEDOUT); /* for good */
        CHECK_EQ(state_of(a), R2_AGREE_FAILED);
    }
    if (end == ABORTED) {
        pthread_join(thread, NULL);
    }
    r2_agree_destroy(a);
    /* Who is asked must live until all have asked. */
    atomic_fetch_add(&sh->switched, 1);
    AWAIT(atomic_load(&sh->switched) == 2);
}

PROCESSES(dead_leader_refusal, 3)
{
    leader_dies(SETTLED_BY_REFUSAL);
}

PROCESSES(dead_leader_timeout, 3)
{
    leader_dies(TIMED_OUT);
}

PROCESSES(abort_wakes, 3)
{
    leader_dies(ABORTED);
}

/* --- outsiders ---------------------------------------------------------------------------- */

static int dial(const struct r2_agree_addr *addr)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(addr->port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    memcpy(&sa.sin_addr, addr->ip, 4);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0);
    return fd;
}

/* In the name of rank 1. */
static void say(int fd, enum r2_agree_kind kind, const uint8_t *token, const void *payload,
                uint32_t len)
{
    struct r2_agree_frame f = {.kind = kind, .from = 1, .len = len};
    uint8_t text[R2_AGREE_HEADER];

    memcpy(f.token, token, 16);
    r2_agree_frame_encode(text, &f);
    if (send(fd, text, sizeof(text), MSG_NOSIGNAL) < 0 ||
        (len > 0 && send(fd, payload, len, MSG_NOSIGNAL) < 0)) {
        return; /* thrown out already */
    }
}

/* Noise, half frames, large frames, a stranger's token; and a process that knows the token but is
 * none of the ranks. */
static void attack(const uint8_t id[R2_AGREE_ID])
{
    struct r2_agree_tail tail;
    uint8_t hello[R2_AGREE_HELLO_BYTES], noise[512], msg[R2_AGREE_MSG_BYTES];
    struct r2_agree_hello h = {.process = {9}};
    struct r2_agree_msg refuse = {.type = R2_AGREE_REFUSE, .epoch = 1};

    CHECK_EQ(r2_agree_tail_decode(id, &tail), 0);
    r2_agree_hello_encode(hello, &h);
    r2_agree_msg_encode(msg, &refuse);
    for (int i = 0; i < 100; i++) {
        int fd = dial(&tail.addr);
        uint8_t token[16];

        for (size_t k = 0; k < sizeof(noise); k++) {
            noise[k] = (uint8_t)check_random();
        }
        memcpy(token, i % 4 == 3 ? tail.token : noise, 16);
        if (i % 4 == 0) {
            say(fd, R2_FRAME_MACHINE, noise, NULL, 0);
            CHECK(send(fd, noise, check_below(sizeof(noise)), MSG_NOSIGNAL) >= -1);
        } else {
            say(fd, R2_FRAME_HELLO, token, hello, sizeof(hello));
            say(fd, i % 2 ? R2_FRAME_MACHINE : R2_FRAME_REGISTER, token, msg, sizeof(msg));
            say(fd, (enum r2_agree_kind)(1 + check_below(R2_FRAME_KINDS - 1)), token, noise,
                (uint32_t)check_below(sizeof(noise)));
        }
        await_nap(); /* while the ranks change their plan */
        atomic_fetch_add(&sh->off, 1);
        if (i % 8 != 5) {
            close(fd); /* some hold on */
        }
    }
}

/* The proposal stays open long enough for somebody to meddle: `off` counts what the outsider did.
 */
static int accept_slowly(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    int off = atomic_load(&sh->off);

    if (me == 1)
        AWAIT(atomic_load(&sh->off) >= off + 20 || atomic_load(&sh->stuck) == 2);
    return on_accept(user, epoch, plan, len, object);
}

PROCESSES(attack, 3)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    if (me == 2) {
        AWAIT(atomic_load(&sh->ready) == 2);
        atomic_store(&sh->stuck, 1);
        attack(id);
        atomic_store(&sh->stuck, 2);
        return;
    }
    ops.ready = NULL;
    ops.accept = accept_slowly;
    a = member(id, me, 2);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    atomic_fetch_add(&sh->ready, 1);
    AWAIT(atomic_load(&sh->stuck) >= 1);
    CHECK_EQ(state_of(a), R2_AGREE_READY);
    if (me == 0) {
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
    }
    change(&a, 1, 0, 1);
    AWAIT(atomic_load(&sh->stuck) == 2);
    CHECK_EQ(atomic_load(&sh->step), 1); /* nobody took the outsider's refusal for rank 1's */
    r2_agree_destroy(a);
}

/* Who connects is told the process's name, and may call itself by it: that it goes away again is
 * not the end of the process. Else the ranks of this one would leave, and the group with them. A
 * rank that is started again would be taken for the first of another group. */
static void pose(const uint8_t id[R2_AGREE_ID])
{
    struct r2_agree_tail tail;
    uint8_t told[R2_AGREE_HEADER + R2_AGREE_HELLO_BYTES];
    struct r2_agree_hello h;
    size_t n = 0;
    int fd;

    CHECK_EQ(r2_agree_tail_decode(id, &tail), 0);
    fd = dial(&tail.addr);
    while (n < sizeof(told)) {
        ssize_t more = recv(fd, told + n, sizeof(told) - n, 0);

        CHECK(more > 0);
        n += (size_t)more;
    }
    CHECK_EQ(r2_agree_hello_decode(told + R2_AGREE_HEADER, R2_AGREE_HELLO_BYTES, &h), 0);
    for (int i = 0; i < 5; i++) {
        int other = dial(&tail.addr);
        uint8_t hello[R2_AGREE_HELLO_BYTES], none[16] = {0};

        r2_agree_hello_encode(hello, &h);
        say(other, R2_FRAME_HELLO, none, hello, sizeof(hello));
        shutdown(other, SHUT_WR);
        while (recv(other, told, sizeof(told), 0) > 0)
            ; /* until it was heard, and that it has ended */
        close(other);
    }
    close(fd);
}

PROCESSES(pose, 2)
{
    struct r2_agree *all[2] = {NULL};
    struct r2_agree_stats stats;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    ops.ready = NULL;
    get_id(id);
    if (me == 1) {
        AWAIT(atomic_load(&sh->step) == 1);
        pose(id);
        all[0] = member(id, 1, 2);
        CHECK_EQ(operate(all[0], 0, &epoch), 0);
        AWAIT(state_of(all[0]) == R2_AGREE_OFF);
        r2_agree_get_stats(all[0], &stats);
        CHECK_STR(stats.why, "two processes are rank 1");
        r2_agree_destroy(all[0]);
        atomic_store(&sh->step, 2);
        return;
    }
    for (int r = 0; r < 2; r++) {
        all[r] = member(id, r, 2);
        CHECK_EQ(operate(all[r], 0, &epoch), 0);
    }
    AWAIT(state_of(all[0]) == R2_AGREE_READY && state_of(all[1]) == R2_AGREE_READY);
    atomic_store(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) == 2);
    r2_agree_destroy(all[0]);
    r2_agree_destroy(all[1]);
}

/* More of them than the process that made the id may hold connections for, who say nothing: they
 * keep no rank out. */
enum { CROWD = 200, CROWD_FILES = 256 };

static void crowd(const uint8_t id[R2_AGREE_ID])
{
    int fds[CROWD], next = 0;
    struct r2_agree_tail tail;

    CHECK_EQ(r2_agree_tail_decode(id, &tail), 0);
    for (int i = 0; i < CROWD; i++) {
        fds[i] = dial(&tail.addr);
    }
    atomic_store(&sh->stuck, 1);
    while (atomic_load(&sh->ready) < 2) { /* and more come in the place of those thrown out */
        close(fds[next]);
        fds[next] = dial(&tail.addr);
        next = (next + 1) % CROWD;
        await_nap();
    }
    atomic_store(&sh->stuck, 2);
    for (int i = 0; i < CROWD; i++) {
        close(fds[i]);
    }
}

PROCESSES(crowd, 3)
{
    struct rlimit few;
    uint64_t epoch, begin;
    uint8_t id[R2_AGREE_ID];
    struct r2_agree *a;

    get_id(id);
    if (me == 2) {
        AWAIT(atomic_load(&sh->step) == 1);
        crowd(id);
        return;
    }
    ops.ready = NULL;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &few), 0);
    few.rlim_cur = CROWD_FILES;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    a = member(id, me, 2);
    if (me == 0) {
        CHECK_EQ(operate(a, 0, &epoch), 0);
        atomic_store(&sh->step, 1);
    } else {
        AWAIT(atomic_load(&sh->stuck) == 1);
        CHECK_EQ(operate(a, 0, &epoch), 0);
    }
    begin = r2_now_ns();
    AWAIT(state_of(a) == R2_AGREE_READY);
    CHECK(me == 0 || r2_now_ns() - begin < 8 * R2_NS_PER_S); /* silent ones may stay for 10 s */
    atomic_fetch_add(&sh->ready, 1);
    AWAIT(atomic_load(&sh->stuck) == 2);
    r2_agree_destroy(a);
}

/* --- fork --------------------------------------------------------------------------------- */

static int count_sockets(void)
{
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    int n = 0;

    CHECK(dir != NULL);
    while ((e = readdir(dir)) != NULL) {
        char path[300], target[64];
        ssize_t len;

        snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
        len = readlink(path, target, sizeof(target) - 1);
        target[len > 0 ? len : 0] = '\0';
        n += strncmp(target, "socket:", 7) == 0 || strstr(target, "event") != NULL;
    }
    closedir(dir);
    return n;
}

static void child_is_inert(struct r2_agree *a)
{
    struct r2_agree_view view;
    uint8_t id[R2_AGREE_ID] = {0};
    pid_t pid = fork();
    int status = 0;

    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(20);
        CHECK_EQ(count_sockets(), 0);
        CHECK_EQ(r2_agree_lookup(a, true, &view), 0);
        CHECK(view.epoch == 0 && view.object == NULL);
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), -EPERM);
        CHECK_EQ(r2_agree_id_sign(id, NULL), -EPERM);
        r2_agree_abort(a);
        r2_agree_destroy(a);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_EQ(status, 0);
}

PROCESSES(fork, 2)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    CHECK_GT(count_sockets(), 0);
    child_is_inert(a);
    AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
    epoch = change(&a, 1, 0, 1);
    child_is_inert(a);
    AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
    change(&a, 1, 0, epoch + 1); /* the parents go on */
    r2_agree_destroy(a);
}

/* Another thread makes and closes descriptors all the time, for who knocks. No child has one that
 * it does not know of, which would keep a connection open that its peer takes for ended with the
 * process; and those that it has for a moment bring no events of what is closed here. */
PROCESSES(fork_at_the_door, 2)
{
    struct r2_agree_tail tail;
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    if (me == 1) {
        CHECK_EQ(r2_agree_tail_decode(id, &tail), 0);
        while (!atomic_load(&sh->stuck)) {
            close(dial(&tail.addr));
            await_nap();
        }
        atomic_store(&sh->stuck, 2);
        return;
    }
    a = member(id, me, 2);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    for (int i = 0; i < 100; i++) {
        int status = 0;
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            alarm(20);
            _exit(count_sockets());
        }
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK_MSG(status == 0, "child %d: status 0x%x", i, status);
    }
    atomic_store(&sh->stuck, 1);
    AWAIT(atomic_load(&sh->stuck) == 2); /* it has a door to knock at as long as it does */
    r2_agree_destroy(a);
}

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv);
}
