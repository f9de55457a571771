/* The journal and the row have every change of a path's state and every suspicion about a NIC, with
 * its cause (rung 2). What it cannot prove: that each cause is a good one. */
#include <errno.h>

#include "check.h"
#include "control/impl.h"
#include "enginelib/remote.h"
#include "journal_look.h"

static struct remote r;

/* What the journal has to say of a path that comes into the state; NONE: it is told elsewhere. */
static enum r2_seg_event wanted(enum r2_health_state before, enum r2_health_state state)
{
    switch (state) {
    case R2_HEALTH_RAMPING: /* it begins again; the first time: path-up */
        return before == R2_HEALTH_RAMPING ? R2_EV_PATH_RAMPING : R2_EV_NONE;
    case R2_HEALTH_UNREACHED:
        return R2_EV_PATH_CLOSED;
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
    default: /* path-down */
        return R2_EV_NONE;
    }
}

/* How many events with that cause there are since number `from`; the last of them. */
static int told_since(uint64_t from, const char *cause, struct r2_seg_journal_entry *last)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t to = journal_head(seg);
    int n = 0;

    for (; from < to; from++) { /* other threads may have something to tell as well */
        const struct r2_seg_journal_entry *e = journal_entry(seg, from);

        if (e && strcmp(e->cause, cause) == 0) {
            *last = *e;
            n++;
        }
    }
    return n;
}

static void one(struct r2_path *path, enum r2_health_state s, enum r2_health_event e)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t from = journal_head(seg);
    struct r2_health after = {.state = s};
    enum r2_health_state next = (r2_health_step(&after, e, 0), after.state);
    struct r2_seg_journal_entry told = {0};
    bool changes = next != s || (s == R2_HEALTH_RAMPING && e == R2_HEALTH_EV_SILENCE), did;
    enum r2_seg_event want = changes ? wanted(s, next) : R2_EV_NONE;
    char cause[32];

    path->health.state = s;
    snprintf(cause, sizeof(cause), "because %d %d", s, e);
    did = r2_path_event(path, e, cause);
    CHECK(changes == did);
    CHECK_EQ(path->health.state, next);
    CHECK_EQ(told_since(from, cause, &told), want != R2_EV_NONE);
    if (want != R2_EV_NONE) {
        CHECK_EQ(told.event, want);
    }
    if (did)
        CHECK_STR(seg->paths[path->shown.row].cause, cause);
}

TEST(every_change)
{
    struct r2_path *path;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    path = fake_find(r.id, 1, 1, 0)->params.owner;
    fake_pass_ms(200); /* what comes with the beginning has been told */
    r2_peer_lock(path->peer);
    for (int s = 0; s < R2_HEALTH_STATES; s++) {
        for (int e = 0; e < R2_HEALTH_EVENTS; e++)
            one(path, (enum r2_health_state)s, (enum r2_health_event)e);
    }
    path->health.state = R2_HEALTH_HEALTHY;
    r2_peer_unlock(path->peer);
    remote_end(&r);
}

static int told_as(uint64_t from, enum r2_seg_event event, struct r2_seg_journal_entry *last)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t to = journal_head(seg);
    int n = 0;

    for (; from < to; from++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, from);

        if (e && e->event == event) {
            *last = *e;
            n++;
        }
    }
    return n;
}

/* Who leaves closes many: the first are told, and then that there are more. */
TEST(many_are_closed)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    struct r2_seg_journal_entry last = {0};
    struct r2_path *path;
    uint64_t from;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    path = fake_find(r.id, 1, 1, 0)->params.owner;
    from = journal_head(seg);
    r2_peer_lock(path->peer);
    for (int i = 0; i < 500; i++) {
        path->health.state = R2_HEALTH_HEALTHY;
        CHECK(r2_path_event(path, R2_HEALTH_EV_CLOSE, "closed by the test"));
    }
    path->health.state = R2_HEALTH_HEALTHY;
    r2_peer_unlock(path->peer);
    CHECK(told_as(from, R2_EV_PATH_CLOSED, &last) > 0);
    CHECK(told_as(from, R2_EV_PATH_CLOSED, &last) <= 64);
    CHECK_STR(last.cause, "closed by the test");
    remote_end(&r);
}

