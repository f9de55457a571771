/* The shipped plan table and its arithmetic (rung 1). */
#include "check.h"
#include "plan/table.h"
#include "util/crc32c.h"

#define RANKS 24

static uint32_t orders[R2_PLAN_ORDERS][RANKS];

static struct r2_plan_table random_table(void)
{
    struct r2_plan_table t = {.nranks = RANKS,
                              .ncomms = (int)check_below(R2_PLAN_ORDERS + 1),
                              .nentries = (int)check_below(R2_PLAN_ENTRIES + 1)};

    snprintf(t.reason, sizeof(t.reason), "reason %d", (int)check_below(100));
    for (int i = 0; i < t.ncomms; i++) {
        t.comms[i].key = check_random() * 8 + (uint64_t)i + 1;
        t.comms[i].key = t.comms[i].key ? t.comms[i].key : 99;
        t.comms[i].ranks = orders[i];
        for (size_t k = 0; k < sizeof(t.comms[i].id); k++) {
            t.comms[i].id[k] = (uint8_t)check_random();
        }
        for (uint32_t r = 0; r < RANKS; r++) {
            uint32_t at = (uint32_t)check_below(r + 1);

            orders[i][r] = orders[i][at];
            orders[i][at] = r;
        }
    }
    for (int i = 0; i < t.nentries; i++) {
        struct r2_plan_entry *e = &t.entries[i];
        uint32_t boundary = 0;

        e->coll = (uint8_t)check_below(R2_PLAN_COLLS);
        e->type_class = (uint8_t)check_below(R2_PLAN_CLASSES);
        e->schedule = t.ncomms ? (uint8_t)check_below(2) : 0;
        e->segments = (uint8_t)(1 + check_below(R2_PLAN_ORDERS));
        e->from_bytes = check_below(1 << 20);
        e->below_bytes = e->from_bytes + 1 + check_below(UINT64_MAX / 2);
        for (int k = 0; k < e->segments; k++) {
            e->comm[k] = t.ncomms ? (uint32_t)check_below((uint64_t)t.ncomms) : 0;
            e->boundary[k] = boundary;
            boundary += (uint32_t)check_below(R2_PLAN_UNIT / R2_PLAN_ORDERS);
        }
    }
    return t;
}

static void test_round_trip(void)
{
    unsigned char data[65536], again[65536];

    for (unsigned long round = 0; round < check_rounds(300); round++) {
        struct r2_plan_table t = random_table();
        struct r2_plan_table *u;
        long len = r2_plan_table_encode(&t, NULL, 0);

        CHECK_GT(len, 0);
        CHECK_EQ(r2_plan_table_encode(&t, data, sizeof(data)), len);
        CHECK_EQ(r2_plan_table_decode(&u, data, (size_t)len, RANKS), 0);
        CHECK_EQ(r2_plan_table_encode(u, again, sizeof(again)), len);
        CHECK_MEM(data, again, len);
        CHECK_STR(u->reason, t.reason);
        for (int i = 0; i < t.ncomms; i++) {
            CHECK_EQ(u->comms[i].key, t.comms[i].key);
            CHECK_MEM(u->comms[i].id, t.comms[i].id, 128);
            CHECK_MEM(u->comms[i].ranks, t.comms[i].ranks, sizeof(orders[i]));
        }
        r2_plan_table_free(u);
        CHECK_EQ(r2_plan_table_decode(&u, data, (size_t)len, RANKS + 1), -EINVAL);
    }
}

static void put_crc(unsigned char *data, long len)
{
    uint32_t crc = r2_crc32c(0, data, (size_t)len - 4);

    for (int i = 0; i < 4; i++) {
        data[len - 4 + i] = (unsigned char)(crc >> (8 * i));
    }
}

