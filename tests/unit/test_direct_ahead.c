/* Copies that are queued ahead (rung 0), read as a device makes them that has one queue for all
 * streams: every piece is copied once, to and from its place, and nothing in the queue waits for
 * what stands behind it. */
#include "check.h"

#include "direct/ahead.h"
#include "plan/sizes.h"

#define P_MOST 12
#define STEPS_MOST 20000
#define MIB ((uint64_t)1 << 20)
#define QUEUE 1024 /* what the driver's queue of a stream holds */

static struct {
    struct r2_ahead ahead;
    bool copied[2][STEPS_MOST];
    bool held, out;
    unsigned n, rows; /* of the group that is open */
    uint64_t first, last;
    int entries[2];
} bed;

static struct r2_step step_at(uint64_t index)
{
    struct r2_step step;

    r2_schedule_step(bed.ahead.schedule, index, &step);
    return step;
}

static bool is_copied(uint64_t index, bool out)
{
    struct r2_step step = step_at(index);

    return step.count && (out ? step.own != R2_STEP_NOTHING : r2_exec_lands(&step));
}

static bool is_beside(uint64_t earlier, uint64_t later)
{
    return r2_exec_beside(bed.ahead.exec, earlier, step_at(earlier).round, later,
                          step_at(later).round);
}

static int start(void *user, const struct r2_direct_call *call)
{
    (void)user, (void)call;
    return 0;
}

static int hold(void *user, bool out, unsigned n)
{
    (void)user;
    CHECK(!bed.held && n > 0);
    bed.held = true;
    bed.out = out;
    bed.n = n;
    bed.rows = 0;
    bed.first = UINT64_MAX;
    bed.last = 0;
    bed.entries[out]++;
    return 0;
}

/* The step that is copied from this offset, or to it. */
static uint64_t step_of(bool out, uint64_t offset)
{
    const struct r2_schedule *s = bed.ahead.schedule;

    for (uint64_t i = 0; i < s->n_steps; i++)
        if (!bed.copied[out][i] && is_copied(i, out) && step_at(i).offset * s->elem == offset)
            return i;
    CHECK_MSG(false, "nothing is copied at %llu", (unsigned long long)offset);
    return 0;
}

static int queue(void *user, const struct r2_direct_call *call, bool out,
                 const struct r2_direct_rows *rows)
{
    (void)user, (void)call;
    CHECK(bed.held && out == bed.out && rows->n > 0);
    if (rows->n > 1) /* CU_DEVICE_ATTRIBUTE_MAX_PITCH: no steps backwards either */
        CHECK(rows->slot_pitch <= INT32_MAX && rows->pitch <= INT32_MAX);
    bed.entries[out]++;
    for (unsigned k = 0; k < rows->n; k++) {
        uint64_t i = step_of(out, rows->offset + k * rows->pitch);
        struct r2_step step = step_at(i);

        CHECK(r2_exec_slot(bed.ahead.exec, bed.ahead.base + i) ==
              (char *)rows->slot + k * rows->slot_pitch);
        CHECK_EQ(rows->len, step.count * bed.ahead.schedule->elem);
        CHECK_EQ(out && rows->written, out && step.own == R2_STEP_OUTPUT);
        bed.copied[out][i] = true;
        bed.first = i < bed.first ? i : bed.first;
        bed.last = i > bed.last ? i : bed.last;
        bed.rows++;
    }
    return 0;
}

/* All of a group goes at once, so its steps have to be under way at once. */
static int tell(void *user, bool out)
{
    uint64_t after = step_at(bed.last).after;

    (void)user;
    CHECK(bed.held && out == bed.out);
    CHECK_EQ(bed.rows, bed.n);
    CHECK(is_beside(bed.first, bed.last));
    for (uint64_t i = 0; i <= bed.last; i++) {
        if (!out)
            CHECK_MSG(!is_copied(i, true) || bed.copied[true][i],
                      "sum %llu waits for what is behind", (unsigned long long)i);
        else if (i < bed.first && is_copied(i, false) && !bed.copied[false][i])
            CHECK_MSG(i >= after && is_beside(i, bed.last), "piece %llu waits for a sum behind it",
                      (unsigned long long)bed.last);
    }
    bed.held = false;
    bed.entries[out]++;
    return 0;
}

