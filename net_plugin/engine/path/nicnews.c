/* Words about NICs that are repeated until they are heard. See nicnews.h. */
#include <errno.h>
#include <string.h>

#include "engine/path/path.h"

#define FIRST_NS                                                                                   \
    (100 * R2_NS_PER_MS) /* before the first repetition; then twice as long each time */
#define MOST_NS (1 * R2_NS_PER_S)

/* ---- what is open */

static bool nic_open(const struct r2_peer *p, int nic)
{
    return p->nicnews.acked[nic] < atomic_load(&r2_eng.nic_state[nic].epoch);
}

/* Something is said to the peer and not acknowledged yet. */
static bool nicnews_open(const struct r2_peer *p)
{
    for (int i = 0; i < r2_local.n; i++) {
        if (nic_open(p, i))
            return true;
    }
    return false;
}

/* ---- saying it */

/* News are repeated soon; those that come one after the other put nothing off. */
static void begin(struct r2_nicnews *w, uint64_t now)
{
    w->wait = FIRST_NS;
    if (!w->due || w->due > now + FIRST_NS)
        w->due = now + FIRST_NS;
}

/* Nothing is open: the next news begin anew. Something is: it is said, some time. */
static void rest(struct r2_peer *p)
{
    if (!nicnews_open(p))
        p->nicnews.due = 0;
    else if (!p->nicnews.due)
        begin(&p->nicnews, r2_peer_now(p));
}

/* Where a NIC is comes before the word about it: who has heard this has heard that. */
static void say_place(struct r2_path *via)
{
    if (r2_local_moved())
        r2_out_info(via);
}

void r2_nicnews_tell(struct r2_peer *p, int nic)
{
    struct r2_path *via = r2_path_for_ctrl(p, -1, -1);

    begin(&p->nicnews, r2_peer_now(p));
    if (!via || r2_out_full(via))
        return; /* said by the repetition; the first path that comes up says all */
    say_place(via);
    r2_out_nic(via, nic);
}

static void say_open(struct r2_peer *p, struct r2_path *via)
{
    for (int i = 0; i < r2_local.n; i++) {
        if (nic_open(p, i))
            r2_out_nic(via, i);
    }
}

void r2_nicnews_resync(struct r2_peer *p, struct r2_path *via)
{
    say_place(via);
    if (!nicnews_open(p))
        return;
    begin(&p->nicnews, r2_peer_now(p));
    say_open(p, via);
}

/* Each repetition takes another path: the one before may be dead, and not known to be. */
static struct r2_path *next_path(struct r2_peer *p)
{
    struct r2_path *fit[R2_PATHS_MAX];
    unsigned n = 0;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_may(path) >= R2_MAY_LAST_RESORT && !r2_out_full(path))
            fit[n++] = path;
    }
    if (n)
        return fit[p->nicnews.turn++ % n];
    fit[0] = r2_path_for_ctrl(p, -1, -1);
    return fit[0] && !r2_out_full(fit[0]) ? fit[0] : NULL;
}

void r2_nicnews_repeat(struct r2_peer *p, uint64_t now)
{
    struct r2_nicnews *w = &p->nicnews;
    struct r2_path *via;

    rest(p);
    via = p->n_up && w->due && now >= w->due ? next_path(p) : NULL;
    if (!via)
        return;
    say_place(via);
    say_open(p, via);
    w->wait = 2 * w->wait < MOST_NS ? 2 * w->wait : MOST_NS;
    w->due = now + w->wait;
}

/* ---- hearing it */

/* Over the path that brought it, unless that has just ended by what it said. */
void r2_nicnews_heard_nic(struct r2_path *path, int nic, uint32_t epoch)
{
    const struct r2_rnic *r = &path->peer->rnics[nic];
    struct r2_msg_heard m = {.nic = (uint8_t)nic, .number = r->known ? r->epoch : epoch};
    struct r2_path *via = r2_path_is_up(path) ? path : r2_path_for_ctrl(path->peer, -1, -1);

    if (via && !r2_out_full(via)) /* else it is said again */
        r2_out_frame(via, R2_F_HEARD, &m, sizeof(m), NULL, 0);
}

int r2_nicnews_on_heard(struct r2_path *path, const uint8_t *body)
{
    struct r2_nicnews *w = &path->peer->nicnews;
    struct r2_msg_heard m;

    memcpy(&m, body, sizeof(m));
    if (m.nic >= r2_local.n || m.number > atomic_load(&r2_eng.nic_state[m.nic].epoch))
        return -EPROTO;
    if (m.number > w->acked[m.nic])
        w->acked[m.nic] = m.number;
    rest(path->peer);
    return 0;
}
