#include "transport/tcp/errors.h"

#include <errno.h>
#include <stddef.h>

#define ROW(err, cause)                                                                            \
    {                                                                                              \
        err, #err, cause                                                                           \
    }

static const struct r2_tcp_error table[] = {
    ROW(ENETDOWN, "the NIC is down"),
    ROW(ENODEV, "the NIC is not there any more"),
    ROW(ENONET, "the NIC is off the network"),
    ROW(ENETUNREACH, "no route from the NIC to the peer's network"),
    ROW(EADDRNOTAVAIL, "the NIC's address is gone, or no port is free"),
    ROW(EADDRINUSE, "no port is free (R2CCL_PORT_RANGE)"),
    ROW(EAFNOSUPPORT, "the peer's NIC has another address family"),
    ROW(EPERM, "a local firewall refuses"),
    ROW(EACCES, "the peer does not prove the secret, or a firewall refuses"),
    ROW(EMFILE, "too few file descriptors, here or at the peer (ulimit -n)"),
    ROW(ENFILE, "no file descriptors left in the system"),
    ROW(ENOMEM, "no memory here"),
    ROW(ENOBUFS, "no memory for socket buffers here"),
    ROW(ETIMEDOUT, "no answer from the peer's NIC"),
    ROW(EPROTO, "bytes that are not R2CCL's protocol"),
    ROW(EBADMSG, "a chunk arrived damaged (CRC32C)"),
    ROW(EHOSTUNREACH, "the peer's NIC does not answer on its network"),
    ROW(EHOSTDOWN, "the peer's host is down"),
    ROW(ECONNREFUSED, "the peer's host refuses: nobody listens there"),
    ROW(ESRCH, "another process answers at the peer's address"),
    ROW(ECONNRESET, "the peer closed or reset the connection"),
    ROW(EPIPE, "the peer has closed the connection"),
    ROW(ECONNABORTED, "the connection was aborted"),
    ROW(ESTALE, "the peer knows a newer generation of the path"),
    ROW(ENOTRECOVERABLE, "the peer's process has given this one up"),
    {0, "any other", "connection error"},
    {0, NULL, NULL},
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
