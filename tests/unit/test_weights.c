/* engine/weights: products, and shares of paths that pull at given speeds (rung 1). */
#include "check.h"

#include "engine/core/weights.h"

#define PATHS 8
#define KB 1024u
#define MB (1024u * KB)

TEST(product)
{
    CHECK_EQ(r2_weight_of(1000, 1000), 1000);
    CHECK_EQ(r2_weight_of(500, 1000), 500);
    CHECK_EQ(r2_weight_of(250, 100), 25);
    CHECK_EQ(r2_weight_of(1, 1), 1); /* little is not nothing */
    CHECK_EQ(r2_weight_of(0, 1000), 0);
    CHECK_EQ(r2_weight_of(1000, 0), 0);
    CHECK_EQ(r2_weight_of(100000, 2000), 1000);
}

struct world {
    struct r2_share_set set;
    struct r2_share share[PATHS];
    uint64_t sent[PATHS];
    int n;
};

static void weigh(struct world *w)
{
    bool was = w->set.limited;

    r2_share_begin(&w->set);
    for (int i = 0; i < w->n; i++)
        r2_share_add(&w->set, &w->share[i]);
    r2_share_end(&w->set, was);
}

/* Every turn path i wants `speed[i]` chunks; `bytes` in all are sent. Turns in which nobody may
 * send end the program: nothing may wait for a limited path. */
static void run(struct world *w, const unsigned *speed, uint64_t bytes, uint32_t chunk)
{
    uint64_t done = 0;

    memset(w->sent, 0, sizeof(w->sent));
    while (done < bytes) {
        bool any = false;

        for (int i = 0; i < w->n; i++) {
            for (unsigned k = 0; k < speed[i] && r2_share_may(&w->set, &w->share[i]); k++) {
                r2_share_sent(&w->set, &w->share[i], chunk);
                w->sent[i] += chunk;
                done += chunk;
                any = true;
            }
        }
        CHECK(any);
    }
}

TEST(share)
{
    static const uint32_t weights[] = {1, 50, 100, 333, 500, 900};

    for (unsigned i = 0; i < sizeof(weights) / sizeof(weights[0]); i++) {
        struct world w = {.n = 3};
        const unsigned speed[] = {1, 1, 1};
        double want = weights[i] / (2000.0 + weights[i]), got;

        w.share[0].weight = w.share[2].weight = 1000;
        w.share[1].weight = weights[i];
        weigh(&w);
        CHECK(w.set.limited);
        run(&w, speed, (uint64_t)8192 * MB, 512 * KB);
        got = (double)w.sent[1] / (double)(w.sent[0] + w.sent[1] + w.sent[2]);
        CHECK(got < want * 1.1 + 0.002);
        CHECK(got > want * 0.9 - 0.002);
        CHECK_LE(w.set.recent, R2_SHARE_SPAN);
    }
}

/* The limit is an upper one: a path that is slower than its share takes what it can. */
TEST(slow_and_limited)
{
    struct world w = {.n = 2};
    const unsigned speed[] = {20, 1};

    w.share[0].weight = 1000;
    w.share[1].weight = 900;
    weigh(&w);
    run(&w, speed, 210 * MB, 256 * KB);
    CHECK_EQ(w.sent[0], 20 * w.sent[1]);
}

TEST(spare)
{
    struct world w = {.n = 2};
    const unsigned speed[] = {1, 1};

    w.share[0].weight = 1000;
    weigh(&w);
    CHECK(!w.set.limited); /* a spare is no limited path: nothing is counted for it */
    run(&w, speed, 10 * MB, 64 * KB);
    CHECK_EQ(w.sent[1], 0);
    w.share[0].weight = 1; /* however little is left of the others */
    weigh(&w);
    run(&w, speed, 10 * MB, 64 * KB);
    CHECK_EQ(w.sent[1], 0);
    w.share[0].weight = 0; /* spares among themselves */
    weigh(&w);
    run(&w, speed, 10 * MB, 64 * KB);
    CHECK_EQ(w.sent[0], w.sent[1]);
    w.n = 1;
    w.share[0] = w.share[1];
    weigh(&w); /* the last one */
    CHECK(r2_share_may(&w.set, &w.share[0]));
}

/* What was sent before the limit began, or long ago, is no debt and no credit. */
TEST(memory)
{
    struct world w = {.n = 2};
    const unsigned both[] = {1, 1}, first[] = {1, 0};
    uint64_t before;

    w.share[0].weight = w.share[1].weight = 1000;
    weigh(&w);
    run(&w, first, 512 * MB, 512 * KB);
    w.share[1].weight = 100;
    weigh(&w);
    run(&w, both, 110 * MB, 512 * KB);
    CHECK_LT(w.sent[1], 12 * MB); /* not the 51 MB that would make up for the first 512 */
    before = w.sent[1];
    CHECK_GT(before, 8 * MB);
    for (int i = 0; i < 70; i++)
        r2_share_age(&w.set);
    CHECK(r2_share_may(&w.set, &w.share[1]));
    w.share[1].weight = 1000;
    weigh(&w);
    w.share[1].weight = 100;
    weigh(&w); /* a new limit: a new count */
    CHECK_EQ(w.set.recent, 0);
    CHECK(r2_share_may(&w.set, &w.share[1]));
    r2_share_sent(&w.set, &w.share[1], MB);
    CHECK(!r2_share_may(&w.set, &w.share[1]));
}

/* Random weights and speeds that change: always somebody may send, shares stay below their limit
 * by one chunk and a tenth, and weights of 0 take nothing beside others. */
TEST(random)
{
    for (unsigned long round = 0; round < check_rounds(300); round++) {
        struct world w = {.n = (int)check_below(PATHS) + 1};
        uint32_t chunk = (uint32_t)(check_below(8) + 1) * 64 * KB;
        unsigned speed[PATHS];

        for (int turn = 0; turn < 4; turn++) {
            uint64_t all = 0;

            for (int i = 0; i < w.n; i++) {
                w.share[i].weight = check_below(4) ? (uint32_t)check_below(1001) : 0;
                speed[i] = (unsigned)check_below(5) + 1;
            }
            weigh(&w);
            for (int k = 0; k < 70; k++) /* shares of what comes now only */
                r2_share_age(&w.set);
            run(&w, speed, 512 * MB, chunk);
            for (int i = 0; i < w.n; i++)
                all += w.sent[i];
            for (int i = 0; i < w.n; i++) {
                if (r2_share_free(&w.set, &w.share[i]))
                    continue;
                if (!w.share[i].weight)
                    CHECK_EQ(w.sent[i], 0);
                CHECK_LE((double)w.sent[i],
                         1.1 * (double)all * w.share[i].weight / (double)w.set.total + 4.0 * chunk);
            }
        }
    }
}
