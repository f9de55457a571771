/* The trace of plans: its text, damaged in every way; and what the leader of a replay proposes.
 * Rung 1: pure. What ranks do with it: test_shim_trace.c, tests/py/test_plan_trace.py. */
#define _GNU_SOURCE
#include "plan/trace.h"

#include "check.h"
#include "schedules/replay.h"
#include "util/crc32c.h"

#define MOST 40000

static uint32_t orders[R2_PLAN_ORDERS][16];

/* A table for `nranks` ranks with `ncomms` communicators, run on all of them or on none. */
static struct r2_plan_table table_of(int nranks, int ncomms, bool runs)
{
    struct r2_plan_table t = {.nranks = nranks, .ncomms = ncomms};

    for (int c = 0; c < ncomms; c++) {
        for (int r = 0; r < nranks; r++)
            orders[c][r] = (uint32_t)((r + c) % nranks);
        t.comms[c] = (struct r2_plan_comm){.key = (uint64_t)c + 1, .ranks = orders[c]};
        memset(t.comms[c].id, 0xe5, sizeof(t.comms[c].id));
        t.entries[0].comm[c] = (uint32_t)c;
        t.entries[0].boundary[c] = (uint32_t)c * 100;
    }
    t.nentries = runs;
    t.entries[0].schedule = R2_PLAN_TREE;
    t.entries[0].segments = (uint8_t)ncomms;
    t.entries[0].below_bytes = UINT64_MAX;
    snprintf(t.reason, sizeof(t.reason), "because | of\n%s", runs ? "it" : "that");
    return t;
}

static void add(char *text, char *line)
{
    CHECK(line != NULL && strlen(text) + strlen(line) < MOST);
    strcat(text, line);
    free(line);
}

/* Two communicators, one with three plans and one with none. */
static void example(char *text)
{
    struct r2_trace_comm one = {.name = 0xabc, .run = 77, .nranks = 5, .rank = 3};
    struct r2_trace_comm two = {.name = UINT64_MAX, .run = 1, .nranks = 2, .rank = 0};
    struct r2_plan_table make = table_of(5, 2, false), run = table_of(5, 2, true);

    text[0] = '\0';
    add(text, r2_trace_put_head());
    add(text, r2_trace_put_comm(&one));
    add(text, r2_trace_put_plan(0xabc, 1, &make));
    add(text, r2_trace_put_comm(&two));
    add(text, r2_trace_put_plan(0xabc, 500, &run));
    add(text, r2_trace_put_plan(0xabc, UINT64_MAX, &make));
}

/* Parses a copy that is exactly as long, for the sanitizers. */
static int parse(struct r2_trace **out, const char *text, size_t len, char *why)
{
    char *copy = malloc(len + (len == 0));
    int rc;

    CHECK(copy != NULL);
    memcpy(copy, text, len);
    rc = r2_trace_parse(out, copy, len, why);
    free(copy);
    CHECK((rc == 0) == (*out != NULL) && (rc == 0) == (why[0] == '\0'));
    CHECK(strlen(why) < R2_TRACE_WHY);
    return rc;
}

static void refused(const char *text, const char *says)
{
    char why[R2_TRACE_WHY];
    struct r2_trace *trace;

    CHECK_EQ(parse(&trace, text, strlen(text), why), -EINVAL);
    CHECK_MSG(strstr(why, says) != NULL, "says '%s', not '%s'", why, says);
}

static void test_round_trip(void)
{
    struct r2_plan_table make = table_of(5, 2, false), run = table_of(5, 2, true);
    char text[MOST], why[R2_TRACE_WHY];
    const struct r2_trace_comm *comm;
    struct r2_trace *trace;

    example(text);
    CHECK(strstr(text, "e5e5") == NULL); /* an id is a secret of its run */
    CHECK_EQ(parse(&trace, text, strlen(text), why), 0);
    CHECK_EQ(trace->ncomms, 2);
    CHECK(r2_trace_find(trace, 5) == NULL);
    comm = r2_trace_find(trace, UINT64_MAX);
    CHECK(comm && comm->nplans == 0 && comm->run == 1 && comm->nranks == 2 && comm->rank == 0);
    comm = r2_trace_find(trace, 0xabc);
    CHECK(comm && comm->nplans == 3 && comm->run == 77 && comm->nranks == 5 && comm->rank == 3);
    CHECK(comm->plans[0].from == 1 && r2_trace_same(comm->plans[0].table, &make));
    CHECK(comm->plans[1].from == 500 && r2_trace_same(comm->plans[1].table, &run));
    CHECK(comm->plans[2].from == UINT64_MAX && r2_trace_same(comm->plans[2].table, &make));
    CHECK(!r2_trace_same(&make, &run));
    r2_trace_free(trace);
}

