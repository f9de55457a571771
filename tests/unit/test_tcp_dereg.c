/* Memory is given back in the middle of a chunk, over real sockets on loopback (rung 3): half of
 * the chunk has left, or has come. deregMr returns, the memory is unmapped, and another connection
 * on the same lane notices nothing: the stream stays in step and the path is the same. A slowed NIC
 * holds the other half back. It cannot prove what RDMA devices do (test_verbs_revoke). */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define PART (64u * 1024) /* what a slowed NIC lets go at once */
#define CHUNK (PART + PART / 2)
#define MSG (1024u * 1024)
#define RATE (32u * 1024) /* so the other half comes 2 s later */
#define WAIT_MS 20000

static uint8_t out[MSG], in[MSG];
static uint8_t other[CHUNK]; /* the other side's: until that closes, lanes may be at it */

static struct r2_path *path_of(const struct r2_conn *c)
{
    return c->peer->paths[0];
}

static struct r2_lane *lane_of(const struct r2_conn *c)
{
    return r2_ep_lane(path_of(c)->ep, 1);
}

static bool half_sent(struct r2_lane *lane)
{
    bool yes;

    pthread_mutex_lock(&lane->tx_lock);
    yes = lane->tx_active && lane->tx_off > sizeof(lane->tx_head);
    pthread_mutex_unlock(&lane->tx_lock);
    return yes;
}

static bool half_received(struct r2_lane *lane)
{
    bool yes;

    pthread_mutex_lock(&lane->rx_lock);
    yes = lane->rx_state == R2_RX_BODY && lane->rx_off > 0;
    pthread_mutex_unlock(&lane->rx_lock);
    return yes;
}

static int ends(struct r2_req *req)
{
    int done = 0, rc = 0;

    WHILE_MS (WAIT_MS, !done && !rc)
        rc = r2_engine_test(req, &done, NULL);
    return done ? 1 : rc;
}

static void go_on(struct r2_conn *c)
{
    r2_eng.ops->nudge(path_of(c)->ep);
}

static void given_back(bool by_sender)
{
    uint8_t *memory = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct r2_fault slow = {.kind = R2_SEG_FAULT_SLOW, .tx = true, .rate = RATE};
    struct r2_req *s = NULL, *t = NULL;
    struct r2_conn *first_tx, *first_rx;
    struct r2_mr *mr = NULL;
    uint32_t gens[2];
    bool half = false;

    CHECK(memory != MAP_FAILED);
    bed_listen();
    bed_connect();
    first_tx = tx;
    first_rx = rx;
    bed_connect();
    bed_post(out, in, MSG, &s, &t); /* the lane is open */
    CHECK(bed_done(&s, &t, WAIT_MS));
    gens[0] = path_of(tx)->gen;
    gens[1] = path_of(rx)->gen;

    memset(memory, 7, CHUNK);
    CHECK_EQ(
        r2_engine_reg(by_sender ? first_tx : first_rx, memory, CHUNK, R2_MEMORY_TYPE_HOST, &mr), 0);
    r2_fault_set(0, &slow);
    CHECK_EQ(r2_engine_irecv(first_rx, by_sender ? other : memory, CHUNK, 0, NULL, &t), 0);
    CHECK_EQ(r2_engine_isend(first_tx, by_sender ? memory : other, CHUNK, 0, NULL, &s), 0);
    CHECK(s && t);
    WHILE_MS (WAIT_MS, !half)
        half = by_sender ? half_sent(lane_of(tx)) : half_received(lane_of(rx));
    CHECK(half);
    CHECK_EQ(r2_engine_dereg(by_sender ? first_tx : first_rx, mr), 0); /* found by its range */
    CHECK_EQ(munmap(memory, CHUNK), 0);
    r2_fault_clear(0);
    go_on(tx);
    go_on(rx);
    CHECK_EQ(ends(by_sender ? s : t), -ECANCELED);
    CHECK_EQ(ends(by_sender ? t : s), -ECONNRESET);

    for (int i = 0; i < 3; i++) {
        bed_post(out, in, MSG, &s, &t);
        CHECK(bed_done(&s, &t, WAIT_MS));
        CHECK_MEM(in, out, MSG);
    }
    CHECK_EQ(path_of(tx)->gen, gens[0]);
    CHECK_EQ(path_of(rx)->gen, gens[1]);
    CHECK_EQ(r2_engine_close(first_tx), 0);
    CHECK_EQ(r2_engine_close(first_rx), 0);
    end();
}

TEST(sender_in_a_chunk)
{
    given_back(true);
}

TEST(receiver_in_a_chunk)
{
    given_back(false);
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_DISABLE", "1", 1); /* also where a stand-in for libibverbs is set */
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LANES", "1", 1);
    setenv("R2CCL_HEARTBEAT", "20s", 1); /* the slowed NIC is not to be judged */
    setenv("R2CCL_GREY", "0", 1);
    return check_main(argc, argv);
}