static const struct r2_direct_device device = {
    .start = start, .hold = hold, .queue = queue, .tell = tell};

static void queue_ahead(const struct r2_schedule *schedule, size_t slot, int n_slots)
{
    static const struct r2_exec_ops none;
    struct r2_exec_config config = {
        .p = schedule->p, .piece = slot, .n_slots = n_slots, .ops = &none};
    struct r2_direct_call call = {0};
    struct r2_exec *exec;

    config.slots = malloc((size_t)n_slots * slot);
    CHECK(config.slots);
    CHECK_EQ(r2_exec_new(&exec, &config), 0);
    CHECK(schedule->n_steps <= STEPS_MOST);
    memset(&bed, 0, sizeof(bed));
    bed.ahead = (struct r2_ahead){.device = &device,
                                  .call = &call,
                                  .schedule = schedule,
                                  .exec = exec,
                                  .base = check_below(1000)};
    CHECK_EQ(r2_ahead_queue(&bed.ahead), 0);
    for (uint64_t i = 0; i < schedule->n_steps; i++)
        for (int out = 0; out < 2; out++)
            CHECK_EQ(bed.copied[out][i], is_copied(i, out));
    r2_exec_free(exec);
    free(config.slots);
}

static void some_weights(int p, uint32_t *weights)
{
    uint32_t left = R2_SCHEDULE_UNIT;

    for (int r = 0; r < p; r++) {
        weights[r] = r == p - 1 ? left : (uint32_t)check_below(3) * left / (uint32_t)(2 * p);
        left -= weights[r];
    }
}

static void many(enum r2_schedule_kind kind)
{
    for (int k = 0; k < 150; k++) {
        int p = 3 + (int)check_below(P_MOST - 2), me = (int)check_below((uint64_t)p);
        int rounds = r2_exec_least(kind) + (int)check_below(12);
        size_t piece = 4 * (20 + check_below(60));
        struct r2_schedule_data data = {
            .p = p, .count = 1 + check_below(16000), .elem = 4, .piece = piece};
        uint32_t weights[P_MOST];
        struct r2_schedule s;

        some_weights(p, weights);
        CHECK_EQ(kind == R2_SCHEDULE_DIRECT ? r2_schedule_direct(&s, &data, me, weights)
                 : kind == R2_SCHEDULE_RING ? r2_schedule_ring(&s, &data, me)
                                            : r2_schedule_r2ccl(&s, &data, me, 0, 30000, 4),
                 0);
        queue_ahead(&s, piece, rounds * r2_sizes_round(p));
    }
}

TEST(direct)
{
    many(R2_SCHEDULE_DIRECT);
}

TEST(ring)
{
    many(R2_SCHEDULE_RING);
}

TEST(r2ccl)
{
    many(R2_SCHEDULE_R2CCL);
}

/* The application is not held up: all of an operation fits the driver's queue. */
TEST(a_large_operation_fits_the_queue)
{
    static const struct {
        int p;
        uint32_t weights[8];
    } cases[] = {
        {2, {32768, 32768}},
        {4, {16384, 16384, 16384, 16384}},
        {4, {0, 0, 32768, 32768}},
        {4, {6554, 19661, 19661, 19660}},
        {8, {8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192}},
    };

    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++)
        for (uint64_t bytes = MIB; bytes <= 128 * MIB; bytes *= 2) {
            int p = cases[k].p;
            size_t memory = r2_sizes_memory(p), slot = r2_sizes_slot(memory, p);
            struct r2_schedule_data data = {.p = p, .count = bytes / 4, .elem = 4};
            struct r2_schedule s;

            data.piece = r2_sizes_piece(slot, p, bytes, cases[k].weights);
            CHECK_EQ(r2_schedule_direct(&s, &data, 0, cases[k].weights), 0);
            queue_ahead(&s, slot + R2_SIZES_BEHIND, (int)(memory / slot));
            for (int out = 0; out < 2; out++)
                CHECK_MSG(bed.entries[out] < QUEUE, "case %zu, %llu MiB: %d entries", k,
                          (unsigned long long)(bytes / MIB), bed.entries[out]);
        }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
