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

/* The next port is as good. */
static void test_taken_before_it_listens(void)
{
    begin();
    CHECK_EQ(port_of(0), low + 1);
}

/* Tried again: a NIC is not lost for the life of the process. */
static void test_no_port_at_the_start(void)
{
    begin();
    CHECK_EQ(port_of(1), 0);
    let_go(1);
    AWAIT(port_of(1));
    CHECK_EQ(port_of(1), low);
}

/* A listener that is made anew would like its port back. */
static void test_taken_before_it_listens_again(void)
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

static const struct check_test tests[] = {
    {"taken_before_it_listens", test_taken_before_it_listens},
    {"no_port_at_the_start", test_no_port_at_the_start},
    {"taken_before_it_listens_again", test_taken_before_it_listens_again},
    {0},
};

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
    return check_main(argc, argv, tests);
}
