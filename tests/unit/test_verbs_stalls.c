/* When a queue pair that neither completes nor fails is held to have failed (stalls.c), by itself
 * (rung 2): an endpoint whose device, clock and peer's word are the test's. What it looks like from
 * above: test_verbs_lost, test_verbs_lanes, test_verbs_slow. */
#include "check.h"

#ifdef R2_HAVE_VERBS

#include <errno.h>
#include <stdlib.h>

#include "engine/loop/loop.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"

#define STEP (100 * R2_NS_PER_MS)
#define PATIENCE (4 * R2_NS_PER_S) /* more than it takes with the timeout of main() */
#define LONG (600 * R2_NS_PER_S)

static struct r2_hca hca = {.name = "none"};
static struct r2_ep *ep;
static uint64_t now;
static bool is_alone;

static bool alone(void *owner, struct r2_ep *of)
{
    (void)owner;
    CHECK(of == ep);
    return is_alone;
}

static bool no_chunk(void *owner, struct r2_ep *of, struct r2_bulk *bulk)
{
    (void)owner;
    (void)of;
    (void)bulk;
    return false;
}

static void sent(void *owner, struct r2_ep *of, const struct r2_bulk *bulk)
{
    (void)owner;
    (void)of;
    (void)bulk;
}

static void burst_over(void *owner, struct r2_ep *of)
{
    (void)owner;
    (void)of;
}

static const struct r2_transport_events events = {
    .alone = alone, .next_chunk = no_chunk, .chunk_sent = sent, .burst_end = burst_over};

static void open_end(bool initiator)
{
    ep = calloc(1, sizeof(*ep));
    CHECK(ep);
    r2_local.n = 1; /* which it is said of */
    ep->params.initiator = initiator;
    ep->n_bulk = 2;
    ep->hca = &hca;
    ep->memory = calloc(1, r2_v_memory_len(ep));
    ep->tx = calloc((size_t)ep->n_bulk * R2_BULK_TX, sizeof(*ep->tx));
    CHECK(ep->memory && ep->tx);
    r2_verbs.ev = &events;
    is_alone = false;
    now = R2_NS_PER_S;
}

static void close_end(void)
{
    free(ep->memory);
    free(ep->tx);
    free(ep);
}

static uint32_t word(int which)
{
    return ((const uint32_t *)(const void *)r2_v_beat(ep, 0))[which];
}

/* What the peer's heartbeat writes here. */
static void peer_says(uint32_t asks, uint32_t answers)
{
    uint32_t *at = (uint32_t *)(void *)r2_v_beat(ep, 1);

    at[0] = asks;
    at[1] = answers;
}

/* Looks until the endpoint ends or the time is over. */
static int look_for(uint64_t time, uint64_t step)
{
    int rc = 0;

    for (uint64_t end = now + time; now < end && rc == 0; now += step) {
        r2_stalls_empty(ep);
        rc = r2_stalls_look(ep, now);
        r2_stalls_word(ep);
    }
    return rc;
}

static void long_posted(int q, uint32_t len)
{
    ep->tx[q * R2_BULK_TX + (int)(ep->bulk[q].tx_posted++ % R2_BULK_TX)].len = len;
}

static void chunk_posted(int q)
{
    long_posted(q, 64 * 1024);
}

static void chunk_ended(int q)
{
    ep->bulk[q].tx_done++;
    ep->bulk[q].ended++;
}

/* It stands still, or is of a build that knows no questions. */
TEST(unanswered)
{
    open_end(true);
    chunk_posted(1);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 1);
    peer_says(0, word(0));
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0); /* a device may take its time from now on */
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    CHECK_EQ(strcmp(ep->cause, "requests neither completed nor failed"), 0);
    close_end();
}

/* An answer to an earlier question says nothing about now. */
TEST(old_answer)
{
    open_end(true);
    chunk_posted(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    CHECK_EQ(word(0), 1);
    peer_says(0, 1);
    chunk_ended(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    chunk_posted(0);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 2);
    peer_says(0, 2);
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* Something completes now and then, if only a count. */
TEST(slow)
{
    open_end(true);
    for (int i = 0; i < 3; i++)
        chunk_posted(0);
    for (int i = 0; i < 30; i++) {
        CHECK_EQ(look_for(2 * R2_NS_PER_S, STEP), 0);
        peer_says(0, word(0));
        ep->bulk[0].ended++;
    }
    CHECK_EQ(look_for(PATIENCE, STEP), 0); /* asked, and answered by the next word */
    peer_says(0, word(0));
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

TEST(idle)
{
    open_end(true);
    chunk_posted(0);
    chunk_ended(0);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 0);
    close_end();
}

/* We were stopped ourselves: what passed meanwhile is no waiting. */
TEST(observer_stopped)
{
    open_end(true);
    chunk_posted(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(2 * STEP, STEP), 0);
    now += LONG;
    CHECK_EQ(look_for(STEP, STEP), 0);
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* Control frames whose ends nobody asked for complete with others only. */
TEST(control)
{
    open_end(false);
    ep->ctrl.tx_posted = 3;
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 0);
    ep->ctrl_signals = 1u << 3;
    ep->ctrl.tx_posted = 4;
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* 512 KiB, and behind them more, which do not count: how long until they are given up? */
static uint64_t patience_of(int q, bool with_no_other)
{
    uint64_t from;
    int rc = 0;

    open_end(true);
    is_alone = with_no_other;
    long_posted(q, 512 * 1024);
    long_posted(q, 16 * 1024 * 1024);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    for (from = now; rc == 0 && now < from + LONG;)
        rc = look_for(STEP, STEP);
    CHECK_EQ(rc, -ETIMEDOUT);
    close_end();
    return now - from;
}

TEST(long)
{
    uint64_t packet = 2147 * R2_NS_PER_MS, long_way = 16 * R2_NS_PER_S;

    for (int q = 0; q < 2; q++) {
        CHECK_GE(patience_of(q, false), packet + 2 * R2_NS_PER_S);
        CHECK_LT(patience_of(q, false), packet + 3 * R2_NS_PER_S);
        CHECK_GE(patience_of(q, true), packet + long_way);
        CHECK_LT(patience_of(q, true), packet + long_way + R2_NS_PER_S);
    }
}

/* Control frames up to the one that is signalled, which brings all their ends. */
TEST(long_control)
{
    open_end(true);
    is_alone = true;
    for (int i = 0; i < 16; i++)
        ep->ctrl_len[i] = R2_CTRL_SLOT;
    ep->ctrl_signals = 1u << 15 | 1u << 16;
    ep->ctrl_len[16] = 1 << 30;
    ep->ctrl.tx_posted = 17;
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(4 * R2_NS_PER_S, STEP), 0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), -ETIMEDOUT);
    close_end();
}

/* A device of the test's: so many of one completion are in the queue. */
static struct ibv_wc waiting;
static int n_waiting;
static uint32_t posted[R2_BULK_RX]; /* receives, by slot */

static int poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    int got = 0;

    (void)cq;
    for (; got < n && n_waiting; n_waiting--)
        wc[got++] = waiting;
    return got;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    static uint32_t turn;

    (void)qp;
    (void)bad;
    posted[(uint32_t)wr->wr_id] = ++turn;
    return 0;
}

