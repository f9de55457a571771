/* What the kernels of both sides say about a path, with real sockets on loopback (rung 3). A filter
 * on a socket (SO_ATTACH_FILTER) drops all that comes in before TCP sees it: a black hole for that
 * socket alone, as a rule of a firewall would make. What it cannot prove: real NICs and switches.
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "journal_look.h"
#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define MSG (256u * 1024)
#define NICS 2

static uint8_t out[MSG], in[MSG];
static uint64_t events_seen;

static void begin(void)
{
    bed_listen();
    for (int i = 0; i < NICS; i++) { /* sockets inherit it: their windows close soon */
        int small = 16 * 1024;

        setsockopt(r2_tcp.listeners[i].fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    }
    bed_connect();
    events_seen = journal_head(r2_control_segment(r2_eng.ctl));
}

/* Moves one message; false if it is not done within `ms`: it goes on with the next call. */
static struct r2_req *sending, *receiving;

static bool move(int ms)
{
    if (!receiving && !sending)
        bed_post(out, in, MSG, &sending, &receiving);
    if (!bed_done(&sending, &receiving, ms))
        return false;
    CHECK_MEM(in, out, MSG);
    return true;
}

/* The journal since begin(): the first event of the kind, for the NIC, or NULL. */
static const struct r2_seg_journal_entry *said(enum r2_seg_event event, const char *nic)
{
    struct r2_segment *seg = r2_control_segment(r2_eng.ctl);
    uint64_t head = journal_head(seg);

    for (uint64_t n = events_seen; n < head; n++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, n);

        if (e && e->event == event && (!nic || strcmp(e->nic, nic) == 0))
            return e;
    }
    return NULL;
}

/* The accepted sockets, 0 for control and then bulk: of the path between the NICs number `nic`, or
 * of all for -1. */
static int accepted(int index, int nic, struct r2_lane **out, int max)
{
    int found = 0;

    WHILE_MS (15000, !found) {
        struct r2_list *n;

        pthread_mutex_lock(&r2_tcp.lock);
        R2_LIST_FOR_EACH (n, &r2_tcp.accepted) {
            struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);
            struct r2_lane *lane = r2_ep_lane(ep, index);

            if (found < max && lane && atomic_load(&lane->open) &&
                (nic < 0 || (ep->params.local_nic == nic && ep->params.remote_nic == nic)))
                out[found++] = lane;
        }
        pthread_mutex_unlock(&r2_tcp.lock);
    }
    return found;
}

/* One socket of the first NIC's path hears nothing any more: that path is lost, the other is not.
 */
static void black_hole(int index, const char *cause)
{
    struct sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog drop = {.len = 1, .filter = &none};
    const struct r2_seg_journal_entry *e = NULL;
    uint64_t from, moved = 0;
    struct r2_lane *lane;

    CHECK_SKIP_EMULATED("the kernel's word about a connection (TCP_INFO) is not passed on");
    begin();
    for (int i = 0; i < 20; i++)
        CHECK(move(5000));
    CHECK_EQ(accepted(index, 0, &lane, 1), 1); /* of the home NIC */
    CHECK(!said(R2_EV_PATH_DOWN, NULL));
    if (setsockopt(lane->io.fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof(drop)) < 0)
        CHECK_SKIP("no socket filters here: %s", strerror(errno));
    from = r2_now_ns();
    while (!e && r2_now_ns() - from < 5 * R2_NS_PER_S) {
        moved += move(100);
        e = said(R2_EV_PATH_DOWN, "127.0.1.1");
    }
    CHECK_MSG(e, "nobody noticed in 5 s, %d messages moved", (int)moved);
    CHECK_MSG(strstr(e->cause, cause) || strstr(e->cause, "peer's word"), "cause: %s", e->cause);
    CHECK_LE(e->mono_ns - from, 2 * R2_NS_PER_S);
    printf("# noticed after %d ms\n", (int)((e->mono_ns - from) / R2_NS_PER_MS));
    for (int i = 0; i < 20; i++)
        CHECK(move(5000));
    CHECK(!said(R2_EV_PATH_DOWN, "127.0.2.1"));
    end();
}

