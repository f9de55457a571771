/* Lanes that are taken out of use carry nothing more, and what waited for them does not wait on.
 * Real sockets on loopback (rung 3). */
#define _GNU_SOURCE
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"

#define LANES 4
#define MSG (4u << 20)

static uint8_t out[MSG], in[MSG];

static struct r2_ep *sender(void)
{
    struct r2_peer *p = tx->peer;

    CHECK_EQ(p->n_paths, 1);
    CHECK(p->paths[0]->ep != NULL);
    return p->paths[0]->ep;
}

/* Bytes that each bulk lane has handed to its peer's kernel. */
static void carried(uint64_t bytes[LANES])
{
    for (int i = 0; i < LANES; i++) {
        struct r2_lane *lane = r2_ep_lane(sender(), i + 1);
        struct tcp_info info = {0};
        socklen_t len = sizeof(info);

        CHECK(lane != NULL);
        CHECK_EQ(getsockopt(lane->io.fd, IPPROTO_TCP, TCP_INFO, &info, &len), 0);
        bytes[i] = info.tcpi_bytes_acked;
    }
}

static void move(int messages)
{
    struct r2_req *sending, *receiving;

    for (int i = 0; i < messages; i++) {
        bed_post(out, in, MSG, &sending, &receiving);
        CHECK(bed_done(&sending, &receiving, 20000));
        CHECK_MEM(in, out, MSG);
    }
}

static void open_all(void)
{
    for (int i = 0; i < 10000 && r2_bulk_lanes(sender()) < LANES; i++)
        usleep(1000);
    CHECK_EQ(r2_bulk_lanes(sender()), LANES);
}

static void test_out_of_use(void)
{
    uint64_t before[LANES], after[LANES], at_first[LANES];

    bed_listen();
    bed_connect();
    move(1);
    open_all();
    carried(at_first);
    for (int i = 0; i < 200; i++) { /* until each has had a turn */
        bool all = true;

        move(1);
        carried(before);
        for (int k = 0; k < LANES; k++)
            all = all && before[k] > at_first[k];
        if (all)
            break;
        CHECK_LT(i, 199);
    }
    r2_engine_transport->use(sender(), 2);
    CHECK_EQ(r2_bulk_lanes(sender()), 2);
    CHECK_EQ(r2_bulk_planned(sender()), LANES);
    usleep(20000); /* what is on its way */
    carried(before);
    move(20);
    carried(after);
    CHECK(after[0] + after[1] - before[0] - before[1] >= 20ull * MSG);
    CHECK_EQ(after[2], before[2]);
    CHECK_EQ(after[3], before[3]);
    r2_engine_transport->use(sender(), 99); /* all there are */
    CHECK_EQ(r2_bulk_lanes(sender()), LANES);
    end();
}

static atomic_bool stop;

static void *change(void *ep)
{
    for (unsigned i = 0; !atomic_load(&stop); i++) {
        r2_engine_transport->use(ep, 1 + i * 7 % 5 % LANES);
        usleep(50 + i * 37 % 200);
    }
    return NULL;
}

/* Messages go on while the number changes under them. */
static void test_changing(void)
{
    uint64_t from = r2_now_ns();
    pthread_t thread;

    bed_listen();
    bed_connect();
    move(1);
    open_all();
    CHECK_EQ(pthread_create(&thread, NULL, change, sender()), 0);
    while (r2_now_ns() - from < 2 * R2_NS_PER_S)
        move(1);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    end();
}

static const struct check_test tests[] = {
    {"out_of_use", test_out_of_use}, {"changing", test_changing}, {0}};

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LANES", "4", 1); /* no judge changes the number */
    setenv("R2CCL_CHUNK", "64K", 1);
    setenv("R2CCL_GREY", "0", 1);
    setenv("R2CCL_IO_THREADS", "4", 1);
    return check_main(argc, argv, tests);
}
