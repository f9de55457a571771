/* One of several queue pairs for chunks of a path dies, while the others, control and heartbeats
 * live (rung 3; verbs_bed.h says what it cannot prove): what it carried is sent again only after
 * the whole path is fenced, every byte is right, and the path comes back. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (512 * 1024)
#define QPS 4
#define NIC "127.0.1.1" /* the connection's home, so chunks take it first */

enum death {
    ERR_OF_THE_SENDER, /* its work requests are flushed */
    ERR_OF_THE_RECEIVER,
    MUTE,   /* nothing of it arrives any more: one way of several is broken */
    FREEZE, /* and it does not give up either */
};

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
static int turn;

/* That end of the open path from NIC to NIC, with a reference; NULL: there is none now. */
static struct r2_ep *end_of(bool initiator)
{
    struct r2_ep *found = NULL;
    struct r2_list *n;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (found || ep->params.local_nic || ep->params.remote_nic || !atomic_load(&ep->open) ||
            ep->params.initiator != initiator || atomic_load(&ep->failed) || atomic_load(&ep->dead))
            continue;
        found = ep;
        r2_vep_get(ep);
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    return found;
}

static uint32_t carries(void)
{
    struct r2_peer *p = bed.tx->peer;
    const struct r2_path *path;
    uint32_t gen;

    r2_peer_lock(p);
    path = r2_path_find(p, 0, 0, R2_VIA_VERBS);
    gen = path && r2_path_may(path) >= R2_MAY_STAND_BY ? path->gen : 0;
    r2_peer_unlock(p);
    return gen;
}

static void kill_one(struct r2_ep *ep, int q, enum death death)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    char text[32];

    CHECK_EQ(ep->n_bulk, QPS);
    if (death == MUTE || death == FREEZE) {
        snprintf(text, sizeof(text), "%s %u", death == MUTE ? "mute" : "freeze", ep->mine.bulk[q]);
        bed_script(text);
        return;
    }
    pthread_mutex_lock(&ep->lock);
    CHECK(ep->fence == R2_FENCE_NONE);
    CHECK_EQ(r2_ibv.modify_qp(ep->bulk[q].qp, &attr, IBV_QP_STATE), 0);
    r2_vep_unlock(ep);
    r2_vep_kick(ep, R2_WANT_ALL);
}

static bool fenced(struct r2_ep *ep)
{
    bool yes;

    pthread_mutex_lock(&ep->lock);
    yes = ep->fence == R2_FENCE_DONE;
    r2_vep_unlock(ep);
    return yes;
}

static void until_back(uint32_t gen)
{
    uint64_t until = r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS;

    r2_nicstate_forgive(0, r2_now_ns()); /* it flaps in this test */
    while (carries() <= gen && r2_now_ns() < until)
        bed_message(&bed, &memory, turn++);
    CHECK_GT(carries(), gen);
}

static void one_dies(int q, enum death death)
{
    uint64_t from = bed_journal(), until = r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS;
    struct r2_ep *sender, *receiver;
    uint32_t gen = carries();

    sender = end_of(true);
    receiver = end_of(false);
    CHECK(gen && sender && receiver);
    kill_one(death == ERR_OF_THE_RECEIVER ? receiver : sender, q, death);
    while (!bed_told(from, R2_EV_REPLAY, NIC, NIC, NULL) && r2_now_ns() < until)
        bed_message(&bed, &memory, turn++);
    CHECK_GE(bed_told(from, R2_EV_REPLAY, NIC, NIC, NULL), 1);
    CHECK(fenced(receiver));
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NIC, NIC, NULL), 1);
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, "127.0.2.1", "127.0.2.1", NULL), 0);
    CHECK_EQ(bed_told(from, R2_EV_NIC_DOWN, NULL, NULL, NULL), 0);
    AWAIT(fenced(sender));
    r2_vep_put(sender);
    r2_vep_put(receiver);
    until_back(gen);
    sender = end_of(true);
    CHECK(sender);
    CHECK_EQ(sender->n_bulk, QPS);
    r2_vep_put(sender);
}

static void each_one_dies(enum death death)
{
    bed_open(&bed, 2);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, turn++);
    until_back(0);
    for (int q = 0; q < (death == MUTE || death == FREEZE ? 1 : QPS); q++)
        one_dies(q, death);
    bed_message(&bed, &memory, turn++);
    bed_finish(&bed, &memory);
}

TEST(of_the_sender)
{
    each_one_dies(ERR_OF_THE_SENDER);
}

TEST(of_the_receiver)
{
    each_one_dies(ERR_OF_THE_RECEIVER);
}

TEST(mute)
{
    each_one_dies(MUTE);
}

/* Its device has a fault: what waits for it is sent again over another queue pair. */
TEST(freeze)
{
    uint64_t from = bed_journal();

    each_one_dies(FREEZE);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NIC, NIC, "requests neither completed nor failed"), 1);
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_QPS_PER_CONNECTION", "4", 1); /* where R2CCL_IB_QPS is not set */
    setenv("R2CCL_HEARTBEAT", "2s", 1);           /* nothing ends by these */
    setenv("NCCL_IB_TIMEOUT", "14", 1);           /* 0.54 s with all retries */
    setenv("R2CCL_RAMP", "100ms", 1);             /* it is to take chunks of each turn */
    return check_main(argc, argv);
}

#endif
