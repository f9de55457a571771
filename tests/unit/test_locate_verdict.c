/* Evidence and verdict (rung 1): every row of the verdict table of docs/failures.md, and random
 * worlds in which something is broken. The verdict never blames a NIC that answered. It is right
 * where the evidence allows one, and does not depend on the order of what was seen. */
#include "check.h"
#include "engine/core/verdict.h"

#define SINCE 1000
#define NOW 2000

static struct r2_evidence ev;

static int nic(int node, int rail)
{
    struct r2_wire_addr a = {.family = 4, .ip = {10, (uint8_t)(rail + 1), 0, (uint8_t)(node + 1)}};
    char label[R2_WIRE_NAME];

    snprintf(label, sizeof(label), "nic%d@n%d", rail, node);
    return r2_evidence_nic(&ev, &a, label);
}

static void saw(int from, int to, enum r2_seen outcome)
{
    r2_evidence_add(&ev, from, to, outcome, true, NOW);
}

static enum r2_finding_kind judge(int l, int r, bool there)
{
    struct r2_finding v;

    memset(&v, 0x5a, sizeof(v));
    r2_verdict_of(&ev, l, r, SINCE, there, &v);
    CHECK(memchr(v.why, 0, sizeof(v.why)));
    CHECK_MSG(strncmp(v.why, r2_verdict_name(v.kind), strlen(r2_verdict_name(v.kind))) == 0,
              "the line begins with the verdict: %s", v.why);
    return v.kind;
}

static int a, b, c, d; /* one NIC each of four nodes, on one rail */

static void fresh(void)
{
    r2_evidence_init(&ev);
    a = nic(0, 0);
    b = nic(1, 0);
    c = nic(2, 0);
    d = nic(3, 0);
}

/* What was seen, a pair each: "ab-" silent, "ab+" answered. */
static void sees(const char *what)
{
    fresh();
    for (; *what; what += what[3] ? 4 : 3)
        saw(what[0] - 'a', what[1] - 'a', what[2] == '+' ? R2_SEEN_ANSWERED : R2_SEEN_SILENT);
}

/* Of the pair a, b, and as b, a sees it. The other node is known to be there, or not. */
TEST(table)
{
    static const struct {
        const char *seen;
        bool there;
        enum r2_finding_kind found;
    } rows[] = {
        {"", true, R2_FOUND_UNDECIDED},
        {"ac+ bc+", true, R2_FOUND_UNDECIDED}, /* not a word on the pair itself */
        {"ab- ac- bc+ ba+", true, R2_FOUND_TRANSIENT},
        {"ab- ac- bc+", false, R2_FOUND_LOCAL},
        {"ab- bc+", true, R2_FOUND_UNDECIDED}, /* it could be the link as well */
        {"ab- ac+ cb+", false, R2_FOUND_BETWEEN},
        {"ab- ac- bc-", true, R2_FOUND_BETWEEN},    /* the rail */
        {"ab- ac- bc-", false, R2_FOUND_UNDECIDED}, /* the other node may be gone */
        {"ab- ac- bc- cd+", true, R2_FOUND_BOTH},   /* the rail works */
        {"ab- ac- cd+", true, R2_FOUND_LOCAL},      /* nothing is known of b */
        {"ab- ac- cd+", false, R2_FOUND_UNDECIDED},
        {"ab-", true, R2_FOUND_UNDECIDED},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        enum r2_finding_kind found = rows[i].found;

        sees(rows[i].seen);
        CHECK_MSG(judge(a, b, rows[i].there) == found, "%s", rows[i].seen);
        found = found == R2_FOUND_LOCAL ? R2_FOUND_REMOTE : found;
        CHECK_MSG(judge(b, a, rows[i].there) == found, "%s, mirrored", rows[i].seen);
    }
    CHECK_EQ(judge(a, a, true), R2_FOUND_UNDECIDED);
    CHECK_EQ(judge(-1, b, true), R2_FOUND_UNDECIDED);
    CHECK_EQ(judge(a, 99, true), R2_FOUND_UNDECIDED);
}

/* Other NICs of the two nodes are third parties as good as any. */
TEST(auxiliary)
{
    int a1, b1;

    fresh();
    a1 = nic(0, 1);
    b1 = nic(1, 1);
    saw(a, b, R2_SEEN_SILENT);
    saw(a1, b, R2_SEEN_ANSWERED);
    saw(a, b1, R2_SEEN_SILENT);
    CHECK_EQ(judge(a, b, true), R2_FOUND_LOCAL);
}

TEST(words)
{
    fresh();
    saw(a, b, R2_SEEN_ANSWERED); /* what the owner says of its own NIC comes first */
    ev.nics[b].word = true;
    CHECK_EQ(judge(a, b, false), R2_FOUND_REMOTE);
}

