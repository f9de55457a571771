/* A kernel that is asked about links, for tests of the engine: this program's sendto(), recv() and
 * recvfrom() are in its place. They hold questions back before they are put, as the kernel does
 * while it changes an interface, or their answers behind it; say what a link's state is; and make
 * events. It cannot prove which calls of a real kernel wait. All NICs are on interface 1 (lo),
 * which there is in every namespace. */
#ifndef R2_TESTS_LINKS_BED_H
#define R2_TESTS_LINKS_BED_H

#include <dlfcn.h>
#include <linux/if_link.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

#include "await.h"
#include "check.h"
#include "engine/nic/nics.h"
#include "enginelib/remote.h"
#include "topology/nettables.h"
#include "topology/nics.h"

#define LO 1
#define WAIT_MS 20000
#ifndef IFF_LOWER_UP
#define IFF_LOWER_UP 0x10000
#endif

/* ---- the kernel */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t go;
    bool hold_questions;          /* they stay inside sendto() */
    bool hold_links, hold_tables; /* their answers stay inside recv() */
    bool held_up;                 /* what the last one of those says */
    int pass;                     /* so many may go on */
    bool only_tables;             /* questions about one link fail */
    bool no_tables;               /* those for the tables do */
    bool up;                      /* what it says about links */
    int inside;                   /* threads that are held */
    int links, tables;            /* questions that were put */
    int losses, events;           /* of events: to be told */
    bool event_up;
} kernel = {.lock = PTHREAD_MUTEX_INITIALIZER, .go = PTHREAD_COND_INITIALIZER, .up = true};
static _Thread_local bool asks, asks_table, up_then;
static bool no_thread; /* for questions */
static atomic_int refused;

/* Under the lock. */
static void stay(const bool *hold)
{
    kernel.inside++;
    while (*hold && !kernel.pass)
        pthread_cond_wait(&kernel.go, &kernel.lock);
    kernel.pass = 0;
    kernel.inside--;
}

ssize_t sendto(int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
               socklen_t tolen)
{
    const struct nlmsghdr *m = buf;

    asks = to && to->sa_family == AF_NETLINK;
    if (asks) {
        asks_table = m->nlmsg_flags & NLM_F_DUMP;
        pthread_mutex_lock(&kernel.lock);
        ++*(asks_table ? &kernel.tables : &kernel.links);
        stay(&kernel.hold_questions);
        up_then = kernel.up;
        pthread_mutex_unlock(&kernel.lock);
    }
    return syscall(SYS_sendto, fd, buf, len, flags, to, tolen);
}

ssize_t recv(int fd, void *buf, size_t len, int flags)
{
    ssize_t n = syscall(SYS_recvfrom, fd, buf, len, flags, NULL, NULL);
    int left = (int)n;

    if (!asks)
        return n;
    for (struct nlmsghdr *m = buf; left > 0 && NLMSG_OK(m, (unsigned)left);
         m = NLMSG_NEXT(m, left)) {
        struct ifinfomsg *info = NLMSG_DATA(m);

        if (m->nlmsg_type == RTM_NEWLINK && info->ifi_index == LO)
            info->ifi_flags = up_then ? info->ifi_flags | IFF_UP | IFF_LOWER_UP
                                      : info->ifi_flags & ~(unsigned)IFF_LOWER_UP;
    }
    pthread_mutex_lock(&kernel.lock);
    kernel.held_up = up_then;
    stay(asks_table ? &kernel.hold_tables : &kernel.hold_links);
    if (asks_table ? kernel.no_tables : kernel.only_tables) {
        errno = EAGAIN;
        n = -1;
    }
    pthread_mutex_unlock(&kernel.lock);
    return n;
}

/* One event about lo. Under the lock. */
static ssize_t event(void *buf)
{
    struct {
        struct nlmsghdr head;
        struct ifinfomsg info;
        struct rtattr name_head;
        char name[4];
    } m = {
        .head = {.nlmsg_len = sizeof(m), .nlmsg_type = RTM_NEWLINK},
        .info = {.ifi_index = LO,
                 .ifi_flags = IFF_UP | (kernel.event_up ? (unsigned)IFF_LOWER_UP : 0)},
        .name_head = {.rta_len = RTA_LENGTH(3), .rta_type = IFLA_IFNAME},
        .name = "lo",
    };

    kernel.events--;
    memcpy(buf, &m, sizeof(m));
    return sizeof(m);
}

ssize_t recvfrom(int fd, void *buf, size_t len, int flags, struct sockaddr *from,
                 socklen_t *fromlen)
{
    ssize_t n = 0;

    if (!from || !r2_eng.watch || fd != r2_linkwatch_fd(r2_eng.watch))
        return syscall(SYS_recvfrom, fd, buf, len, flags, from, fromlen);
    pthread_mutex_lock(&kernel.lock);
    memset(from, 0, sizeof(struct sockaddr_nl)); /* from the kernel */
    if (kernel.losses) {
        kernel.losses--;
        errno = ENOBUFS;
        n = -1;
    } else if (kernel.events) {
        n = event(buf);
    }
    pthread_mutex_unlock(&kernel.lock);
    return n ? n : syscall(SYS_recvfrom, fd, buf, len, flags, from, fromlen);
}

/* In the place of topology/again.c: no table has the addresses of these NICs. */
int r2_nic_find_again(const struct r2_net_tables *tables, const struct r2_nic *nics, int n,
                      int which, const struct r2_nic *first, int family, struct r2_nic *out)
{
    (void)n, (void)first, (void)family;
    *out = nics[which];
    out->link_up = r2_net_link_is_up(r2_net_tables_link(tables, LO));
    return 0;
}

/* I/O thread 0 starts no other threads. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(
            RTLD_NEXT, "pthread_create");
    char name[16] = "";

    pthread_getname_np(pthread_self(), name, sizeof(name));
    if (no_thread && strncmp(name, "r2ccl-io", 8) == 0) {
        atomic_fetch_add(&refused, 1);
        return EAGAIN;
    }
    return real(thread, attr, run, arg);
}

static int look(const int *what)
{
    int n;

    pthread_mutex_lock(&kernel.lock);
    n = *what;
    pthread_mutex_unlock(&kernel.lock);
    return n;
}

static void wait_for(const int *what, int least)
{
    AWAIT(look(what) >= least);
}

static void set(bool *what, bool to)
{
    pthread_mutex_lock(&kernel.lock);
    *what = to;
    pthread_cond_broadcast(&kernel.go);
    pthread_mutex_unlock(&kernel.lock);
}

/* ---- I/O thread 0 */

static void read_events(int unused)
{
    (void)unused;
    r2_eng.watch_fd.ready(&r2_eng.watch_fd, EPOLLIN);
}

static void tell(bool up)
{
    pthread_mutex_lock(&kernel.lock);
    kernel.events = 1;
    kernel.event_up = up;
    pthread_mutex_unlock(&kernel.lock);
    CHECK(remote_command(read_events, 0));
    CHECK_EQ(look(&kernel.events), 0);
}

#endif
