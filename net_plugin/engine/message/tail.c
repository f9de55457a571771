/* Chunks that a slow path holds back are sent once more over a faster one, where that is sooner.
 * Two-sided transports only: there the receiver takes whichever copy is whole first and drops the
 * other, and a copy that is lost is missed by nobody (ledger.h, r2_send_again). Under the lock.
 *
 * Only the end of a message: everything else of it has been handed out, and the path that takes the
 * copy has nothing else to do. At most a quarter of a message (or one chunk) and a sixteenth of
 * what the paths to the peer carry. */
#include "engine/message/message.h"
#include "util/num.h"

#define MESSAGE_SHARE 4
#define RATE_SHARE 16
#define TOKENS_MAX (UINT64_C(4) << 20)
#define OWES_MAX R2_NS_PER_S
#define LATE_NS (1 * R2_NS_PER_MS) /* beside twice what a chunk should take */

static uint64_t ns_of(uint64_t bytes, uint64_t rate)
{
    return rate ? r2_mul_div(bytes, R2_NS_PER_S, rate) : UINT64_MAX;
}

/* When a chunk of the path is overdue, as age; UINT64_MAX while nothing is known. */
static uint64_t overdue_after(const struct r2_path *path)
{
    uint64_t expect = r2_grey_expect(&path->watch, r2_pathrate_inflight(&path->rate));

    return expect ? 2 * expect + LATE_NS : UINT64_MAX;
}

/* How long until the path has delivered what is under way on it now. */
static uint64_t rest_of(const struct r2_path *path, uint64_t now)
{
    return ns_of(r2_pathrate_inflight(&path->rate), r2_pathrate_rate_now(&path->rate, now));
}

static bool holds_back(const struct r2_path *path, uint64_t now)
{
    uint64_t since = path->rate.delivered_time_ns;

    if (r2_path_may(path) < R2_MAY_STAND_BY || !r2_pathrate_inflight(&path->rate))
        return false;
    return path->watch.factor < R2_GREY_FULL || (now > since && now - since > overdue_after(path));
}

static bool may_take(const struct r2_path *path)
{
    return r2_path_may(path) >= R2_MAY_STAND_BY && !path->hb.unanswered &&
           path->transport == R2_VIA_TCP && path->share.weight &&
           r2_share_free(&path->peer->shares, &path->share);
}

static void refill(struct r2_peer *p, uint64_t now)
{
    uint64_t rates = 0, passed = now - p->tail_at;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_may(path) >= R2_MAY_STAND_BY)
            rates += r2_pathrate_rate(&path->rate);
    }
    if (passed > R2_NS_PER_S)
        passed = R2_NS_PER_S;
    p->tail_at = now;
    p->tail_tokens += rates / RATE_SHARE * (passed / 1000) / 1000000;
    if (p->tail_tokens > TOKENS_MAX)
        p->tail_tokens = TOKENS_MAX;
}

/* The transmission is overdue, and `path` would be done with it in less than half the time. */
static bool sooner(const struct r2_path *path, const struct r2_send_rec *rec, uint64_t now)
{
    const struct r2_peer *p = path->peer;
    const struct r2_path *slow = rec->path < p->n_paths ? p->paths[rec->path] : NULL;
    uint64_t mine =
        ns_of(r2_pathrate_inflight(&path->rate) + rec->len, r2_pathrate_rate_now(&path->rate, now));

    if (rec->copy || rec->copied || rec->lost || !slow || slow == path || slow->gen != rec->gen ||
        slow->transport != R2_VIA_TCP || !holds_back(slow, now) || now < rec->t_sent_ns ||
        now - rec->t_sent_ns <= overdue_after(slow) || mine == UINT64_MAX)
        return false;
    return mine + path->rate.min_rtt_ns < rest_of(slow, now) / 2;
}

static const struct r2_send_rec *find(const struct r2_path *path, const struct r2_req *r,
                                      uint64_t now)
{
    const struct r2_send_ledger *l = &r->led.send;
    uint64_t most = r->size / MESSAGE_SHARE;

    if (!r2_send_idle(l) || !r2_send_carries(path, r))
        return NULL;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_send_rec *rec = r2_send_rec_at(l, i);

        if (sooner(path, rec, now) && rec->len <= path->peer->tail_tokens &&
            (!r->tail_bytes || r->tail_bytes + rec->len <= most))
            return rec;
    }
    return NULL;
}