static int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)qp;
    (void)wr;
    (void)bad;
    return 0;
}

static struct ibv_context ctx = {
    .ops = {.poll_cq = poll, .post_send = post, .post_recv = post_recv}};
static struct ibv_cq cq = {.context = &ctx};
static struct ibv_qp qp = {.context = &ctx};
static struct ibv_mr mr;

static void open_device(bool initiator)
{
    open_end(initiator);
    ep->cq = &cq;
    ep->mr = &mr;
    ep->beat.qp = ep->bulk[0].qp = ep->bulk[1].qp = &qp;
    atomic_store(&ep->marked, 1);
    n_waiting = 0;
}

/* A chunk is long overdue. */
static void open_overdue(void)
{
    open_device(true);
    chunk_posted(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(STEP, STEP), 0);
    ep->bulk[0].waited = LONG;
}

/* It has completed a moment ago. */
TEST(waits_to_be_polled)
{
    open_overdue();
    n_waiting = 1;
    waiting = (struct ibv_wc){.status = IBV_WC_SUCCESS, .wr_id = r2_wr_id(R2_WR_BULK_TX, 0, 0)};
    CHECK_EQ(r2_data_beat(ep), 0);
    CHECK_EQ(ep->bulk[0].tx_done, 1);
    close_end();
}

/* There is more than is polled at a time (of counts here, none of which was told of a chunk). */
TEST(not_all_polled)
{
    open_overdue();
    n_waiting = 100000;
    waiting = (struct ibv_wc){.status = IBV_WC_SUCCESS, .wr_id = r2_wr_id(R2_WR_COUNT, 1, 0)};
    CHECK_EQ(r2_data_beat(ep), 0);
    CHECK_GT(n_waiting, 0);
    n_waiting = 0;
    ep->beat_busy = false;
    CHECK_EQ(r2_data_beat(ep), -ETIMEDOUT);
    close_end();
}

/* A count arrives at that receive; there has been no chunk. */
static int count_arrives(uint32_t slot)
{
    waiting = (struct ibv_wc){.status = IBV_WC_SUCCESS,
                              .wc_flags = IBV_WC_WITH_IMM,
                              .wr_id = r2_wr_id(R2_WR_BULK_RX, 0, slot)};
    n_waiting = 1;
    return r2_data_poll(ep);
}

/* Receives that counts have used without a word are posted again, in the order of their use; one
 * that comes behind others is against the rules. */
TEST(receives_left_out)
{
    uint32_t before;

    open_device(false);
    CHECK_EQ(count_arrives(0), 0);
    CHECK_EQ(count_arrives(3), 0);
    CHECK(posted[0] && posted[1] == posted[0] + 1);
    CHECK(posted[2] == posted[1] + 1 && posted[3] == posted[2] + 1 && !posted[4]);
    for (uint32_t slot = 4; slot < R2_BULK_RX - 1; slot++)
        CHECK_EQ(count_arrives(slot), 0);
    before = posted[R2_BULK_RX - 2];
    CHECK_EQ(count_arrives(1), 0);
    CHECK(posted[R2_BULK_RX - 1] == before + 1);
    CHECK(posted[0] == before + 2 && posted[1] == before + 3);
    CHECK_EQ(count_arrives(2), 0);
    CHECK_EQ(count_arrives(1), -EPROTO);
    CHECK(posted[2] == before + 4 && posted[3] < before);
    close_end();
}

/* An answer is given only after all that had come was taken. */
TEST(answering)
{
    open_end(false);
    peer_says(7, 0);
    r2_stalls_empty(ep); /* before it was read */
    r2_stalls_word(ep);
    CHECK_EQ(word(1), 0);
    r2_stalls_word(ep); /* read, and nothing polled since */
    CHECK_EQ(word(1), 0);
    peer_says(8, 0);
    r2_stalls_empty(ep);
    r2_stalls_word(ep);
    CHECK_EQ(word(1), 7);
    close_end();
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_TIMEOUT", "14", 1); /* 0.54 s with all retries, four times that with patience */
    return check_main(argc, argv);
}

#endif
