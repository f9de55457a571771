/* engine/core/leave (rung 1): which NICs a peer's bytes leave to those of other peers. */
#include "check.h"
#include "engine/core/leave.h"
#include "util/random.h"

#define MIB (UINT64_C(1) << 20)

static const unsigned alike[R2_LEAVE_NICS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static struct r2_prng prng;

static unsigned up_to(unsigned most)
{
    return (unsigned)(r2_prng_next(&prng) % (most + 1));
}

/* A node with all of its NICs sends sums to two that have half of theirs, and as much as both get
 * to one that has all. */
TEST(half_of_two_nodes)
{
    struct r2_leave_peer peers[] = {{32 * MIB, 3, 0}, {32 * MIB, 3, 0}, {64 * MIB, 15, 0}};

    r2_leave_decide(peers, 3, alike);
    CHECK_EQ(peers[0].leaves, 0);
    CHECK_EQ(peers[1].leaves, 0);
    CHECK_EQ(peers[2].leaves, 3);
    peers[2].bytes += MIB; /* next to nothing of it would be theirs */
    r2_leave_decide(peers, 3, alike);
    CHECK_EQ(peers[2].leaves, 3);
    peers[2].bytes += 31 * MIB;
    r2_leave_decide(peers, 3, alike);
    CHECK_EQ(peers[2].leaves, 0);
}

/* NICs that somebody needs more, and others less. */
TEST(mixed)
{
    struct r2_leave_peer peers[] = {{16 * MIB, 15, 0}, {32 * MIB, 3, 0}, {16 * MIB, 7, 0}};

    r2_leave_decide(peers, 3, alike); /* 16 on each of three, then 16 on the last */
    CHECK_EQ(peers[0].leaves, 7);
    CHECK_EQ(peers[1].leaves, 0);
    CHECK_EQ(peers[2].leaves, 3);
}

TEST(unlike_nics)
{
    static const unsigned speed[R2_LEAVE_NICS] = {100, 10};
    struct r2_leave_peer peers[] = {{10 * MIB, 1, 0}, {10 * MIB, 3, 0}};

    r2_leave_decide(peers, 2, speed); /* 8 of these belong onto the fast one */
    CHECK_EQ(peers[1].leaves, 0);
    peers[1].bytes = MIB;
    r2_leave_decide(peers, 2, speed);
    CHECK_EQ(peers[1].leaves, 1);
}

/* Peers with the same NICs leave nothing to each other. */
TEST(all_alike)
{
    struct r2_leave_peer peers[3];

    for (int i = 0; i < 3; i++)
        peers[i] = (struct r2_leave_peer){(uint64_t)i * MIB, 0xffff, 1};
    r2_leave_decide(peers, 3, alike);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(peers[i].leaves, 0);
}

/* How much the NIC with the most bytes has, if each peer deals its bytes out alike over `nics`. */
static double most(const struct r2_leave_peer peers[], int n)
{
    double load[R2_LEAVE_NICS] = {0}, most = 0;

    for (int i = 0; i < n; i++) {
        uint32_t nics = peers[i].nics & ~peers[i].leaves;

        for (int nic = 0; nic < R2_LEAVE_NICS; nic++)
            if (nics >> nic & 1)
                load[nic] += (double)peers[i].bytes / __builtin_popcount(nics);
    }
    for (int nic = 0; nic < R2_LEAVE_NICS; nic++)
        most = load[nic] > most ? load[nic] : most;
    return most;
}

/* Some NIC of its own remains to everybody; nobody leaves what he does not have, or what nobody
 * else uses. */
TEST(random_peers)
{
    int left = 0;

    for (int round = 0; round < 20000; round++) {
        struct r2_leave_peer peers[R2_LEAVE_PEERS];
        int n = 1 + (int)up_to(R2_LEAVE_PEERS - 1);
        unsigned nics = up_to(R2_LEAVE_NICS - 1), speed[R2_LEAVE_NICS];

        for (int i = 0; i < R2_LEAVE_NICS; i++)
            speed[i] = 1 + up_to(99);
        for (int i = 0; i < n; i++)
            peers[i] = (struct r2_leave_peer){.bytes = up_to(3) ? up_to(1000000) : 0,
                                              .nics = 1 + up_to((1u << (nics + 1)) - 2)};
        r2_leave_decide(peers, n, speed);
        for (int i = 0; i < n; i++) {
            uint32_t others = 0;

            for (int other = 0; other < n; other++)
                others |= other == i || peers[other].bytes == 0 ? 0 : peers[other].nics;
            CHECK((peers[i].leaves & ~peers[i].nics) == 0);
            CHECK((peers[i].nics & ~peers[i].leaves) != 0);
            if (peers[i].bytes)
                CHECK((peers[i].leaves & ~others) == 0);
            left += peers[i].leaves != 0;
        }
    }
    CHECK_GE(left, 1000);
}

/* Ranks that have lost their last NICs, as operators see it most: leaving never makes the NIC with
 * the most bytes have more. */
TEST(no_nic_gets_more)
{
    for (int round = 0; round < 20000; round++) {
        struct r2_leave_peer peers[8], all[8];
        int n = 1 + (int)up_to(7);

        for (int i = 0; i < n; i++) {
            peers[i] = (struct r2_leave_peer){.bytes = 1 + up_to(1000),
                                              .nics = (1u << (1 + up_to(3))) - 1};
            all[i] = peers[i];
        }
        r2_leave_decide(peers, n, alike);
        CHECK_MSG(most(peers, n) <= most(all, n) * 1.04, "%.0f bytes, %.0f before", most(peers, n),
                  most(all, n));
    }
}

int main(int argc, char **argv)
{
    r2_prng_seed(&prng, 21);
    return check_main(argc, argv);
}
