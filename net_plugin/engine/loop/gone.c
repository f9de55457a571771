/* The end of a peer whose process is gone, or which no path reaches any more. Under its lock. */
#include "engine/loop/loop.h"

/* R: messages that wait here whole were acknowledged, so their sender may have closed and left in
 * peace: they can still be received, nothing behind them can. */
static bool outlives_sender(struct r2_conn *c)
{
    if (c->peer->out || c->state != R2_CONN_OPEN || c->next_seq >= c->cum)
        return false;
    c->final_seq = c->cum;
    r2_recv_flushed(c, c->cum); /* nobody is left to be told */
    return true;
}

void r2_peer_gone(struct r2_peer *p, int err, const char *cause)
{
    struct r2_control_event ev = {
        .event = R2_EV_PEER_GONE, .peer_host = p->host, .peer_pid = p->pid, .cause = cause};
    char who[R2_PEER_WHO];

    if (p->life != R2_PEER_ALIVE)
        return;
    p->life = R2_PEER_GONE;
    p->error = err;
    r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_GONE, cause);
    if (!r2_list_empty(&p->conn_list)) {
        r2_control_journal(r2_eng.ctl, &ev);
        R2_INFO("peer %s is gone: %s", r2_peer_who(p, who), cause);
        r2_peer_tell_gone(p, cause);
    }
    r2_peer_show(p, r2_peer_now(p));
    for (int i = 0; i < p->n_paths; i++)
        r2_path_fail(p->paths[i], p->paths[i]->gen, -err, cause);
    R2_FOR_EACH_CONN_SAFE (c, p) {
        if (c->state >= R2_CONN_CLOSING) {
            c->word = R2_WORD_HEARD; /* nobody is left to acknowledge it */
            r2_conn_reap(c);
        } else if (!outlives_sender(c)) {
            r2_conn_fail(c, err);
        }
    }
    r2_peer_wake(p);
}
