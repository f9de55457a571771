/* Exhaustive exploration of the agreement's real state machine (shim/agree/machine.c), rung 1:
 * three ranks, every order of deliveries, losses, repetitions, crashes, refusals, time-outs and
 * give-ups.
 *
 * The network is the set of all messages ever sent: any of them may be delivered at any time, any
 * number of times or never, which is loss, duplication and reordering at once. A process that is
 * started again is no member (the roster names processes), so a restart is a crash whose old
 * messages stay around.
 *
 * Checked in every state: no two ranks, dead ones included, begin a collective under different
 * plans; nobody disagrees on what became of an epoch; and, once messages get through, no live rank
 * waits, unless the leader is dead and every live rank has promised and nobody knows.
 */
#include "agree_world.h"

struct bounds {
    int indexes, proposals, crashes;
    unsigned long states; /* give up (a failure) beyond */
};

static struct packed *states;
static uint32_t *parents;
static uint16_t *actions;
static size_t nstates, room, *table, mask;
static size_t waits_seen, stuck_seen, commits_seen, aborts_seen;

/* --- what must hold ----------------------------------------------------------------------- */

static void show(const struct world *w)
{
    for (int r = 0; r < RANKS; r++) {
        const struct r2_agree_machine *m = &w->m[r];

        fprintf(stderr,
                "    rank %d%s next %d decided %d committed %d floor %d promise %d@%d pending %d "
                "force %d%s ran",
                r, w->dead >> r & 1 ? " DEAD" : "", w->next[r], (int)m->decided, (int)m->committed,
                (int)m->floor, (int)m->promise.epoch, (int)m->promise.at, m->npending,
                (int)m->force.epoch, m->failed ? " FAILED" : "");
        fprintf(stderr, "\n");
    }
    for (int i = 0; i < INDEXES; i++) {
        fprintf(stderr, "    collective %d: %s %d\n", i, w->ran[i] ? "epoch" : "-", w->ran[i] - 1);
    }
}

static void show_action(unsigned action)
{
    static const char *const names[] = {"?", "PROPOSE", "PROMISE", "REFUSE", "DECISION", "ASK"};

    if (action < 2 * MESSAGES) {
        const struct envelope *e = &post[action / 2];

        fprintf(stderr, "  deliver %s %d->%d epoch %d at %d (decided %d, committed %d)%s\n",
                names[e->msg.type], e->from, e->to, (int)e->msg.epoch, (int)e->msg.at,
                (int)e->msg.decided, (int)e->msg.committed, action % 2 ? "" : ", unwilling");
        return;
    }
    action -= 2 * MESSAGES;
    fprintf(stderr, "  %c %u\n", (int)(action / 16), action % 16);
}

static void broken(size_t state, const struct world *w, const char *what)
{
    uint16_t path[256];
    int n = 0;

    for (size_t s = state; s != 0 && n < 256; s = parents[s]) {
        path[n++] = actions[s];
    }
    fprintf(stderr,
            "%s after %d steps (B begin, E end, P propose at, A abandon, Q ask, T time out, "
            "C crash; ranks 1 and 2 may change places between steps):\n",
            what, n);
    while (n > 0) {
        show_action(path[--n]);
    }
    show(w);
    check_fail(__FILE__, __LINE__, "%s", what);
}

static void check_safe(size_t state, const struct world *w)
{
    if (w->split) {
        broken(state, w, "one collective under two plans");
    }
    for (int r = 0; r < RANKS; r++) {
        if (w->m[r].failed && !(w->late >> r & 1)) {
            broken(state, w, "a machine saw a commit that it had not promised");
        }
    }
    for (int r = 1; r < RANKS; r++) {
        for (int q = 0; q < r; q++) {
            const struct r2_agree_machine *a = &w->m[r];
            const struct r2_agree_machine *b = &w->m[q];

            if (w->dead >> r & 1 || w->dead >> q & 1) {
                continue;
            }
            if ((a->decided >= b->decided && a->committed < b->committed) ||
                (b->decided >= a->decided && b->committed < a->committed)) {
                broken(state, w, "two fates of one epoch");
            }
        }
    }
}

static bool waits(const struct world *w, int r)
{
    struct r2_agree_machine copy = w->m[r];

    return !(w->dead >> r & 1) && !(w->begun >> r & 1) && !copy.failed &&
           r2_agree_machine_at(&copy, w->next[r]) == R2_AGREE_WAIT;
}

