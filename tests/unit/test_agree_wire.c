/* Bytes of the agreement (rung 1): ids, frames, and hostile ones; the choice of the index. */
#include "agree/horizon.h"
#include "agree/wire.h"
#include "check.h"

static void fill(void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ((uint8_t *)p)[i] = (uint8_t)check_random();
    }
}

static void random_addr(struct r2_agree_addr *a)
{
    memset(a, 0, sizeof(*a));
    a->family = check_below(2) ? 4 : 6;
    a->port = (uint16_t)(1 + check_below(65535));
    fill(a->ip, a->family == 4 ? 4 : 16);
}

TEST(tail)
{
    for (unsigned long round = 0; round < check_rounds(2000); round++) {
        uint8_t id[R2_AGREE_ID] = {0};
        uint8_t before[R2_AGREE_ID];
        struct r2_agree_tail tail, out = {0};
        size_t at;

        fill(id, 64);
        memcpy(before, id, sizeof(id));
        random_addr(&tail.addr);
        fill(tail.token, sizeof(tail.token));
        CHECK_EQ(r2_agree_tail_decode(id, &out), -ENOENT); /* as NCCL makes it */
        CHECK_EQ(r2_agree_tail_encode(id, &tail), 0);
        CHECK_MEM(id, before, 64); /* NCCL's part is untouched */
        CHECK_EQ(r2_agree_tail_decode(id, &out), 0);
        CHECK_EQ(out.addr.family, tail.addr.family);
        CHECK_EQ(out.addr.port, tail.addr.port);
        CHECK_MEM(out.addr.ip, tail.addr.ip, 16);
        CHECK_MEM(out.token, tail.token, 16);
        CHECK_EQ(r2_agree_tail_encode(id, &tail), -EEXIST);
        at = check_below(R2_AGREE_ID); /* one bit, anywhere */
        id[at] ^= (uint8_t)(1u << check_below(8));
        CHECK_NE(r2_agree_tail_decode(id, &out), 0);
    }
}

/* A tail that another has filled stays as it is, whichever byte is in use. */
TEST(tail_in_use)
{
    struct r2_agree_tail tail = {.addr = {.family = 4, .port = 1}};

    for (int i = 64; i < 128; i++) {
        uint8_t id[R2_AGREE_ID] = {0};
        uint8_t before[R2_AGREE_ID];

        id[i] = 1;
        memcpy(before, id, sizeof(id));
        CHECK_EQ(r2_agree_tail_encode(id, &tail), -EEXIST);
        CHECK_MEM(id, before, sizeof(id));
    }
}

TEST(derived_tokens)
{
    uint8_t parent[16] = {1}, tokens[64][16];

    for (int i = 0; i < 64; i++) {
        r2_agree_token_derive(tokens[i], parent, (uint64_t)i / 8, (uint64_t)i % 8);
        for (int j = 0; j < i; j++) {
            CHECK(memcmp(tokens[i], tokens[j], 16) != 0);
        }
    }
}

TEST(frames)
{
    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        struct r2_agree_frame f = {.kind =
                                       (enum r2_agree_kind)(1 + check_below(R2_FRAME_KINDS - 1)),
                                   .from = (uint32_t)check_below(R2_AGREE_RANKS),
                                   .to = (uint32_t)check_below(R2_AGREE_RANKS),
                                   .len = (uint32_t)check_below(R2_AGREE_FRAME + 1)};
        struct r2_agree_frame out;
        uint8_t text[R2_AGREE_HEADER];

        fill(f.token, sizeof(f.token));
        r2_agree_frame_encode(text, &f);
        CHECK_EQ(r2_agree_frame_decode(text, &out), 0);
        CHECK_EQ(out.kind, f.kind);
        CHECK_EQ(out.from, f.from);
        CHECK_EQ(out.to, f.to);
        CHECK_EQ(out.len, f.len);
        CHECK_MEM(out.token, f.token, 16);
        if (check_below(2)) {
            fill(text + check_below(32), 1 + check_below(8));
        } else {
            fill(text, sizeof(text));
        }
        if (r2_agree_frame_decode(text, &out) == 0) {
            CHECK(out.len <= R2_AGREE_FRAME && out.from < R2_AGREE_RANKS &&
                  out.to < R2_AGREE_RANKS);
            CHECK(out.kind > 0 && out.kind < R2_FRAME_KINDS);
        }
    }
}