/* The receiver does not read for 3 s: its window closes, its kernel answers. That is no silence.
 * Nothing is tested meanwhile: a caller may stand in for a thread that has no core, and read. */
TEST(closed_window)
{
    struct r2_lane *lanes[16];
    int n;

    begin();
    for (int i = 0; i < 20; i++)
        CHECK(move(5000));
    n = accepted(1, -1, lanes, 16);
    CHECK_GE(n, NICS);
    for (int i = 0; i < n; i++)
        pthread_mutex_lock(&lanes[i]->rx_lock);
    bed_post(out, in, MSG, &sending, &receiving);
    STAYS_MS(3000, atomic_load(&sending->state) == R2_REQ_ACTIVE &&
                       atomic_load(&receiving->state) == R2_REQ_ACTIVE);
    for (int i = 0; i < n; i++)
        pthread_mutex_unlock(&lanes[i]->rx_lock);
    for (int i = 0; i < 20; i++)
        CHECK(move(5000));
    CHECK_MSG(!said(R2_EV_PATH_DOWN, NULL), "cause: %s", said(R2_EV_PATH_DOWN, NULL)->cause);
    CHECK(!said(R2_EV_PEER_SUSPECT, NULL));
    end();
}

TEST(bulk_alone)
{
    black_hole(1, "bulk bytes unacknowledged");
}

TEST(control_alone)
{
    black_hole(0, "heartbeats unanswered");
}

/* What a process said last and its end may come as one event: nothing else tells of the end before
 * the next heartbeat. */
static atomic_int frames_in, ended_with;
static _Atomic(struct r2_ep *) ending; /* the engine's own go on as they were */
static const struct r2_transport_events *real;

static int count_frame(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len)
{
    if (ep != ending)
        return real->ctrl(owner, ep, type, body, len);
    atomic_fetch_add(&frames_in, 1);
    return 0;
}

static void note_end(void *owner, struct r2_ep *ep, int err, const struct r2_ep_health *health)
{
    if (ep != ending)
        real->failed(owner, ep, err, health);
    else
        atomic_store(&ended_with, err);
}

static void no_burst(void *owner, struct r2_ep *ep)
{
    if (ep != ending)
        real->burst_end(owner, ep);
}

static size_t no_frames(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap)
{
    return ep != ending ? real->next_ctrl(owner, ep, buf, cap) : 0;
}

static void none_sent(void *owner, struct r2_ep *ep, uint64_t sent)
{
    if (ep != ending)
        real->ctrl_sent(owner, ep, sent);
}

/* The engine's upcalls, but for `ending`. */
static atomic_uint unsent;

static void note_sent(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk)
{
    if (ep == ending)
        atomic_store(&unsent, bulk->unsent);
    else
        real->chunk_sent(owner, ep, bulk);
}

static int start_watched(const struct r2_transport_events *events, const uint8_t process[16])
{
    static struct r2_transport_events watched;

    real = events;
    watched = *events;
    watched.ctrl = count_frame;
    watched.failed = note_end;
    watched.chunk_sent = note_sent;
    watched.burst_end = no_burst;
    watched.next_ctrl = no_frames;
    watched.ctrl_sent = none_sent;
    return r2_transport_mux.start(&watched, process);
}

