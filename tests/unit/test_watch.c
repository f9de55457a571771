/* What of a node's NICs the planner counts, on rows that are made up. Rung 1. */
#include "../../shim/comms/watch.c"
#include "check.h"

#define GBIT UINT64_C(125000000)
#define WHOLE 65536

static struct r2_segment seg;

struct r2_segment *r2_comm_segment(void)
{
    return &seg;
}

static void nic(int i, uint32_t gbit, uint32_t weight, uint32_t state)
{
    seg.nics[i] =
        (struct r2_seg_nic){.used = 1, .speed_mbps = 1000 * gbit, .weight = weight, .state = state};
}

static uint64_t capacity;

static uint32_t share(void)
{
    uint32_t found;

    add_up(&capacity, &found);
    return found;
}

/* Two NICs of 100 Gbit/s, and one of 25 Gbit/s of weight 0. */
static void spare_beside(uint32_t first, uint32_t second, uint32_t spare)
{
    nic(0, 100, 100, first);
    nic(1, 100, 100, second);
    nic(2, 25, 0, spare);
}

TEST(a_nic_is_lost)
{
    spare_beside(R2_SEG_NIC_HEALTHY, R2_SEG_NIC_HEALTHY, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE);
    CHECK_EQ(capacity, 200 * GBIT);
    spare_beside(R2_SEG_NIC_HEALTHY, R2_SEG_NIC_FAILED, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE / 2);
    CHECK_EQ(capacity, 200 * GBIT);
    spare_beside(R2_SEG_NIC_HEALTHY, R2_SEG_NIC_DRAINED, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE / 2);
}

/* It carried nothing. */
TEST(a_spare_is_lost)
{
    spare_beside(R2_SEG_NIC_HEALTHY, R2_SEG_NIC_HEALTHY, R2_SEG_NIC_FAILED);
    CHECK_EQ(share(), WHOLE);
    CHECK_EQ(capacity, 200 * GBIT);
}

TEST(only_a_spare_is_left)
{
    spare_beside(R2_SEG_NIC_FAILED, R2_SEG_NIC_FAILED, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE / 8);
    spare_beside(R2_SEG_NIC_FAILED, R2_SEG_NIC_FAILED, R2_SEG_NIC_FAILED);
    CHECK_EQ(share(), 0);
}

/* set-weight 0. */
TEST(an_operator_makes_spares)
{
    spare_beside(R2_SEG_NIC_HEALTHY, R2_SEG_NIC_HEALTHY, R2_SEG_NIC_HEALTHY);
    nic(1, 100, 0, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE);
    CHECK_EQ(capacity, 100 * GBIT);
    nic(0, 100, 0, R2_SEG_NIC_HEALTHY);
    CHECK_EQ(share(), WHOLE);
    CHECK_EQ(capacity, 225 * GBIT);
}