TEST(roster)
{
    for (unsigned long round = 0; round < check_rounds(1000); round++) {
        struct r2_agree_roster r = {.nranks = 1 + (uint32_t)check_below(64)}, out;
        struct r2_agree_hello processes[64];
        struct r2_agree_seat seats[64];
        uint8_t *text;
        size_t len;

        memset(processes, 0, sizeof(processes));
        r.nprocesses = 1 + (uint32_t)check_below(r.nranks);
        r.processes = processes;
        r.seats = seats;
        for (uint32_t i = 0; i < r.nranks; i++) {
            fill(processes[i].process, 16);
            random_addr(&processes[i].addr);
            seats[i] = (struct r2_agree_seat){(uint32_t)check_below(r.nprocesses), check_random()};
        }
        len = r2_agree_roster_encode(NULL, 0, &r);
        text = malloc(len); /* exact, for the sanitizer */
        CHECK(text && r2_agree_roster_encode(text, len, &r) == len);
        CHECK_EQ(r2_agree_roster_decode(text, len, &out), 0);
        CHECK_EQ(out.nranks, r.nranks);
        for (uint32_t i = 0; i < r.nranks; i++) {
            CHECK_EQ(out.seats[i].process, seats[i].process);
            CHECK_EQ(out.seats[i].node, seats[i].node);
        }
        CHECK_MEM(out.processes, processes, r.nprocesses * sizeof(processes[0]));
        r2_agree_roster_free(&out);
        if (len > 0) {
            CHECK_NE(r2_agree_roster_decode(text, check_below(len), &out), 0);
        }
        text[check_below(len < 64 ? len : 64)] ^= (uint8_t)(1u << check_below(8));
        if (r2_agree_roster_decode(text, len, &out) == 0) {
            for (uint32_t i = 0; i < out.nranks; i++) {
                CHECK_LT(out.seats[i].process, out.nprocesses);
            }
            r2_agree_roster_free(&out);
        }
        free(text);
    }
}

TEST(small_payloads)
{
    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        size_t len = check_below(100);
        uint8_t *text = malloc(len ? len : 1);
        struct r2_agree_register r;
        uint8_t again[R2_AGREE_FAILURE_BYTES];
        struct r2_agree_failure failure;
        struct r2_agree_report report;
        struct r2_agree_hello h;
        struct r2_agree_msg m;
        const uint8_t *plan;
        size_t plan_len;
        uint64_t number;

        CHECK(text != NULL);
        fill(text, len);
        if (len >= 8 && check_below(2)) {
            memset(text + 1, 0, 7);
        } else if (len == R2_AGREE_FAILURE_BYTES) {
            memset(text + 2, 0, 2); /* a rank that may be */
        }
        if (r2_agree_msg_decode(text, len, &m, &plan, &plan_len) == 0) {
            CHECK(m.type >= R2_AGREE_PROPOSE && m.type < R2_AGREE_TYPES && m.epoch > 0);
            CHECK(plan + plan_len == text + len);
        }
        if (r2_agree_register_decode(text, len, &r) == 0) {
            CHECK(r.nranks >= 1 && r.nranks <= R2_AGREE_RANKS);
        }
        if (r2_agree_report_decode(text, len, &number, &report) == 0) {
            CHECK_LE(report.share, 65536);
        }
        if (r2_agree_failure_decode(text, len, &failure) == 0) {
            CHECK(len == R2_AGREE_FAILURE_BYTES && failure.error != 0);
            r2_agree_failure_encode(again, &failure);
            CHECK_MEM(again, text, len);
        }
        r2_agree_hello_decode(text, len, &h);
        free(text);
    }
}