/* Everything that the living have under way arrives, whoever waits asks, a leader repeats and then
 * gives up. */
static void settle(struct world *w)
{
    for (int round = 0; round < 12; round++) {
        struct r2_agree_msg msg;
        struct r2_agree_out out;
        bool any = false;

        for (int r = 0; r < RANKS; r++) {
            if (waits(w, r)) {
                any = true;
                ask_all(w, r);
            }
        }
        if (!any) {
            return;
        }
        if (!(w->dead & 1) && r2_agree_machine_repeat(&w->m[0], &msg)) {
            if (round < 6) {
                send_one(w, 0, 1, &msg);
                send_one(w, 0, 2, &msg);
            } else {
                r2_agree_machine_abandon(&w->m[0], &out);
                emit(w, 0, 0, &out);
            }
        }
        for (int i = 0; i < nposts; i++) {
            /* what the dead have sent and nobody has received went with their host */
            if ((w->net[i / 64] >> (i % 64) & 1) &&
                !((w->dead >> post[i].to | w->dead >> post[i].from) & 1)) {
                deliver(w, i, true);
            }
        }
    }
}

static void check_live(size_t state, const struct world *before)
{
    struct world w = *before;
    bool any = false;

    w.m[0].promises = &w.promises;
    for (int r = 0; r < RANKS; r++) {
        any |= waits(&w, r);
    }
    if (!any) {
        return;
    }
    waits_seen++;
    settle(&w);
    for (int r = 0; r < RANKS; r++) {
        if (!waits(&w, r)) {
            continue;
        }
        if (!(w.dead & 1)) {
            broken(state, &w, "a wait without end although the leader lives");
        }
        for (int q = 0; q < RANKS; q++) {
            if (!(w.dead >> q & 1) && w.m[q].promise.epoch != w.m[r].promise.epoch) {
                broken(state, &w, "a wait without end although a live rank could tell");
            }
        }
        stuck_seen++;
    }
}

/* --- exploration -------------------------------------------------------------------------- */

static uint64_t hash_of(const struct packed *p)
{
    const uint8_t *b = (const uint8_t *)p;
    uint64_t h = UINT64_C(0x9e3779b97f4a7c15);

    for (size_t i = 0; i < sizeof(*p); i += 8) {
        uint64_t v = 0;

        memcpy(&v, b + i, sizeof(*p) - i < 8 ? sizeof(*p) - i : 8);
        h = (h ^ v) * UINT64_C(0xff51afd7ed558ccd);
        h ^= h >> 32;
    }
    return h;
}

static void grow(void)
{
    room = room ? room * 2 : 1 << 16;
    states = realloc(states, room * sizeof(*states));
    parents = realloc(parents, room * sizeof(*parents));
    actions = realloc(actions, room * sizeof(*actions));
    free(table);
    table = calloc(room * 2, sizeof(*table));
    CHECK(states && parents && actions && table);
    mask = room * 2 - 1;
    for (size_t s = 0; s < nstates; s++) {
        size_t at = hash_of(&states[s]) & mask;

        while (table[at]) {
            at = (at + 1) & mask;
        }
        table[at] = s + 1;
    }
}

static void visit(const struct world *w, size_t parent, unsigned action)
{
    struct world copy = *w;
    struct packed p, q;
    size_t at;

    copy.m[0].promises = &copy.promises;
    normalise(&copy);
    pack(&copy, &p);
    exchange(&p, &q);
    if (memcmp(&q, &p, sizeof(p)) < 0) {
        p = q;
    }
    if (nstates == room) {
        grow();
    }
    for (at = hash_of(&p) & mask; table[at]; at = (at + 1) & mask) {
        if (memcmp(&states[table[at] - 1], &p, sizeof(p)) == 0) {
            return;
        }
    }
    table[at] = nstates + 1;
    states[nstates] = p;
    parents[nstates] = (uint32_t)parent;
    actions[nstates] = (uint16_t)action;
    nstates++;
    check_safe(nstates - 1, w);
    check_live(nstates - 1, w);
}

#define ACTION(letter, number) (2 * MESSAGES + 16 * (unsigned)(letter) + (unsigned)(number))
#define STEP(letter, number, ...)                                                                  \
    do {                                                                                           \
        struct world w = *from;                                                                    \
        struct r2_agree_out out = {0};                                                             \
        w.m[0].promises = &w.promises;                                                             \
        (void)out;                                                                                 \
        __VA_ARGS__                                                                                \
        visit(&w, state, ACTION(letter, number));                                                  \
    } while (0)

