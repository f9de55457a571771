/* The leader's steps to a plan (schedules/steer.c), and what it ships (schedules/lead.c). Rung 1:
 * every sequence of events is explored, over all states that three ranks and two plans can reach.
 */
#include "check.h"

#include <string.h>

#include "schedules/lead.h"
#include "schedules/steer.h"

#define RANKS 3
#define ROOM 200000

/* The leader with what the world knows of it. */
struct world {
    struct r2_steer s;
    uint64_t made[1];
    uint64_t now;
    bool had;        /* the target was wanted as one that is there */
    uint8_t said;    /* ranks that have said so about the agreed make */
    bool spoiled;    /* a rank has said that it could not */
    uint64_t agreed; /* what the ranks run, by what was committed */
};

static struct world seen[ROOM];
static int nseen;

/* Times relative to now: where only "reached or not" counts, so that states repeat. */
static struct world canon(const struct world *w)
{
    struct world c;

    memset(&c, 0, sizeof(c));
    c.made[0] = w->made[0];
    c.had = w->had;
    c.said = w->said;
    c.spoiled = w->spoiled;
    c.agreed = w->agreed;
    c.s.step = w->s.step;
    c.s.asked = w->s.asked;
    c.s.stop = w->s.stop;
    c.s.current = w->s.current;
    c.s.target = w->s.target;
    c.s.lost = w->s.lost;
    c.s.make_epoch = w->s.make_epoch;
    c.s.since_ns = w->now >= w->s.since_ns + R2_STEER_PATIENCE_NS;
    c.s.not_before_ns = w->now >= w->s.not_before_ns;
    c.s.tries = w->s.tries < R2_STEER_TRIES ? w->s.tries : R2_STEER_TRIES;
    c.s.nmade = w->s.nmade;
    c.s.failed = w->s.failed;
    return c;
}

static void check_world(struct world *w)
{
    enum r2_steer_step due = r2_steer_due(&w->s, w->now);

    CHECK_EQ(w->s.current, w->agreed);
    if (due == R2_STEER_SWITCH)
        CHECK(w->had || (w->said == (1 << RANKS) - 1 && !w->spoiled));
    if (due == R2_STEER_MAKE || due == R2_STEER_RELIEF || due == R2_STEER_SWITCH)
        CHECK(w->s.target != 0);
    if (due == R2_STEER_BACK)
        CHECK(w->s.step == R2_STEER_BACK);
    if (w->s.step == R2_STEER_IDLE)
        CHECK_EQ(w->s.target, 0);
    if (w->s.step == R2_STEER_MADE || w->s.step == R2_STEER_DROP)
        CHECK_EQ(w->s.failed, w->spoiled);
}

static void copy(struct world *to, const struct world *from)
{
    *to = *from;
    to->s.made = to->made;
}

enum { EVENTS = 5 + 2 + 2 * RANKS + 2 + 1 };

/* False: the event cannot happen here. */
static bool happen(struct world *w, int e)
{
    enum r2_steer_step due, through, step;
    uint64_t target;

    if (e < 5) { /* want 1 or 2, there or not; want stock */
        bool have = e % 2, idle = w->s.step == R2_STEER_IDLE;
        uint64_t key = e < 4 ? (uint64_t)(1 + e / 2) : 0;
        bool took = r2_steer_want(&w->s, key, have, w->now);

        if (took && key && idle && key != w->s.current) {
            w->had = have;
            w->said = 0;
            w->spoiled = false;
        }
        return true;
    }
    e -= 5;
    if (e < 2) { /* the proposal that is due ends well or not */
        due = r2_steer_due(&w->s, w->now);
        if (!w->s.asked) {
            if (due == R2_STEER_IDLE)
                return false;
            r2_steer_asked(&w->s);
            return true;
        }
        step = w->s.step;
        target = w->s.target;
        through = r2_steer_decided(&w->s, 7, e == 0, w->now);
        CHECK_EQ(through, e == 0 ? step : R2_STEER_IDLE);
        if (e == 1 && (step == R2_STEER_MAKE || step == R2_STEER_RELIEF))
            CHECK_EQ(w->s.step, R2_STEER_IDLE); /* the planner's to want again */
        if (through == R2_STEER_SWITCH)
            w->agreed = target;
        if (through == R2_STEER_BACK || through == R2_STEER_RELIEF)
            w->agreed = 0;
        if (through == R2_STEER_MAKE || through == R2_STEER_RELIEF)
            w->said = 0;
        return true;
    }
    e -= 2;
    if (e < 2 * RANKS) { /* a rank's word */
        if (w->s.step == R2_STEER_MADE) {
            w->said |= e % 2 ? 0 : (uint8_t)(1 << (e / 2));
            w->spoiled |= e % 2;
        }
        r2_steer_made(&w->s, e / 2, 7, e % 2, w->now);
        r2_steer_made(&w->s, e / 2, 6, true, w->now); /* of another make: nothing */
        return true;
    }
    e -= 2 * RANKS;
    if (e == 2) { /* what runs is not to run on meanwhile */
        step = w->s.step;
        r2_steer_relieve(&w->s);
        CHECK(w->s.step == step || (w->s.current && w->s.target && !w->s.asked));
        return w->s.step != step;
    }
    w->now += e ? R2_STEER_PATIENCE_NS : R2_STEER_PAUSE_NS;
    return true;
}