/* Damaged tables, most of them with a right checksum: refused, or valid (they encode again). */
static void test_fuzz(void)
{
    unsigned char again[65536];
    unsigned long taken = 0;

    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        struct r2_plan_table t = random_table();
        struct r2_plan_table *u;
        long len = r2_plan_table_encode(&t, NULL, 0);
        unsigned char *data = malloc((size_t)len); /* exact, for the sanitizer */

        CHECK(data && r2_plan_table_encode(&t, data, (size_t)len) == len);
        for (uint64_t n = check_below(4); n > 0; n--) {
            uint64_t range = check_below(2) ? 40 : (uint64_t)len;

            data[check_below(range < (uint64_t)len ? range : (uint64_t)len)] ^=
                (unsigned char)(1u << check_below(8));
        }
        if (check_below(4) == 0) {
            len = (long)check_below((uint64_t)len);
        }
        if (len >= 4 && check_below(8)) {
            put_crc(data, len);
        }
        if (r2_plan_table_decode(&u, data, (size_t)len, RANKS) == 0) {
            taken++;
            CHECK_EQ(r2_plan_table_encode(u, again, sizeof(again)), len);
            r2_plan_table_free(u);
        }
        free(data);
    }
    CHECK_GT(taken, 0);
}

static void test_bad_tables(void)
{
    struct r2_plan_table t = {.nranks = RANKS, .ncomms = 1, .nentries = 1};
    struct r2_plan_entry good = {
        .schedule = R2_PLAN_TREE, .segments = 2, .below_bytes = 10, .boundary = {0, 5}};
    uint32_t twice[RANKS] = {0};

    for (uint32_t r = 0; r < RANKS; r++) {
        orders[0][r] = r;
    }
    t.comms[0] = (struct r2_plan_comm){.key = 7, .ranks = orders[0]};
    t.entries[0] = good;
    CHECK_GT(r2_plan_table_encode(&t, NULL, 0), 0);
    t.comms[0].ranks = twice;
    CHECK_EQ(r2_plan_table_encode(&t, NULL, 0), -EINVAL);
    t.comms[0] = (struct r2_plan_comm){.key = 0, .ranks = orders[0]};
    CHECK_EQ(r2_plan_table_encode(&t, NULL, 0), -EINVAL);
    t.comms[0].key = 7;
    t.comms[1] = t.comms[0];
    t.ncomms = 2; /* the same communicator twice */
    CHECK_EQ(r2_plan_table_encode(&t, NULL, 0), -EINVAL);
    t.ncomms = 1;
    for (int i = 0; i < 6; i++) {
        struct r2_plan_entry *e = &t.entries[0];

        *e = good;
        CHECK_GT(r2_plan_table_encode(&t, NULL, 0), 0);
        e->comm[1] = i == 0 ? 1 : 0;
        e->boundary[0] = i == 1;
        e->boundary[1] = i == 2 ? R2_PLAN_UNIT + 1 : 5;
        e->segments = (uint8_t)(i == 3 ? 0 : i == 4 ? R2_PLAN_ORDERS + 1 : 2);
        e->from_bytes = i == 5 ? 10 : 0;
        CHECK_EQ(r2_plan_table_encode(&t, NULL, 0), -EINVAL);
    }
}

static void test_find(void)
{
    struct r2_plan_table t = {.nentries = 3};

    t.entries[0] = (struct r2_plan_entry){.coll = R2_PLAN_ALLREDUCE,
                                          .type_class = R2_PLAN_FLOATS,
                                          .from_bytes = 100,
                                          .below_bytes = 200};
    t.entries[1] = (struct r2_plan_entry){
        .coll = R2_PLAN_ALLREDUCE, .from_bytes = 150, .below_bytes = UINT64_MAX};
    t.entries[2] = (struct r2_plan_entry){.coll = R2_PLAN_REDUCE, .below_bytes = 10};
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_FLOATS, 99) == NULL);
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_FLOATS, 100) == &t.entries[0]);
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_FLOATS, 199) == &t.entries[0]);
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_FLOATS, 200) == &t.entries[1]);
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_INTS, 199) == &t.entries[1]);
    CHECK(r2_plan_table_find(&t, R2_PLAN_ALLREDUCE, R2_PLAN_INTS, 149) == NULL);
    CHECK(r2_plan_table_find(&t, R2_PLAN_REDUCE, R2_PLAN_INTS, 10) == NULL);
    CHECK(r2_plan_table_find(&t, R2_PLAN_BROADCAST, R2_PLAN_INTS, 5) == NULL);
}