/* A path that was up and has ended in order is no path that nobody ever reached. */
TEST(closed_is_not_unreached)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    enum r2_path_state was;
    struct r2_path *path;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    path = fake_find(r.id, 1, 1, 0)->params.owner;
    r2_peer_lock(path->peer);
    was = path->state;
    path->state = R2_PATH_WAIT;
    path->health.state = R2_HEALTH_HEALTHY;
    CHECK(r2_path_event(path, R2_HEALTH_EV_CLOSE, "closed by the test"));
    CHECK_EQ(seg->paths[path->shown.row].state, R2_SEG_PATH_CLOSED);
    path->past = R2_PAST_MISSED; /* it is wanted again and cannot be had */
    r2_path_show(path, "");
    CHECK_EQ(seg->paths[path->shown.row].state, R2_SEG_PATH_CONNECTING);
    r2_path_set_role(path, R2_ROLE_SPARE); /* ... or is not, while a better pair serves */
    CHECK_EQ(seg->paths[path->shown.row].state, R2_SEG_PATH_CLOSED);
    r2_path_set_role(path, R2_ROLE_FIRST);
    CHECK_EQ(seg->paths[path->shown.row].state, R2_SEG_PATH_CONNECTING);
    path->past = R2_PAST_NONE;
    r2_path_show(path, "");
    CHECK_EQ(seg->paths[path->shown.row].state, R2_SEG_PATH_NEVER_REACHED);
    path->past = R2_PAST_CARRIED;
    path->state = was;
    path->health.state = R2_HEALTH_HEALTHY;
    r2_path_show(path, "");
    r2_peer_unlock(path->peer);
    remote_end(&r);
}

static uint32_t shown(struct r2_path *path)
{
    uint32_t state;

    r2_peer_lock(path->peer);
    state = r2_eng.ctl->seg->paths[path->shown.row].state;
    r2_peer_unlock(path->peer);
    return state;
}

/* Attempts of the other side, which knows whether it tries again. */
TEST(others_attempts)
{
    struct r2_path *path;
    struct r2_ep *ep;

    remote_new(&r, false, 2);
    CHECK(remote_open(&r, 1));
    ep = fake_accept(r.id, 1, 1, 7);
    CHECK(ep);
    path = ep->params.owner;
    fake_fail(ep, ECONNRESET, false);
    CHECK_EQ(shown(path), R2_SEG_PATH_NEVER_REACHED);
    r2_peer_lock(path->peer);
    path->past = R2_PAST_CLOSED;
    r2_peer_unlock(path->peer);
    ep = fake_accept(r.id, 1, 1, 8);
    CHECK(ep && ep->params.owner == path);
    fake_fail(ep, ECONNRESET, false);
    CHECK_EQ(shown(path), R2_SEG_PATH_CLOSED);
    remote_end(&r);
}

/* A cause stays while a failed path is tried in vain, and while a pair that was never up becomes a
 * spare. */
TEST(causes_stay)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    struct r2_path *path;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    path = fake_find(r.id, 1, 1, 0)->params.owner;
    r2_peer_lock(path->peer);
    path->health.state = R2_HEALTH_PROBING;
    r2_path_show(path, "a verdict");
    CHECK(!r2_path_event(path, R2_HEALTH_EV_PROBE, "tried again"));
    CHECK_STR(seg->paths[path->shown.row].cause, "a verdict");
    path->state = R2_PATH_WAIT;
    path->health.state = R2_HEALTH_UNREACHED;
    path->past = R2_PAST_TRIED;
    r2_path_set_role(path, R2_ROLE_SPARE);
    r2_path_set_role(path, R2_ROLE_FIRST);
    CHECK_STR(seg->paths[path->shown.row].cause, "a verdict");
    path->state = R2_PATH_PROVEN;
    path->health.state = R2_HEALTH_HEALTHY;
    path->past = R2_PAST_CARRIED;
    r2_path_show(path, "");
    r2_peer_unlock(path->peer);
    remote_end(&r);
}

