#define _GNU_SOURCE
#include "bootstrap.h"
#include "../pause.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SECOND 1000000000ull
#define FIXED_SECRET 0x5232434cull /* for NCCL_COMM_ID, where ids carry no secret */

enum { MAX_RANKS = 4096, MAX_MESSAGE = 1 << 20 };
#define RING_TAG (~0ull)

struct unique { /* inside ncclUniqueId */
    uint64_t secret;
    struct hn_addr root;
};

struct hello { /* rank to root */
    uint64_t secret;
    int32_t rank, nranks;
    struct hn_addr addr;
};

struct header { /* rank to rank */
    uint64_t secret;
    uint64_t tag;
    int32_t from;
    uint32_t bytes;
};

struct message {
    struct message *next;
    struct header header;
    char data[];
};

struct hn_boot {
    uint64_t secret;
    int rank, nranks;
    const _Atomic int *stop;
    int listen_fd, next_fd, prev_fd;
    struct hn_addr *addrs;
    struct message *early; /* arrived before they were asked for */
};

struct root {
    int fd;
    uint64_t secret;
};

uint64_t hn_boot_deadline(void)
{
    return hn_util_now() +
           (uint64_t)hn_util_env("HOSTNCCL_BOOTSTRAP_TIMEOUT", 60, 1, 86400) * SECOND;
}

static ncclResult_t broken(const char *what, int err)
{
    ncclResult_t result = err == -ECONNRESET || err == -ECONNREFUSED || err == -ETIMEDOUT
                              ? ncclRemoteError
                              : ncclSystemError;
    if (err == -ECANCELED)
        return hn_util_fail(ncclInternalError, "bootstrap: %s: aborted", what);
    return hn_util_fail(result, "bootstrap: %s: %s", what, strerror(-err));
}

/* Fd of the next connection, or -errno. */
static int accept_wait(int listen_fd, const _Atomic int *stop, uint64_t deadline)
{
    struct pollfd p = {listen_fd, POLLIN, 0};
    for (;;) {
        int fd = hn_sockets_accept(listen_fd);
        if (fd != -EAGAIN)
            return fd;
        if (stop && atomic_load(stop))
            return -ECANCELED;
        if (hn_util_now() > deadline)
            return -ETIMEDOUT;
        poll(&p, 1, 20);
    }
}

static int connect_wait(const struct hn_addr *to, const _Atomic int *stop, uint64_t deadline)
{
    for (;;) {
        int fd = hn_sockets_connect(to, NULL);
        int rc = fd < 0 ? fd : 0;
        while (!rc) {
            rc = hn_sockets_connected(fd);
            if (!rc) {
                struct pollfd p = {fd, POLLOUT, 0};
                poll(&p, 1, 20);
                if (stop && atomic_load(stop))
                    rc = -ECANCELED;
                else if (hn_util_now() > deadline)
                    rc = -ETIMEDOUT;
            }
        }
        if (rc > 0)
            return fd;
        if (fd >= 0)
            close(fd);
        if (rc != -ECONNREFUSED || hn_util_now() > deadline) /* the root may come later */
            return rc;
        if (stop && atomic_load(stop))
            return -ECANCELED;
        pause_us(20000);
    }
}

static int own_addr(struct hn_addr *addr)
{
    const char *text = getenv("HOSTNCCL_BOOTSTRAP_ADDR");
    struct hn_nic nic;
    if (text && *text)
        return hn_sockets_parse(text, addr);
    if (hn_sockets_nics(&nic, 1) < 1)
        return -ENODEV;
    *addr = nic.addr;
    return 0;
}

/* One connection of the root: reads who it is; keeps the fd in `fds`. */
static void greet(const struct root *root, int fd, int *count, int *nranks, int *fds,
                  struct hn_addr *addrs)
{
    struct hello hello;
    uint64_t soon = hn_util_now() + 5 * SECOND;
    if (hn_sockets_read(fd, &hello, sizeof(hello), NULL, soon) || hello.secret != root->secret ||
        hello.nranks < 1 || hello.nranks > MAX_RANKS || hello.rank < 0 ||
        hello.rank >= hello.nranks || (*nranks && hello.nranks != *nranks) ||
        fds[hello.rank] >= 0) {
        HN_WARN("bootstrap: a connection to the root was refused: wrong id, rank or rank count");
        close(fd);
        return;
    }
    *nranks = hello.nranks;
    fds[hello.rank] = fd;
    addrs[hello.rank] = hello.addr;
    (*count)++;
}

static void *root_main(void *arg)
{
    struct root *root = arg;
    uint64_t deadline = hn_util_now() + 600 * SECOND;
    int *fds = malloc(MAX_RANKS * sizeof(*fds));
    struct hn_addr *addrs = calloc(MAX_RANKS, sizeof(*addrs));
    int count = 0, nranks = 0;
    memset(fds, 0xff, MAX_RANKS * sizeof(*fds));
    while (!nranks || count < nranks) {
        int fd = accept_wait(root->fd, NULL, deadline);
        if (fd < 0)
            break;
        greet(root, fd, &count, &nranks, fds, addrs);
    }
    for (int r = 0; r < nranks; r++) {
        if (fds[r] < 0)
            continue;
        if (count == nranks)
            hn_sockets_write(fds[r], addrs, (size_t)nranks * sizeof(*addrs), NULL,
                             hn_util_now() + 10 * SECOND);
        close(fds[r]);
    }
    close(root->fd);
    free(fds);
    free(addrs);
    free(root);
    return NULL;
}

