/* NCCL fails at one rank: all others hear of it, once, whoever dies in between. Rung 3: processes
 * over loopback. It cannot prove anything between hosts: one that loses its power is played by a
 * filter on sockets. */
#define _GNU_SOURCE
#include "agree_power.h"
#include "agree_ranks.h"

#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#define ERROR 6

static atomic_int heard; /* of this process; told by the service thread */
static atomic_int heard_rank, heard_error;

static void on_failed(void *user, int rank, uint32_t error)
{
    (void)user;
    CHECK(rank != me);
    atomic_store(&heard_rank, rank);
    atomic_store(&heard_error, (int)error);
    atomic_fetch_add(&heard, 1);
}

/* A rank that has met the others. */
static struct r2_agree *meet_and_hear(void)
{
    ops.failed = on_failed;
    return meet();
}

/* sh->switched counts who is done; the others live until then, since they may be asked. */
static void leave(struct r2_agree *a, int all)
{
    atomic_fetch_add(&sh->switched, 1);
    AWAIT(atomic_load(&sh->switched) >= all);
    STAYS_MS(50, atomic_load(&heard) <= 1); /* a second word would come now */
    r2_agree_destroy(a);
}

static void hear(struct r2_agree *a, int rank, int all)
{
    AWAIT(atomic_load(&heard));
    CHECK_EQ(atomic_load(&heard_rank), rank);
    CHECK_EQ(atomic_load(&heard_error), ERROR);
    leave(a, all);
}

/* All but the rank that tells; false: this is that one. */
static bool hears(struct r2_agree *a, int teller, int all)
{
    if (me != teller) {
        hear(a, teller, all);
    }
    return me != teller;
}

static uint64_t sent_by(struct r2_agree *a)
{
    struct r2_agree_stats stats;

    r2_agree_get_stats(a, &stats);
    return stats.sent;
}

/* Until the rank may end, which on a busy machine may take longer than one call waits. */
static void tell(struct r2_agree *a, uint32_t error)
{
    AWAIT(r2_agree_tell(a, error) == 0);
}

PROCESSES(one_tells, 5)
{
    struct r2_agree *a = meet_and_hear();

    if (hears(a, 2, processes)) {
        return;
    }
    tell(a, ERROR);
    tell(a, 3); /* the first one counts */
    leave(a, processes);
    CHECK_EQ(atomic_load(&heard), 0);
}

PROCESSES(leader_tells, 5)
{
    struct r2_agree *a = meet_and_hear();
    uint64_t before = sent_by(a);

    if (hears(a, 0, processes)) {
        return;
    }
    tell(a, ERROR);
    CHECK_EQ(sent_by(a) - before, (uint64_t)processes - 1);
    leave(a, processes);
}

/* The word is with the kernel when tell returns: the leader passes it on. */
PROCESSES(teller_ends, 5)
{
    struct r2_agree *a = meet_and_hear();

    if (hears(a, 2, processes - 1)) {
        return;
    }
    tell(a, ERROR);
    _exit(0);
}

/* What an application does with an error. */
PROCESSES(teller_aborts, 4)
{
    struct r2_agree *a = meet_and_hear();

    if (hears(a, 1, processes)) {
        return;
    }
    r2_agree_tell(a, ERROR);
    r2_agree_abort(a);
    r2_agree_destroy(a);
    atomic_fetch_add(&sh->switched, 1);
    AWAIT(atomic_load(&sh->switched) >= processes);
}

/* ... and what the leader may have done before: it passes on what it hears all the same. */
PROCESSES(leader_aborted, 4)
{
    struct r2_agree *a = meet_and_hear();

    if (me == 0) {
        r2_agree_abort(a);
        r2_agree_destroy(a);
        atomic_fetch_add(&sh->switched, 1);
        AWAIT(atomic_load(&sh->switched) >= processes - 1);
        return;
    }
    AWAIT(atomic_load(&sh->switched) >= 1);
    if (hears(a, 2, processes - 1)) {
        return;
    }
    tell(a, ERROR);
    _exit(0);
}

/* ... and the rank that noticed ends at once, too. */
PROCESSES(leader_and_teller_end, 5)
{
    struct r2_agree *a = meet_and_hear();

    if (me == 0) {
        pause(); /* until it is killed */
    }
    if (hears(a, 2, processes - 2)) {
        return;
    }
    kill(sh->pids[0], SIGKILL);
    AWAIT(kill(sh->pids[0], 0) < 0); /* reaped: its sockets are closed */
    tell(a, ERROR);
    _exit(0);
}

