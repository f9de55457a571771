/* A rank whose host has lost its power, for the tests of the agreement: nothing that comes to its
 * sockets is taken any more. */
#ifndef R2_TESTS_UNIT_AGREE_POWER_H
#define R2_TESTS_UNIT_AGREE_POWER_H

#include <linux/filter.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "check.h"

static bool is_stream(int fd)
{
    int type = 0;
    socklen_t len = sizeof(type);

    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 && type == SOCK_STREAM;
}

/* Nothing that comes to the socket is taken any more, not even acknowledged. */
static void deafen(int fd)
{
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program = {.len = 1, .filter = &drop};

    CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), 0);
}

/* To its peers this process's host has lost its power. */
static void lose_power(void)
{
    int sockets = 0;

    for (int fd = 3; fd < 256; fd++) {
        if (is_stream(fd)) {
            deafen(fd);
            sockets++;
        }
    }
    CHECK_LT(1, sockets); /* the listener and a connection at least */
}

#endif