static ncclResult_t start_root(struct hn_addr *addr, uint64_t secret)
{
    struct root *root = malloc(sizeof(*root));
    pthread_t thread;
    if (!root)
        return hn_util_fail(ncclSystemError, "out of memory");
    root->secret = secret;
    root->fd = hn_sockets_listen(addr);
    if (root->fd < 0) {
        char text[64];
        int err = root->fd;
        hn_sockets_format(addr, text, sizeof(text));
        free(root);
        return hn_util_fail(ncclSystemError, "bootstrap: root cannot listen on %s: %s", text,
                            strerror(-err));
    }
    if (pthread_create(&thread, NULL, root_main, root)) {
        close(root->fd);
        free(root);
        return hn_util_fail(ncclSystemError, "bootstrap: no thread for the root");
    }
    pthread_detach(thread);
    return ncclSuccess;
}

ncclResult_t hn_boot_new_id(ncclUniqueId *id)
{
    struct unique unique = {.secret = hn_util_random()};
    const char *fixed = getenv("NCCL_COMM_ID");
    memset(id, 0, sizeof(*id));
    ncclResult_t result = ncclSuccess;
    if (fixed && *fixed) {
        unique.secret = FIXED_SECRET;
        if (hn_sockets_parse(fixed, &unique.root) || !unique.root.port)
            return hn_util_fail(ncclInvalidArgument, "NCCL_COMM_ID=%s: address:port is needed",
                                fixed);
    } else if (own_addr(&unique.root)) {
        return hn_util_fail(ncclSystemError, "bootstrap: no address; set HOSTNCCL_BOOTSTRAP_ADDR");
    } else {
        unique.root.port = 0;
        result = start_root(&unique.root, unique.secret);
    }
    memcpy(id, &unique, sizeof(unique));
    return result;
}

ncclResult_t hn_boot_open(uint64_t secret, const _Atomic int *stop, struct hn_boot **out,
                          struct hn_addr *addr)
{
    struct hn_boot *boot = calloc(1, sizeof(*boot));
    if (!boot)
        return hn_util_fail(ncclSystemError, "out of memory");
    *boot = (struct hn_boot){.secret = secret, .stop = stop, .next_fd = -1, .prev_fd = -1};
    int rc = own_addr(addr);
    addr->port = 0;
    boot->listen_fd = rc ? rc : hn_sockets_listen(addr);
    if (boot->listen_fd < 0) {
        rc = boot->listen_fd;
        free(boot);
        return broken("cannot listen (HOSTNCCL_BOOTSTRAP_ADDR, NCCL_SOCKET_IFNAME)", rc);
    }
    *out = boot;
    return ncclSuccess;
}

static int send_to(struct hn_boot *boot, int peer, uint64_t tag, const void *data, size_t bytes,
                   bool keep)
{
    struct header h = {boot->secret, tag, boot->rank, (uint32_t)bytes};
    uint64_t deadline = hn_boot_deadline();
    int fd = connect_wait(&boot->addrs[peer], boot->stop, deadline);
    if (fd < 0)
        return fd;
    int rc = hn_sockets_write(fd, &h, sizeof(h), boot->stop, deadline);
    if (!rc)
        rc = hn_sockets_write(fd, data, bytes, boot->stop, deadline);
    if (rc || !keep)
        close(fd);
    return rc ? rc : keep ? fd : 0;
}

/* Takes one connection: the ring's, or a message, which is put aside. 0 or -errno. */
static int take_one(struct hn_boot *boot, uint64_t deadline)
{
    struct header h;
    int fd = accept_wait(boot->listen_fd, boot->stop, deadline);
    if (fd < 0)
        return fd;
    uint64_t soon = hn_util_now() + 5 * SECOND;
    if (hn_sockets_read(fd, &h, sizeof(h), boot->stop, soon) || h.secret != boot->secret ||
        h.bytes > MAX_MESSAGE || h.from < 0 || h.from >= boot->nranks) {
        close(fd);
        return 0;
    }
    if (h.tag == RING_TAG && boot->prev_fd < 0) {
        boot->prev_fd = fd;
        return 0;
    }
    struct message *m = malloc(sizeof(*m) + h.bytes);
    int rc = m ? hn_sockets_read(fd, m->data, h.bytes, boot->stop, deadline) : -ENOMEM;
    close(fd);
    if (rc) {
        free(m);
        return rc;
    }
    m->header = h;
    m->next = NULL;
    struct message **end = &boot->early;
    while (*end)
        end = &(*end)->next;
    *end = m;
    return 0;
}