static uint16_t port_of(int fd, bool own)
{
    struct sockaddr_in addr = {0};
    socklen_t len = sizeof(addr);
    int rc = own ? getsockname(fd, (struct sockaddr *)&addr, &len)
                 : getpeername(fd, (struct sockaddr *)&addr, &len);

    return rc == 0 && addr.sin_family == AF_INET ? ntohs(addr.sin_port) : 0;
}

/* These ranks end when the others are done. */
static void lost(int all)
{
    atomic_fetch_add(&sh->stuck, 1);
    AWAIT(atomic_load(&sh->switched) >= all);
    _exit(0);
}

PROCESSES(leader_stands_still, 5)
{
    struct r2_agree *a = meet_and_hear();

    if (hears(a, 2, processes - 2)) {
        return;
    }
    kill(sh->pids[0], SIGSTOP);
    AWAIT(process_stopped(sh->pids[0])); /* a thread that runs may tell one more until then */
    tell(a, ERROR);
    AWAIT(atomic_load(&sh->switched) >= processes - 2);
    kill(sh->pids[0], SIGKILL);
    _exit(0);
}

/* The leader hears nothing of the rank that tells, but of others that heard it. */
PROCESSES(teller_out_of_the_leaders_reach, 4)
{
    struct r2_agree *a = meet_and_hear();
    uint64_t begun;

    if (me == 2) { /* sh->ran: the ports of its ends */
        int n = 0;

        for (int fd = 3; fd < 256; fd++) {
            if (is_stream(fd)) {
                atomic_store(&sh->ran[0][n++], port_of(fd, true));
            }
        }
        atomic_store(&sh->stuck, n);
    }
    AWAIT(atomic_load(&sh->stuck));
    if (me == 0) {
        int cut = 0;

        for (int fd = 3; fd < 256; fd++) {
            for (int i = 0; is_stream(fd) && i < atomic_load(&sh->stuck); i++) {
                if (port_of(fd, false) && port_of(fd, false) == atomic_load(&sh->ran[0][i])) {
                    deafen(fd);
                    cut++;
                }
            }
        }
        CHECK_LT(0, cut);
        atomic_store(&sh->accepted, 1);
    }
    AWAIT(atomic_load(&sh->accepted));
    begun = r2_now_ns();
    if (me == 2) {
        tell(a, ERROR);
        leave(a, processes);
        return;
    }
    AWAIT(atomic_load(&heard));
    CHECK_LT(r2_now_ns() - begun, 5 * R2_NS_PER_S); /* a connection anew would take 10 s */
    hears(a, 2, processes);
}

/* Nor does one that no connection can be made to keep the rank from saying so in time. */
PROCESSES(two_without_power, 6)
{
    struct r2_agree *a = meet_and_hear();
    uint64_t begun;

    if (me == 0 || me == 4) {
        lose_power();
        lost(processes - 2);
    }
    if (hears(a, 2, processes - 3)) {
        return;
    }
    AWAIT(atomic_load(&sh->stuck) == 2);
    begun = r2_now_ns();
    tell(a, ERROR);
    CHECK_LT(r2_now_ns() - begun, 5 * R2_NS_PER_S); /* the attempt ends after 10 s */
    atomic_fetch_add(&sh->switched, 1);
    _exit(0);
}

/* A communicator that was split off: the process that its ranks met at is not its leader's, to whom
 * there is no connection before the word. */
