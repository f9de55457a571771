/* A stranger's socket to the engine's NIC 0. */
#ifndef R2_TESTS_DIAL_H
#define R2_TESTS_DIAL_H

#include <sys/socket.h>
#include <sys/time.h>

#include "check.h"
#include "engine/loop/loop.h"

/* Connected; what it reads comes within 20 s. The caller closes it. */
static int dial(void)
{
    const struct timeval patience = {.tv_sec = 20};
    struct sockaddr_storage sa;
    struct r2_wire_addr addr;
    socklen_t len;
    int fd;

    CHECK_EQ(r2_eng.ops->address(0, &addr), 0);
    CHECK_EQ(r2_wire_to_sockaddr(&addr, &sa, &len), 0);
    fd = socket(sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_GE(fd, 0);
    CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&sa, len), 0);
    return fd;
}

#endif
