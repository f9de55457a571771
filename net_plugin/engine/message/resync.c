/* What a peer may not have heard, said again over a path that lives. Under the peer's lock. */
#include "engine/message/message.h"

static void resync_paths(struct r2_peer *p, struct r2_path *via)
{
    R2_FOR_EACH_PATH (path, p) {
        struct r2_msg_path m = {
            .sender_nic = path->lnic, .receiver_nic = path->rnic, .transport = path->transport};

        if (p->out && path->down.gen > path->down.fenced) {
            m.gen = path->down.gen;
            m.reason = (uint32_t)path->attempt.err;
            path->down.said_at = r2_peer_now(p);
            r2_out_frame(via, R2_F_DOWN, &m, sizeof(m), NULL, 0);
        } else if (!p->out && path->down.fenced && p->resync != R2_RESYNC_ACKS) {
            m.sender_nic = path->rnic;
            m.receiver_nic = path->lnic;
            m.gen = path->down.fenced;
            m.reason = (uint32_t)path->attempt.err;
            r2_out_frame(via, R2_F_FENCED, &m, sizeof(m), NULL, 0);
        }
    }
}

static void resync_conn(struct r2_conn *c, struct r2_path *via)
{
    if (c->peer->out && (c->state == R2_CONN_OPENING || c->state == R2_CONN_OPEN))
        r2_conn_out_open(c);
    if (!c->peer->out && c->state != R2_CONN_FAILED) {
        r2_recv_repeat(c, via);
        c->cts_sent = 0; /* credit that was on its way may be lost: the next receive says it */
        R2_FOR_EACH_REQ (r, c) {
            if (!r->arrived && c->state == R2_CONN_OPEN)
                r2_recv_cts(r, via);
        }
    }
    if (c->word == R2_WORD_OWED)
        r2_conn_out_close(c);
}

/* One path carries all of it, acknowledgements before FENCED: when the sender puts the missing
 * bytes back into the queue it knows everything that has arrived. */
void r2_peer_resync(struct r2_peer *p)
{
    struct r2_path *via = p->resync ? r2_path_for_ctrl(p, -1, -1) : NULL;

    if (!via || r2_out_full(via))
        return; /* the peer does not read: what is queued says enough until it does */
    p->resync = R2_RESYNC_NONE;
    r2_nicnews_resync(p, via);
    R2_FOR_EACH_CONN (c, p)
        resync_conn(c, via);
    r2_recv_out_acks(p);
    resync_paths(p, via);
}
