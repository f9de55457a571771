/* Control frames that arrive. Lengths were checked by the transport (r2_wire_check). */
#include <errno.h>
#include <string.h>

#include "engine/loop/loop.h"

static int on_open(struct r2_path *path, const uint8_t *body)
{
    struct r2_peer *p = path->peer;
    struct r2_msg_open_ack ack = {0};
    struct r2_msg_open m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    if (p->out)
        return -EPROTO;
    ack.conn = m.conn;
    ack.flags = r2_eng.device_memory ? R2_OPEN_NO_EAGER : 0;
    c = r2_conn_find(p, m.conn);
    if (!c && (m.must_exist || r2_conn_has_ended(p, m.conn))) {
        ack.status = ECONNRESET;
    } else if (!c) {
        struct r2_listen *listen = NULL;

        pthread_mutex_lock(&r2_eng.lock);
        R2_LIST_EACH (l, struct r2_listen, node, &r2_eng.listens) {
            if (l->id == m.listen)
                listen = l;
        }
        c = listen ? r2_conn_new(p, m.conn) : NULL;
        if (c) {
            c->remote_home = m.home_nic;
            c->peer_eager = r2_eng.device_memory ? 0 : m.eager;
            c->home = (uint8_t)listen->dev;
            c->state = R2_CONN_OPEN;
            r2_list_add_tail(&listen->backlog, &c->queue);
        } else {
            ack.status = listen ? ENOMEM : ECONNREFUSED;
        }
        pthread_mutex_unlock(&r2_eng.lock);
        r2_p2pchunk_heard(p, m.p2p_chunk);
    }
    return r2_out_frame(path, R2_F_OPEN_ACK, &ack, sizeof(ack), NULL, 0) == -ENOMEM ? -ENOMEM : 0;
}

static int on_open_ack(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_open_ack m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    c = path->peer->out ? r2_conn_find(path->peer, m.conn) : NULL;
    if (c && c->state == R2_CONN_OPEN && m.status && !r2_conn_is_left(c))
        r2_conn_fail(c, -ECONNRESET); /* the receiver has given this connection up */
    if (!c || c->state != R2_CONN_OPENING)
        return 0;
    path->peer->opening--;
    if (m.status) {
        path->peer->opening++; /* r2_conn_fail counts it */
        r2_conn_fail(c, -ECONNREFUSED);
        return 0;
    }
    if (m.flags & R2_OPEN_NO_EAGER)
        c->eager = 0;
    c->state = R2_CONN_OPEN;
    return 0;
}

static int on_cts(struct r2_path *path, const uint8_t *body)
{
    uint32_t keys[R2_WIRE_MAX_NICS] = {0};
    struct r2_msg_cts m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    memcpy(keys, body + sizeof(m), m.keys * sizeof(uint32_t));
    c = path->peer->out ? r2_conn_find(path->peer, m.conn) : NULL;
    if (c) {
        r2_send_on_cts(c, &m, keys);
    } else if (path->peer->out) { /* its OPEN was overtaken by its CLOSE */
        struct r2_msg_close gone = {.conn = m.conn, .from_sender = 1};

        r2_out_frame(path, R2_F_CLOSE, &gone, sizeof(gone), NULL, 0);
    }
    return 0;
}

static int on_eager(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_eager m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    c = path->peer->out ? NULL : r2_conn_find(path->peer, m.conn);
    return c ? r2_recv_on_eager(c, path, &m, body + sizeof(m)) : 0;
}

static int on_ack(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_ack m;
    struct r2_conn *c;
    int rc = 0;

    memcpy(&m, body, sizeof(m));
    c = path->peer->out ? r2_conn_find(path->peer, m.conn) : NULL;
    r2_count(&r2_eng.n->acks_received, 1);
    if (!c || c->state == R2_CONN_FAILED)
        return 0;
    if (m.cumulative > c->next_seq)
        return -EPROTO;
    rc = r2_send_on_ack(c, m.cumulative, NULL, 0);
    for (uint32_t i = 0; i < m.ranges && !rc; i++) {
        struct r2_ack_range r;

        memcpy(&r, body + sizeof(m) + i * sizeof(r), sizeof(r));
        rc = r2_send_on_ack(c, 0, &r, 1);
    }
    r2_send_pump(c);
    return rc;
}

