/* The service thread: one per process, started by the first eligible operation. It owns the sockets
 * and runs every callback. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "agree/internal.h"
#include "util/clock.h"
#include "util/random.h"
#include "util/siphash.h"
#include "util/thread.h"

#define R2_SERVICE_TURN_MS 1000

/* A frame from this process to itself. */
struct r2_service_note {
    struct r2_list node;
    struct r2_agree_frame frame;
    uint8_t payload[];
};

static struct {
    pthread_mutex_t lock;
    bool listening, opened, running, prepared;
    int listener, wake;
    struct r2_agree_addr addr;
    uint8_t process[16];
    uint8_t (*signed_)[R2_AGREE_TOKEN]; /* tokens of ids that this process has signed */
    size_t nsigned, signed_room;
    struct r2_list all, dirty;
    struct r2_hash by_key;
    /* the thread's own */
    struct r2_agree_net net;
    struct r2_list notes;
} svc = {.lock = PTHREAD_MUTEX_INITIALIZER, .listener = -1, .wake = -1};

atomic_bool r2_agree_inert;

/* --- fork --------------------------------------------------------------------------------- */

static void r2_service_in_child(void)
{
    atomic_store(&r2_agree_inert, true);
    r2_agree_fds_in_child();
}

/* Service lock held; once. */
static int r2_service_prepare(void)
{
    int rc;

    if (svc.prepared) {
        return 0;
    }
    rc = r2_random_bytes(svc.process, sizeof(svc.process));
    if (rc == 0) {
        rc = -pthread_atfork(r2_agree_fds_before_fork, r2_agree_fds_in_parent, r2_service_in_child);
    }
    if (rc != 0) {
        return rc;
    }
    r2_list_init(&svc.all);
    r2_list_init(&svc.dirty);
    r2_list_init(&svc.notes);
    r2_hash_init(&svc.by_key);
    svc.prepared = true;
    return 0;
}

/* --- ids ---------------------------------------------------------------------------------- */

static int r2_service_listen_locked(char *why, size_t whylen)
{
    int rc = r2_service_prepare();

    if (rc == 0 && !svc.listening) {
        rc = r2_agree_net_open_listener(&svc.listener, &svc.addr, why, whylen);
        svc.listening = rc == 0;
    }
    return rc;
}

int r2_agree_service_listen(struct r2_agree_addr *addr, char *why, size_t whylen)
{
    int rc;

    pthread_mutex_lock(&svc.lock);
    rc = r2_service_listen_locked(why, whylen);
    *addr = svc.addr;
    pthread_mutex_unlock(&svc.lock);
    return rc;
}

int r2_agree_service_sign(const uint8_t token[R2_AGREE_TOKEN])
{
    int rc = 0;

    pthread_mutex_lock(&svc.lock);
    if (svc.nsigned == svc.signed_room) {
        size_t room = svc.signed_room ? svc.signed_room * 2 : 16;
        void *more = realloc(svc.signed_, room * sizeof(*svc.signed_));

        if (more) {
            svc.signed_ = more;
            svc.signed_room = room;
        } else {
            rc = -ENOMEM;
        }
    }
    if (rc == 0) {
        memcpy(svc.signed_[svc.nsigned++], token, R2_AGREE_TOKEN);
    }
    pthread_mutex_unlock(&svc.lock);
    return rc;
}

bool r2_agree_service_signed(const uint8_t token[R2_AGREE_TOKEN])
{
    bool found = false;

    pthread_mutex_lock(&svc.lock);
    for (size_t i = 0; i < svc.nsigned && !found; i++) {
        found = memcmp(svc.signed_[i], token, R2_AGREE_TOKEN) == 0;
    }
    pthread_mutex_unlock(&svc.lock);
    return found;
}

/* --- members ------------------------------------------------------------------------------ */

uint64_t r2_agree_key(const uint8_t token[R2_AGREE_TOKEN], uint32_t rank)
{
    uint8_t tag[16];
    uint64_t key;

    r2_siphash128(token, &rank, sizeof(rank), tag);
    memcpy(&key, tag, sizeof(key));
    return key;
}