PROCESSES(teller_of_a_split_ends, 5)
{
    struct r2_agree_config config;
    struct r2_agree *parent, *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    ops.ready = NULL; /* other nodes than those that on_ready knows */
    get_id(id);
    parent = member(id, me, processes);
    if (me == 0) {
        CHECK_EQ(operate(parent, 0, &epoch), 0); /* it answers for the id */
        CHECK_EQ(r2_agree_derive(NULL, parent, 1, NULL), 0);
        leave(parent, processes - 1);
        return;
    }
    me--;
    ops.failed = on_failed;
    config = config_of(NULL, me, processes - 1);
    CHECK_EQ(r2_agree_derive(&a, parent, 1, &config), 0);
    CHECK_EQ(operate(a, 1, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes - 1);
    if (hears(a, 2, processes - 1)) {
        return;
    }
    tell(a, ERROR);
    _exit(0);
}

/* Another rank of the leader's own process. */
PROCESSES(neighbour_of_the_leader_ends, 6)
{
    int ranks = processes + 1;
    struct r2_agree *a, *b = NULL;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    ops.ready = NULL;
    get_id(id);
    a = member(id, me, ranks);
    if (me != 0) {
        ops.failed = on_failed;
        CHECK_EQ(operate(a, 0, &epoch), 0);
    } else {
        b = member(id, processes, ranks);
        CHECK_EQ(operate(a, 0, &epoch), 0);
        CHECK_EQ(operate(b, 0, &epoch), 0);
        AWAIT(state_of(b) == R2_AGREE_READY);
    }
    AWAIT(state_of(a) == R2_AGREE_READY);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes);
    if (me != 0) {
        hear(a, processes, processes - 1);
        return;
    }
    tell(b, ERROR);
    _exit(0);
}

PROCESSES(all_tell, 6)
{
    struct r2_agree *a = meet_and_hear();

    r2_agree_tell(a, ERROR);
    leave(a, processes);
}

/* The last rank comes when the error is known. It may hear of it within its first call. */
PROCESSES(before_they_met, 4)
{
    uint8_t id[R2_AGREE_ID];
    struct r2_agree *a;
    uint64_t epoch;
    int rc;

    ops.failed = on_failed;
    get_id(id);
    a = member(id, me, processes);
    if (me == 1) {
        AWAIT(atomic_load(&sh->refuse));
    }
    rc = operate(a, 0, &epoch);
    CHECK(rc == 0 || (me == 1 && rc == -EREMOTEIO));
    atomic_fetch_add(&sh->step, 1);
    if (hears(a, 2, processes)) {
        return;
    }
    CHECK_EQ(r2_agree_tell(a, ERROR), -ENOTCONN);
    AWAIT(atomic_load(&sh->step) == processes - 1);
    atomic_store(&sh->refuse, 1);
    leave(a, processes);
}

PROCESSES(nobody_to_tell, 2)
{
    uint8_t id[R2_AGREE_ID];
    struct r2_agree *a;

    ops.failed = on_failed;
    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(r2_agree_tell(a, ERROR), -ENOTCONN); /* no operation, no traffic */
    CHECK_EQ(r2_agree_tell(a, 0), -ENOTCONN);
    CHECK_EQ(sent_by(a), 0);
    leave(a, processes);
}

/* Rank 2 does not answer before the others are done. */
static int accept_late(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    AWAIT(me != 2 || atomic_load(&sh->switched) >= 2);
    return on_accept(user, epoch, plan, len, object);
}

/* Says so when the lookup waits. */
static void *watch(void *arg)
{
    struct r2_agree_stats stats = {0};

    WHILE_MS (40000, !stats.waiting)
        r2_agree_get_stats(arg, &stats);
    atomic_store(&sh->stuck, stats.waiting);
    return NULL;
}

static uint64_t promised_by(struct r2_agree *a)
{
    struct r2_agree_stats stats;

    r2_agree_get_stats(a, &stats);
    return stats.promised;
}

/* A rank that waits to hear of a plan hears of the error instead, at once. */
PROCESSES(who_waits_for_a_plan, 3)
{
    struct r2_agree_view view;
    struct r2_agree *a;
    uint64_t begun;
    pthread_t watcher;
    int rc;

    ops.accept = accept_late;
    a = meet_and_hear();
    if (me == 0) {
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
        AWAIT(atomic_load(&sh->stuck) == 1);
        tell(a, ERROR);
        leave(a, processes);
        return;
    }
    if (me == 1) {
        AWAIT(promised_by(a) == 1);
        CHECK_EQ(pthread_create(&watcher, NULL, watch, a), 0);
        begun = r2_now_ns();
        for (rc = 0; rc == 0;) { /* as far as the plan's index */
            rc = r2_agree_lookup(a, true, &view);
            r2_agree_advance(a, rc == 0);
        }
        CHECK_EQ(rc, -EREMOTEIO);
        pthread_join(watcher, NULL);
        CHECK_LT(r2_now_ns() - begun, 3 * R2_NS_PER_S); /* the leader gives up after 5 s */
        CHECK_EQ(r2_agree_lookup(a, true, &view), -EREMOTEIO);
    }
    hear(a, 0, processes);
}

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv);
}