static int on_down(struct r2_path *path, const uint8_t *body)
{
    struct r2_peer *p = path->peer;
    struct r2_msg_path m;
    struct r2_path *dead;

    memcpy(&m, body, sizeof(m));
    if (p->out)
        return -EPROTO;
    dead = r2_path_obtain(p, m.receiver_nic, m.sender_nic, m.transport);
    if (!dead)
        return 0;
    if (m.gen > dead->down.gen)
        r2_path_fail(dead, m.gen, (int)(m.reason & 0xfff), "the peer's word");
    /* Nothing of the generation left here: it is fenced already, and only has to be said. */
    if (dead->down.fenced < m.gen && (!dead->ep || dead->gen > m.gen)) {
        bool shutting = false;

        R2_LIST_EACH (d, struct r2_dying, node, &p->dying)
            shutting |= d->path == dead && d->gen <= m.gen;
        if (!shutting)
            dead->down.fenced = m.gen;
    }
    r2_peer_want_resync(p);
    r2_peer_wake(p);
    return 0;
}

static int on_fenced(struct r2_path *path, const uint8_t *body)
{
    struct r2_peer *p = path->peer;
    struct r2_msg_path m;
    struct r2_path *dead;

    memcpy(&m, body, sizeof(m));
    if (!p->out)
        return -EPROTO;
    dead = r2_path_find(p, m.sender_nic, m.receiver_nic, m.transport);
    if (!dead || m.gen > dead->gen)
        return 0;
    if (m.gen > dead->down.gen)
        r2_path_fail(dead, m.gen, (int)(m.reason & 0xfff), "the peer's word");
    if (m.gen > dead->down.fenced) {
        dead->down.fenced = m.gen;
        r2_send_fenced(dead, m.gen);
    }
    return 0;
}

/* Nothing of what was sent is missing at the receiver; a lane may not have let go of it yet. */
static bool all_acked(struct r2_conn *c)
{
    R2_FOR_EACH_REQ (r, c) {
        if (r->led.send.acked.bytes < r->size || !r->size)
            return false;
    }
    return true;
}

/* S: the receiver is closed. Its last acknowledgements may come behind the CLOSE, so it carries
 * them. */
static int receiver_closed(struct r2_conn *c, uint64_t cumulative)
{
    int rc;

    if (cumulative > c->next_seq)
        return -EPROTO;
    rc = r2_send_on_ack(c, cumulative, NULL, 0);
    if (c->state == R2_CONN_OPENING || rc || !all_acked(c))
        r2_conn_fail(c, -ECONNRESET);
    return rc;
}

/* R: the sender is closed after `begun` messages. Those that have arrived whole, stashed ones too,
 * can still be received; nothing behind them can. A sender that has forgotten the connection says
 * 0 (on_cts). */
static void sender_closed(struct r2_conn *c, uint64_t begun)
{
    if (c->cum < begun) {
        r2_conn_fail(c, -ECONNRESET);
        return;
    }
    c->final_seq = c->cum;
    R2_FOR_EACH_REQ (r, c) {
        if (r->seq < c->final_seq)
            continue;
        if (r2_recv_writing(&r->led.recv)) { /* it lied: a chunk behind the end is arriving */
            r2_conn_fail(c, -ECONNRESET);
            return;
        }
        r2_req_finish(r, -ECONNRESET);
    }
}

static int on_close(struct r2_path *path, const uint8_t *body)
{
    struct r2_peer *p = path->peer;
    struct r2_msg_close_ack ack = {0};
    struct r2_msg_close m;
    struct r2_conn *c;
    int rc = 0;

    memcpy(&m, body, sizeof(m));
    if ((m.from_sender != 0) == p->out)
        return -EPROTO;
    ack.conn = m.conn;
    ack.from_sender = m.from_sender;
    c = r2_conn_find(p, m.conn);
    if (!c && !p->out)
        r2_conn_ended(p, m.conn); /* its OPEN may be behind it on another path */
    if (c && !c->peer->out && (m.from_sender & R2_CLOSE_IDLE))
        r2_revoke_said(c, body + sizeof(m), m.lanes);
    if (c && !r2_conn_is_left(c)) {
        c->final_seq = 0;
        r2_buffered_left(c); /* it may be gone before it hears ours */
        if (c->state == R2_CONN_OPENING || c->state == R2_CONN_OPEN) {
            if (c->peer->out)
                rc = receiver_closed(c, m.cumulative);
            else
                sender_closed(c, m.cumulative);
        }
    }
    if (c)
        r2_conn_reap(c);
    r2_out_frame(path, R2_F_CLOSE_ACK, &ack, sizeof(ack), NULL, 0);
    return rc;
}