static void test_same(void)
{
    struct r2_plan_table a = table_of(5, 2, true), b = table_of(5, 2, true);
    static const uint32_t other[5] = {4, 3, 2, 1, 0};

    memset(b.comms[0].id, 1, sizeof(b.comms[0].id));
    b.reason[0] = 'x';
    CHECK(r2_trace_same(&a, &b));
    b.entries[0].boundary[1]++;
    CHECK(!r2_trace_same(&a, &b));
    b = table_of(5, 2, true);
    b.comms[1].ranks = other;
    CHECK(!r2_trace_same(&a, &b));
    b = table_of(5, 2, true);
    b.comms[1].key++;
    CHECK(!r2_trace_same(&a, &b));
    b = table_of(5, 2, true);
    b.entries[0].segments = 1;
    CHECK(!r2_trace_same(&a, &b));
    b = table_of(5, 2, true);
    b.entries[0].from_bytes = 9;
    CHECK(!r2_trace_same(&a, &b));
    b = table_of(5, 1, true);
    CHECK(!r2_trace_same(&a, &b));
}

/* No byte can change unnoticed; cut off, it is good only where a line ends. */
static void test_damage(void)
{
    char text[MOST], why[R2_TRACE_WHY];
    struct r2_trace *trace;
    size_t len;

    example(text);
    len = strlen(text);
    for (size_t i = 0; i < len; i++) {
        char was = text[i];

        text[i] = (char)(was ^ (1 + check_below(255)));
        CHECK_MSG(parse(&trace, text, len, why) == -EINVAL, "byte %zu as %d", i, text[i]);
        text[i] = was;
    }
    for (size_t n = 0; n < len; n++) {
        bool whole = n > 0 && text[n - 1] == '\n';

        CHECK_MSG((parse(&trace, text, n, why) == 0) == whole, "%zu bytes: %s", n, why);
        CHECK(whole || n == 0 || strstr(why, "line ") == why);
        r2_trace_free(trace);
    }
    for (unsigned long i = 0; i < check_rounds(2000); i++) { /* lines lost, doubled, noise */
        char noise[300];

        for (size_t k = 0; k < sizeof(noise); k++)
            noise[k] = (char)check_random();
        r2_trace_parse(&trace, noise, check_below(sizeof(noise)), why);
        r2_trace_free(trace);
    }
}

/* Lines that are whole and say what cannot be. */
static char *line(const char *body)
{
    static char text[MOST];
    char *head = r2_trace_put_head();

    snprintf(text, sizeof(text), "%s%08x %s\n", head, (unsigned)r2_crc32c(0, body, strlen(body)),
             body);
    free(head);
    return text;
}

static void test_nonsense(void)
{
    struct r2_plan_table make = table_of(5, 2, false);
    struct r2_trace_comm one = {.name = 9, .run = 77, .nranks = 4, .rank = 3};
    char text[MOST] = "";

    refused("", "empty");
    refused("#!/bin/sh\n", "line 1 is not the beginning of a trace of plans");
    refused("00000000 r2ccl-plan-trace 2\n", "line 1 says version 2, and this R2CCL reads");
    refused("00000000 r2ccl-plan-trace 1\n", "line 1 is damaged");
    refused(line("comm 1 run 2 ranks 0 rank 0"), "line 2 says nothing");
    refused(line("comm 1 run 2 ranks 2 rank 2"), "line 2 says nothing");
    refused(line("comm 1 run 2 ranks 2 rank 0 x"), "line 2 says nothing");
    refused(line("plan 1 from 2 table 00"), "line 2 has a plan of a communicator that is not");
    refused(line("plan 1 from two table 00"), "line 2 says nothing");
    refused(line(""), "line 2 says nothing");
    add(text, r2_trace_put_head());
    add(text, r2_trace_put_comm(&one));
    add(text, r2_trace_put_plan(9, 3, &make));
    refused(text, "line 3 has no plan for 4 ranks");
    text[0] = '\0';
    one.nranks = 5;
    add(text, r2_trace_put_head());
    add(text, r2_trace_put_comm(&one));
    add(text, r2_trace_put_plan(9, 3, &make));
    add(text, r2_trace_put_plan(9, 3, &make));
    refused(text, "line 4 has a plan that is not later");
    text[0] = '\0';
    add(text, r2_trace_put_head());
    add(text, r2_trace_put_comm(&one));
    add(text, r2_trace_put_comm(&one));
    refused(text, "line 3 names a communicator for the second time");
}

