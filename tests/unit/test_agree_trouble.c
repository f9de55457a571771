/* The agreement when a leader dies, outsiders knock and processes fork: waits end, nobody guesses.
 */
#define _GNU_SOURCE
#include "agree_ranks.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <sys/socket.h>

/* --- waits end ---------------------------------------------------------------------------- */

/* Rank 2 kills the leader while it looks at the proposal, then promises or refuses it: rank 1 has
 * promised, and the leader will never say. */
static int accept_and_kill(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    if (me == 2) {
        AWAIT(atomic_load(&sh->step) == 100); /* rank 1 has promised */
        kill(sh->pids[0], SIGKILL);
        usleep(50000);
        if (atomic_load(&sh->refuse)) {
            return -ENOMEM;
        }
    } else if (me == 1) {
        atomic_store(&sh->step, 100);
    }
    return on_accept(user, epoch, plan, len, object);
}

static void *abort_later(void *a)
{
    usleep(700000);
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
    AWAIT(kill(sh->pids[0], 0) != 0 || atomic_load(&sh->step) == 100);
    usleep(300000);
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

static void refusal_settles(void)
{
    leader_dies(SETTLED_BY_REFUSAL);
}

static void nobody_knows(void)
{
    leader_dies(TIMED_OUT);
}

static void abort_wakes(void)
{
    leader_dies(ABORTED);
}

static void test_dead_leader_refusal(void)
{
    run_processes(3, refusal_settles);
}

static void test_dead_leader_timeout(void)
{
    run_processes(3, nobody_knows);
}

static void test_abort_wakes(void)
{
    run_processes(3, abort_wakes);
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
    for (int i = 0; i < 200; i++) {
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
        usleep(3000); /* while the ranks change their plan */
        if (i % 8 != 5) {
            close(fd); /* some hold on */
        }
    }
}

/* The proposal stays open long enough for somebody to meddle. */
static int accept_slowly(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    usleep(me == 1 ? 200000 : 0);
    return on_accept(user, epoch, plan, len, object);
}

static void under_attack(void)
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

static void test_attack(void)
{
    run_processes(3, under_attack);
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

static void fork_in_the_middle(void)
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
    change(&a, 1, 0, 1);
    child_is_inert(a);
    AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
    change(&a, 1, 0, 2); /* the parents go on */
    r2_agree_destroy(a);
}

static void test_fork(void)
{
    run_processes(2, fork_in_the_middle);
}

static const struct check_test tests[] = {{"dead_leader_refusal", test_dead_leader_refusal},
                                          {"dead_leader_timeout", test_dead_leader_timeout},
                                          {"abort_wakes", test_abort_wakes},
                                          {"attack", test_attack},
                                          {"fork", test_fork},
                                          {0}};

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv, tests);
}
