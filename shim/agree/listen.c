/* Where the agreement listens, and the descriptors that a forked child must close. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agree/net.h"
#include "settings/settings.h"
#include "topology/nics.h"

#define R2_LISTEN_BACKLOG 4096 /* ranks that arrive before this process's thread runs */

/* --- descriptors -------------------------------------------------------------------------- */

static pthread_mutex_t r2_fds_lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static int *r2_fds;
static size_t r2_nfds, r2_fds_room;

void r2_agree_fds_begin(void)
{
    pthread_mutex_lock(&r2_fds_lock);
}

/* The lock is held. */
static void r2_fds_note(int fd)
{
    if (r2_nfds == r2_fds_room) {
        size_t room = r2_fds_room ? r2_fds_room * 2 : 64;
        int *more = realloc(r2_fds, room * sizeof(*more));

        if (more) {
            r2_fds = more;
            r2_fds_room = room;
        }
    }
    if (r2_nfds < r2_fds_room) { /* else: one that a child will not close; close-on-exec is set */
        r2_fds[r2_nfds++] = fd;
    }
}

int r2_agree_fds_made(int fd)
{
    int saved = errno;

    if (fd >= 0) {
        r2_fds_note(fd);
    }
    pthread_mutex_unlock(&r2_fds_lock);
    errno = saved;
    return fd;
}

void r2_agree_fds_close(int fd)
{
    pthread_mutex_lock(&r2_fds_lock);
    for (size_t i = 0; i < r2_nfds; i++) {
        if (r2_fds[i] == fd) {
            r2_fds[i] = r2_fds[--r2_nfds];
            break;
        }
    }
    close(fd); /* under the lock: a fork in between must not miss the number's next owner */
    pthread_mutex_unlock(&r2_fds_lock);
}

void r2_agree_fds_before_fork(void)
{
    pthread_mutex_lock(&r2_fds_lock);
}

void r2_agree_fds_in_parent(void)
{
    pthread_mutex_unlock(&r2_fds_lock);
}

void r2_agree_fds_in_child(void)
{
    for (size_t i = 0; i < r2_nfds; i++) {
        close(r2_fds[i]);
    }
    r2_nfds = 0;
    pthread_mutex_unlock(&r2_fds_lock);
}

/* --- the listener ------------------------------------------------------------------------- */

static int r2_listen_interface(struct r2_nic *nic, char *why, size_t whylen)
{
    struct r2_settings *s = malloc(sizeof(*s));
    struct r2_nic *nics = calloc(R2_MAX_NICS, sizeof(*nics));
    int n = -ENOMEM;

    if (s && nics) {
        *s = *r2_settings_get();
        s->nics[0] = '\0'; /* these carry data; the agreement goes where NCCL bootstraps */
        n = r2_nics_find(s, nics, R2_MAX_NICS, why, whylen);
    }
    if (n > 0) {
        *nic = nics[0];
    }
    free(s);
    free(nics);
    return n > 0 ? 0 : n < 0 ? n : -ENODEV;
}

static int r2_listen_bind(int fd, struct sockaddr_storage *sa, socklen_t len)
{
    const struct r2_port_range *ports = &r2_settings_get()->ports;
    in_port_t *port = sa->ss_family == AF_INET ? &((struct sockaddr_in *)sa)->sin_port
                                               : &((struct sockaddr_in6 *)sa)->sin6_port;

    if (ports->low == 0) {
        *port = 0;
        return bind(fd, (struct sockaddr *)sa, len) < 0 ? -errno : 0;
    }
    for (int p = ports->low; p <= ports->high; p++) {
        *port = htons((uint16_t)p);
        if (bind(fd, (struct sockaddr *)sa, len) == 0) {
            return 0;
        }
        if (errno != EADDRINUSE) {
            return -errno;
        }
    }
    return -EADDRINUSE;
}

static int r2_listen_socket(struct sockaddr_storage *sa, socklen_t len)
{
    int fd, rc;

    r2_agree_fds_begin();
    fd = r2_agree_fds_made(socket(sa->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0) {
        return -errno;
    }
    rc = r2_listen_bind(fd, sa, len);
    if (rc == 0 && listen(fd, R2_LISTEN_BACKLOG) < 0) {
        rc = -errno;
    }
    if (rc == 0 && getsockname(fd, (struct sockaddr *)sa, &len) < 0) {
        rc = -errno;
    }
    if (rc != 0) {
        r2_agree_fds_close(fd);
        return rc;
    }
    return fd;
}

int r2_agree_net_open_listener(int *fd, struct r2_agree_addr *addr, char *why, size_t whylen)
{
    struct r2_nic nic;
    char text[64];
    int rc = r2_listen_interface(&nic, why, whylen);

    if (rc != 0) {
        return rc;
    }
    rc = r2_listen_socket(&nic.addr, nic.socklen);
    if (rc < 0) {
        snprintf(why, whylen, "cannot listen on %s (%s): %s", nic.ifname,
                 r2_addr_text((struct sockaddr *)&nic.addr, text, sizeof(text)), strerror(-rc));
        return rc;
    }
    *fd = rc;
    memset(addr, 0, sizeof(*addr));
    if (nic.addr.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&nic.addr;

        addr->family = 4;
        addr->port = ntohs(in->sin_port);
        memcpy(addr->ip, &in->sin_addr, 4);
    } else {
        const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)&nic.addr;

        addr->family = 6;
        addr->port = ntohs(in->sin6_port);
        memcpy(addr->ip, &in->sin6_addr, 16);
    }
    return 0;
}
