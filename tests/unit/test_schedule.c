/* How much a schedule gives each rank to send, its size and what it refuses (rung 1). That every
 * rank ends with every contribution once: test_direct_exec. How long it takes: test_direct_time. */
#include <errno.h>

#include "check.h"
#include "plan/schedule.h"

static struct r2_schedule schedule;

/* With pieces of a size that is used, the bytes of each rank are as its weight says. */
TEST(the_weights_decide_how_much_each_rank_sends)
{
    const uint32_t weights[] = {20000, 0, 12345, 33191};
    struct r2_schedule_data data = {.p = 4, .count = 10000001, .elem = 4, .piece = 64 << 10};

    for (int i = 0; i < 4; i++) {
        double share = weights[i] / 65536.0, want = 1 + 2 * share, sent = 0, got = 0;
        struct r2_schedule *s = &schedule;

        CHECK_EQ(r2_schedule_direct(s, &data, i, weights), 0);
        for (uint64_t k = 0; k < s->n_steps; k++) {
            struct r2_step step;

            r2_schedule_step(s, k, &step);
            sent += (double)step.count * ((step.up >= 0) + step.n_out);
            got += (double)step.count * ((step.down >= 0) + step.n_in);
        }
        CHECK(sent == got);
        CHECK_MSG(sent / 1e7 > want - 0.002 && sent / 1e7 < want + 0.002, "rank %d: %f, not %f", i,
                  sent / 1e7, want);
    }
}

TEST(a_large_schedule_takes_no_memory_and_its_end_is_the_datas_end)
{
    uint32_t weights[R2_SCHEDULE_RANKS];
    struct r2_schedule_data data = {
        .p = R2_SCHEDULE_RANKS, .count = UINT64_C(1) << 40, .elem = 8, .piece = 512 << 10};
    struct r2_schedule *s = &schedule;
    struct r2_step step;
    uint64_t end = 0;

    for (int i = 0; i < R2_SCHEDULE_RANKS; i++)
        weights[i] = R2_SCHEDULE_UNIT / R2_SCHEDULE_RANKS;
    CHECK_EQ(r2_schedule_direct(s, &data, 7, weights), 0);
    for (uint64_t i = s->n_steps - R2_SCHEDULE_RANKS; i < s->n_steps; i++) {
        r2_schedule_step(s, i, &step);
        end = step.offset + step.count > end ? step.offset + step.count : end;
    }
    CHECK_EQ(end, data.count);
}

TEST(what_makes_no_sense_is_refused)
{
    struct r2_schedule_data data = {.p = 4, .count = 100, .elem = 4, .piece = 64};
    const uint32_t less[] = {1, 2, 3, 4}, more[] = {65536, 1, 0, 0}, fine[] = {65536, 0, 0, 0};
    struct r2_schedule *s = &schedule;

    CHECK_EQ(r2_schedule_direct(s, &data, 0, fine), 0);
    CHECK_EQ(r2_schedule_direct(s, &data, 0, less), -EINVAL);
    CHECK_EQ(r2_schedule_direct(s, &data, 0, more), -EINVAL);
    CHECK_EQ(r2_schedule_direct(s, &data, 4, fine), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 4, 100, 1), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 65536, 1), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 100, 0), -EINVAL);
    data.piece = 3;
    CHECK_EQ(r2_schedule_ring(s, &data, 0), -EINVAL);
    data = (struct r2_schedule_data){.p = 2, .count = 100, .elem = 4, .piece = 64};
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 100, 1), -EINVAL);
    data.p = R2_SCHEDULE_RANKS + 1;
    CHECK_EQ(r2_schedule_ring(s, &data, 0), -EINVAL);
}
