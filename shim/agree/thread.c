/* The service thread: one per process, started by the first eligible operation. It owns the sockets
 * and runs every callback. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agree/service.h"
#include "util/clock.h"
#include "util/thread.h"

#define R2_SERVICE_TURN_MS 1000

/* --- receiving ---------------------------------------------------------------------------- */

/* True if the frame's token is one that this process knows. */
static bool r2_service_dispatch(const struct r2_agree_hello *from, const struct r2_agree_frame *f,
                                const uint8_t *payload)
{
    struct r2_agree *a;

    if (f->kind == R2_FRAME_REGISTER || f->kind == R2_FRAME_LEAVE) {
        return r2_agree_rendezvous_frame(from, f, payload, r2_service.net.now_ns);
    }
    a = r2_agree_service_find(f->token, f->to);
    if (!a) {
        return false;
    }
    r2_agree_member_frame(a, from->process, f, payload);
    return true;
}

static bool r2_service_on_frame(void *user, const struct r2_agree_conn *c,
                                const struct r2_agree_frame *f, const uint8_t *payload)
{
    struct r2_agree_hello from = {.addr = c->addr};

    (void)user;
    memcpy(from.process, c->process, sizeof(from.process));
    return r2_service_dispatch(&from, f, payload);
}

static bool r2_service_knows(void *user, const struct r2_agree_frame *f)
{
    (void)user;
    return r2_agree_service_find(f->token, f->to) != NULL;
}

/* The member after `a` (NULL: the first), or NULL. The thread alone removes members, so the list is
 * stable without the lock except for its end, where other threads add. */
static struct r2_agree *r2_service_after(struct r2_agree *a)
{
    struct r2_list *it;

    pthread_mutex_lock(&r2_service.lock);
    it = (a ? &a->node_all : &r2_service.all)->next;
    pthread_mutex_unlock(&r2_service.lock);
    return it == &r2_service.all ? NULL : R2_CONTAINER_OF(it, struct r2_agree, node_all);
}

static void r2_service_on_close(void *user, const uint8_t process[16])
{
    struct r2_agree *a = NULL;

    (void)user;
    r2_agree_rendezvous_lost(process);
    while ((a = r2_service_after(a)) != NULL) {
        r2_agree_member_lost(a, process);
    }
}

static void r2_service_on_refused(void *user, const struct r2_agree_addr *addr)
{
    struct r2_agree *a = NULL;

    (void)user;
    while ((a = r2_service_after(a)) != NULL) {
        r2_agree_member_refused(a, addr, r2_service.net.now_ns);
    }
}

static void r2_service_notes(void)
{
    struct r2_agree_hello self = r2_service.net.self;
    struct r2_list *it;

    while ((it = r2_list_first(&r2_service.notes)) != NULL) {
        struct r2_service_note *note = R2_CONTAINER_OF(it, struct r2_service_note, node);

        r2_list_del(it);
        r2_service_dispatch(&self, &note->frame, note->payload);
        free(note);
    }
}

/* --- the thread --------------------------------------------------------------------------- */

/* Members that somebody has kicked. */
static void r2_service_kicked(uint64_t now)
{
    for (;;) {
        struct r2_agree *a = NULL;
        struct r2_list *it;

        pthread_mutex_lock(&r2_service.lock);
        it = r2_list_first(&r2_service.dirty);
        if (it) {
            a = R2_CONTAINER_OF(it, struct r2_agree, node_dirty);
            r2_list_del(it);
        }
        pthread_mutex_unlock(&r2_service.lock);
        if (!a) {
            return;
        }
        r2_agree_member_turn(a, now);
    }
}

