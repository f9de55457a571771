/* What a path has to show before it carries anything again: chunks of several packets on each of
 * its queue pairs for chunks, found whole at the other end (rung 3; verbs_bed.h says what it cannot
 * prove). Two queue pairs for chunks on each path. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (256 * 1024)
#define NIC "127.0.1.1" /* of fv0, at both ends; the connection's home, so chunks take it first */

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
static int turn;

static void finish(void)
{
    bed_message(&bed, &memory, turn++);
    bed_finish(&bed, &memory);
}

/* The sender's path from NIC to NIC. Under the peer's lock. */
static const struct r2_path *path_of(struct r2_peer *p)
{
    const struct r2_path *path = r2_path_find(p, 0, 0, R2_VIA_VERBS);

    CHECK(path);
    return path;
}

/* Its generation, and the bytes of messages that it has carried. */
static uint32_t look(uint64_t *bytes)
{
    struct r2_peer *p = bed.tx->peer;
    uint32_t gen;

    r2_peer_lock(p);
    gen = path_of(p)->gen;
    *bytes = path_of(p)->sum.tx_bytes;
    r2_peer_unlock(p);
    return gen;
}

static bool carries(void)
{
    struct r2_peer *p = bed.tx->peer;
    bool yes;

    r2_peer_lock(p);
    yes = r2_path_may(path_of(p)) >= R2_MAY_STAND_BY;
    r2_peer_unlock(p);
    return yes;
}

static bool told(struct r2_conn *c)
{
    bool yes;

    r2_peer_lock(c->peer);
    yes = path_of(c->peer)->intro == R2_INTRO_TOLD;
    r2_peer_unlock(c->peer);
    return yes;
}

/* Both ends' words that the path is up are in the journal. */
static void begin(void)
{
    bed_open(&bed, 2);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, turn++);
    AWAIT(told(bed.tx) && told(bed.rx));
}

static int came_up(uint64_t from)
{
    return bed_told(from, R2_EV_PATH_UP, NIC, NIC, NULL);
}

/* Messages go on meanwhile, and it does not come up. */
static void until_attempt(uint32_t gen, uint64_t from)
{
    uint64_t until = r2_now_ns() + 2 * BED_WAIT_MS * R2_NS_PER_MS, bytes;

    while (look(&bytes) < gen && r2_now_ns() < until) {
        bed_message(&bed, &memory, turn++);
        CHECK_EQ(came_up(from), 0);
    }
    CHECK_GE(look(&bytes), gen);
}

/* The path itself: others may stand in for it, and leave when it is back. */
static void back(void)
{
    r2_nicstate_forgive(0, r2_now_ns()); /* it flapped in the tests before this one */
    AWAIT(carries());
}

/* What is to be known of an endpoint. */
struct view {
    bool found;  /* one that is open and has not failed */
    bool proven; /* ... and its path carries by it */
    int n_bulk;
    uint32_t rx_done[R2_VERBS_MAX_BULK];
};

static void view_one(struct r2_ep *ep, struct view *v)
{
    struct r2_path *path;

    pthread_mutex_lock(&ep->lock);
    v->found = true;
    v->n_bulk = ep->n_bulk;
    for (int q = 0; q < ep->n_bulk; q++)
        v->rx_done[q] = ep->bulk[q].rx_done;
    path = ep->owner;
    r2_vep_unlock(ep);
    r2_peer_lock(path->peer);
    v->proven = path->ep == ep && path->state == R2_PATH_PROVEN;
    r2_peer_unlock(path->peer);
}

/* The numbers of queue pairs do not change once it is open. */
static bool sends_by(const struct r2_ep *ep, uint32_t qpn)
{
    for (int q = 0; q < ep->n_bulk; q++) {
        if (ep->mine.bulk[q] == qpn)
            return true;
    }
    return false;
}

/* The sender's end that sends chunks by that queue pair; 0: the receiver's end, from NIC to NIC. */
static struct view look_at(uint32_t qpn)
{
    struct r2_ep *eps[64];
    struct r2_list *n;
    struct view v = {0};
    int count = 0;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (count == 64 || !atomic_load(&ep->open) || atomic_load(&ep->failed) ||
            atomic_load(&ep->dead) || ep->params.initiator != (qpn != 0))
            continue;
        if (qpn ? !sends_by(ep, qpn) : ep->params.local_nic || ep->params.remote_nic)
            continue;
        r2_vep_get(ep);
        eps[count++] = ep;
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    for (int i = 0; i < count; i++) {
        view_one(eps[i], &v);
        r2_vep_put(eps[i]);
    }
    return v;
}