static void steps_of_rank(const struct world *from, size_t state, int r, const struct bounds *b)
{
    int index = from->next[r];

    if (from->begun >> r & 1) {
        STEP('E', r, w.next[r]++; w.begun &= (uint8_t) ~(1 << r););
    } else if (index < b->indexes) {
        STEP(
            'B', r, if (r2_agree_machine_at(&w.m[r], (uint64_t)index) == R2_AGREE_GO) {
                uint8_t plan = (uint8_t)(1 + w.m[r].force.epoch);

                w.split = w.ran[index] && w.ran[index] != plan;
                w.ran[index] = plan;
                w.begun |= (uint8_t)(1 << r);
            });
    }
    if (waits(from, r)) {
        STEP('Q', r, ask_all(&w, r););
        STEP('T', r, r2_agree_machine_fail(&w.m[r]); w.late |= (uint8_t)(1 << r););
    }
    if (__builtin_popcount(from->dead) < b->crashes) {
        STEP('C', r, w.dead |= (uint8_t)(1 << r););
    }
}

static void steps_of_leader(const struct world *from, size_t state, const struct bounds *b)
{
    for (int at = from->next[0] + 1; from->proposals < b->proposals && at < b->indexes; at++) {
        STEP(
            'P', at, if (r2_agree_machine_propose(&w.m[0], (uint64_t)at, w.next[0], &out) == 0) {
                w.proposals++;
                emit(&w, 0, 0, &out);
            });
    }
    if (from->m[0].proposal.epoch) {
        STEP('A', 0, r2_agree_machine_abandon(&w.m[0], &out); emit(&w, 0, 0, &out););
    }
}

static void steps(const struct world *from, size_t state, const struct bounds *b)
{
    for (int r = 0; r < RANKS; r++) {
        if (!(from->dead >> r & 1)) {
            steps_of_rank(from, state, r, b);
        }
    }
    if (!(from->dead & 1)) {
        steps_of_leader(from, state, b);
    }
    for (int i = 0; i < nposts; i++) {
        if (!(from->net[i / 64] >> (i % 64) & 1) || (from->dead >> post[i].to & 1)) {
            continue;
        }
        for (int willing = 0; willing < 2; willing++) {
            struct world w = *from;

            if (!willing && post[i].msg.type != R2_AGREE_PROPOSE) {
                continue;
            }
            w.m[0].promises = &w.promises;
            deliver(&w, i, willing);
            visit(&w, state, (unsigned)(2 * i + willing));
        }
    }
}

static void explore(struct bounds b)
{
    struct world w = {0};

    nstates = 0;
    waits_seen = stuck_seen = commits_seen = aborts_seen = 0;
    if (table) {
        memset(table, 0, (mask + 1) * sizeof(*table));
    }
    for (int r = 0; r < RANKS; r++) {
        r2_agree_machine_init(&w.m[r], r, RANKS, &w.promises);
    }
    visit(&w, 0, 0);
    for (size_t s = 0; s < nstates; s++) {
        struct world from;

        unpack(&states[s], &from);
        steps(&from, s, &b);
        commits_seen += from.m[0].decided && from.m[0].committed == from.m[0].decided;
        aborts_seen += from.m[0].decided > from.m[0].committed;
        CHECK_MSG(nstates < b.states, "more than %lu states", b.states);
    }
    printf("# %d indexes, %d proposals, %d crashes: %zu states, %d messages; %zu with a wait, %zu "
           "of which only a time-out ends\n",
           b.indexes, b.proposals, b.crashes, nstates, nposts, waits_seen, stuck_seen);
    CHECK(commits_seen > 0 && aborts_seen > 0 && waits_seen > 0); /* it did explore something */
    CHECK(b.crashes == 0 || stuck_seen > 0);
}

TEST(one_epoch)
{
    explore((struct bounds){.indexes = 3, .proposals = 1, .crashes = 2, .states = 20000000});
}

/* Tens of seconds with R2_LONG=1 in the environment, as a soak test has it; 2: minutes, and GBs. */
TEST(two_epochs)
{
    if (!getenv("R2_LONG")) {
        CHECK_SKIP("runs with R2_LONG=1 or more");
    }
    explore((struct bounds){.indexes = 3, .proposals = 2, .crashes = 1, .states = 20000000});
    if (check_rounds(1) > 1) {
        explore((struct bounds){.indexes = 4, .proposals = 2, .crashes = 2, .states = 200000000});
    }
}