/* A NIC that is out of order itself is no witness of another one's silence. */
TEST(no_witness)
{
    sees("ab- ca- bd+");
    CHECK_EQ(judge(a, b, true), R2_FOUND_LOCAL);
    ev.nics[c].word = true;
    CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
    CHECK_EQ(judge(b, a, true), R2_FOUND_UNDECIDED);
    saw(a, d, R2_SEEN_SILENT); /* one that is not */
    CHECK_EQ(judge(a, b, true), R2_FOUND_LOCAL);
    sees("ab- ac- bc-");
    CHECK_EQ(judge(a, b, true), R2_FOUND_BETWEEN);
    ev.nics[c].word = true;
    CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
}

/* What says nothing: refusals, missing routes, kernels without their process, pairs that never
 * worked, what was seen before. */
TEST(counts_for_nothing)
{
    static const enum r2_seen nothing[] = {R2_SEEN_NOTHING, R2_SEEN_REFUSED, R2_SEEN_NO_ROUTE,
                                           R2_SEEN_MUTE};

    for (size_t i = 0; i < sizeof(nothing) / sizeof(nothing[0]); i++) {
        sees("ab-");
        saw(a, c, nothing[i]);
        saw(b, c, R2_SEEN_ANSWERED);
        CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
        fresh();
        saw(a, b, nothing[i]);
        saw(a, c, R2_SEEN_SILENT);
        saw(b, c, R2_SEEN_ANSWERED);
        CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
        sees("ab- ac-");
        saw(b, c, nothing[i]);
        CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
    }
    sees("ab-");
    r2_evidence_add(&ev, a, c, R2_SEEN_SILENT, false, NOW); /* never reached */
    saw(b, c, R2_SEEN_ANSWERED);
    CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
    sees("ab- ac-");
    r2_evidence_add(&ev, b, c, R2_SEEN_ANSWERED, true, SINCE - 1); /* long ago */
    CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
    sees("ab- bc+");
    r2_evidence_add(&ev, a, c, R2_SEEN_SILENT, true, SINCE - 1);
    CHECK_EQ(judge(a, b, true), R2_FOUND_UNDECIDED);
}

/* ---- bounds */

TEST(bounds)
{
    struct r2_wire_addr strange = {.family = 0}, v6 = {.family = 6, .ip = {0xfd}};

    fresh();
    CHECK_EQ(r2_evidence_nic(&ev, &strange, "x"), -1);
    CHECK_EQ(nic(0, 0), a); /* known again, whatever the port */
    CHECK_GE(r2_evidence_nic(&ev, &v6, NULL), 0);
    for (int i = 0; i < 300; i++)
        nic(i % 250, 5 + i / 250);
    CHECK_EQ(ev.n_nics, R2_EVIDENCE_NICS);
    CHECK_EQ(nic(9, 99), -1);
    r2_evidence_add(&ev, a, a, R2_SEEN_ANSWERED, true, NOW);
    r2_evidence_add(&ev, -1, b, R2_SEEN_ANSWERED, true, NOW);
    r2_evidence_add(&ev, a, R2_EVIDENCE_NICS, R2_SEEN_ANSWERED, true, NOW);
    r2_evidence_add(&ev, a, b, (enum r2_seen)200, true, NOW);
    CHECK_EQ(ev.n_seen, 0);
    for (int i = 0; i < 2 * R2_EVIDENCE_SEEN; i++)
        saw(a, b, R2_SEEN_SILENT);
    CHECK_EQ(ev.n_seen, R2_EVIDENCE_SEEN);
    CHECK_STR(r2_verdict_name((enum r2_finding_kind)77), "unknown");
}

/* ---- random worlds */

#define WORLD_NODES 5

struct world {
    int n;
    bool nic_dead[WORLD_NODES]; /* one NIC per node, one rail */
    bool cut[WORLD_NODES][WORLD_NODES];
    bool rail_dead;
};

static bool passes(const struct world *w, int x, int y)
{
    return !w->rail_dead && !w->nic_dead[x] && !w->nic_dead[y] && !w->cut[x][y];
}

/* Observations of everybody with everybody, some left out, in random order and direction. */
static void look(const struct world *w, unsigned percent)
{
    int pairs[WORLD_NODES * WORLD_NODES][2], n = 0;

    r2_evidence_init(&ev);
    for (int i = 0; i < w->n; i++)
        CHECK_EQ(nic(i, 0), i);
    for (int x = 0; x < w->n; x++) {
        for (int y = x + 1; y < w->n; y++) {
            pairs[n][0] = x;
            pairs[n++][1] = y;
        }
    }
    for (int i = n - 1; i > 0; i--) {
        int k = (int)check_below((uint64_t)i + 1), x = pairs[i][0], y = pairs[i][1];

        pairs[i][0] = pairs[k][0];
        pairs[i][1] = pairs[k][1];
        pairs[k][0] = x;
        pairs[k][1] = y;
    }
    for (int i = 0; i < n; i++) {
        bool turn = check_below(2);
        int x = pairs[i][turn], y = pairs[i][!turn];

        if (check_below(100) >= percent && !(x + y == 1)) /* the pair 0-1 is always asked */
            continue;
        saw(x, y, passes(w, x, y) ? R2_SEEN_ANSWERED : R2_SEEN_SILENT);
        if (check_below(4) == 0) /* a lost packet: once silent, once not */
            saw(y, x, R2_SEEN_SILENT);
    }
}

