/* From other threads to I/O thread 0: failed paths, frames, probes that are over. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

#define INBOX_MAX 512
#define TICK_NS (10 * R2_NS_PER_MS)

enum note_kind { NOTE_FAILED, NOTE_NIC, NOTE_SEEN };

struct note {
    struct r2_list node;
    enum note_kind kind;
    struct r2_peer *peer; /* holds a reference; NULL: NOTE_NIC */
    int lnic, rnic, via;
    uint64_t at;
    uint8_t *body; /* NOTE_SEEN */
};

static struct {
    pthread_mutex_t lock; /* notes, over, count */
    struct r2_list notes, over;
    int count;
    atomic_bool on; /* release, behind what it begins; acquire */
    struct r2_task task;
    struct r2_timer timer;
} box = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The note's references are the caller's when it is refused. */
static bool post(const struct note *from)
{
    struct note *n;
    bool ok = false;

    if (!atomic_load_explicit(&box.on, memory_order_acquire))
        return false;
    n = malloc(sizeof(*n));
    if (!n)
        return false;
    *n = *from;
    pthread_mutex_lock(&box.lock);
    if (box.count < INBOX_MAX) {
        r2_list_add_tail(&box.notes, &n->node);
        box.count++;
        ok = true;
    }
    pthread_mutex_unlock(&box.lock);
    if (ok)
        r2_task_kick(&box.task);
    else
        free(n);
    return ok;
}

static void post_from(struct r2_path *path, struct note *n)
{
    n->peer = path->peer;
    n->at = r2_peer_now(path->peer);
    r2_peer_get(n->peer);
    if (!post(n)) {
        free(n->body);
        r2_peer_put(n->peer); /* never the last one: the path's endpoint or list holds it */
    }
}

void r2_locate_path_failed(struct r2_path *path, int err)
{
    struct note n = {
        .kind = NOTE_FAILED, .lnic = path->lnic, .rnic = path->rnic, .via = path->transport};

    if (err)
        post_from(path, &n);
}

void r2_locate_nic_changed(int nic)
{
    post(&(struct note){.kind = NOTE_NIC, .lnic = nic});
}

int r2_locate_on_seen(struct r2_path *path, const uint8_t *body)
{
    struct note n = {.kind = NOTE_SEEN};
    struct r2_msg_seen m;
    size_t len;

    memcpy(&m, body, sizeof(m));
    len = sizeof(m) + m.seen * sizeof(struct r2_wire_seen); /* r2_wire_check has looked */
    n.body = malloc(len);
    if (!n.body)
        return 0;
    memcpy(n.body, body, len);
    post_from(path, &n);
    return 0;
}

void r2_locate_probe_over(void *owner, int err, const struct r2_ep_health *health)
{
    struct r2_probe *p = owner;

    p->err = err;
    p->connected = health->answered;
    p->refused = health->refused;
    p->other_process = health->other_process;
    atomic_fetch_add_explicit(&p->refs, 1, memory_order_relaxed);
    pthread_mutex_lock(&box.lock); /* the thread that drains it sees the fields above */
    r2_list_add_tail(&box.over, &p->node);
    pthread_mutex_unlock(&box.lock);
    r2_task_kick(&box.task);
}

/* ---- I/O thread 0 */

static void handle(struct note *n, uint64_t now)
{
    switch (n->kind) {
    case NOTE_FAILED:
        r2_rounds_failed(n->peer, n->lnic, n->rnic, n->via, n->at);
        break;
    case NOTE_NIC:
        r2_rounds_nic(n->lnic, now);
        break;
    case NOTE_SEEN:
        r2_rounds_told(n->peer, n->body, now);
        break;
    }
    if (n->peer)
        r2_peer_put(n->peer);
    free(n->body);
    free(n);
}

static void tick(struct r2_timer *t, uint64_t now)
{
    r2_timer_set(t, r2_rounds_tick(now) ? now + TICK_NS : 0);
}

static void run(struct r2_task *t)
{
    struct r2_list notes, over, *l;
    uint64_t now = r2_now_ns();

    (void)t;
    r2_list_init(&notes);
    r2_list_init(&over);
    pthread_mutex_lock(&box.lock);
    r2_list_splice_tail(&notes, &box.notes);
    r2_list_splice_tail(&over, &box.over);
    box.count = 0;
    pthread_mutex_unlock(&box.lock);
    while ((l = r2_list_first(&over))) {
        struct r2_probe *p = R2_CONTAINER_OF(l, struct r2_probe, node);

        r2_list_del(l);
        p->over = true;
        r2_locate_probe_released(p);
    }
    while ((l = r2_list_first(&notes))) {
        r2_list_del(l);
        handle(R2_CONTAINER_OF(l, struct note, node), now);
    }
    tick(&box.timer, now);
}

void r2_locate_start(void)
{
    int rc;

    r2_list_init(&box.notes);
    r2_list_init(&box.over);
    r2_task_init(&box.task, r2_io_at(0), run);
    r2_timer_init(&box.timer, r2_io_at(0), tick);
    if (!r2_eng.set->locate)
        return;
    rc = r2_eng.set->shm ? r2_nodeseg_open(&r2_locate_seg, r2_eng.host) : 0;
    if (rc)
        R2_INFO("nothing is shared with other processes of this node (%s): each one finds broken "
                "NICs by itself",
                strerror(-rc));
    atomic_store_explicit(&box.on, true, memory_order_release);
}

void r2_locate_child(void)
{
    atomic_store_explicit(&box.on, false, memory_order_release);
    r2_nodeseg_child(r2_locate_seg);
}