struct r2_agree *r2_agree_service_find(const uint8_t token[R2_AGREE_TOKEN], uint32_t rank)
{
    uint64_t key = r2_agree_key(token, rank);
    struct r2_agree *a;

    pthread_mutex_lock(&svc.lock);
    a = r2_hash_get(&svc.by_key, key);
    pthread_mutex_unlock(&svc.lock);
    return a && a->rank == (int)rank && memcmp(a->token, token, R2_AGREE_TOKEN) == 0 ? a : NULL;
}

void r2_agree_service_remove(struct r2_agree *a)
{
    pthread_mutex_lock(&svc.lock);
    r2_hash_del(&svc.by_key, a->key);
    r2_list_del(&a->node_all);
    r2_list_del(&a->node_dirty);
    pthread_mutex_unlock(&svc.lock);
}

void r2_agree_service_kick(struct r2_agree *a)
{
    uint64_t one = 1;
    bool wake = false;

    if (!atomic_load(&a->known)) {
        return;
    }
    pthread_mutex_lock(&svc.lock);
    if (!a->dirty) {
        a->dirty = true;
        wake = r2_list_empty(&svc.dirty);
        r2_list_add_tail(&svc.dirty, &a->node_dirty);
    }
    pthread_mutex_unlock(&svc.lock);
    if (wake && write(svc.wake, &one, sizeof(one)) < 0) {
        return; /* the counter is full: the thread is being woken anyway */
    }
}

/* --- sending ------------------------------------------------------------------------------ */

void r2_agree_service_send(const uint8_t *process, const struct r2_agree_addr *addr,
                           const struct r2_agree_frame *f, const void *first, size_t first_len,
                           const void *second)
{
    struct r2_service_note *note;

    if (process ? memcmp(process, svc.process, 16) != 0 : !r2_agree_addr_equal(addr, &svc.addr)) {
        r2_agree_net_send(&svc.net, process, addr, f, first, first_len, second);
        return;
    }
    note = malloc(sizeof(*note) + f->len);
    if (!note) {
        return; /* lost, as any frame may be */
    }
    note->frame = *f;
    if (first_len > 0) {
        memcpy(note->payload, first, first_len);
    }
    if (f->len > first_len) {
        memcpy(note->payload + first_len, second, f->len - first_len);
    }
    r2_list_add_tail(&svc.notes, &note->node);
}

enum r2_agree_way r2_agree_service_way(const uint8_t process[16], const struct r2_agree_addr *addr)
{
    return memcmp(process, svc.process, 16) == 0 ? R2_WAY_SELF
                                                 : r2_agree_net_way(&svc.net, process, addr);
}

uint64_t r2_agree_service_now(void)
{
    return r2_now_ns();
}

/* --- receiving ---------------------------------------------------------------------------- */

/* True if the frame's token is one that this process knows. */
static bool r2_service_dispatch(const struct r2_agree_hello *from, const struct r2_agree_frame *f,
                                const uint8_t *payload)
{
    struct r2_agree *a;

    if (f->kind == R2_FRAME_REGISTER || f->kind == R2_FRAME_LEAVE) {
        return r2_agree_rendezvous_frame(from, f, payload, svc.net.now_ns);
    }
    a = r2_agree_service_find(f->token, f->to);
    if (!a) {
        return false;
    }
    r2_agree_member_frame(a, from->process, f, payload);
    return true;
}

static bool r2_service_on_frame(void *user, struct r2_agree_conn *c, const struct r2_agree_frame *f,
                                const uint8_t *payload)
{
    struct r2_agree_hello from = {.addr = c->addr};

    (void)user;
    memcpy(from.process, c->process, sizeof(from.process));
    if (r2_service_dispatch(&from, f, payload)) {
        c->trusted = true;
    }
    /* A stranger must show a token with its first frame; a friend may be late for one that has
     * been destroyed. */
    return c->trusted || c->outgoing;
}

static bool r2_service_knows(void *user, const struct r2_agree_frame *f)
{
    (void)user;
    return r2_agree_service_find(f->token, f->to) != NULL;
}