TEST(end_with_the_last_words)
{
    const struct r2_frame f = {.type = R2_F_HEARTBEAT, .version = R2_WIRE_VERSION};
    struct r2_ep_params params = {0};
    struct r2_lane *lane;
    int sv[2];

    begin(); /* the engine's threads run */
    end();
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sv), 0);
    ending = r2_ep_new(&params);
    lane = r2_lane_new(sv[0], 0, r2_io_at(1), R2_LANE_OPEN);
    CHECK(ending && lane);
    atomic_store(&lane->open, true);
    lane->ep = ending;
    lane->ep->lanes[0] = lane;
    CHECK_EQ(write(sv[1], &f, sizeof(f)), sizeof(f));
    CHECK_EQ(shutdown(sv[1], SHUT_WR), 0);
    CHECK_EQ(r2_lane_start(lane), 0);
    AWAIT(atomic_load(&ended_with));
    CHECK_EQ(atomic_load(&frames_in), 1);
    CHECK_EQ(atomic_load(&ended_with), ECONNRESET);
    r2_ep_get(ending); /* the lane's */
    r2_lane_shut(lane, true);
    r2_ep_put(ending);
    close(sv[1]);
}

/* A probe is judged by a thread that may be late: the peer's kernel has answered, and the thread
 * whose socket it is has not seen it yet. That is no silence. */
TEST(late_prober)
{
    struct r2_ep_params params = {.probe = true, .initiator = true};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(0x7f000101)}};
    socklen_t len = sizeof(at);
    struct sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog drop = {.len = 1, .filter = &none};
    struct r2_ep_health health;
    struct r2_lane *lane;
    struct r2_ep *ep;
    int host, fd;

    begin(); /* the engine's threads run */
    end();
    host = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(bind(host, (struct sockaddr *)&at, len), 0);
    CHECK_EQ(getsockname(host, (struct sockaddr *)&at, &len), 0);
    for (int answers = 0; answers < 2; answers++) {
        fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (answers)
            CHECK_EQ(listen(host, 1), 0);
        else if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof(drop)) < 0)
            CHECK_SKIP("no socket filters here: %s", strerror(errno));
        CHECK_EQ(connect(fd, (struct sockaddr *)&at, len), -1);
        ep = r2_ep_new(&params);
        lane = r2_lane_new(fd, 0, r2_io_at(1), R2_LANE_CONNECTING);
        CHECK(ep && lane);
        lane->ep = ep;
        ep->lanes[0] = lane;
        if (answers)
            AWAIT(r2_transport_tcp.reached(ep));
        else
            STAYS_MS(20, !r2_transport_tcp.reached(ep));
        r2_transport_tcp.health(ep, &health);
        CHECK_EQ(health.answered, answers);
        r2_ep_put(ep);
        close(fd);
    }
    close(host);
}

/* A lane ends in the middle of a chunk: what had not reached the kernel does not count as sent. */
TEST(half_sent_chunk)
{
    static const size_t off[] = {0, sizeof(struct r2_data_head) / 2, sizeof(struct r2_data_head),
                                 sizeof(struct r2_data_head) + 400};
    struct r2_ep_params params = {0};
    int sv[2];

    begin(); /* the engine's threads run */
    end();
    for (int i = 0; i < 4; i++) {
        struct r2_lane *lane;

        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sv), 0);
        ending = r2_ep_new(&params);
        lane = r2_lane_new(sv[0], 0, r2_io_at(1), R2_LANE_OPEN);
        CHECK(ending && lane);
        lane->ep = ending;
        lane->index = 1;
        ending->lanes[1] = lane;
        lane->tx_chunk = (struct r2_bulk){.conn = 1, .len = 1000};
        lane->tx_active = true;
        lane->tx_off = off[i];
        atomic_store(&unsent, 1);
        r2_ep_get(ending); /* the lane's */
        r2_lane_shut(lane, true);
        CHECK_EQ(atomic_load(&unsent), i == 3 ? 600 : 1000);
        r2_ep_put(ending);
        close(sv[1]);
    }
}

int main(int argc, char **argv)
{
    static struct r2_transport_ops ops;

    ops = r2_transport_mux;
    ops.start = start_watched;
    r2_engine_transport = &ops;
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LANES", "1", 1);
    setenv("R2CCL_GREY", "0",
           1); /* or a busy machine's slow path carries nothing that could be missed */
    setenv("R2CCL_IO_THREADS", "3", 1);
    return check_main(argc, argv);
}