/* Members whose time has come. Returns the next time. */
static uint64_t r2_service_timers(uint64_t now)
{
    uint64_t next = r2_agree_rendezvous_turn(now);
    struct r2_list *it;

    pthread_mutex_lock(&r2_service.lock);
    it = r2_service.all.next;
    while (it != &r2_service.all) {
        struct r2_agree *a = R2_CONTAINER_OF(it, struct r2_agree, node_all);

        it = it->next;
        if (a->deadline_ns <= now) {
            /* It may remove itself, and nothing else. */
            pthread_mutex_unlock(&r2_service.lock);
            r2_agree_member_turn(a, now);
            pthread_mutex_lock(&r2_service.lock);
        }
    }
    for (it = r2_service.all.next; it != &r2_service.all; it = it->next) {
        const struct r2_agree *a = R2_CONTAINER_OF(it, struct r2_agree, node_all);

        next = a->deadline_ns < next ? a->deadline_ns : next;
    }
    pthread_mutex_unlock(&r2_service.lock);
    return next;
}

static int r2_service_patience(uint64_t next)
{
    uint64_t now = r2_now_ns();
    uint64_t ms = next <= now ? 0 : (next - now + R2_NS_PER_MS - 1) / R2_NS_PER_MS;

    return ms < R2_SERVICE_TURN_MS ? (int)ms : R2_SERVICE_TURN_MS;
}

static void *r2_service_main(void *arg)
{
    uint64_t next = 0;

    (void)arg;
    pthread_setname_np(pthread_self(), "r2-agree");
    for (;;) {
        uint64_t count;

        r2_agree_net_turn(&r2_service.net, r2_service_patience(next));
        if (read(r2_service.wake, &count, sizeof(count)) < 0) {
            count = 0; /* nobody kicked */
        }
        r2_service_notes();
        r2_service_kicked(r2_service.net.now_ns);
        next = r2_service_timers(r2_service.net.now_ns);
        if (!r2_list_empty(&r2_service.notes)) {
            next = 0;
        }
    }
    return NULL;
}

/* Service lock held. */
static int r2_service_open(void)
{
    struct epoll_event ev = {.events = EPOLLIN};
    int rc;

    r2_service.net.self.addr = r2_service.addr;
    memcpy(r2_service.net.self.process, r2_service.process, sizeof(r2_service.process));
    r2_service.net.on_frame = r2_service_on_frame;
    r2_service.net.on_refused = r2_service_on_refused;
    r2_service.net.on_close = r2_service_on_close;
    r2_service.net.knows = r2_service_knows;
    rc = r2_agree_net_init(&r2_service.net, r2_service.listener);
    if (rc != 0) {
        return rc;
    }
    r2_agree_fds_begin();
    r2_service.wake = r2_agree_fds_made(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (r2_service.wake >= 0 &&
        epoll_ctl(r2_service.net.epoll, EPOLL_CTL_ADD, r2_service.wake, &ev) == 0) {
        r2_service.opened = true;
        return 0;
    }
    rc = -errno;
    r2_agree_fds_close(r2_service.net.epoll);
    if (r2_service.wake >= 0) {
        r2_agree_fds_close(r2_service.wake);
    }
    return rc;
}

/* Service lock held. */
static int r2_service_run(void)
{
    char why[R2_AGREE_WHY];
    int rc = r2_service_listen(why, sizeof(why));

    if (r2_service.running) {
        return 0;
    }
    rc = rc == 0 && !r2_service.opened ? r2_service_open()
                                       : rc; /* once: the thread may come later */
    if (rc != 0) {
        return rc;
    }
    rc = -r2_thread_start(r2_service_main, NULL);
    r2_service.running = rc == 0;
    return rc;
}

int r2_agree_service_add(struct r2_agree *a)
{
    int rc;

    pthread_mutex_lock(&r2_service.lock);
    rc = r2_service_prepare();
    rc = rc == 0 ? r2_hash_put(&r2_service.by_key, a->key, a) : rc;
    if (rc == 0) {
        rc = r2_service_run();
        if (rc == 0) {
            r2_list_add_tail(&r2_service.all, &a->node_all);
        } else {
            r2_hash_del(&r2_service.by_key, a->key);
        }
    }
    pthread_mutex_unlock(&r2_service.lock);
    return rc;
}
