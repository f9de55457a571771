/* Connections of the direct AllReduce that no peer made, beside those of the peers: ranks are
 * processes over loopback NICs (rung 3). */
#define _GNU_SOURCE
#include "direct_bed.h"
#include "nccl_abi/nccl_net_abi.h"

#define COUNT 100003

static float in[COUNT];

enum { MUTE = 30 };

static void *stranger(const void *said, size_t len)
{
    const struct r2_ncclnet_v12 *net = &ncclNetPlugin_v12;
    static void *ctx;
    struct r2_ncclnet_config config = {.traffic_class = R2_NCCL_TRAFFIC_CLASS_UNDEF};
    struct r2_ncclnet_device_handle *device = NULL;
    uint8_t handle[R2_LINKS_HANDLE]; /* the plugin keeps its state in it */
    void *comm = NULL, *request = NULL;
    int done = 0;

    memcpy(handle, sh->card[0].handle[0], sizeof(handle));

    if (!ctx)
        CHECK_EQ(net->init(&ctx, 1, &config, NULL, NULL), 0);
    AWAIT(net->connect(ctx, 0, handle, &comm, &device) == 0 && comm);
    if (!said)
        return comm;
    AWAIT(net->isend(comm, (void *)said, len, 0, NULL, NULL, &request) == 0 && request);
    AWAIT(net->test(request, &done, NULL) == 0 && done);
    return comm;
}

/* To rank 0, before rank 1 itself connects: noise, another rank's place, nothing, an end. */
static void strange(int rank)
{
    static const uint32_t noise[2] = {7, 9}, mine[2] = {UINT32_C(0x45324352), 0};

    if (rank != 1)
        return;
    stranger(noise, sizeof(noise));
    stranger(mine, sizeof(mine));
    stranger(noise, 3);
    ncclNetPlugin_v12.close_send(stranger(NULL, 0));
    for (int i = 0; i < MUTE; i++)
        stranger(NULL, 0);
}

static void one_beside_strangers(int rank)
{
    struct r2_direct *d = bed_join(rank);

    bed_fill(in, rank, COUNT, 0);
    CHECK_EQ(bed_allreduce(d, in, in, COUNT, NULL), 0);
    bed_check(in, COUNT, 0);
    bed_together(0);
    r2_direct_free(d);
}

TEST(strangers_are_dropped)
{
    bed_before = strange;
    bed_run(3, -1, one_beside_strangers);
    bed_before = NULL;
}
