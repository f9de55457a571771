#include "transport/tcp/errors.h"

#include <errno.h>
#include <stddef.h>

#define ROW(err, cause, whose)                                                                     \
    {                                                                                              \
        err, #err, cause, R2_WHOSE_##whose                                                         \
    }

static const struct r2_tcp_error table[] = {
    ROW(ENETDOWN, "the NIC is down", LOCAL_LINK),
    ROW(ENODEV, "the NIC is not there any more", LOCAL_LINK),
    ROW(ENONET, "the NIC is off the network", LOCAL_LINK),
    ROW(ENETUNREACH, "no route from the NIC to the peer's network", LOCAL_CONFIG),
    ROW(EADDRNOTAVAIL, "the NIC's address is gone, or no port is free", LOCAL_CONFIG),
    ROW(EADDRINUSE, "no port is free (R2CCL_PORT_RANGE)", LOCAL_CONFIG),
    ROW(EAFNOSUPPORT, "the peer's NIC has another address family", LOCAL_CONFIG),
    ROW(EPERM, "a local firewall refuses", LOCAL_CONFIG),
    ROW(EACCES, "the peer does not prove the secret, or a firewall refuses", REMOTE_PROCESS),
    ROW(EMFILE, "too few file descriptors, here or at the peer (ulimit -n)", LOCAL_HOST),
    ROW(ENFILE, "no file descriptors left in the system", LOCAL_HOST),
    ROW(ENOMEM, "no memory here", LOCAL_HOST),
    ROW(ENOBUFS, "no memory for socket buffers here", LOCAL_HOST),
    ROW(ETIMEDOUT, "no answer from the peer's NIC", NETWORK),
    ROW(EPROTO, "bytes that are not R2CCL's protocol", NETWORK),
    ROW(EBADMSG, "a chunk arrived damaged (CRC32C)", NETWORK),
    ROW(EHOSTUNREACH, "the peer's NIC does not answer on its network", REMOTE_HOST),
    ROW(EHOSTDOWN, "the peer's host is down", REMOTE_HOST),
    ROW(ECONNREFUSED, "the peer's host refuses: nobody listens there", REMOTE_PROCESS),
    ROW(ESRCH, "another process answers at the peer's address", REMOTE_PROCESS),
    ROW(ECONNRESET, "the peer closed or reset the connection", REMOTE_PROCESS),
    ROW(EPIPE, "the peer has closed the connection", REMOTE_PROCESS),
    ROW(ECONNABORTED, "the connection was aborted", REMOTE_PROCESS),
    ROW(ESTALE, "the peer knows a newer generation of the path", REMOTE_PROCESS),
    ROW(ENOTRECOVERABLE, "the peer's process has given this one up", REMOTE_PROCESS),
    {0, "any other", "connection error", R2_WHOSE_UNKNOWN},
    {0, NULL, NULL, R2_WHOSE_UNKNOWN},
};

const struct r2_tcp_error *r2_tcp_error(int err)
{
    const struct r2_tcp_error *row = table;

    if (err < 0 && err > -4096)
        err = -err;
    while (row->err && row->err != err)
        row++;
    return row;
}

const struct r2_tcp_error *r2_tcp_error_row(int i)
{
    return &table[i];
}

const char *r2_tcp_whose(enum r2_tcp_whose whose)
{
    static const char *const words[] = {"unknown",       "local link", "local configuration",
                                        "local host",    "network",    "remote host",
                                        "remote process"};

    return (unsigned)whose < R2_WHOSE_COUNT ? words[whose] : words[0];
}