ncclResult_t hn_boot_meet(struct hn_boot *boot, int rank, int nranks, const struct hn_addr *addrs)
{
    uint64_t deadline = hn_boot_deadline();
    boot->rank = rank;
    boot->nranks = nranks;
    boot->addrs = malloc((size_t)nranks * sizeof(*addrs));
    if (!boot->addrs)
        return hn_util_fail(ncclSystemError, "out of memory");
    memcpy(boot->addrs, addrs, (size_t)nranks * sizeof(*addrs));
    if (nranks == 1)
        return ncclSuccess;
    boot->next_fd = send_to(boot, (rank + 1) % nranks, RING_TAG, NULL, 0, true);
    if (boot->next_fd < 0)
        return broken("connection to the next rank", boot->next_fd);
    while (boot->prev_fd < 0) {
        int rc = take_one(boot, deadline);
        if (rc)
            return broken("connection of the previous rank", rc);
    }
    return ncclSuccess;
}

static int ask_root(const struct unique *unique, struct hello *hello, struct hn_addr *addrs,
                    const _Atomic int *stop)
{
    uint64_t deadline = hn_boot_deadline();
    int fd = connect_wait(&unique->root, stop, deadline);
    if (fd < 0)
        return fd;
    int rc = hn_sockets_write(fd, hello, sizeof(*hello), stop, deadline);
    if (!rc)
        rc = hn_sockets_read(fd, addrs, (size_t)hello->nranks * sizeof(*addrs), stop, deadline);
    close(fd);
    return rc;
}

ncclResult_t hn_boot_join(const ncclUniqueId *id, int rank, int nranks, const _Atomic int *stop,
                          struct hn_boot **out)
{
    struct unique unique;
    struct hn_boot *boot = NULL;
    const char *fixed = getenv("NCCL_COMM_ID");
    memcpy(&unique, id, sizeof(unique));
    struct hello hello = {.secret = unique.secret, .rank = rank, .nranks = nranks};
    if (fixed && *fixed && unique.secret == FIXED_SECRET && rank == 0) {
        ncclResult_t started = start_root(&unique.root, unique.secret);
        if (started != ncclSuccess)
            return started;
    }
    ncclResult_t result = hn_boot_open(unique.secret, stop, &boot, &hello.addr);
    if (result != ncclSuccess)
        return result;
    struct hn_addr *addrs = calloc((size_t)nranks, sizeof(*addrs));
    int rc = addrs ? ask_root(&unique, &hello, addrs, stop) : -ENOMEM;
    if (rc)
        result = broken("no answer from the root of the unique id", rc);
    else
        result = hn_boot_meet(boot, rank, nranks, addrs);
    free(addrs);
    if (result == ncclSuccess)
        *out = boot;
    else
        hn_boot_free(boot);
    return result;
}

void hn_boot_stop(struct hn_boot *boot, const _Atomic int *stop)
{
    boot->stop = stop;
}

void hn_boot_free(struct hn_boot *boot)
{
    if (!boot)
        return;
    while (boot->early) {
        struct message *m = boot->early;
        boot->early = m->next;
        free(m);
    }
    int fds[] = {boot->listen_fd, boot->next_fd, boot->prev_fd};
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(boot->addrs);
    free(boot);
}

ncclResult_t hn_boot_allgather(struct hn_boot *boot, void *data, size_t bytes)
{
    char *blocks = data;
    int n = boot->nranks;
    uint64_t deadline = hn_boot_deadline();
    for (int step = 0; step < n - 1; step++) {
        size_t give = (size_t)((boot->rank - step + n) % n);
        size_t take = (size_t)((boot->rank - step - 1 + n) % n);
        int rc =
            hn_sockets_write(boot->next_fd, blocks + give * bytes, bytes, boot->stop, deadline);
        if (!rc)
            rc = hn_sockets_read(boot->prev_fd, blocks + take * bytes, bytes, boot->stop, deadline);
        if (rc)
            return broken("all-gather", rc);
    }
    return ncclSuccess;
}

ncclResult_t hn_boot_send(struct hn_boot *boot, int peer, uint64_t tag, const void *data,
                          size_t bytes)
{
    int rc = send_to(boot, peer, tag, data, bytes, false);
    return rc ? broken("send", rc) : ncclSuccess;
}

ncclResult_t hn_boot_recv(struct hn_boot *boot, int peer, uint64_t tag, void *data, size_t bytes)
{
    uint64_t deadline = hn_boot_deadline();
    for (;;) {
        for (struct message **link = &boot->early; *link; link = &(*link)->next) {
            struct message *m = *link;
            if (m->header.from != peer || m->header.tag != tag)
                continue;
            bool fits = m->header.bytes == bytes;
            if (fits)
                memcpy(data, m->data, bytes);
            *link = m->next;
            free(m);
            return fits ? ncclSuccess
                        : hn_util_fail(ncclInternalError, "bootstrap: message of another size");
        }
        int rc = take_one(boot, deadline);
        if (rc)
            return broken("receive", rc);
    }
}