/* With everything going well from here on, it comes to rest, and where it was told to. */
static void check_ends(const struct world *from)
{
    struct world w;
    bool stop;

    copy(&w, from);
    stop = w.s.stop || w.s.step == R2_STEER_BACK;
    for (int i = 0; i < 40 && (w.s.step != R2_STEER_IDLE || w.s.stop); i++) {
        w.now += R2_STEER_PAUSE_NS;
        if (w.s.step == R2_STEER_MADE)
            for (int r = 0; r < RANKS; r++)
                r2_steer_made(&w.s, r, w.s.make_epoch, false, w.now);
        if (r2_steer_due(&w.s, w.now) != R2_STEER_IDLE)
            r2_steer_asked(&w.s);
        if (w.s.asked)
            r2_steer_decided(&w.s, 7, true, w.now);
    }
    CHECK_EQ(w.s.step, R2_STEER_IDLE);
    CHECK(!w.s.stop);
    if (stop)
        CHECK_EQ(w.s.current, 0);
}

/* By hash; the place in `slots` of a state that was met, plus one. */
static int slots[4 * ROOM];
static struct world keys[ROOM];

static void add(const struct world *w)
{
    struct world key = canon(w);
    const unsigned char *bytes = (const unsigned char *)&key;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    size_t at;

    for (size_t i = 0; i < sizeof(key); i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    for (at = hash % (4 * ROOM); slots[at]; at = (at + 1) % (4 * ROOM))
        if (!memcmp(&keys[slots[at] - 1], &key, sizeof(key)))
            return;
    CHECK(nseen < ROOM);
    keys[nseen] = key;
    copy(&seen[nseen++], w);
    slots[at] = nseen;
}

static void test_every_sequence(void)
{
    struct world first = {.now = 1};

    r2_steer_init(&first.s, RANKS, first.made);
    add(&first);
    for (int at = 0; at < nseen; at++) {
        check_ends(&seen[at]);
        for (int e = 0; e < EVENTS; e++) {
            struct world next;

            copy(&next, &seen[at]);
            if (!happen(&next, e))
                continue;
            check_world(&next);
            add(&next);
        }
    }
    printf("    %d states\n", nseen);
    CHECK(nseen > 200);
}

/* ---- what is shipped */

static struct r2_plan plan_of(int norders, int turn)
{
    struct r2_plan plan = {.schedule = R2_PLAN_TREE, .norders = norders, .nranks = 4, .nnodes = 4};

    for (int o = 0; o < norders; o++) {
        plan.orders[o].ranks = calloc(4, sizeof(int));
        plan.orders[o].nodes = calloc(4, sizeof(int));
        plan.orders[o].boundary = (uint32_t)(o * R2_PLAN_UNIT / norders);
        for (int r = 0; r < 4; r++)
            plan.orders[o].ranks[r] = (r ^ (turn + o)) % 4;
    }
    snprintf(plan.reason, sizeof(plan.reason), "turn %d", turn);
    return plan;
}

static struct r2_plan_table *ship(struct r2_lead *l, enum r2_steer_step step)
{
    struct r2_plan_table *t;
    void *bytes = NULL;
    size_t len = 0;

    for (struct r2_lead_comm *c; (c = r2_lead_idless(l));) {
        memcpy(c->id.bytes, &c->key, sizeof(c->key));
        c->has_id = true;
    }
    CHECK_EQ(r2_lead_encode(l, step, &bytes, &len), 0);
    CHECK_EQ(r2_plan_table_decode(&t, bytes, len, 4), 0);
    free(bytes);
    return t;
}

static void expect(struct r2_lead *l, enum r2_steer_step step, int ncomms, int segments)
{
    struct r2_plan_table *t = ship(l, step);

    CHECK_EQ(t->ncomms, ncomms);
    CHECK_EQ(t->nentries, segments > 0);
    if (segments > 0)
        CHECK_EQ(t->entries[0].segments, segments);
    for (int s = 0; s < segments; s++) /* each part on the communicator that it was planned for */
        CHECK_EQ(t->comms[t->entries[0].comm[s]].key,
                 step == R2_STEER_SWITCH ? l->target.comm[s] : l->current.comm[s]);
    r2_plan_table_free(t);
    r2_lead_through(l, step);
}

static void target(struct r2_lead *l, int norders, int turn, bool there)
{
    struct r2_plan plan = plan_of(norders, turn);

    CHECK_EQ(r2_lead_target(l, &plan, (uint64_t)(turn + 1)), 0);
    CHECK_EQ(r2_lead_has(l), there);
    r2_plan_free(&plan);
}

static void test_what_is_shipped(void)
{
    struct r2_lead l;

    r2_lead_init(&l, 4, 1);
    target(&l, 1, 0, false);
    expect(&l, R2_STEER_MAKE, 1, 0);
    expect(&l, R2_STEER_SWITCH, 1, 1);
    CHECK_EQ(l.current.key, 1);
    target(&l, 2, 1, false);
    expect(&l, R2_STEER_MAKE, 3, 1); /* what runs goes on running while the next is made */
    expect(&l, R2_STEER_SWITCH, 3, 2);
    target(&l, 1, 0, true); /* kept */
    expect(&l, R2_STEER_SWITCH, 2, 1);
    expect(&l, R2_STEER_BACK, 1, 0);
    CHECK_EQ(l.ncomms, 1);
    CHECK_EQ(l.current.key, 0);
    target(&l, 1, 2, false); /* could not be made */
    expect(&l, R2_STEER_MAKE, 2, 0);
    expect(&l, R2_STEER_DROP, 1, 0);
    target(&l, 1, 2, false);
    r2_lead_forget(&l);
    CHECK_EQ(l.ncomms, 1);
    r2_lead_free(&l);
}

/* What runs has become worse than stock: stock runs while the next is made. */
static void test_relief(void)
{
    struct r2_lead l;

    r2_lead_init(&l, 4, 1);
    target(&l, 1, 0, false);
    expect(&l, R2_STEER_MAKE, 1, 0);
    expect(&l, R2_STEER_SWITCH, 1, 1);
    target(&l, 1, 1, false);
    expect(&l, R2_STEER_RELIEF, 2, 0); /* the old one is kept */
    CHECK_EQ(l.current.key, 0);
    CHECK_EQ(l.target.key, 2);
    expect(&l, R2_STEER_DROP, 1, 0); /* could not be made: stock stays */
    target(&l, 1, 1, false);
    expect(&l, R2_STEER_MAKE, 2, 0);
    expect(&l, R2_STEER_SWITCH, 2, 1);
    CHECK_EQ(l.current.key, 2);
    r2_lead_free(&l);
}

static void test_nothing_kept(void)
{
    struct r2_lead l;

    r2_lead_init(&l, 4, 0);
    target(&l, 1, 0, false);
    expect(&l, R2_STEER_MAKE, 1, 0);
    expect(&l, R2_STEER_SWITCH, 1, 1);
    target(&l, 1, 1, false);
    expect(&l, R2_STEER_MAKE, 2, 1);
    expect(&l, R2_STEER_SWITCH, 1, 1);
    expect(&l, R2_STEER_BACK, 0, 0);
    CHECK_EQ(l.ncomms, 0);
    r2_lead_free(&l);
}

static const struct check_test tests[] = {
    {"every_sequence", test_every_sequence},
    {"what_is_shipped", test_what_is_shipped},
    {"relief", test_relief},
    {"nothing_kept", test_nothing_kept},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
