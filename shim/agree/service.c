/* What the service thread and those that use it share: the listener, signed ids, the members that
 * the thread looks after, and the way out. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agree/service.h"
#include "util/clock.h"
#include "util/random.h"
#include "util/siphash.h"

struct r2_service r2_service = {.lock = PTHREAD_MUTEX_INITIALIZER, .listener = -1, .wake = -1};

atomic_bool r2_agree_inert;

/* --- fork --------------------------------------------------------------------------------- */

static void r2_service_in_child(void)
{
    atomic_store(&r2_agree_inert, true);
    r2_agree_fds_in_child();
}

int r2_service_prepare(void)
{
    int rc;

    if (r2_service.prepared) {
        return 0;
    }
    rc = r2_random_bytes(r2_service.process, sizeof(r2_service.process));
    if (rc == 0) {
        rc = -pthread_atfork(r2_agree_fds_before_fork, r2_agree_fds_in_parent, r2_service_in_child);
    }
    if (rc != 0) {
        return rc;
    }
    r2_list_init(&r2_service.all);
    r2_list_init(&r2_service.dirty);
    r2_list_init(&r2_service.notes);
    r2_hash_init(&r2_service.by_key);
    r2_service.prepared = true;
    return 0;
}

/* --- ids ---------------------------------------------------------------------------------- */

int r2_service_listen(char *why, size_t whylen)
{
    int rc = r2_service_prepare();

    if (rc == 0 && !r2_service.listening) {
        rc = r2_agree_net_open_listener(&r2_service.listener, &r2_service.addr, why, whylen);
        r2_service.listening = rc == 0;
    }
    return rc;
}

int r2_agree_service_listen(struct r2_agree_addr *addr, char *why, size_t whylen)
{
    int rc;

    pthread_mutex_lock(&r2_service.lock);
    rc = r2_service_listen(why, whylen);
    *addr = r2_service.addr;
    pthread_mutex_unlock(&r2_service.lock);
    return rc;
}

int r2_agree_service_sign(const uint8_t token[R2_AGREE_TOKEN])
{
    int rc = 0;

    pthread_mutex_lock(&r2_service.lock);
    if (r2_service.nsigned == r2_service.signed_room) {
        size_t room = r2_service.signed_room ? r2_service.signed_room * 2 : 16;
        void *more = realloc(r2_service.signed_, room * sizeof(*r2_service.signed_));

        if (more) {
            r2_service.signed_ = more;
            r2_service.signed_room = room;
        } else {
            rc = -ENOMEM;
        }
    }
    if (rc == 0) {
        memcpy(r2_service.signed_[r2_service.nsigned++], token, R2_AGREE_TOKEN);
    }
    pthread_mutex_unlock(&r2_service.lock);
    return rc;
}

bool r2_agree_service_signed(const uint8_t token[R2_AGREE_TOKEN])
{
    bool found = false;

    pthread_mutex_lock(&r2_service.lock);
    for (size_t i = 0; i < r2_service.nsigned && !found; i++) {
        found = memcmp(r2_service.signed_[i], token, R2_AGREE_TOKEN) == 0;
    }
    pthread_mutex_unlock(&r2_service.lock);
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

    pthread_mutex_lock(&r2_service.lock);
    a = r2_hash_get(&r2_service.by_key, key);
    pthread_mutex_unlock(&r2_service.lock);
    return a && a->rank == (int)rank && memcmp(a->token, token, R2_AGREE_TOKEN) == 0 ? a : NULL;
}

void r2_agree_service_remove(struct r2_agree *a)
{
    pthread_mutex_lock(&r2_service.lock);
    r2_hash_del(&r2_service.by_key, a->key);
    r2_list_del(&a->node_all);
    r2_list_del(&a->node_dirty);
    pthread_mutex_unlock(&r2_service.lock);
}

void r2_agree_service_kick(struct r2_agree *a)
{
    uint64_t one = 1;
    bool wake = false;

    if (!atomic_load(&a->known)) {
        return;
    }
    pthread_mutex_lock(&r2_service.lock);
    if (r2_list_empty(&a->node_dirty)) {
        wake = r2_list_empty(&r2_service.dirty);
        r2_list_add_tail(&r2_service.dirty, &a->node_dirty);
    }
    pthread_mutex_unlock(&r2_service.lock);
    if (wake && write(r2_service.wake, &one, sizeof(one)) < 0) {
        return; /* the counter is full: the thread is being woken anyway */
    }
}

/* --- sending ------------------------------------------------------------------------------ */

void r2_agree_service_send(const uint8_t *process, const struct r2_agree_addr *addr,
                           const struct r2_agree_frame *f, const void *first, size_t first_len,
                           const void *second)
{
    struct r2_service_note *note;

    if (process ? memcmp(process, r2_service.process, 16) != 0
                : !r2_agree_addr_equal(addr, &r2_service.addr)) {
        r2_agree_net_send(&r2_service.net, process, addr, f, first, first_len, second);
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
    r2_list_add_tail(&r2_service.notes, &note->node);
}

enum r2_agree_way r2_agree_service_way(const uint8_t process[16], const struct r2_agree_addr *addr)
{
    return memcmp(process, r2_service.process, 16) == 0
               ? R2_WAY_SELF
               : r2_agree_net_way(&r2_service.net, process, addr);
}

uint64_t r2_agree_service_now(void)
{
    return r2_now_ns();
}