static bool take_from(struct r2_path *path, struct r2_conn *c, struct r2_bulk *bulk, uint64_t now)
{
    R2_FOR_EACH_REQ (r, c) {
        const struct r2_send_rec *rec;
        struct r2_chunk chunk;

        if (r->size <= r2_eng.set->eager || !(rec = find(path, r, now)) ||
            !r2_send_again(&r->led.send, rec->id, path->index, path->gen, now, &chunk))
            continue;
        r2_send_fill(path, c, r, &chunk, bulk);
        bulk->flags |= R2_BULK_COPY;
        r->tail_bytes += chunk.len;
        path->peer->tail_tokens -= chunk.len;
        r2_count(&r2_eng.n->tail_resent_bytes, chunk.len);
        r2_count(&r2_eng.n->tail_resent_chunks, 1);
        return true;
    }
    return false;
}

static const struct r2_path *held_back(const struct r2_peer *p, uint64_t now)
{
    for (int i = 0; r2_eng.set->grey && p->n_up > 1 && i < p->n_paths; i++) {
        if (holds_back(p->paths[i], now))
            return p->paths[i];
    }
    return NULL;
}

bool r2_tail_waits(const struct r2_peer *p, uint64_t now)
{
    return held_back(p, now) != NULL;
}

bool r2_tail_take(struct r2_path *path, struct r2_bulk *bulk)
{
    struct r2_peer *p = path->peer;
    uint64_t now = r2_peer_now(p);
    const struct r2_path *slow = held_back(p, now);

    if (!slow || !may_take(path))
        return false;
    refill(p, now);
    R2_FOR_EACH_CONN (c, p) {
        /* What was revoked is cleared no more, wherever the original is. */
        if (c->peer->out && c->state == R2_CONN_OPEN && !c->revocation &&
            take_from(path, c, bulk, now))
            return true;
    }
    /* Known to be slow, and not overdue yet: somebody has to look again in time. */
    if (slow->watch.factor < R2_GREY_FULL && slow != path)
        r2_timer_sooner(
            &p->timer, now + (overdue_after(slow) < R2_TICK_NS ? overdue_after(slow) : R2_TICK_NS));
    return false;
}

void r2_tail_poll(struct r2_peer *p, uint64_t now)
{
    struct r2_path *best = NULL;

    if (!p->out || !p->active || !r2_list_empty(&p->ready) || !held_back(p, now))
        return;
    R2_FOR_EACH_PATH (path, p) {
        if (may_take(path) && !holds_back(path, now) &&
            (!best || r2_pathrate_rate(&path->rate) > r2_pathrate_rate(&best->rate)))
            best = path;
    }
    if (best)
        best->outbox.kick_wanted++;
}

void r2_tail_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now)
{
    uint64_t rate = r2_pathrate_rate_now(&path->rate, now), took = now - rep->t_sent_ns, owed;

    r2_pathrate_on_lost(&path->rate, rep->bytes); /* room, but no sample: who brought them? */
    if (rep->copy || now <= rep->t_sent_ns)
        return;
    r2_pathrate_overtaken(&path->rate, rep->bytes, &rep->stamp, rep->t_sent_ns, now);
    /* The original may still have to get through: until then it takes room. And it took at least
     * so long. */
    owed = ns_of(rep->bytes, rate);
    if (owed > OWES_MAX)
        owed = OWES_MAX;
    path->flow.busy_until = (path->flow.busy_until > now ? path->flow.busy_until : now) + owed;
    if (path->flow.busy_until > now + OWES_MAX) /* the rate is a guess: it may be well again */
        path->flow.busy_until = now + OWES_MAX;
    if (r2_eng.set->grey && rep->complete)
        r2_grey_chunk(&path->watch, path->rate.delivered - rep->stamp.at_send + rep->len, took,
                      r2_pathrate_rate(&path->rate), now);
}
