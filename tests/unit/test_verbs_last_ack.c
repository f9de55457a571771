/* A receiver that has everything says so and leaves: its acknowledgement lies at the sender's NIC
 * when the path ends there, for whatever reason, and nobody will repeat it. Over the stand-in for
 * libibverbs (rung 3; verbs_bed.h says what it cannot prove). */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include <pthread.h>

#include "transport/verbs/verbs.h"

#define SIZE (64 * 1024)
#define EPS 16

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};

static struct r2_transport_ops ops;
static struct r2_transport_events events;
static const struct r2_transport_events *engine;
static atomic_bool gone; /* the receiver: nothing of what it says from then on leaves */

static size_t says(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap)
{
    if (atomic_load(&gone) && !r2_eng.ops->params(ep)->initiator)
        return 0;
    return engine->next_ctrl(owner, ep, buf, cap);
}

static int start(const struct r2_transport_events *ev, const uint8_t process[16])
{
    engine = ev;
    events = *ev;
    events.next_ctrl = says;
    return r2_transport_mux.start(&events, process);
}

/* The sender's endpoints that carry, locked, so that nothing is taken from their queues. */
static struct r2_ep *held[EPS];
static int n_held;

static void hold(void)
{
    struct r2_list *n;

    n_held = 0;
    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (!ep->params.initiator || !atomic_load(&ep->open) || atomic_load(&ep->failed))
            continue;
        CHECK_LT(n_held, EPS);
        r2_vep_get(ep);
        held[n_held++] = ep;
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    CHECK_GT(n_held, 0);
    for (int i = 0; i < n_held; i++)
        pthread_mutex_lock(&held[i]->lock);
}

static void let_go(void)
{
    for (int i = 0; i < n_held; i++)
        r2_vep_unlock(held[i]);
}

/* The next look at this queue finds that a queue pair has failed, before all else that has come. */
static _Atomic(struct ibv_cq *) spoilt;
static int (*poll_cq)(struct ibv_cq *cq, int n, struct ibv_wc *wc);

static int polls(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    struct ibv_cq *mine = cq;
    int got;

    if (atomic_load(&spoilt) != cq || n < 2 ||
        !atomic_compare_exchange_strong(&spoilt, &mine, NULL))
        return poll_cq(cq, n, wc);
    got = poll_cq(cq, n - 1, wc + 1);
    wc[0] = (struct ibv_wc){.wr_id = r2_wr_id(R2_WR_BEAT, 0, 0), .status = IBV_WC_RETRY_EXC_ERR};
    return 1 + (got > 0 ? got : 0);
}

static void begin(void)
{
    struct r2_ctx *first;

    bed_library();
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    bed_nics = "127.0.1.1";
    atomic_store(&gone, false);
    CHECK_EQ(r2_engine_init(&first, 1, NULL), 0);
    for (int i = 0; i < r2_verbs.n_slots && !poll_cq; i++) { /* nobody polls yet */
        poll_cq = r2_verbs.slots[i].now->ctx->ops.poll_cq;
        r2_verbs.slots[i].now->ctx->ops.poll_cq = polls;
    }
    bed_open(&bed, 1);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 0);
}

static void *fails(void *arg)
{
    r2_vep_fail(arg, EIO);
    return NULL;
}

/* A message whose acknowledgement lies in the sender's queues, which are held. False: a thread of
 * the engine that looks at every path wanted one of the locks before it saw the message come, and
 * waits for it; all is let go again, and over. */
static bool acknowledged(struct r2_req **send)
{
    struct r2_req *recv = NULL;

    bed_until_paths(bed.tx, 1);
    bed_script("network 32768");
    memset(out, 0x5a, SIZE);
    memset(in, 0, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, memory.in_mr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, memory.out_mr, send), 0);
    bed_until_script(1);
    hold();
    bed_script("release");
    if (bed_test(recv, 2000) == 1) {
        CHECK_MEM(in, out, SIZE);
        return true;
    }
    let_go();
    for (int i = 0; i < n_held; i++)
        r2_vep_put(held[i]);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(*send, BED_WAIT_MS), 1);
    return false;
}

/* How the sender's paths end while the acknowledgement lies in their queues; `in_queue`: they find
 * it out there, else somebody tells them. */
static void left_behind(bool in_queue)
{
    struct r2_req *send = NULL;
    pthread_t threads[EPS];
    int tries = 0;

    begin();
    while (!acknowledged(&send))
        CHECK_LT(++tries, 6);
    atomic_store(&gone, true);
    if (in_queue)
        atomic_store(&spoilt, held[0]->cq);
    for (int i = 0; i < n_held && !in_queue; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, fails, held[i]), 0);
        AWAIT(atomic_load(&held[i]->failed));
    }
    let_go();
    for (int i = 0; i < n_held && !in_queue; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(bed_test(send, 3000), 1);
    for (int i = 0; i < n_held; i++) {
        CHECK(atomic_load(&held[i]->failed));
        r2_vep_put(held[i]);
    }
    atomic_store(&gone, false);
    bed_until_paths(bed.tx, 1);
    bed_message(&bed, &memory, 1);
    bed_finish(&bed, &memory);
}

TEST(told)
{
    left_behind(false);
}

TEST(found_in_the_queue)
{
    left_behind(true);
}

int main(int argc, char **argv)
{
    /* Not in each test: the threads of the one before may still look. */
    ops = r2_transport_mux;
    ops.start = start;
    r2_engine_transport = &ops;
    return check_main(argc, argv);
}

#endif
