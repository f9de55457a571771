/* engine/core/pathstate (rung 1): every state of the three machines with every event, and what a
 * path may carry in every combination of facts. What it cannot prove: that the engine says the
 * right events (engine_paths, engine_health). */
#include "check.h"

#include <string.h>

#include "engine/core/pathstate.h"

static bool is_up(enum r2_path_state s)
{
    return s == R2_PATH_TESTING || s == R2_PATH_PROVEN;
}

/* A generation goes one way: it begins with an attempt, takes each step once, and ends. */
TEST(one_way)
{
    static const enum r2_path_event steps[] = {R2_PATH_EV_ATTEMPT, R2_PATH_EV_CONNECTED,
                                               R2_PATH_EV_ARRIVED};
    static const enum r2_path_state after[] = {R2_PATH_CONNECTING, R2_PATH_TESTING, R2_PATH_PROVEN};

    for (int s = 0; s < R2_PATH_STATES; s++) {
        for (int e = 0; e < R2_PATH_EVENTS; e++) {
            enum r2_path_state next = r2_path_next(s, e);
            bool live = s == R2_PATH_CONNECTING || is_up(s), moved = next != (enum r2_path_state)s;

            CHECK(next != R2_PATH_IDLE || s == R2_PATH_IDLE);
            if (e == R2_PATH_EV_END)
                CHECK_EQ(next, live ? R2_PATH_WAIT : (enum r2_path_state)s);
            for (int i = 0; i < 3; i++) {
                if ((int)steps[i] == e && moved)
                    CHECK_EQ(next, after[i]);
                if ((int)steps[i] == e)
                    CHECK_EQ(moved, i ? s == (int)after[i - 1] : !live);
            }
        }
    }
}

/* Each state is reached from IDLE, and each leads back to an attempt. */
TEST(all_are_reached)
{
    unsigned reached = 1u << R2_PATH_IDLE;

    for (int round = 0; round < R2_PATH_STATES; round++) {
        for (int s = 0; s < R2_PATH_STATES; s++) {
            for (int e = 0; e < R2_PATH_EVENTS; e++)
                reached |= reached >> s & 1 ? 1u << r2_path_next(s, e) : 0;
        }
    }
    CHECK_EQ(reached, (1u << R2_PATH_STATES) - 1);
    for (int s = 0; s < R2_PATH_STATES; s++)
        CHECK_EQ(r2_path_next(r2_path_next(s, R2_PATH_EV_END), R2_PATH_EV_ATTEMPT),
                 R2_PATH_CONNECTING);
}

/* What each event says stands afterwards, whatever was before; nothing takes "has carried" back. */
TEST(past)
{
    unsigned reached = 1u << R2_PAST_NONE;

    for (int s = 0; s < R2_PAST_STATES; s++) {
        bool carried = r2_past_carried(s);
        enum r2_path_past proven = r2_past_next(s, R2_PAST_EV_PROVEN);

        for (int e = 0; e < R2_PAST_EVENTS; e++) {
            CHECK_EQ(r2_past_carried(r2_past_next(s, e)), carried || e == R2_PAST_EV_PROVEN);
            for (int again = 0; again < R2_PAST_STATES; again++)
                reached |= reached >> again & 1 ? 1u << r2_past_next(again, e) : 0;
        }
        CHECK_EQ(r2_past_next(proven, R2_PAST_EV_PROVEN), proven);
        CHECK_EQ(r2_past_next(proven, R2_PAST_EV_CLOSE), R2_PAST_CLOSED);
        CHECK_EQ(r2_past_next(proven, R2_PAST_EV_LOSS), R2_PAST_LOST);
        CHECK_EQ(r2_past_next(s, R2_PAST_EV_ATTEMPT), carried ? R2_PAST_MISSED : R2_PAST_TRIED);
        CHECK_EQ(r2_past_next(s, R2_PAST_EV_END), carried ? R2_PAST_CARRIED : R2_PAST_NONE);
        CHECK_EQ(r2_past_next(s, R2_PAST_EV_WAIT), s == R2_PAST_TRIED ? R2_PAST_WAITED : s);
    }
    CHECK_EQ(reached, (1u << R2_PAST_STATES) - 1);
    CHECK_EQ(r2_past_next(R2_PAST_CLOSED, R2_PAST_EV_PROVEN), R2_PAST_CLOSED); /* until FENCED */
    CHECK_EQ(r2_past_next(R2_PAST_LOST, R2_PAST_EV_PROVEN), R2_PAST_LOST);
    CHECK_EQ(r2_past_next(R2_PAST_MISSED, R2_PAST_EV_PROVEN), R2_PAST_CARRIED);
}