static enum r2_finding_kind truth(const struct world *w)
{
    if (w->rail_dead || w->cut[0][1])
        return R2_FOUND_BETWEEN;
    return w->nic_dead[0] && w->nic_dead[1] ? R2_FOUND_BOTH
           : w->nic_dead[0]                 ? R2_FOUND_LOCAL
                                            : R2_FOUND_REMOTE;
}

static void one_fault(struct world *w)
{
    memset(w, 0, sizeof(*w));
    w->n = 3 + (int)check_below(WORLD_NODES - 2);
    switch (check_below(5)) {
    case 0:
        w->nic_dead[0] = true;
        break;
    case 1:
        w->nic_dead[1] = true;
        break;
    case 2:
        w->nic_dead[0] = w->nic_dead[1] = true;
        w->n = WORLD_NODES; /* two others have to see each other */
        break;
    case 3:
        w->cut[0][1] = w->cut[1][0] = true;
        break;
    default:
        w->rail_dead = true;
    }
}

/* With everything seen the verdict is the truth, at both ends alike. */
TEST(worlds_complete)
{
    for (unsigned long i = check_rounds(20000); i; i--) {
        enum r2_finding_kind t, mirrored;
        struct world w;

        one_fault(&w);
        look(&w, 100);
        t = truth(&w);
        mirrored = t == R2_FOUND_LOCAL    ? R2_FOUND_REMOTE
                   : t == R2_FOUND_REMOTE ? R2_FOUND_LOCAL
                                          : t;
        CHECK_EQ(judge(0, 1, true), t);
        CHECK_EQ(judge(1, 0, true), mirrored);
    }
}

/* With gaps: a NIC that works is not blamed unless what was seen fits a broken one as well. */
TEST(worlds_gaps)
{
    unsigned long decided = 0, rounds = check_rounds(20000);

    for (unsigned long i = rounds; i; i--) {
        enum r2_finding_kind k;
        struct world w;

        one_fault(&w);
        look(&w, 60);
        k = judge(0, 1, true);
        if (r2_evidence_works(&ev, 0, SINCE))
            CHECK(k != R2_FOUND_LOCAL && k != R2_FOUND_BOTH);
        if (r2_evidence_works(&ev, 1, SINCE))
            CHECK(k != R2_FOUND_REMOTE && k != R2_FOUND_BOTH);
        if (!w.nic_dead[0] && !w.rail_dead)
            CHECK(k != R2_FOUND_LOCAL);
        if (!w.nic_dead[1] && !w.rail_dead)
            CHECK(k != R2_FOUND_REMOTE);
        decided += k == truth(&w);
    }
    CHECK_GT(decided, rounds / 4);
}

/* Any evidence at all, true or not: a NIC that answered anybody is never at fault, without
 * anything seen nobody is, and more answers never bring blame. */
TEST(any_evidence)
{
    for (unsigned long i = check_rounds(50000); i; i--) {
        enum r2_finding_kind k;
        int n = 2 + (int)check_below(6), l, r;

        r2_evidence_init(&ev);
        for (int x = 0; x < n; x++)
            nic(x, 0);
        for (int s = (int)check_below(20); s; s--)
            r2_evidence_add(&ev, (int)check_below((uint64_t)n), (int)check_below((uint64_t)n),
                            (enum r2_seen)check_below(R2_SEEN_LAST + 1), check_below(2),
                            SINCE - 5 + check_below(10));
        l = (int)check_below((uint64_t)n);
        r = (int)check_below((uint64_t)n);
        k = judge(l, r, check_below(2));
        if (k == R2_FOUND_LOCAL || k == R2_FOUND_BOTH)
            CHECK(!r2_evidence_works(&ev, l, SINCE));
        if (k == R2_FOUND_REMOTE || k == R2_FOUND_BOTH)
            CHECK(!r2_evidence_works(&ev, r, SINCE));
        if (l != r) {
            saw(l, (l + 1) % n == r && n > 2 ? (l + 2) % n : (l + 1) % n, R2_SEEN_ANSWERED);
            k = judge(l, r, true);
            CHECK(k != R2_FOUND_LOCAL && k != R2_FOUND_BOTH);
        }
    }
}