/* The same from the start of the job: such a path never carries a chunk, so that the first message
 * does not wait for its retries; it comes up when the larger ones pass. The first test: paths of
 * this process to itself outlive their connections. */
TEST(large_packets_vanish_from_the_start)
{
    struct r2_ctx *first;
    uint64_t bytes, until;

    bed_library();
    setenv("R2CCL_NICS", bed_nics, 1); /* as bed_open does it, too late for here */
    setenv("R2CCL_CHUNK", "64K", 1);
    CHECK_EQ(r2_engine_init(&first, 1, NULL), 0); /* the devices are open now */
    bed_script("!most fv0 4096");
    bed_open(&bed, 1);
    bed_register(&bed, &memory);
    until = r2_now_ns() + 2 * BED_WAIT_MS * R2_NS_PER_MS;
    while (look(&bytes) < 3 && r2_now_ns() < until) { /* one attempt at least has been judged */
        CHECK(!carries());
        bed_message(&bed, &memory, turn++);
    }
    CHECK_GE(look(&bytes), 3);
    CHECK_EQ(bytes, 0);
    CHECK_EQ(came_up(0), 0); /* nor does the receiver say so */
    bed_script("!most fv0 0");
    back();
    CHECK_GE(came_up(0), 1);
    finish();
    r2_engine_finalize(first);
}

/* Small requests pass, larger ones vanish, as where a switch does not know the NICs' MTU:
 * heartbeats and control frames are answered, and yet the path takes no chunk until the larger ones
 * pass. */
TEST(large_packets_vanish)
{
    uint64_t from, until, before, after;
    struct view v;
    uint32_t gen;

    begin();
    from = bed_journal();
    bed_script("!most fv0 4096");
    until = r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS; /* it may be ramping up */
    while (!bed_told(from, R2_EV_PATH_DOWN, NIC, NIC, NULL) && r2_now_ns() < until)
        bed_message(&bed, &memory, turn++);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NIC, NIC, NULL), 1);
    gen = look(&before);
    until_attempt(gen + 3, from); /* two at least have been judged */
    CHECK_EQ(came_up(from), 0);
    look(&after);
    CHECK_EQ(after, before);
    CHECK(!carries());
    bed_script("!most fv0 0");
    back();
    v = look_at(0);
    CHECK(v.found);
    CHECK_EQ(v.n_bulk, 2);
    for (int q = 0; q < v.n_bulk; q++)
        CHECK_EQ(v.rx_done[q], R2_TEST_EACH);
    CHECK_GE(came_up(from), 1);
    finish();
}

/* The port goes and comes back; what is written next, by whichever path, is a test chunk. */
static void end_paths(const char *script)
{
    bed_script("!port fv0 1 down");
    AWAIT(!carries());
    r2_nicstate_forgive(0, r2_now_ns());
    bed_script(script);
    bed_script("!port fv0 1 up");
}

/* The attempt whose test chunk the script has dealt with ends, and has proven nothing. */
static void is_given_up(void)
{
    uint32_t qpn = (uint32_t)bed_script("source");
    struct view v = look_at(qpn);

    WHILE_MS (BED_WAIT_MS, v.found) {
        CHECK(!v.proven);
        v = look_at(qpn);
    }
    CHECK(!v.found);
}

/* A byte of a test chunk, the last one, is another one: that attempt proves nothing, and ends. */
TEST(damaged)
{
    begin();
    end_paths("damage write 16384 16383");
    bed_until_script(2);
    is_given_up();
    back();
    finish();
}

/* A test chunk is acknowledged and not in memory: its path is not proven, and when it lands, its
 * generation long over, nobody is hurt. */
TEST(late)
{
    begin();
    end_paths("late 16384");
    bed_until_script(1);
    is_given_up();
    bed_ms(100); /* the receiver waits for its device */
    bed_script("release");
    back();
    finish();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_IB_QPS", "2", 1);
    return check_main(argc, argv);
}

#endif