static void test_names(void)
{
    uint64_t base = r2_trace_name(0, 1, 0, 4, 2, 0);

    CHECK(base == r2_trace_name(0, 1, 0, 4, 2, 0) && base != 0);
    CHECK(base != r2_trace_name(1, 1, 0, 4, 2, 0) && base != r2_trace_name(0, 2, 0, 4, 2, 0));
    CHECK(base != r2_trace_name(0, 1, 1, 4, 2, 0) && base != r2_trace_name(0, 1, 0, 5, 2, 0));
    CHECK(base != r2_trace_name(0, 1, 0, 4, 1, 0) && base != r2_trace_name(0, 1, 0, 4, 2, 1));
}

/* ---- the leader */

#define RANKS 3
#define SECOND UINT64_C(1000000000)

static struct r2_plan_table steps[5];
static struct r2_trace_plan plans[5];
static struct r2_trace_comm record;

/* make A, run A, make A and B, run B, stock without communicators */
static void start(struct r2_replay *r)
{
    static const int ncomms[5] = {1, 1, 2, 2, 0};

    for (int i = 0; i < 5; i++) {
        steps[i] = table_of(RANKS, ncomms[i], i % 2);
        plans[i] = (struct r2_trace_plan){.from = (uint64_t)i * 10 + 5, .table = &steps[i]};
    }
    record = (struct r2_trace_comm){.nranks = RANKS, .nplans = 5, .plans = plans};
    CHECK_EQ(r2_replay_init(r, &record, RANKS), 0);
}

static void counted(struct r2_replay *r, int a, int b, int c)
{
    r2_replay_counted(r, 0, a);
    r2_replay_counted(r, 1, b);
    CHECK_EQ(r2_replay_due(r, 0), R2_REPLAY_NOTHING);
    r2_replay_counted(r, 1, b);
    CHECK_EQ(r2_replay_due(r, 0), R2_REPLAY_NOTHING);
    r2_replay_counted(r, 2, c);
}

static int fill(struct r2_replay *r)
{
    static uint8_t serial;
    struct r2_replay_id *id;
    int n = 0;

    for (; (id = r2_replay_idless(r)) != NULL; n++) {
        memset(id->id.bytes, ++serial, sizeof(id->id.bytes));
        id->has = true;
    }
    return n;
}

static struct r2_plan_table *proposed(struct r2_replay *r, enum r2_replay_step step, uint64_t at)
{
    struct r2_plan_table *t;
    uint64_t from;
    size_t len;
    void *out;

    CHECK_EQ(r2_replay_encode(r, step, &out, &len, &from), 0);
    CHECK_EQ(from, at);
    CHECK_EQ(r2_plan_table_decode(&t, out, len, RANKS), 0);
    free(out);
    r2_replay_asked(r, step);
    CHECK_EQ(r2_replay_due(r, UINT64_MAX / 2), R2_REPLAY_NOTHING);
    return t;
}

/* The plan that is due, agreed in `epoch`, `fresh` ids. */
static void agreed(struct r2_replay *r, int number, int fresh, uint64_t epoch, uint64_t now)
{
    struct r2_plan_table *t;

    CHECK_EQ(r2_replay_due(r, now), R2_REPLAY_PLAN);
    CHECK_EQ(fill(r), fresh);
    t = proposed(r, R2_REPLAY_PLAN, plans[number].from);
    CHECK(r2_trace_same(t, plans[number].table));
    r2_plan_table_free(t);
    r2_replay_decided(r, epoch, true, "", now);
}

static void all_made(struct r2_replay *r)
{
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(r2_replay_due(r, 0), R2_REPLAY_NOTHING);
        r2_replay_made(r, rank, false);
        r2_replay_made(r, rank, false);
    }
}

static void ended(struct r2_replay *r, uint64_t now, const char *says)
{
    struct r2_plan_table *t;

    for (int i = 0; i < 10; i++, now += SECOND) { /* tried for ever */
        CHECK_EQ(r2_replay_due(r, now), R2_REPLAY_END);
        t = proposed(r, R2_REPLAY_END, 0);
        CHECK_EQ(t->nentries + t->ncomms, 0);
        CHECK(strstr(t->reason, R2_REPLAY_ENDED) == t->reason);
        CHECK_MSG(strstr(t->reason, says) != NULL, "says '%s', not '%s'", t->reason, says);
        r2_plan_table_free(t);
        r2_replay_decided(r, 90, i == 9, "", now);
        CHECK_EQ(r2_replay_due(r, now), R2_REPLAY_NOTHING);
    }
    CHECK_EQ(r2_replay_due(r, UINT64_MAX / 2), R2_REPLAY_NOTHING);
    r2_replay_free(r);
}

