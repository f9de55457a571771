/* More unproven connections than are read at once, over real sockets on loopback (rung 3). */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define CROWD (R2_TCP_MAX_PENDING + 60)

static struct sockaddr_in listener(void)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct r2_wire_addr at;

    CHECK_EQ(r2_eng.ops->address(0, &at), 0);
    sa.sin_port = htons(at.port);
    memcpy(&sa.sin_addr, &((const struct sockaddr_in *)&r2_local.nics[0].addr)->sin_addr,
           sizeof(sa.sin_addr));
    return sa;
}

static bool is_reset(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_DONTWAIT);

    return n == 0 || (n < 0 && errno != EAGAIN);
}

/* Nobody is sent away because others came before: who is late waits. */
TEST(a_crowd_waits)
{
    struct rlimit files;
    struct sockaddr_in sa;
    int fds[CROWD];

    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
    if (files.rlim_max < 4 * CROWD) {
        fprintf(stderr, "not tried: at most %lu files\n", (unsigned long)files.rlim_max);
        return;
    }
    files.rlim_cur = files.rlim_cur < 4 * CROWD ? 4 * CROWD : files.rlim_cur;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
    bed_listen();
    sa = listener();
    for (int i = 0; i < CROWD; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK_GE(fds[i], 0);
        CHECK_EQ(connect(fds[i], (struct sockaddr *)&sa, sizeof(sa)), 0);
    }
    WHILE_MS (200, true) { /* far less than they are given to say who they are */
        for (int i = 0; i < CROWD; i++)
            CHECK(!is_reset(fds[i]));
    }
    for (int i = 0; i < CROWD; i++)
        close(fds[i]);
    bed_connect();
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    return check_main(argc, argv);
}
