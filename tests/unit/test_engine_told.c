/* Every change of a path's state is told, in the journal and in the path's row, with its cause
 * (rung 2). What it cannot prove: that each cause is a good one. */
#include "check.h"
#include "control/impl.h"
#include "enginelib/remote.h"

static struct remote r;

/* What the journal has to say of a path that comes into the state; NONE: it is told elsewhere. */
static enum r2_seg_event wanted(enum r2_health_state before, enum r2_health_state state)
{
    switch (state) {
    case R2_HEALTH_SUSPECT:
        return R2_EV_PATH_SUSPECT;
    case R2_HEALTH_PROBING:
        return R2_EV_PATH_PROBING;
    case R2_HEALTH_DRAINED:
        return R2_EV_PATH_DRAINED;
    case R2_HEALTH_DAMPED:
        return R2_EV_PATH_DAMPED;
    case R2_HEALTH_HEALTHY: /* from unreached: path-up */
        return before == R2_HEALTH_UNREACHED ? R2_EV_NONE : R2_EV_PATH_HEALTHY;
    default: /* path-down, path-up; closed in order */
        return R2_EV_NONE;
    }
}

/* How many events with that cause there are since number `from`; the last of them. */
static int told_since(uint64_t from, const char *cause, struct r2_seg_journal_entry *last)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t to = __atomic_load_n(&seg->header.event_head, __ATOMIC_ACQUIRE);
    int n = 0;

    for (; from < to; from++) { /* other threads may have something to tell as well */
        const struct r2_seg_journal_entry *e = &seg->events[from % R2_SEG_MAX_EVENTS];

        if (strcmp(e->cause, cause) == 0) {
            *last = *e;
            n++;
        }
    }
    return n;
}

static void one(struct r2_path *path, enum r2_health_state s, enum r2_health_event e)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t from = __atomic_load_n(&seg->header.event_head, __ATOMIC_ACQUIRE);
    enum r2_health_state next = r2_health_next(s, e);
    struct r2_seg_journal_entry told = {0};
    enum r2_seg_event want = next == s ? R2_EV_NONE : wanted(s, next);
    char cause[32];
    bool did;

    path->health.state = s;
    snprintf(cause, sizeof(cause), "because %d %d", s, e);
    did = r2_path_event(path, e, cause);
    CHECK(next == s || did);
    CHECK_EQ(path->health.state, next);
    CHECK_EQ(told_since(from, cause, &told), want != R2_EV_NONE);
    if (want != R2_EV_NONE) {
        CHECK_EQ(told.event, want);
    }
    if (did)
        CHECK_STR(seg->paths[path->row].cause, cause);
}

static void test_every_change(void)
{
    struct r2_path *path;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    path = fake_find(r.id, 1, 1, 0)->params.owner;
    fake_sleep_ms(200); /* what comes with the beginning has been told */
    r2_peer_lock(path->peer);
    for (int s = 0; s < R2_HEALTH_STATES; s++) {
        for (int e = 0; e < R2_HEALTH_EVENTS; e++)
            one(path, (enum r2_health_state)s, (enum r2_health_event)e);
    }
    path->health.state = R2_HEALTH_HEALTHY;
    r2_peer_unlock(path->peer);
    remote_end(&r);
}

static const struct check_test tests[] = {
    {"every_change", test_every_change},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_GREY", "0", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