/* --- the index ---------------------------------------------------------------------------- */

#define MS UINT64_C(1000000)

TEST(horizon)
{
    struct r2_agree_horizon h = {0};
    uint64_t first;

    r2_agree_horizon_watch(&h, 1000, 0);
    CHECK_EQ(r2_agree_horizon_pick(&h, 1000, 100 * MS), 1001); /* nothing moves */
    CHECK_EQ(r2_agree_horizon_pick(&h, 1100, 100 * MS), 1100 + 25 + 1);
    r2_agree_horizon_heard(&h, 1100, 1500, 100 * MS); /* another rank runs ahead */
    first = r2_agree_horizon_pick(&h, 1100, 100 * MS);
    CHECK_EQ(first, 1100 + 400 + 26);
    r2_agree_horizon_refused(&h, 100 * MS);
    CHECK_EQ(r2_agree_horizon_pick(&h, 1100, 100 * MS), 1100 + 400 + 52);
    r2_agree_horizon_committed(&h, 100 * MS, 100 * MS); /* slow commits need more room */
    CHECK_EQ(r2_agree_horizon_pick(&h, 1100, 100 * MS), 1100 + 300 + 801);
    for (int i = 0; i < 100; i++) {
        r2_agree_horizon_refused(&h, 50 * MS);
    }
    r2_agree_horizon_heard(&h, 0, UINT64_MAX, 50 * MS); /* nonsense from outside is bounded */
    CHECK_LT(r2_agree_horizon_pick(&h, 1010, 50 * MS), UINT64_C(1) << 42);
}

/* Watches operations of a length; what it picks beyond the next one. */
static uint64_t horizon_of(struct r2_agree_horizon *h, uint64_t length, uint64_t *now)
{
    uint64_t index = 70;

    r2_agree_horizon_watch(h, index, *now);
    *now += R2_HORIZON_WATCH_NS;
    index += R2_HORIZON_WATCH_NS / length;
    return r2_agree_horizon_pick(h, index, *now) - index;
}

/* Operations of seconds: each one that a plan waits for costs its length. */
TEST(long_operations)
{
    struct r2_agree_horizon h = {0};
    uint64_t now = 0;

    CHECK_EQ(horizon_of(&h, 1000 * MS, &now), 1);
    r2_agree_horizon_committed(&h, 500 * MS, now); /* agreeing takes longer than that */
    CHECK_EQ(horizon_of(&h, 1000 * MS, &now), 1);
    r2_agree_horizon_refused(&h, now);
    CHECK_EQ(horizon_of(&h, 1000 * MS, &now), 2);
    h = (struct r2_agree_horizon){0};
    CHECK_EQ(horizon_of(&h, 50 * MS, &now), 1);
    CHECK_EQ(horizon_of(&h, 10 * MS, &now), 3);
}

/* One slow commit, one rank that ran ahead, a refusal: a minute later they say nothing. */
TEST(horizon_fades)
{
    struct r2_agree_horizon h = {0};
    uint64_t now = 1000 * MS, slow, last, lead = 0;

    last = horizon_of(&h, 20 * MS, &now);
    r2_agree_horizon_committed(&h, 1000 * MS, now);
    r2_agree_horizon_heard(&h, 0, 3, now);
    slow = horizon_of(&h, 20 * MS, &now);
    CHECK_LT(last + 300, slow);
    r2_agree_horizon_committed(&h, 10 * MS, now); /* the next one is fast: not so soon forgotten */
    CHECK_LT(last + 200, horizon_of(&h, 20 * MS, &now));
    r2_agree_horizon_refused(&h, now);
    for (int s = 0; s < 60; s += 5) {
        uint64_t was = lead;

        now += 5000 * MS;
        lead = horizon_of(&h, 20 * MS, &now);
        CHECK(s == 0 || lead <= was);
    }
    CHECK_EQ(lead, last);
}
