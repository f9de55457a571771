/* What one process tells another about its NICs (frame INFO), repeated until the other side says
 * that it has heard it (frame HEARD). It is a state, not an event: what is repeated is what holds
 * by then, and who has heard a number need not hear an older one. Under the peer's lock. */
#include <errno.h>
#include <string.h>

#include "engine/path/path.h"

#define FIRST_NS                                                                                   \
    (100 * R2_NS_PER_MS) /* before the first repetition; then twice as long each time */
#define MOST_NS (1 * R2_NS_PER_S)

/* Something is said to the peer, and it has not said that it heard it. */
static bool is_open(const struct r2_peer *p)
{
    return p->nicnews.heard < atomic_load(&r2_eng.news);
}

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
    if (!is_open(p))
        p->nicnews.due = 0;
    else if (!p->nicnews.due)
        begin(&p->nicnews, r2_peer_now(p));
}

void r2_nicnews_tell(struct r2_peer *p)
{
    struct r2_path *via = r2_path_for_ctrl(p, -1, -1);

    begin(&p->nicnews, r2_peer_now(p));
    if (via && !r2_out_full(via)) /* else by the repetition; the first path that comes up says it */
        r2_out_info(via);
}

void r2_nicnews_resync(struct r2_peer *p, struct r2_path *via)
{
    if (!is_open(p))
        return;
    begin(&p->nicnews, r2_peer_now(p));
    r2_out_info(via);
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
    r2_out_info(via);
    w->wait = 2 * w->wait < MOST_NS ? 2 * w->wait : MOST_NS;
    w->due = now + w->wait;
}

void r2_nicnews_heard(struct r2_path *path)
{
    struct r2_msg_heard m = {.number = path->peer->info};
    struct r2_path *via = r2_path_is_up(path) ? path : r2_path_for_ctrl(path->peer, -1, -1);

    if (via && !r2_out_full(via)) /* else it is said again */
        r2_out_frame(via, R2_F_HEARD, &m, sizeof(m), NULL, 0);
}

int r2_nicnews_on_heard(struct r2_path *path, const uint8_t *body)
{
    struct r2_nicnews *w = &path->peer->nicnews;
    struct r2_msg_heard m;

    memcpy(&m, body, sizeof(m));
    if (m.number > atomic_load(&r2_eng.news))
        return -EPROTO;
    if (m.number > w->heard)
        w->heard = m.number;
    rest(path->peer);
    return 0;
}
