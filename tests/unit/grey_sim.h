/* Simulated paths that are judged by engine/core/grey. */
#ifndef R2_TESTS_GREY_SIM_H
#define R2_TESTS_GREY_SIM_H

#include "check.h"

#include "engine/core/grey.h"

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)
#define MB UINT64_C(1000000)
#define KIB 1024u
#define PATHS 4

/* A path that always has two chunks out, or one every `every` ns. */
struct sim {
    uint64_t rate, rtt;
    uint64_t noise; /* each chunk up to this much later */
    uint64_t every; /* 0: without pause */
    bool limited;   /* by the application: nothing waits behind what is sent */
    uint64_t next;  /* acknowledgement of the chunk in hand */
    uint64_t took;
    uint64_t segments, resent;
    uint32_t loss_ppm;
    unsigned changes;
    struct r2_grey g;
};

static struct sim sims[PATHS];
static int count;
static uint64_t now;

static void chunk_out(struct sim *s, uint64_t at)
{
    uint64_t bytes = s->every ? 64 * KIB : 128 * KIB; /* without pause one waits before it */

    s->took = s->rtt + bytes * SEC / s->rate + (s->noise ? check_below(s->noise) : 0);
    s->next = at + (s->every ? s->every : s->took / 2);
}

static void set_up(int paths, uint64_t rate, uint64_t announced)
{
    memset(sims, 0, sizeof(sims));
    now = 77 * SEC;
    count = paths;
    for (int i = 0; i < paths; i++) {
        sims[i].rate = rate;
        sims[i].rtt = 100 * US;
        sims[i].noise = 50 * US;
        r2_grey_init(&sims[i].g, announced);
        chunk_out(&sims[i], now);
    }
}

static void segments(struct sim *s, uint64_t n)
{
    s->segments += n;
    for (uint64_t i = 0; i < n; i++)
        s->resent += check_below(1000000) < s->loss_ppm;
    r2_grey_segments(&s->g, s->segments, s->resent, now);
}

/* Runs for `ns`; ends early when the factor of path `watch` changes. Returns the time spent. */
static uint64_t run(uint64_t ns, int watch)
{
    struct r2_grey *all[PATHS];
    uint64_t from = now;

    for (int i = 0; i < count; i++)
        all[i] = &sims[i].g;
    while (now - from < ns) {
        uint64_t judge_at = (now / (25 * MS) + 1) * 25 * MS, changed;

        for (int i = 0; i < count; i++) {
            struct sim *s = &sims[i];

            for (; s->next <= judge_at; chunk_out(s, s->next)) {
                if (s->rate == 1) /* stopped */
                    break;
                r2_grey_moved(&s->g, 64 * KIB, s->took, s->limited || s->every, s->next);
                r2_grey_chunk(&s->g, s->every ? 64 * KIB : 128 * KIB, s->took,
                              s->every ? s->rate / 2 : s->rate, s->next);
                segments(s, 8);
            }
        }
        now = judge_at;
        changed = r2_grey_judge(all, count, now);
        for (int i = 0; i < count; i++)
            sims[i].changes += changed >> i & 1;
        if (watch >= 0 && changed >> watch & 1)
            break;
    }
    return now - from;
}

static void expect_full(int except)
{
    for (int i = 0; i < count; i++) {
        if (i != except)
            CHECK_EQ(sims[i].g.factor, R2_GREY_FULL);
    }
}

static void fall(struct sim *s, uint64_t rate)
{
    s->rate = rate;
    chunk_out(s, now);
}

#endif