/* Parts cover every element once, for any size, the largest included. */
static void test_parts(void)
{
    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        struct r2_plan_entry e = {.segments = (uint8_t)(1 + check_below(R2_PLAN_ORDERS))};
        uint64_t elements = check_random() >> check_below(64);
        uint64_t align = UINT64_C(1) << check_below(8);
        uint64_t at = 0;

        for (int k = 1; k < e.segments; k++) {
            uint32_t left = R2_PLAN_UNIT - e.boundary[k - 1];

            e.boundary[k] = e.boundary[k - 1] + (uint32_t)check_below(left + 1);
        }
        for (int k = 0; k < e.segments; k++) {
            uint64_t first, count;

            r2_plan_entry_part(&e, k, elements, align, &first, &count);
            CHECK_EQ(first, at);
            CHECK(first + count >= first && first + count <= elements);
            CHECK(first % align == 0 || first == elements);
            if (elements / R2_PLAN_UNIT > 0 && e.boundary[k] < R2_PLAN_UNIT) {
                long double want = (long double)elements * e.boundary[k] / R2_PLAN_UNIT;

                CHECK((long double)first <= want && want - (long double)first <= align);
            }
            at = first + count;
        }
        CHECK(at == elements);
    }
}

static void test_from_plan(void)
{
    struct r2_plan_node nodes[6] = {{1e9, 1}, {1e9, .5}, {1e9, 1}, {1e9, .5}, {1e9, 1}, {1e9, .5}};
    int rank_node[12];
    struct r2_plan_input in = {.nnodes = 6,
                               .nodes = nodes,
                               .nranks = 12,
                               .rank_node = rank_node,
                               .bytes = 1 << 28,
                               .min_bytes = 1 << 20,
                               .max_orders = 4,
                               .cost = R2_PLAN_COST_DEFAULT};
    struct r2_plan plan;
    struct r2_plan_table *made, *full;
    uint64_t next = 0;

    for (int r = 0; r < 12; r++) {
        rank_node[r] = r % 6;
    }
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_TREE);
    CHECK_GE(plan.norders, 2);
    CHECK_EQ(r2_plan_table_from_plan(&made, &plan, true), 0);
    CHECK_EQ(r2_plan_table_from_plan(&full, &plan, false), 0);
    CHECK_GT(r2_plan_table_encode(made, NULL, 0), 0);
    CHECK_GT(r2_plan_table_encode(full, NULL, 0), 0);
    CHECK_EQ(made->nentries, 0);
    CHECK_EQ(made->ncomms, plan.norders);
    CHECK_EQ(full->entries[0].segments, plan.norders);
    CHECK_STR(full->reason, plan.reason);
    for (int k = 0; k < plan.norders; k++) {
        uint64_t first, count;

        CHECK_EQ(made->comms[k].key, full->comms[k].key); /* make, then switch: the same */
        r2_plan_entry_part(&full->entries[0], k, 1 << 26, 128, &first, &count);
        CHECK_EQ(first, next);
        CHECK_GT(count, 0);
        next = first + count;
        for (int r = 0; r < 12; r++) {
            CHECK_EQ(full->comms[k].ranks[r], plan.orders[k].ranks[r]);
        }
    }
    CHECK_EQ(next, 1 << 26);
    r2_plan_table_free(made);
    r2_plan_table_free(full);
    r2_plan_free(&plan);
}

static const struct check_test tests[] = {
    {"round_trip", test_round_trip},
    {"fuzz", test_fuzz},
    {"bad_tables", test_bad_tables},
    {"find", test_find},
    {"parts", test_parts},
    {"from_plan", test_from_plan},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
