/* How many lanes carry what waits: one for little, more for more, and others in place of those that
 * take nothing. Real sockets on loopback (rung 3); the I/O threads are held while it is looked who
 * is asked, so that nobody answers meanwhile. That fewer lanes are quicker is no test's matter:
 * docs/decisions.md 41. */
#define _GNU_SOURCE
#include "await.h"
#include "held_threads.h"
#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#include "io/fault.h"
#include "util/clock.h"

#define LANES 4
#define MSG (96u << 10)
#define MOST 20          /* messages at once */
#define PART (64u << 10) /* one chunk, whatever the rate */

static uint8_t out[MOST][MSG], in[MOST][MSG];
static struct r2_req *sending[MOST], *receiving[MOST];
static const struct r2_transport_events *real;
static struct r2_ep *ep;
static atomic_int blocked;

static void count(void *owner, struct r2_ep *of)
{
    atomic_fetch_add(&blocked, 1);
    real->blocked(owner, of);
}

static struct r2_lane *lane(int i)
{
    return r2_ep_lane(ep, i);
}

/* Lanes that were asked and have not come to it, or are at work. */
static int asked(void)
{
    int n = 0;

    for (int i = 1; i <= LANES; i++)
        n += !atomic_load(&lane(i)->tx_idle);
    return n;
}

static int full(void)
{
    int n = 0;

    for (int i = 1; i <= LANES; i++)
        n += atomic_load(&lane(i)->tx_full);
    return n;
}

static void all_idle(void)
{
    AWAIT(!asked());
}

static void send_part(int i, uint32_t len)
{
    CHECK_EQ(r2_engine_isend(tx, out[i], len, 0, NULL, &sending[i]), 0);
    CHECK(sending[i]);
}

static void send_one(int i)
{
    send_part(i, MSG);
}

/* Clear to send, `n` messages from the next one on. */
static bool cleared(int n)
{
    bool all = true;

    pthread_mutex_lock(&tx->peer->lock);
    for (int i = 0; i < n; i++)
        all = all && r2_send_cts(tx, tx->next_seq + (uint64_t)i);
    pthread_mutex_unlock(&tx->peer->lock);
    return all;
}

/* Messages that wait for their senders: the receives of all are known to the other side. */
static void begin(int n)
{
    for (int i = 0; i < n; i++) {
        memset(out[i], i + 1, MSG);
        memset(in[i], 0, MSG);
        CHECK_EQ(r2_engine_irecv(rx, in[i], MSG, 0, NULL, &receiving[i]), 0);
        CHECK(receiving[i]);
    }
    AWAIT(cleared(n));
    all_idle();
    keep_awake();
    CHECK_EQ(asked(), 0);
}

static void finish(int n)
{
    release();
    for (int i = 0; i < n; i++) {
        CHECK(bed_done(&sending[i], &receiving[i], 20000));
        CHECK_MEM(in[i], out[i], MSG);
    }
}

/* Whoever was asked has been so just now, however long this thread waits for its core. */
static void keep_fresh(void)
{
    for (int i = 1; i <= LANES; i++)
        atomic_store(&lane(i)->tx_since, r2_now_ns() + 60 * R2_NS_PER_S);
}

/* As if it were in the middle of a chunk. */
static void at_work(int i)
{
    atomic_store(&lane(i)->tx_idle, false);
    keep_fresh();
}

static void start(void)
{
    static struct r2_transport_events hooked;

    if (ep)
        return;
    bed_listen();
    real = r2_tcp.ev;
    hooked = *real;
    hooked.blocked = count;
    r2_tcp.ev = &hooked;
    bed_connect();
    ep = tx->peer->paths[0]->ep;
    AWAIT(r2_bulk_lanes(ep) >= LANES);
    CHECK_EQ(r2_bulk_lanes(ep), LANES);
    for (int i = 0; i < 20; i++) { /* the path's window has room for what follows */
        begin(MOST);
        for (int k = 0; k < MOST; k++)
            send_one(k);
        finish(MOST);
    }
}

/* One lane, and one more for every 128 KiB. */
TEST(as_many_as_it_is_worth)
{
    start();
    begin(MOST);
    for (int i = 0; i < MOST; i++) {
        int worth = 1 + (i + 1) * (int)MSG / (128 << 10);

        keep_fresh();
        send_one(i);
        CHECK_EQ(asked(), worth < LANES ? worth : LANES);
    }
    finish(MOST);
}

