/* What a rank of the direct AllReduce makes of errors of the net API, and of connections that no
 * peer made: over a net of its own (rung 2), whose messages arrive only if a test says so. What it
 * cannot prove: when the plugin gives which error. */
#include "await.h"
#include "direct/direct.h"
#include "nccl_abi/nccl_net_abi.h"

#define MOST 64
#define RANKS 3

enum { INT32 = 2, SUM = 0 };

struct hello {
    uint32_t magic;
    uint16_t rank, stream;
};

struct comm {
    struct hello says; /* one that was accepted */
    bool in, said;
};

struct request {
    struct comm *comm;
    bool hello;
};

static struct {
    struct comm comms[MOST];
    struct request requests[1024];
    int n_comms, n_requests;
    int accepted;
    struct hello strange; /* said by the first that is accepted; magic 0: there is none */
    uint64_t peers_at;    /* when the others are there to be accepted */
    int result[RANKS];    /* of what is posted from or to the rank; 0: it goes on for ever */
    size_t got;           /* bytes of what has arrived; 0: nothing has */
} net;

static int do_init(void **ctx, uint64_t id, struct r2_ncclnet_config *config, r2_nccl_logger log,
                   r2_nccl_profiler prof)
{
    (void)id, (void)config, (void)log, (void)prof;
    *ctx = &net;
    return 0;
}

static int do_devices(int *n)
{
    *n = 1;
    return 0;
}

static int do_listen(void *ctx, int dev, void *handle, void **out)
{
    (void)ctx, (void)dev;
    memset(handle, 0, R2_LINKS_HANDLE);
    *out = &net;
    return 0;
}

static struct comm *new_comm(bool in, struct hello says)
{
    struct comm *c = &net.comms[net.n_comms++];

    CHECK_LT(net.n_comms, MOST);
    *c = (struct comm){.in = in, .says = says};
    return c;
}

/* Ranks dial in the order of peers and streams: 1 and 2 here, two streams each. */
static int do_connect(void *ctx, int dev, void *handle, void **out,
                      struct r2_ncclnet_device_handle **device)
{
    static int n;

    (void)ctx, (void)dev, (void)handle, (void)device;
    *out = new_comm(false, (struct hello){.rank = (uint16_t)(1 + n++ / 2 % 2)});
    return 0;
}

static int do_accept(void *listen, void **out, struct r2_ncclnet_device_handle **device)
{
    int at = net.accepted - (net.strange.magic != 0);

    (void)listen, (void)device;
    *out = NULL;
    if (at < 0)
        *out = new_comm(true, net.strange);
    else if (at < 4 && r2_now_ns() >= net.peers_at)
        *out = new_comm(
            true, (struct hello){UINT32_C(0x45324352), (uint16_t)(1 + at / 2), (uint16_t)(at % 2)});
    net.accepted += *out != NULL;
    return 0;
}

static int do_regmr(void *comm, void *data, size_t size, int type, void **mr)
{
    (void)comm, (void)data, (void)size, (void)type;
    *mr = NULL;
    return 0;
}

static void *new_request(struct comm *c, bool hello)
{
    struct request *r = &net.requests[net.n_requests++ % 1024];

    *r = (struct request){c, hello};
    return r;
}

static int do_isend(void *comm, void *data, size_t size, int tag, void *mr, void *phandle,
                    void **request)
{
    struct comm *c = comm;

    (void)data, (void)size, (void)tag, (void)mr, (void)phandle;
    *request = new_request(c, !c->said);
    c->said = true;
    return 0;
}

static int do_irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs,
                    void **phandles, void **request)
{
    struct comm *c = comm;

    (void)n, (void)sizes, (void)tags, (void)mrs, (void)phandles;
    if (!c->said)
        memcpy(data[0], &c->says, sizeof(c->says));
    *request = new_request(c, !c->said);
    c->said = true;
    return 0;
}

static int do_test(void *request, int *done, int *size)
{
    struct request *r = request;

    *done = r->hello || (net.got && r->comm->in);
    if (size)
        *size = r->hello ? (int)sizeof(struct hello) : (int)net.got;
    return r->hello ? 0 : net.result[r->comm->says.rank];
}

static int do_close(void *comm)
{
    (void)comm;
    return 0;
}

static const struct r2_ncclnet_v12 fake_net = {.init = do_init,
                                               .devices = do_devices,
                                               .listen = do_listen,
                                               .connect = do_connect,
                                               .accept = do_accept,
                                               .regmr = do_regmr,
                                               .isend = do_isend,
                                               .irecv = do_irecv,
                                               .test = do_test,
                                               .close_send = do_close,
                                               .close_recv = do_close,
                                               .close_listen = do_close,
                                               .finalize = do_close};

static struct r2_direct *begin(void)
{
    struct r2_direct_config config = {.net = &fake_net, .rank = 0, .p = RANKS};
    struct r2_direct *d;

    CHECK_EQ(r2_direct_new(&d, &config), 0);
    for (int r = 0; r < RANKS; r++) {
        const struct r2_links_card *card = r2_direct_card(d);

        CHECK_EQ(r2_direct_meet(d, r, card, r2_links_card_bytes(card)), 0);
    }
    r2_direct_connect(d);
    AWAIT(r2_direct_state(d, NULL) != R2_DIRECT_CONNECTING);
    return d;
}

static int until_error(void)
{
    static int32_t data[3000];
    struct r2_direct *d = begin();
    struct r2_direct_call call = {.in = data, .out = data, .count = 3000, .type = INT32, .op = SUM};
    uint64_t number;
    int rc;

    CHECK_EQ(r2_direct_state(d, NULL), R2_DIRECT_READY);
    CHECK_EQ(r2_direct_allreduce(d, &call, &number), 0);
    rc = r2_direct_wait(d, number);
    r2_direct_free(d);
    return rc;
}

TEST(each_error_is_told_as_it_is)
{
    static const int cases[][2] = {{R2_NCCL_INVALID_USAGE, -EMSGSIZE},
                                   {R2_NCCL_INVALID_ARGUMENT, -EINVAL},
                                   {R2_NCCL_REMOTE_ERROR, -ECONNRESET},
                                   {R2_NCCL_SYSTEM_ERROR, -EIO}};

    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        memset(&net, 0, sizeof(net));
        net.result[1] = cases[i][0];
        CHECK_EQ(until_error(), cases[i][1]);
    }
}

/* A peer leaves since another rank left, which this rank's own message did not fit: this rank alone
 * knows the reason, and it hears of the peer first. */
TEST(the_reason_behind_a_reset)
{
    for (int peer = 1; peer < RANKS; peer++) {
        memset(&net, 0, sizeof(net));
        net.result[peer] = R2_NCCL_INVALID_USAGE;
        net.result[RANKS - peer] = R2_NCCL_REMOTE_ERROR;
        CHECK_EQ(until_error(), -EMSGSIZE);
    }
}

TEST(a_message_of_another_size)
{
    memset(&net, 0, sizeof(net));
    net.got = 3996;
    CHECK_EQ(until_error(), -EMSGSIZE);
}

/* Whoever else connects says nothing of the peers. */
TEST(a_stranger_does_not_hurry)
{
    struct r2_direct *d;

    memset(&net, 0, sizeof(net));
    net.strange.magic = 7;
    net.peers_at = r2_now_ns() + 4 * R2_NS_PER_S;
    d = begin();
    CHECK_EQ(r2_direct_state(d, NULL), R2_DIRECT_READY);
    r2_direct_free(d);
}