static void r2_service_on_close(void *user, const uint8_t process[16])
{
    struct r2_list *it;

    (void)user;
    r2_agree_rendezvous_lost(process);
    /* The thread alone removes members, so the list is stable without the lock except for its
     * end, where other threads add. */
    pthread_mutex_lock(&svc.lock);
    it = svc.all.next;
    pthread_mutex_unlock(&svc.lock);
    while (it != &svc.all) {
        r2_agree_member_lost(R2_CONTAINER_OF(it, struct r2_agree, node_all), process);
        pthread_mutex_lock(&svc.lock);
        it = it->next;
        pthread_mutex_unlock(&svc.lock);
    }
}

static void r2_service_notes(void)
{
    struct r2_agree_hello self = svc.net.self;
    struct r2_list *it;

    while ((it = r2_list_first(&svc.notes)) != NULL) {
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

        pthread_mutex_lock(&svc.lock);
        it = r2_list_first(&svc.dirty);
        if (it) {
            a = R2_CONTAINER_OF(it, struct r2_agree, node_dirty);
            r2_list_del(it);
            a->dirty = false;
        }
        pthread_mutex_unlock(&svc.lock);
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

    pthread_mutex_lock(&svc.lock);
    it = svc.all.next;
    while (it != &svc.all) {
        struct r2_agree *a = R2_CONTAINER_OF(it, struct r2_agree, node_all);

        it = it->next;
        if (a->deadline_ns <= now) {
            /* It may remove itself, and nothing else. */
            pthread_mutex_unlock(&svc.lock);
            r2_agree_member_turn(a, now);
            pthread_mutex_lock(&svc.lock);
        }
    }
    for (it = svc.all.next; it != &svc.all; it = it->next) {
        const struct r2_agree *a = R2_CONTAINER_OF(it, struct r2_agree, node_all);

        next = a->deadline_ns < next ? a->deadline_ns : next;
    }
    pthread_mutex_unlock(&svc.lock);
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

        r2_agree_net_turn(&svc.net, r2_service_patience(next));
        if (read(svc.wake, &count, sizeof(count)) < 0) {
            count = 0; /* nobody kicked */
        }
        r2_service_notes();
        r2_service_kicked(svc.net.now_ns);
        next = r2_service_timers(svc.net.now_ns);
        if (!r2_list_empty(&svc.notes)) {
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

    svc.net.self.addr = svc.addr;
    memcpy(svc.net.self.process, svc.process, sizeof(svc.process));
    svc.net.on_frame = r2_service_on_frame;
    svc.net.on_close = r2_service_on_close;
    svc.net.knows = r2_service_knows;
    rc = r2_agree_net_init(&svc.net, svc.listener);
    if (rc != 0) {
        return rc;
    }
    r2_agree_fds_begin();
    svc.wake = r2_agree_fds_made(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (svc.wake >= 0 && epoll_ctl(svc.net.epoll, EPOLL_CTL_ADD, svc.wake, &ev) == 0) {
        svc.opened = true;
        return 0;
    }
    rc = -errno;
    r2_agree_fds_close(svc.net.epoll);
    if (svc.wake >= 0) {
        r2_agree_fds_close(svc.wake);
    }
    return rc;
}

/* Service lock held. */
static int r2_service_run(void)
{
    char why[R2_AGREE_WHY];
    int rc = r2_service_listen_locked(why, sizeof(why));

    if (svc.running) {
        return 0;
    }
    rc = rc == 0 && !svc.opened ? r2_service_open() : rc; /* once: the thread may come later */
    if (rc != 0) {
        return rc;
    }
    rc = -r2_thread_start(r2_service_main, NULL);
    svc.running = rc == 0;
    return rc;
}

int r2_agree_service_add(struct r2_agree *a)
{
    int rc;

    pthread_mutex_lock(&svc.lock);
    rc = r2_service_prepare();
    rc = rc == 0 ? r2_hash_put(&svc.by_key, a->key, a) : rc;
    if (rc == 0) {
        rc = r2_service_run();
        if (rc == 0) {
            r2_list_add_tail(&svc.all, &a->node_all);
        } else {
            r2_hash_del(&svc.by_key, a->key);
        }
    }
    pthread_mutex_unlock(&svc.lock);
    return rc;
}