/* Where threads are few, each is at hand soon: as many lanes as there are chunks. */
TEST(threads_are_few)
{
    start();
    r2_io_use(8);
    begin(3);
    for (int i = 0; i < 3; i++) {
        send_one(i);
        CHECK_EQ(asked(), i + 1);
    }
    finish(3);
    r2_io_use(9);
}

/* A lane that is in the middle of something and takes nothing does not count. */
TEST(blocked_ones_do_not_count)
{
    start();
    begin(1);
    at_work(1);
    atomic_store(&lane(1)->tx_full, true);
    send_one(0);
    CHECK(!atomic_load(&lane(2)->tx_idle));
    CHECK_EQ(asked(), 2);
    atomic_store(&lane(1)->tx_full, false);
    atomic_store(&lane(1)->tx_idle, true);
    finish(1);
}

/* One that is at work is relied on; should it be blocked before it comes to that, another one is
 * asked. */
TEST(what_a_blocked_one_leaves)
{
    start();
    begin(1);
    at_work(1);
    send_one(0);
    CHECK_EQ(asked(), 1);
    atomic_store(&lane(1)->tx_full, true);
    real->blocked(ep->owner, ep);
    CHECK_EQ(asked(), 2);
    CHECK(!atomic_load(&lane(2)->tx_idle));
    release();
    CHECK(bed_done(&sending[0], &receiving[0], 20000));
    CHECK_MEM(in[0], out[0], MSG);
    AWAIT(asked() <= 1);
    CHECK_EQ(asked(), 1);
    real->blocked(ep->owner, ep); /* nothing waits: nobody is asked */
    CHECK_EQ(asked(), 1);
    atomic_store(&lane(1)->tx_full, false);
    atomic_store(&lane(1)->tx_idle, true);
}

/* Its thread may have no core: who has not come to it for long is not relied on. */
TEST(one_that_does_not_come)
{
    start();
    begin(1);
    at_work(1);
    atomic_store(&lane(1)->tx_since, r2_now_ns() - R2_NS_PER_MS);
    send_one(0);
    CHECK_EQ(asked(), 2);
    CHECK(!atomic_load(&lane(2)->tx_idle));
    atomic_store(&lane(1)->tx_idle, true);
    finish(1);
}

/* Until another lane is asked; the tick would do it after 25 ms. */
static void poll_briefly(void)
{
    int done = 0;

    WHILE_MS (15, asked() == 1) {
        CHECK_EQ(r2_engine_test(sending[0], &done, NULL), 0);
    }
}

/* Nor on one that comes no more after it was relied on: whoever polls for the message looks again.
 */
TEST(who_polls_looks_again)
{
    start();
    begin(1);
    at_work(1);
    send_one(0);
    CHECK_EQ(asked(), 1);
    atomic_store(&lane(1)->tx_since, r2_now_ns() - R2_NS_PER_MS);
    poll_briefly();
    CHECK_EQ(asked(), 2);
    CHECK(!atomic_load(&lane(2)->tx_idle));
    atomic_store(&lane(1)->tx_idle, true);
    finish(1);
}

/* One was asked at once, and its thread has no core. */
TEST(with_few_threads_too)
{
    start();
    r2_io_use(8);
    begin(1);
    send_one(0);
    CHECK_EQ(asked(), 1);
    poll_briefly();
    CHECK_GE(asked(), 2);
    finish(1);
    r2_io_use(9);
}

/* A socket or a NIC that takes nothing is said to be so; the lane goes on. */
TEST(who_is_blocked_says_so)
{
    struct r2_fault fault = {.kind = R2_SEG_FAULT_BLACKHOLE, .tx = true};
    int before;

    start();
    before = atomic_load(&blocked);
    begin(1);
    r2_fault_set(0, &fault);
    send_part(0, PART);
    release();
    AWAIT(atomic_load(&blocked) != before);
    CHECK_EQ(atomic_load(&blocked), before + 1);
    CHECK_EQ(full(), 1); /* the first, as a rule: another one where that has no core */
    r2_fault_clear(0);
    CHECK(bed_done(&sending[0], &receiving[0], 20000));
    CHECK_MEM(in[0], out[0], PART);
    AWAIT(!full());
}

int main(int argc, char **argv)
{
    int rc;

    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LANES", "4", 1); /* no judge changes the number */
    setenv("R2CCL_GREY", "0", 1);
    setenv("R2CCL_IO_THREADS", "9", 1);
    setenv("R2CCL_HEARTBEAT", "5s", 1); /* a NIC that takes nothing for a while is not lost */
    rc = check_main(argc, argv);

    if (ep)
        end();
    return rc;
}