static void test_replay_to_the_end(void)
{
    struct r2_replay r;

    start(&r);
    counted(&r, 5, 5, 5);
    agreed(&r, 0, 1, 1, 0);
    all_made(&r);
    agreed(&r, 1, 0, 3, 0); /* an epoch that was aborted between */
    agreed(&r, 2, 1, 4, 0); /* nothing runs on what is new: not waited for */
    all_made(&r);
    agreed(&r, 3, 0, 5, 0);
    agreed(&r, 4, 0, 6, 0);
    CHECK_EQ(r2_replay_due(&r, UINT64_MAX / 2), R2_REPLAY_NOTHING);
    r2_replay_end(&r, "enough");
    ended(&r, 0, "replay ended: enough");
}

static void test_replay_of_unequal_length(void)
{
    static const int counts[][3] = {{5, 4, 5}, {5, 5, 6}, {5, 6, 4}};
    struct r2_replay r;

    for (int i = 0; i < 3; i++) {
        int limit = i == 1 ? 5 : 4;

        start(&r);
        counted(&r, counts[i][0], counts[i][1], counts[i][2]);
        for (int n = 0; n < limit; n++) {
            if (n % 2)
                all_made(&r);
            agreed(&r, n, n == 0 || n == 2, (uint64_t)n + 1, 0);
        }
        ended(&r, 0, "the trace of another rank ends here");
    }
    start(&r);
    record.nplans = 1; /* and another rank has none: modulo 32 */
    counted(&r, 1, 0, 1);
    ended(&r, 0, "before plan 1 of 1 (operation 5)");
}

static uint64_t refused_once(struct r2_replay *r, bool first, uint64_t now)
{
    CHECK_EQ(r2_replay_due(r, now), R2_REPLAY_PLAN);
    CHECK_EQ(fill(r), first); /* ids are kept */
    r2_plan_table_free(proposed(r, R2_REPLAY_PLAN, 5));
    r2_replay_decided(r, 1, false, "a rank has refused it", now);
    return now + R2_REPLAY_PAUSE_NS;
}

static void test_replay_refused(void)
{
    struct r2_replay r;
    uint64_t now = 0;

    start(&r);
    counted(&r, 5, 5, 5);
    while (now < R2_REPLAY_PATIENCE_NS + R2_REPLAY_PAUSE_NS) {
        CHECK_EQ(r2_replay_due(&r, now ? now - 1 : 0), now ? R2_REPLAY_NOTHING : R2_REPLAY_PLAN);
        now = refused_once(&r, now == 0, now);
    }
    ended(&r, now, "before plan 1 of 5 (operation 5): a rank has refused it");

    start(&r);
    counted(&r, 5, 5, 5);
    r2_replay_made(&r, 1, true);
    for (int i = 0; i < R2_REPLAY_TRIES; i++)
        now = refused_once(&r, i == 0, now);
    ended(&r, now, "a rank could not make its communicators");
}

static void test_replay_not_made(void)
{
    struct r2_replay r;

    start(&r);
    counted(&r, 5, 5, 5);
    agreed(&r, 0, 1, 1, SECOND);
    r2_replay_made(&r, 0, false);
    r2_replay_made(&r, 2, false);
    r2_replay_made(&r, -1, false);
    r2_replay_made(&r, RANKS, false);
    CHECK_EQ(r2_replay_due(&r, R2_REPLAY_PATIENCE_NS), R2_REPLAY_NOTHING);
    ended(&r, SECOND + R2_REPLAY_PATIENCE_NS, "not all ranks have made its communicators");
}

static void test_replay_ended_meanwhile(void)
{
    struct r2_replay r;

    start(&r);
    counted(&r, 5, 5, 5);
    CHECK_EQ(r2_replay_due(&r, 0), R2_REPLAY_PLAN);
    fill(&r);
    r2_plan_table_free(proposed(&r, R2_REPLAY_PLAN, 5));
    r2_replay_end(&r, "the first reason");
    r2_replay_end(&r, "the second");
    CHECK_EQ(r2_replay_due(&r, 0), R2_REPLAY_NOTHING);
    r2_replay_decided(&r, 1, true, "", 0); /* it is in force, and then stock */
    ended(&r, 0, "the first reason");
    CHECK_EQ(r2_replay_init(&r, NULL, RANKS), 0);
    r2_replay_counted(&r, 0, 3);
    r2_replay_end(&r, "nothing was replayed");
    CHECK_EQ(r2_replay_due(&r, 0), R2_REPLAY_NOTHING);
    r2_replay_free(&r);
}

static const struct check_test tests[] = {
    {"round_trip", test_round_trip},
    {"same", test_same},
    {"damage", test_damage},
    {"nonsense", test_nonsense},
    {"names", test_names},
    {"replay_to_the_end", test_replay_to_the_end},
    {"replay_of_unequal_length", test_replay_of_unequal_length},
    {"replay_refused", test_replay_refused},
    {"replay_not_made", test_replay_not_made},
    {"replay_ended_meanwhile", test_replay_ended_meanwhile},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
