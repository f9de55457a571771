/* NCCL fails at the rank that is left of a communicator: nobody is waited for who is not there.
 * Rung 3: processes over loopback. Who hears of it, and that they do, is test_agree_tell.c's. */
#define _GNU_SOURCE
#include "agree_power.h"
#include "agree_ranks.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <unistd.h>

#define ERROR 6

/* Its sockets are closed: its last thread has ended. */
static bool is_over(pid_t pid)
{
    char path[64], state = 0;
    int threads = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    f = fopen(path, "re");
    if (!f)
        return true;
    if (fscanf(f,
               "%*d (%*[^)]) %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d",
               &state, &threads) != 2) {
        state = 'Z'; /* reaped meanwhile */
        threads = 1;
    }
    fclose(f);
    return (state == 'Z' || state == 'X') && threads <= 1;
}

/* This process's kernel knows of a living other end. */
static bool is_connected(void)
{
    for (int fd = 3; fd < 256; fd++) {
        struct tcp_info info = {0};
        socklen_t len = sizeof(info);

        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 &&
            info.tcpi_state == TCP_ESTABLISHED)
            return true;
    }
    return false;
}

static void end_rank(int rank)
{
    kill(sh->pids[rank], SIGKILL);
    AWAIT(is_over(sh->pids[rank]));
}

/* The process may end at once: 0, which nothing but that makes it here. */
static void nobody_is_left(int last)
{
    struct r2_agree *a = meet();

    if (me != last)
        pause(); /* until it is killed */
    for (int i = 0; i < processes; i++) {
        if (i != me)
            end_rank(i);
    }
    AWAIT(!is_connected());
    AWAIT(r2_agree_tell(a, ERROR) == 0);
    r2_agree_destroy(a);
}

PROCESSES(leader_is_left, 2)
{
    nobody_is_left(0);
}

PROCESSES(other_is_left, 2)
{
    nobody_is_left(1);
}

PROCESSES(last_is_left, 4)
{
    nobody_is_left(processes - 1);
}

/* One that a connection cannot be made to at once may still be there. */
PROCESSES(one_may_be_left, 3)
{
    struct r2_agree *a = meet();
    uint64_t begun;

    if (me == 0)
        pause(); /* until it is killed */
    if (me == 2) {
        lose_power();
        atomic_store(&sh->stuck, 1);
        AWAIT(atomic_load(&sh->switched));
        _exit(0);
    }
    AWAIT(atomic_load(&sh->stuck));
    end_rank(0);
    AWAIT(!is_connected());
    begun = r2_now_ns();
    CHECK_EQ(r2_agree_tell(a, ERROR), -ENOTCONN);
    CHECK_GE(r2_now_ns() - begun, 200 * R2_NS_PER_MS);
    atomic_store(&sh->switched, 1);
    _exit(0);
}

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv);
}
