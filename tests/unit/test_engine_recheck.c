/* The second look at what was left to others, by whoever polls for a message
 * (engine/loop/recheck.c), over a scripted transport (rung 2). With real lanes and threads that do
 * not come: test_tcp_lane_choice, test_tcp_lanes. */
#include "await.h"
#include "send_bed.h"

#define KB 1024u
#define MSG (512 * KB)
#define FAR_OFF (60 * R2_NS_PER_S)

static uint8_t data[MSG];
static struct r2_req *req;
static struct r2_peer *p;
static uint64_t next; /* message */

static void send_one(void)
{
    req = NULL;
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_EQ(remote_cts(a, &r, next++, MSG), 0);
}

/* A message waits and its lane was asked. */
static void start(void)
{
    begin(1);
    p = r.conn->peer;
    next = 0;
    send_one();
}

static uint64_t look_at(void)
{
    return atomic_load(&p->recheck_at);
}

static void set_look(uint64_t at)
{
    atomic_store(&p->recheck_at, at);
    atomic_store(&r2_eng.recheck_at, at);
}

static void poll_once(void)
{
    int done;

    CHECK_EQ(r2_engine_test(req, &done, NULL), 0);
    CHECK(!done);
}

/* Whether polls ask lanes: most of five do, or not. The peer's tick may ask besides, or have the
 * lock. */
static bool polls_ask(uint64_t at)
{
    int asking = 0;

    for (int i = 0; i < 5; i++) {
        int before = atomic_load(&a->kicks);

        set_look(at);
        poll_once();
        asking += atomic_load(&a->kicks) > before;
    }
    return asking > 2;
}

TEST(when_it_is_time)
{
    start();
    CHECK_GT(look_at(), 0);
    CHECK(!polls_ask(0));
    CHECK(!polls_ask(r2_now_ns() + FAR_OFF));
    AWAIT(polls_ask(1)); /* who has a lock may have no core */
    for (int i = 0; i < 1000 && look_at() == 1; i++)
        poll_once();
    CHECK_GT(look_at(), 1); /* and again, if that one does not come either */
    remote_end(&r);
}

TEST(nothing_waits)
{
    struct r2_bulk c;

    start();
    while (fake_next(a, &c))
        CHECK(fake_chunk_sent(a, &c));
    CHECK(!polls_ask(1));
    for (int i = 0; i < 1000 && look_at(); i++)
        poll_once();
    CHECK_EQ(look_at(), 0);
    remote_end(&r);
}

/* NCCL's thread waits for nobody: whoever has the lock may have lost its core. */
TEST(no_lock_is_waited_for)
{
    start();
    r2_peer_lock(p);
    set_look(1);
    for (int i = 0; i < 1000 && atomic_load(&r2_eng.recheck_at) == 1; i++)
        poll_once();
    CHECK_EQ(look_at(), 1);
    CHECK_GT(atomic_load(&r2_eng.recheck_at), 1); /* soon again */
    CHECK_LE(atomic_load(&r2_eng.recheck_at), r2_now_ns() + 100 * R2_NS_PER_US);
    r2_peer_unlock(p);
    remote_end(&r);
}

TEST(one_to_come_stays)
{
    uint64_t far = r2_now_ns() + FAR_OFF;

    start();
    set_look(far);
    send_one();
    CHECK_EQ(look_at(), far);
    set_look(1); /* nobody polled: it is not taken at once for what comes now */
    send_one();
    CHECK_GT(look_at(), r2_now_ns() - R2_NS_PER_S);
    remote_end(&r);
}

/* One that is due is not pushed away by what comes before anybody polls. */
TEST(one_that_is_due_stays)
{
    uint64_t due, over = 0;

    start();
    for (int i = 0; i < 100; i++) {
        due = r2_now_ns() - 50 * R2_NS_PER_US;
        set_look(due);
        send_one();
        over = look_at();
        if (r2_now_ns() < due + 250 * R2_NS_PER_US || over == due)
            break;
    }
    CHECK_EQ(over, due);
    remote_end(&r);
}

/* A peer that is due later is not forgotten when somebody looks. */
TEST(later_ones)
{
    uint64_t far = r2_now_ns() + FAR_OFF;

    start();
    for (int tries = 0; tries < 20; tries++) { /* peers of other tests may be due, too */
        set_look(far);
        atomic_store(&r2_eng.recheck_at, 1);
        for (int i = 0; i < 1000 && atomic_load(&r2_eng.recheck_at) == 1; i++)
            poll_once();
        CHECK_GT(atomic_load(&r2_eng.recheck_at), 1);
        CHECK_LE(atomic_load(&r2_eng.recheck_at), far);
    }
    CHECK_EQ(look_at(), far);
    remote_end(&r);
}

/* One thread comes to all its lanes, or to none. */
TEST(with_one_thread)
{
    r2_io_use(1);
    start();
    CHECK_EQ(look_at(), 0);
    remote_end(&r);
    r2_io_use(2);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_IO_THREADS=2 R2CCL_RAMP=0 R2CCL_EAGER=0");
    return check_main(argc, argv);
}