/* One heartbeat at a time is queued, and watched once; only a look finds a stall, or none. */
TEST(beats)
{
    unsigned reached = 1u << R2_BEAT_NONE;

    for (int s = 0; s < R2_BEAT_STATES; s++) {
        bool watched = s == R2_BEAT_OUT || s == R2_BEAT_STALLED;

        for (int e = 0; e < R2_BEAT_EVENTS; e++) {
            enum r2_beat_state next = r2_beat_next(s, e);

            reached |= reached >> s & 1 ? 1u << next : 0;
            CHECK_EQ(next == R2_BEAT_NONE,
                     e == R2_BEAT_EV_UP || s == R2_BEAT_NONE ? e != R2_BEAT_EV_SEND : false);
        }
        CHECK_EQ(r2_beat_next(s, R2_BEAT_EV_SEND), R2_BEAT_QUEUED);
        CHECK_EQ(r2_beat_next(s, R2_BEAT_EV_FLUSHED), s == R2_BEAT_QUEUED ? R2_BEAT_OUT : s);
        CHECK_EQ(r2_beat_next(s, R2_BEAT_EV_STALL), watched ? R2_BEAT_STALLED : s);
        CHECK_EQ(r2_beat_next(s, R2_BEAT_EV_SILENCE), watched ? R2_BEAT_OUT : s);
    }
    CHECK_EQ(reached, (1u << R2_BEAT_STATES) - 1);
}

static struct r2_path_facts facts_of(unsigned i)
{
    return (struct r2_path_facts){.state = i / 16 % R2_PATH_STATES,
                                  .health = i / 16 / R2_PATH_STATES,
                                  .spare = i & 1,
                                  .barred = i & 2,
                                  .limited = i & 4,
                                  .slow = i & 8};
}

#define ALL (16u * R2_PATH_STATES * R2_HEALTH_STATES)

TEST(what_it_may_carry)
{
    for (unsigned i = 0; i < ALL; i++) {
        struct r2_path_facts f = facts_of(i);
        enum r2_path_may may = r2_path_may_carry(&f);

        CHECK_EQ(may >= R2_MAY_FRAMES, is_up(f.state));
        CHECK_EQ(may >= R2_MAY_LAST_RESORT,
                 f.state == R2_PATH_PROVEN && r2_health_carries(f.health));
        CHECK_EQ(may >= R2_MAY_STAND_BY, may >= R2_MAY_LAST_RESORT && !f.spare);
        CHECK_EQ(may >= R2_MAY_LIMITED, may >= R2_MAY_STAND_BY && !f.barred);
        CHECK_EQ(may >= R2_MAY_UNLIMITED, may >= R2_MAY_LIMITED && !f.limited);
        CHECK_EQ(may >= R2_MAY_BEST, may >= R2_MAY_UNLIMITED && !f.slow);
    }
}

/* No event but the arrival of test chunks lets a path carry chunks, and an end takes all. */
TEST(events_and_what_it_may)
{
    for (unsigned i = 0; i < ALL; i++) {
        for (int e = 0; e < R2_PATH_EVENTS; e++) {
            struct r2_path_facts f = facts_of(i);
            enum r2_path_may before = r2_path_may_carry(&f), after;

            f.state = r2_path_next(f.state, e);
            after = r2_path_may_carry(&f);
            if (e == R2_PATH_EV_END)
                CHECK_EQ(after, R2_MAY_NOTHING);
            else
                CHECK(after >= before);
            if (after >= R2_MAY_LAST_RESORT && before < R2_MAY_LAST_RESORT)
                CHECK_EQ(e, R2_PATH_EV_ARRIVED);
        }
    }
}
