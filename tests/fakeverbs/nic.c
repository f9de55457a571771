/* What moves the packets and serves the clock: a thread, or with R2_FAKEVERBS_NIC=process a process
 * that has memory and descriptors in common with its parent. A signal that stops the parent does
 * not stop that one, so the NIC of a stopped process goes on answering, as hardware does. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "fake.h"

#define STACK (1u << 20)

static bool accept_on(void *ptr)
{
    for (int d = 0; d < fv.n_dev; d++) {
        for (int p = 1; p <= fv.dev[d].n_ports; p++) {
            int fd;

            if (ptr != &fv.dev[d].listener[p])
                continue;
            while ((fd = accept4(fv.dev[d].listener[p], NULL, NULL,
                                 SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
                fv_conn_new(fd, &fv.dev[d], (uint8_t)p);
            return true;
        }
    }
    return false;
}

static void take_command(void)
{
    char text[512];
    struct sockaddr_un from;
    socklen_t len = sizeof(from);
    ssize_t n =
        recvfrom(fv.ctl, text, sizeof(text) - 1, MSG_DONTWAIT, (struct sockaddr *)&from, &len);

    if (n <= 0)
        return;
    text[n] = '\0';
    if (strncmp(text, "attr ", 5) == 0) {
        snprintf(text, sizeof(text), "%d", fv_attr_seen(text + 5));
    } else if (strcmp(text, "overtaken") == 0) {
        snprintf(text, sizeof(text), "%d", fv.overtaken);
    } else if (strcmp(text, "injected") == 0) {
        snprintf(text, sizeof(text), "%llu", (unsigned long long)fv.injected_ns);
    } else {
        fv_command(text);
        snprintf(text, sizeof(text), "ok");
    }
    if (len > sizeof(sa_family_t))
        sendto(fv.ctl, text, strlen(text), MSG_DONTWAIT, (struct sockaddr *)&from, len);
}

static void tick(void)
{
    uint64_t now = fv_now();

    for (int i = 0; i < FV_QPS; i++) {
        if (fv.qps[i])
            fv_qp_tick(fv.qps[i], now);
    }
    fv_cq_tick(now);
    for (struct fv_conn *c = fv.conns; c; c = c->next)
        fv_conn_serve(c);
    fv_conn_reap();
}

static void *run(void *arg)
{
    struct epoll_event ev[64];
    uint64_t last = 0;

    (void)arg;
    for (;;) {
        int n = epoll_wait(fv.epoll, ev, 64, 2);
        bool all = n == 0;

        pthread_mutex_lock(&fv.lock);
        for (int i = 0; i < n; i++) {
            uint64_t count;

            if (ev[i].data.ptr == &fv.wake) {
                all = read(fv.wake, &count, sizeof(count)) > 0;
            } else if (ev[i].data.ptr == &fv.ctl) {
                take_command();
                all = true;
            } else if (!accept_on(ev[i].data.ptr)) {
                fv_conn_serve(ev[i].data.ptr);
            }
        }
        if (all || fv_now() - last > 2000000) {
            tick();
            last = fv_now();
        }
        pthread_mutex_unlock(&fv.lock);
    }
    return NULL;
}

/* ---- a process of its own */

static int alone(void *parent)
{
    prctl(PR_SET_NAME, "fakeverbs-nic");
    /* With the thread that made it, so with its process. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != *(pid_t *)parent)
        _exit(0);
    run(NULL);
    return 0;
}

/* Lends its thread-local memory (errno, what malloc keeps) to the process that it makes, and uses
 * it no more: it waits, inside the kernel, for the end of everything. That process is no thread of
 * ours, so it may not wait for a condition of this library, but may lock fv.lock: a futex is known
 * by its address in the memory that both have. Who is stopped with the lock in hand stops the NIC,
 * too: so nothing is sent while it is held but here (fv_post_send). */
static void *lend(void *arg)
{
    static uint32_t never;
    static pid_t parent;
    uint8_t *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);

    (void)arg;
    parent = getpid();
    /* No signal at its end: whoever waits for any child does not see it. */
    if (stack == MAP_FAILED ||
        clone(alone, stack + STACK, CLONE_VM | CLONE_FS | CLONE_FILES, &parent) < 0)
        abort();
    for (;;)
        syscall(SYS_futex, &never, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    return NULL;
}

/* Where R2_FAKEVERBS_TALLY wants it, else where nobody looks. */
static struct fv_tally *tally_open(void)
{
    static struct fv_tally own;
    const char *folder = getenv("R2_FAKEVERBS_TALLY");
    char path[512];
    void *at = MAP_FAILED;
    int fd;

    if (!folder)
        return &own;
    snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0 && ftruncate(fd, sizeof(own)) == 0)
        at = mmap(NULL, sizeof(own), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    return at == MAP_FAILED ? &own : at;
}

int fv_start(void)
{
    struct epoll_event wake = {.events = EPOLLIN, .data.ptr = &fv.wake};
    struct epoll_event ctl = {.events = EPOLLIN, .data.ptr = &fv.ctl};
    const char *how = getenv("R2_FAKEVERBS_NIC");
    sigset_t all, old;
    char name[64];

    if (fv.started)
        return 0;
    fv.slot_fd = -1;
    for (fv.slot = 1; fv.slot < FV_SLOTS && fv.slot_fd < 0; fv.slot += fv.slot_fd < 0) {
        snprintf(name, sizeof(name), "r2fv-slot.%u", fv.slot);
        fv.slot_fd = fv_bound(name, SOCK_DGRAM);
    }
    snprintf(name, sizeof(name), "r2fv-ctl.%d", (int)getpid());
    fv.ctl = fv_bound(name, SOCK_DGRAM);
    fv.epoll = epoll_create1(EPOLL_CLOEXEC);
    fv.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fv.slot_fd < 0 || fv.ctl < 0 || fv.epoll < 0 || fv.wake < 0)
        return -EADDRINUSE;
    epoll_ctl(fv.epoll, EPOLL_CTL_ADD, fv.wake, &wake);
    epoll_ctl(fv.epoll, EPOLL_CTL_ADD, fv.ctl, &ctl);
    fv.tally = tally_open();
    fv_chaos_parse(getenv("R2_FAKEVERBS_CHAOS"));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    fv.apart = how && strcmp(how, "process") == 0;
    fv.started = pthread_create(&fv.thread, NULL, fv.apart ? lend : run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (fv.started)
        pthread_setname_np(fv.thread, "fakeverbs");
    return fv.started ? 0 : -EAGAIN;
}
