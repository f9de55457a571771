/* What the layers above do for peers: begin and end with them, and carry out what was noted. */
#include "engine/locate/locate.h"
#include "engine/loop/loop.h"

static void began(struct r2_peer *p)
{
    r2_task_init(&p->task, p->io, r2_peer_task);
    r2_timer_init(&p->timer, p->io, r2_peer_timer);
    r2_acks_init(p);
}

static void ended(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p)
        r2_path_free(path);
    r2_liveness_free(&p->liveness);
}

static void blame(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p) {
        if (path->down.blame)
            r2_locate_path_failed(path, path->down.blame);
        path->down.blame = 0;
    }
}

/* Weights first: lanes are asked by weight. */
static void carry_out(struct r2_peer *p)
{
    unsigned todo = p->todo;

    p->todo = 0;
    if (todo & R2_TODO_BLAME)
        blame(p);
    if (todo & R2_TODO_WEIGH)
        r2_peer_weigh(p);
    if (todo & R2_TODO_KICK)
        r2_peer_kick(p);
}

const struct r2_upper r2_loop_upper = {
    .began = began, .ended = ended, .carry_out = carry_out, .nic_changed = r2_locate_nic_changed};