/* Of the NIC in doubt, as I/O thread 0 sees it, which writes it. */
static struct {
    bool suspect;
    char cause[80];
    uint64_t from;
    int begun, ended;
    struct r2_seg_journal_entry begin, end;
} seen;

static void see(int nic)
{
    const struct r2_seg_nic *row = &r2_eng.ctl->seg->nics[nic];

    seen.suspect = row->state == R2_SEG_NIC_SUSPECT;
    snprintf(seen.cause, sizeof(seen.cause), "%.79s", row->cause);
    seen.begun = told_as(seen.from, R2_EV_NIC_SUSPECT, &seen.begin);
    seen.ended = told_as(seen.from, R2_EV_NIC_HEALTHY, &seen.end);
}

/* What its paths say is the NIC's doubt, until they say something else; the tick is 20 ms. */
static void doubt(int nic, bool begins)
{
    atomic_store(&r2_eng.nic_state[nic].census[R2_CENSUS_OUT], !begins);
    atomic_store(&r2_eng.nic_state[nic].census[R2_CENSUS_LOST], begins);
    seen.suspect = !begins;
    for (int i = 0; i < 2000 && seen.suspect != begins; i++) {
        fake_pass_ms(1);
        CHECK(remote_command(see, nic));
    }
    CHECK_EQ(seen.suspect, begins);
}

/* A NIC comes into doubt and out of it: both are told, with their causes, and are the row's. One
 * that does so all the time is told of 64 times and then once a minute. */
TEST(doubts_end)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    int census[R2_CENSUSES];

    seen.from = journal_head(seg);
    for (int i = 0; i < R2_CENSUSES; i++)
        census[i] = atomic_load(&r2_eng.nic_state[1].census[i]);
    doubt(1, true);
    CHECK_EQ(seen.begun, 1);
    CHECK_EQ(seen.ended, 0);
    CHECK_STR(seen.begin.cause, "none of its paths answers");
    doubt(1, false);
    CHECK_EQ(seen.ended, 1);
    CHECK_STR(seen.end.cause, "it answers");
    CHECK_STR(seen.end.nic, seen.begin.nic);
    CHECK_STR(seen.cause, "it answers");
    for (int i = 0; i < 70; i++) {
        doubt(1, true);
        doubt(1, false);
    }
    CHECK_EQ(seen.begun, 64);
    CHECK_EQ(seen.ended, 64);
    for (int i = 0; i < R2_CENSUSES; i++)
        atomic_store(&r2_eng.nic_state[1].census[i], census[i]);
}

static uint64_t shown_in_flight(const struct r2_path *path)
{
    return __atomic_load_n(&r2_eng.ctl->seg->paths[path->shown.row].n.inflight_bytes,
                           __ATOMIC_RELAXED);
}

/* The row says in time whether bytes are under way. */
static bool in_flight(const struct r2_path *path, bool some)
{
    for (int i = 0; i < 2000 && (shown_in_flight(path) > 0) != some; i++)
        fake_pass_ms(1);
    return (shown_in_flight(path) > 0) == some;
}

/* What a path that has ended had under way is shown as long as it is not sent again: until the
 * receiver has confirmed that no more of it can come. */
TEST(unconfirmed_bytes)
{
    static uint8_t data[65536];
    struct r2_ep *a, *b;
    struct r2_path *path;
    struct r2_req *req = NULL;
    struct r2_bulk chunk;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    path = a->params.owner;
    CHECK(in_flight(path, false));
    CHECK_EQ(r2_engine_isend(r.conn, data, sizeof(data), 0, NULL, &req), 0);
    CHECK_EQ(remote_cts(a, &r, 0, sizeof(data)), 0);
    while (fake_next(a, &chunk))
        CHECK(fake_chunk_sent(a, &chunk));
    CHECK(in_flight(path, true));
    fake_fail(a, ECONNRESET, false);
    fake_pass_ms(300); /* several looks at it */
    CHECK(in_flight(path, true));
    CHECK_EQ(remote_fenced(b, a), 0);
    CHECK(in_flight(path, false));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_GREY=0");
    return check_main(argc, argv);
}