static int on_close_ack(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_close_ack m;
    struct r2_conn *c;

    memcpy(&m, body, sizeof(m));
    c = (m.from_sender != 0) == path->peer->out ? r2_conn_find(path->peer, m.conn) : NULL;
    if (c && c->state == R2_CONN_FAILED)
        c->word = R2_WORD_NONE; /* the CLOSE of the application comes yet */
    if (c && c->state >= R2_CONN_CLOSING) {
        c->word = R2_WORD_HEARD;
        r2_conn_reap(c);
    }
    return 0;
}

/* Up paths of the peer that do not end at that NIC of its. */
static bool others_up(const struct r2_peer *p, int rnic)
{
    return R2_ANY_PATH(path, p, path->rnic != rnic && r2_path_suffices(path));
}

static void rnic_path(struct r2_path *path, enum r2_nic_word word, bool others)
{
    static const char *const causes[R2_NIC_WORDS] = {
        [R2_NIC_DOWN] = "the peer's word: its NIC is down",
        [R2_NIC_DAMPED] = "the peer's word: its NIC fails too often",
        [R2_NIC_FAILED] = "the peer's word: its NIC has failed",
    };

    if (word == R2_NIC_USABLE) {
        path->attempt.next_at = 0;
        r2_peer_answers(path->peer); /* whoever refused while it was down */
    } else if (word != R2_NIC_DRAINED && (word != R2_NIC_DAMPED || others)) {
        r2_path_fail(path, path->gen, ENETDOWN, causes[word]);
    }
    r2_path_follow(path);
}

/* What the peer says of its NIC. */
static void rnic_change(struct r2_peer *p, int nic, const struct r2_info_nic *m)
{
    struct r2_rnic *r = &p->rnics[nic];
    uint16_t weight = (uint16_t)(R2_WEIGHT_FULL - (m->less & R2_NIC_LESS) % (R2_WEIGHT_FULL + 1));
    bool was = r->word == R2_NIC_USABLE, others = others_up(p, nic), news, forgiven;
    enum r2_nic_word word = m->word < R2_NIC_WORDS ? (enum r2_nic_word)m->word : R2_NIC_DOWN;

    forgiven = r->known && (int8_t)(m->forgiven - r->forgiven) > 0;
    if (forgiven || !r->known)
        r->forgiven = m->forgiven;
    news = r->known ? r->word != word : word != R2_NIC_USABLE;
    r->known = true;
    r->word = (uint8_t)word;
    r->weight = weight;
    if (nic >= p->n_rnics)
        p->n_rnics = nic + 1;
    R2_FOR_EACH_PATH (path, p) {
        if (path->rnic != nic)
            continue;
        if (forgiven) {
            r2_path_forgive(path);
            r2_nic_forget(path->lnic);
        }
        if (news)
            rnic_path(path, word, others);
    }
    r2_peer_weigh(p);
    r2_peer_census(p);
    if (was != (word == R2_NIC_USABLE) || news)
        r2_peer_wake(p);
}

static bool same_place(const struct r2_wire_addr *a, const struct r2_wire_addr *b)
{
    return a->family == b->family && a->port == b->port && memcmp(a->ip, b->ip, sizeof(a->ip)) == 0;
}

/* What was connected to where the NIC was leads nowhere any more. */
static void leave_old_place(struct r2_peer *p, int nic, const struct r2_path *via,
                            const struct r2_wire_addr *addr)
{
    for (int i = 0; p->out && i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];
        const struct r2_wire_addr *was;

        if (path->rnic != nic || path == via)
            continue;
        path->attempt.next_at = 0;
        was = path->ep ? &r2_eng.ops->params(path->ep)->remote_addr : NULL;
        if (was && !same_place(was, addr) && !same_place(was, &p->rnics[nic].second))
            r2_path_fail(path, path->gen, EADDRNOTAVAIL, "the peer's word: its NIC has moved");
    }
}

