/* Listeners in a range of ports that other processes take from, too (R2CCL_PORT_RANGE), over real
 * sockets on loopback (rung 3). The other processes are sockets of this one that bind and listen in
 * the very moment between. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "await.h"
#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define PORTS 3

static unsigned low;
static atomic_int rivals[2]; /* by NIC: listeners that find another process ahead of them */
static int theirs[2][PORTS], n_theirs[2];

/* Both have bound the port; the other process listens first. */
int listen(int fd, int backlog)
{
    struct sockaddr_in at;
    socklen_t len = sizeof(at);
    int nic, one = 1;

    if (getsockname(fd, (struct sockaddr *)&at, &len) == 0 && at.sin_family == AF_INET) {
        nic = at.sin_addr.s_addr == inet_addr("127.0.2.1");
        if (atomic_load(&rivals[nic]) > 0) {
            int rival = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

            atomic_fetch_sub(&rivals[nic], 1);
            setsockopt(rival, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
            if (bind(rival, (struct sockaddr *)&at, len) || syscall(SYS_listen, rival, backlog))
                abort();
            theirs[nic][n_theirs[nic]++] = rival;
        }
    }
    return (int)syscall(SYS_listen, fd, backlog);
}

static void let_go(int nic)
{
    while (n_theirs[nic])
        close(theirs[nic][--n_theirs[nic]]);
}

static unsigned port_of(int nic)
{
    struct r2_wire_addr at;

    return r2_eng.ops->address(nic, &at) ? 0 : at.port;
}

static void begin(void)
{
    if (r2_eng.started)
        return;
    atomic_store(&rivals[0], 1);
    atomic_store(&rivals[1], PORTS);
    bed_listen();
    r2_engine_close_listen(listen_here);
    CHECK_EQ(n_theirs[0], 1);
    CHECK_EQ(n_theirs[1], PORTS);
}

static int nics_known(void)
{
    int n = 0;

    r2_peer_lock(tx->peer);
    for (int i = 0; i < 2; i++)
        n += tx->peer->rnics[i].known;
    r2_peer_unlock(tx->peer);
    return n;
}

static int paths_up(void)
{
    int n;

    r2_peer_lock(tx->peer);
    n = tx->peer->n_up;
    r2_peer_unlock(tx->peer);
    return n;
}

/* The other process: both of its NICs have a path to the only one that listens; later it is told of
 * the second one. */
static void sender(int in, int out)
{
    unsetenv("R2CCL_PORT_RANGE");
    CHECK_EQ(read(in, listen_handle, sizeof(listen_handle)), (ssize_t)sizeof(listen_handle));
    CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
    WHILE_MS (20000, !tx)
        CHECK_EQ(r2_engine_connect(ctx, 0, listen_handle, &tx), 0);
    AWAIT(paths_up() == 2);
    CHECK_EQ(nics_known(), 1);
    CHECK_EQ(write(out, "", 1), 1);
    AWAIT(nics_known() == 2);
    _exit(0);
}

/* Tried again: a NIC is not lost for the life of the process, and peers that were connected before
 * hear where it is. The first test: it forks before there are threads. */
TEST(no_port_at_the_start)
{
    int there[2], back[2], status = 0;
    char said;
    pid_t pid;

    CHECK(!r2_eng.started && pipe(there) == 0 && pipe(back) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        sender(there[0], back[1]);
    }
    close(back[1]);
    begin();
    bed_listen();
    CHECK_EQ(write(there[1], listen_handle, sizeof(listen_handle)), (ssize_t)sizeof(listen_handle));
    rx = NULL;
    WHILE_MS (20000, !rx)
        CHECK_EQ(r2_engine_accept(listen_here, &rx), 0);
    CHECK_EQ(read(back[0], &said, 1), 1);
    CHECK_EQ(port_of(1), 0);
    let_go(1);
    AWAIT(port_of(1));
    CHECK_EQ(port_of(1), low);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    close(there[0]);
    close(there[1]);
    close(back[0]);
    r2_engine_close(rx);
    r2_engine_close_listen(listen_here);
    r2_engine_finalize(ctx);
}

/* The next port is as good. */
TEST(taken_before_it_listens)
{
    begin();
    CHECK_EQ(port_of(0), low + 1);
}

/* A listener that is made anew would like its port back. */
TEST(taken_before_it_listens_again)
{
    unsigned was;

    begin();
    was = port_of(0);
    atomic_store(&rivals[0], 1);
    CHECK_EQ(r2_eng.ops->rebind(0), 0);
    CHECK(port_of(0) && port_of(0) != was);
    CHECK_GE(port_of(0), low);
    CHECK_LT(port_of(0), low + PORTS);
    let_go(0);
    bed_listen(); /* and serves */
    bed_connect();
    end();
}

int main(int argc, char **argv)
{
    char range[32];

    low = 20000 + (unsigned)getpid() % 10000;
    snprintf(range, sizeof(range), "%u-%u", low, low + PORTS - 1);
    setenv("R2CCL_PORT_RANGE", range, 1);
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_IO_THREADS", "1", 1);
    return check_main(argc, argv);
}
