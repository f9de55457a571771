#include "transport/tcp/errors.h"

#include <errno.h>
#include <stddef.h>

#define ANEW "path made anew with back-off"
#define SOON "path made anew at once, its bytes are sent again"
#define GONE "with no path up: the peer is gone, ncclRemoteError"
#define TOLD "path made anew with back-off; the operator has to act"

#define ROW(err, cause, whose, next)                                                               \
    {                                                                                              \
        err, #err, cause, R2_WHOSE_##whose, next                                                   \
    }

static const struct r2_tcp_error table[] = {
    ROW(ENETDOWN, "the NIC is down", LOCAL_LINK, ANEW),
    ROW(ENODEV, "the NIC is not there any more", LOCAL_LINK, ANEW),
    ROW(ENONET, "the NIC is off the network", LOCAL_LINK, ANEW),
    ROW(ENETUNREACH, "no route from the NIC to the peer's network", LOCAL_CONFIG, ANEW),
    ROW(EADDRNOTAVAIL, "the NIC's address is gone, or no port is free", LOCAL_CONFIG, TOLD),
    ROW(EADDRINUSE, "no port is free (R2CCL_PORT_RANGE)", LOCAL_CONFIG, TOLD),
    ROW(EAFNOSUPPORT, "the peer's NIC has another address family", LOCAL_CONFIG, TOLD),
    ROW(EPERM, "a local firewall refuses", LOCAL_CONFIG, TOLD),
    ROW(EACCES, "the peer does not prove the secret, or a firewall refuses", REMOTE_PROCESS, TOLD),
    ROW(EMFILE, "too few file descriptors, here or at the peer (ulimit -n)", LOCAL_HOST, TOLD),
    ROW(ENFILE, "no file descriptors left in the system", LOCAL_HOST, TOLD),
    ROW(ENOMEM, "no memory here", LOCAL_HOST, ANEW),
    ROW(ENOBUFS, "no memory for socket buffers here", LOCAL_HOST, ANEW),
    ROW(ETIMEDOUT, "no answer from the peer's NIC", NETWORK, ANEW),
    ROW(EPROTO, "bytes that are not R2CCL's protocol", NETWORK, SOON),
    ROW(EBADMSG, "a chunk arrived damaged (CRC32C)", NETWORK, SOON),
    ROW(EHOSTUNREACH, "the peer's NIC does not answer on its network", REMOTE_HOST, ANEW),
    ROW(EHOSTDOWN, "the peer's host is down", REMOTE_HOST, ANEW),
    ROW(ECONNREFUSED, "the peer's host refuses: nobody listens there", REMOTE_PROCESS, GONE),
    ROW(ESRCH, "another process answers at the peer's address", REMOTE_PROCESS, GONE),
    ROW(ECONNRESET, "the peer closed or reset the connection", REMOTE_PROCESS, SOON),
    ROW(EPIPE, "the peer has closed the connection", REMOTE_PROCESS, SOON),
    ROW(ECONNABORTED, "the connection was aborted", REMOTE_PROCESS, SOON),
    ROW(ESTALE, "the peer knows a newer generation of the path", REMOTE_PROCESS, SOON),
    ROW(ENOTRECOVERABLE, "the peer's process has given this one up", REMOTE_PROCESS, GONE),
    {0, "any other", "connection error", R2_WHOSE_UNKNOWN, ANEW},
    {0, NULL, NULL, R2_WHOSE_UNKNOWN, NULL},
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
