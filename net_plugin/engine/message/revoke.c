/* What was cleared to send is taken back, before its memory is.
 *
 * With one-sided transports a peer that was cleared to send may write at any moment, so the
 * receiver cannot just let go. It asks the sender (REVOKE), which hands out no chunk of the
 * connection any more. When its NICs have let go of those under way, the sender answers (REVOKED)
 * how many it has handed to each path generation. That its NICs are done says nothing about the
 * receiver's memory. But a chunk's head completes at the receiver behind the chunk's bytes. So when
 * as many heads have come as the sender names, all bytes are in place, and none follows. A
 * generation that is fenced here cannot write, however many chunks it took along; one that a newer
 * one has replaced is waited for until it is. Paths and other connections notice nothing.
 *
 * Whoever does not answer in time is fenced instead, and the keys are made invalid: the caller's.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "engine/message/message.h"

uint64_t r2_revoke_wait_ns; /* 0: patience() */
#define LOOK_NS (100 * R2_NS_PER_US)
#define PATIENCE_MIN_NS (200 * R2_NS_PER_MS)
#define PATIENCE_MAX_NS R2_NS_PER_S

static void count(struct r2_conn_lane *lane, uint32_t gen)
{
    if (lane->gen != gen)
        *lane = (struct r2_conn_lane){.gen = gen};
    lane->chunks++;
}

void r2_revoke_count(struct r2_conn *c, const struct r2_path *path)
{
    if (!r2_path_one_sided(path))
        return;
    count(&c->lanes[path->index], path->gen);
    c->under_way += c->peer->out;
}

uint32_t r2_revoke_lanes(const struct r2_conn *c, struct r2_msg_lane out[R2_PATHS_MAX])
{
    uint32_t n = 0;

    for (int i = 0; i < c->peer->n_paths; i++) {
        const struct r2_path *path = c->peer->paths[i];

        if (!c->lanes[i].chunks || c->lanes[i].gen <= path->down.fenced)
            continue;
        out[n++] = (struct r2_msg_lane){.sender_nic = path->lnic,
                                        .receiver_nic = path->rnic,
                                        .transport = path->transport,
                                        .gen = c->lanes[i].gen,
                                        .chunks = c->lanes[i].chunks};
    }
    return n;
}

static void answer(struct r2_conn *c, struct r2_path *path)
{
    struct r2_msg_lane lanes[R2_PATHS_MAX];
    struct r2_msg_revoke m = {.conn = c->id, .lanes = r2_revoke_lanes(c, lanes)};

    if (path)
        r2_out_frame(path, R2_F_REVOKED, &m, sizeof(m), lanes, m.lanes * sizeof(lanes[0]));
    c->revocation = R2_REVOKE_SAID;
}

bool r2_revoke_back(struct r2_conn *c, const struct r2_path *path)
{
    if (!r2_path_one_sided(path) || !c->under_way)
        return false;
    c->under_way--;
    if (c->revocation != R2_REVOKE_ASKED || c->under_way)
        return false;
    answer(c, r2_path_for_ctrl(c->peer, -1, -1));
    return true;
}

/* S: the CLOSE, which follows or came before, ends what has not arrived. */
int r2_revoke_on_ask(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_revoke m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    c = path->peer->out ? r2_conn_find(path->peer, m.conn) : NULL;
    if (!c) /* closed: its CLOSE has said it all */
        return path->peer->out ? 0 : -EPROTO;
    c->revocation = R2_REVOKE_ASKED;
    for (int i = 0; i < R2_WINDOW; i++)
        c->cts[i].valid = false;
    c->waiting = 0;
    r2_list_del(&c->ready);
    if (!c->under_way)
        answer(c, path); /* the way of the question is alive */
    return 0;
}

void r2_revoke_said(struct r2_conn *c, const uint8_t *lanes, uint32_t n)
{
    struct r2_conn_lane said[R2_PATHS_MAX] = {0};

    for (uint32_t i = 0; i < n; i++) {
        struct r2_msg_lane l;
        struct r2_path *path;

        memcpy(&l, lanes + i * sizeof(l), sizeof(l));
        path = r2_path_find(c->peer, l.receiver_nic, l.sender_nic, l.transport);
        if (!path)
            return; /* nonsense: no answer at all, and an earlier one stands */
        said[path->index] = (struct r2_conn_lane){.gen = l.gen, .chunks = l.chunks};
    }
    memcpy(c->said, said, sizeof(c->said));
    c->revocation = R2_REVOKE_SAID;
}

int r2_revoke_on_answer(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_revoke m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    if (path->peer->out)
        return -EPROTO;
    c = r2_conn_find(path->peer, m.conn);
    if (c && c->state != R2_CONN_OPEN)
        r2_revoke_said(c, body + sizeof(m), m.lanes);
    return 0;
}

/* The sender names the newest generation of each path alone: what an older one took along may still
 * land while its end is not confirmed. */
static bool older_unconfirmed(const struct r2_conn *c)
{
    R2_LIST_EACH (d, const struct r2_dying, node, &c->peer->dying) {
        if (d->path && r2_path_one_sided(d->path) && d->gen < c->said[d->path->index].gen)
            return true;
    }
    return false;
}

/* All that the sender has handed out has arrived, or belongs to a fenced generation. */
static bool all_in(const struct r2_conn *c)
{
    if (older_unconfirmed(c))
        return false;
    for (int i = 0; i < c->peer->n_paths; i++) {
        const struct r2_conn_lane *said = &c->said[i], *seen = &c->lanes[i];

        if (said->chunks && said->gen > c->peer->paths[i]->down.fenced &&
            (seen->gen != said->gen || seen->chunks != said->chunks))
            return false;
    }
    return c->revocation;
}

/* Over every path: one of them may be dead, which an idle peer's heartbeats find out late.
 * Questions and answers may come twice. */
static void ask(struct r2_conn *c)
{
    struct r2_msg_revoke m = {.conn = c->id};

    R2_FOR_EACH_PATH (path, c->peer) {
        if (r2_path_is_up(path))
            r2_out_frame(path, R2_F_REVOKE, &m, sizeof(m), NULL, 0);
    }
}

/* The path that carries the answer may have died just now: that is known after so many heartbeats,
 * and one more is for asking again. Whoever waits less fences a peer
 * that would have answered; NCCL waits for all of it, so no more than a second. */
static uint64_t patience(void)
{
    uint64_t beats = (uint64_t)r2_eng.set->heartbeat_misses + 1;
    uint64_t ns = beats * r2_eng.set->heartbeat_ns;

    if (r2_revoke_wait_ns)
        return r2_revoke_wait_ns;
    return ns < PATIENCE_MIN_NS ? PATIENCE_MIN_NS : ns > PATIENCE_MAX_NS ? PATIENCE_MAX_NS : ns;
}

bool r2_revoke(struct r2_conn *c)
{
    uint64_t now = r2_now_ns(), until = now + patience(), again = now;
    struct r2_peer *p = c->peer;
    bool done, possible;

    for (;; now = r2_now_ns()) {
        r2_peer_lock(p);
        done = all_in(c);
        if (!done && !c->revocation && now >= again) {
            ask(c);
            again = now + r2_eng.set->heartbeat_ns;
        }
        possible = p->life == R2_PEER_ALIVE && p->n_up > 0;
        r2_peer_unlock(p);
        if (done || !possible || now >= until)
            return done;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}
