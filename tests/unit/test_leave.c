/* engine/core/leave (rung 1): which NICs peers that all NICs reach leave to other peers. */
#include "check.h"
#include "engine/core/leave.h"
#include "util/random.h"

#define MIB (UINT64_C(1) << 20)

static struct r2_prng prng;

static unsigned up_to(unsigned most)
{
    return (unsigned)(r2_prng_next(&prng) % (most + 1));
}

static struct r2_leave nics_alike(uint32_t all)
{
    struct r2_leave l = {.all = all};

    for (int i = 0; i < R2_LEAVE_NICS; i++)
        l.speed[i] = 1;
    return l;
}

/* A node with four NICs sends sums to two peers that have half of theirs, and `mib` to one that has
 * all. */
static uint32_t half_of_two(uint64_t mib)
{
    struct r2_leave l = nics_alike(0xf);

    r2_leave_add(&l, 0x3, 32 * MIB);
    r2_leave_add(&l, 0x3, 32 * MIB);
    r2_leave_add(&l, 0xf, mib * MIB);
    return r2_leave_nics(&l);
}

TEST(half_of_two_nodes)
{
    CHECK_EQ(half_of_two(64), 0x3);
    CHECK_EQ(half_of_two(72), 0x3); /* next to nothing of it would be theirs */
    CHECK_EQ(half_of_two(96), 0);
    CHECK_EQ(half_of_two(1), 0x3);
}

/* What peers with few NICs get comes together, peer by peer. */
TEST(several_kinds_of_peers)
{
    struct r2_leave l = nics_alike(0xf);

    r2_leave_add(&l, 0x7, 30 * MIB);
    r2_leave_add(&l, 0x1, 30 * MIB); /* 40, 10, 10, and nothing */
    r2_leave_add(&l, 0xf, 30 * MIB);
    CHECK_EQ(r2_leave_nics(&l), 0x1);
    r2_leave_add(&l, 0x1, 50 * MIB);
    r2_leave_add(&l, 0x2, 20 * MIB); /* 90, 30, 10, and nothing: 20 for each of the last two */
    CHECK_EQ(r2_leave_nics(&l), 0x3);
}

TEST(unlike_nics)
{
    struct r2_leave l = {.speed = {100, 10}, .all = 0x3};

    r2_leave_add(&l, 0x1, 10 * MIB);
    r2_leave_add(&l, 0x3, MIB);
    CHECK_EQ(r2_leave_nics(&l), 0x1);
    r2_leave_add(&l, 0x3, 9 * MIB); /* 8 of these belong onto the fast one */
    CHECK_EQ(r2_leave_nics(&l), 0);
}

/* All peers have lost the same NICs, or none. */
TEST(all_alike)
{
    for (uint32_t all = 1; all < 0x10000; all = all << 1 | 1) {
        struct r2_leave l = nics_alike(all);

        for (unsigned i = 0; i < 3; i++)
            r2_leave_add(&l, all, i * MIB);
        CHECK_EQ(r2_leave_nics(&l), 0);
    }
}

/* The time until these NICs have done all that they have, and l->bytes in addition. */
static double done(const struct r2_leave *l, uint32_t nics)
{
    double from = 0, to = 1e9;

    for (int step = 0; step < 60; step++) {
        double at = (from + to) / 2, room = 0;

        for (int i = 0; i < R2_LEAVE_NICS; i++)
            room +=
                nics >> i & 1 && at * l->speed[i] > l->load[i] ? at * l->speed[i] - l->load[i] : 0;
        *(room < l->bytes ? &from : &to) = at;
    }
    return to;
}

/* Some NIC remains. A NIC without other bytes is not left. Without those that are left, the rest
 * has a seventh more to do at most. */
TEST(random_peers)
{
    int left = 0;

    for (int round = 0; round < 20000; round++) {
        unsigned n = 1 + up_to(R2_LEAVE_NICS - 1);
        struct r2_leave l = nics_alike((1u << n) - 1);
        uint32_t leaves;

        for (int i = 0; i < R2_LEAVE_NICS; i++)
            l.speed[i] = 1 + up_to(99);
        for (unsigned peers = up_to(20); peers; peers--)
            r2_leave_add(&l, up_to(1) ? l.all : 1 + up_to(l.all - 1), up_to(1000000));
        leaves = r2_leave_nics(&l);
        CHECK((leaves & ~l.all) == 0);
        CHECK(leaves != l.all || l.bytes < 100);
        for (int i = 0; i < R2_LEAVE_NICS; i++)
            CHECK(!(leaves >> i & 1) || l.load[i] > 0);
        CHECK(done(&l, l.all & ~leaves) <= done(&l, l.all) * 8 / 7 + 1);
        left += leaves != 0;
    }
    CHECK_GE(left, 1000);
}

int main(int argc, char **argv)
{
    r2_prng_seed(&prng, 21);
    return check_main(argc, argv);
}