/* Where the peer's NIC is. */
static void rnic_place(struct r2_path *via, int nic, const struct r2_info_nic *m, bool newer)
{
    struct r2_peer *p = via->peer;
    struct r2_rnic *r = &p->rnics[nic];
    bool news = r->known && newer && memcmp(&r->addr, &m->addr, sizeof(r->addr)) != 0;

    r->addr = m->addr;
    r->second = m->second;
    memcpy(r->name, m->name, sizeof(r->name));
    if (news)
        leave_old_place(p, nic, via, &m->addr);
}

void r2_peer_moved(struct r2_peer *p, int nic, const struct r2_wire_addr *addr)
{
    struct r2_wire_addr now = *addr;

    now.offers = p->rnics[nic].addr.offers;
    if (memcmp(&now, &p->rnics[nic].addr, sizeof(now)) == 0)
        return;
    p->rnics[nic].addr = now;
    memset(&p->rnics[nic].second, 0, sizeof(p->rnics[nic].second)); /* told on the first path */
    r2_peer_answers(p);
    leave_old_place(p, nic, NULL, &now);
    r2_peer_wake(p);
}

static int on_info(struct r2_path *path, const uint8_t *body)
{
    struct r2_peer *p = path->peer;
    struct r2_msg_info m;

    memcpy(&m, body, sizeof(m));
    m.host[sizeof(m.host) - 1] = 0;
    p->pid = m.pid;
    p->rank = m.rank;
    memcpy(p->host, m.host, sizeof(p->host));
    for (uint32_t i = 0; i < m.nics && m.number >= p->info; i++) { /* not what was overtaken */
        struct r2_info_nic nic;

        memcpy(&nic, body + sizeof(m) + i * sizeof(nic), sizeof(nic));
        nic.name[sizeof(nic.name) - 1] = 0;
        if (nic.addr.family)
            rnic_place(path, (int)i, &nic, m.number > p->info);
        if (nic.addr.family || p->rnics[i].known)
            rnic_change(p, (int)i, &nic);
    }
    p->info = m.number > p->info ? m.number : p->info;
    r2_control_peer_describe(r2_eng.ctl, p->row, p->host, p->pid, p->rank);
    R2_FOR_EACH_PATH (path, p)
        r2_control_path_remote(r2_eng.ctl, path->shown.row, p->rnics[path->rnic].name);
    if (path->intro == R2_INTRO_NONE)
        path->intro = R2_INTRO_HEARD;
    r2_path_tell_up(path);
    r2_nicnews_heard(path);
    r2_peer_wake(p);
    return 0;
}

typedef int (*handler)(struct r2_path *path, const uint8_t *body);

static const handler handlers[R2_F_LAST + 1] = {
    [R2_F_OPEN] = on_open,
    [R2_F_OPEN_ACK] = on_open_ack,
    [R2_F_CTS] = on_cts,
    [R2_F_EAGER] = on_eager,
    [R2_F_ACK] = on_ack,
    [R2_F_DOWN] = on_down,
    [R2_F_FENCED] = on_fenced,
    [R2_F_CLOSE] = on_close,
    [R2_F_CLOSE_ACK] = on_close_ack,
    [R2_F_INFO] = on_info,
    [R2_F_SEEN] = r2_locate_on_seen,
    [R2_F_TEST] = r2_path_on_test,
    [R2_F_TEST_ACK] = r2_path_on_test_ack,
    [R2_F_REVOKE] = r2_revoke_on_ask,
    [R2_F_REVOKED] = r2_revoke_on_answer,
    [R2_F_HEARD] = r2_nicnews_on_heard,
};

int r2_up_ctrl(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    int rc = 0;

    (void)len;
    r2_io_note(type != R2_F_HEARTBEAT);
    r2_peer_lock(p);
    /* A frame of a dead generation is not believed: what it said is repeated on a live path. An
     * acknowledgement is, whoever brings it and when: what has arrived stays so, and who said it
     * may not be there any more to repeat it. */
    if (path->ep == ep && r2_path_is_up(path) && handlers[type])
        rc = handlers[type](path, body);
    else if (type == R2_F_ACK)
        rc = on_ack(path, body);
    r2_peer_leave(p); /* burst_end flushes */
    return rc;
}
