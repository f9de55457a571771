/* When slow NICs are what is waited for (engine/sched/slownics.c), over a scripted transport (rung
 * 2): all paths are slow, full, and more waits. What follows from it: test_standin, test_pollers.
 */
#include <sys/wait.h>

#include "check.h"
#include "engine/path/path.h"
#include "engine/sched/sched.h"
#include "enginelib/remote.h"
#include "io/pause.h"

#define LEN (1u << 20)
#define MESSAGES 16
#define CHUNK (32 * 1024) /* what remote_rate counts by */
#define PER_CHUNK(rate) ((uint64_t)CHUNK * R2_NS_PER_S / (rate))
#define SLOW PER_CHUNK(125000000)             /* ns: 1 Gbit/s */
#define FAST PER_CHUNK(UINT64_C(2500000000))  /* ... 20 */
#define MIDDLE PER_CHUNK(UINT64_C(560000000)) /* ... 4.5, of which three are too many */

static struct remote r;
static struct r2_ep *a; /* the path of NIC 0 */
static uint8_t data[LEN];
static struct r2_req *reqs[MESSAGES];

static void nothing_limits(void)
{
    FAKE_AWAIT(1000, !r2_pause_limited(r2_now_ns()));
}

/* Of the bed's peer, since it began. Whether that still holds is a matter of 20 ms. */
static bool limited(void)
{
    return atomic_load(&r.conn->peer->limited_until) != 0;
}

/* Whether they help; no thread of NCCL's is under way. */
static void help(bool on)
{
    ((struct r2_settings *)(uintptr_t)r2_eng.set)->help_progress = on;
}

/* All of `paths` NICs, each as fast as `ns` says; what is known of them is no start-up's. */
static void start(int paths, const uint64_t *ns, int messages)
{
    nothing_limits();
    remote_new(&r, true, 3);
    CHECK(remote_open(&r, paths));
    for (int nic = 0; nic < paths; nic++) {
        struct r2_ep *ep = fake_find(r.id, nic, nic, 0);
        struct r2_path *path = ep->params.owner;

        if (ns[nic])
            remote_rate(ep, ns[nic]);
        r2_peer_lock(path->peer);
        path->rate.startup = !ns[nic];
        path->rate.probing_rtt = false;
        r2_peer_unlock(path->peer);
    }
    a = fake_find(r.id, 0, 0, 0);
    for (int i = 0; i < messages; i++) {
        CHECK_EQ(r2_engine_isend(r.conn, data, LEN, 0, NULL, &reqs[i]), 0);
        CHECK_EQ(remote_cts(a, &r, (uint64_t)i, LEN), 0);
    }
}

/* Takes all that the first path may have; the flags of the latest chunk. */
static uint32_t fill(struct r2_bulk *latest, int *n)
{
    *n = 0;
    while (fake_next(a, latest)) {
        CHECK(fake_chunk_sent(a, latest));
        ++*n;
        CHECK(*n < 1000);
    }
    return *n ? latest->flags : 0;
}

/* That chunks came at once says nothing. */
static void still_slow(void)
{
    struct r2_path *path = a->params.owner;

    r2_peer_lock(path->peer);
    memset(path->rate.bucket, 0, sizeof(path->rate.bucket));
    path->rate.bucket[path->rate.bucket_now] = 125000000;
    path->rate.startup = path->rate.probing_rtt = false;
    r2_peer_unlock(path->peer);
}

/* All up to this chunk, of the first message, has arrived. */
static void all_came(const struct r2_bulk *c)
{
    CHECK_EQ(c->seq, 0);
    CHECK_EQ(remote_ack_range(a, &r, 0, 0, c->offset + c->len), 0);
    still_slow();
}

TEST(full_and_slow)
{
    struct r2_bulk c;
    int n;

    start(1, (const uint64_t[]){SLOW}, MESSAGES);
    CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, 0); /* nothing was full before */
    CHECK(n > 1);
    CHECK(limited());
    all_came(&c);
    CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, R2_BULK_LIMITED); /* the receiver is told */
    CHECK(n > 0);
    remote_end(&r);
}

/* What is not known yet limits nobody. Nor does a path that is to run empty for its round trip, or
 * that still has bytes which came another way. */
TEST(not_known_yet)
{
    struct r2_bulk c;
    int n;

    for (int i = 0; i < 3; i++) {
        struct r2_path *path;

        start(1, (const uint64_t[]){SLOW}, MESSAGES);
        path = a->params.owner;
        r2_peer_lock(path->peer);
        path->rate.startup = i == 0;
        path->rate.probing_rtt = i == 1;
        path->flow.busy_until = i == 2 ? r2_now_ns() + R2_NS_PER_S : 0;
        r2_peer_unlock(path->peer);
        CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, 0);
        CHECK(n > 0);
        CHECK(!limited());
        remote_end(&r);
    }
}

/* It was full, then took all there was: what comes later is not marked. */
TEST(was_full)
{
    struct r2_bulk c;
    uint64_t sum = 0;
    int n;

    start(1, (const uint64_t[]){MIDDLE}, 2);
    for (int turn = 0; turn < 100 && sum < 2 * LEN; turn++) {
        struct r2_bulk sent[2 * LEN / (64 * 1024)];

        for (n = 0; fake_next(a, &sent[n]); n++) {
            CHECK(fake_chunk_sent(a, &sent[n]));
            sum += sent[n].len;
        }
        while (n--)
            CHECK_EQ(remote_ack_range(a, &r, sent[n].seq, sent[n].offset, sent[n].len), 0);
        still_slow();
    }
    CHECK_EQ(sum, 2 * LEN);
    CHECK(limited());
    CHECK_EQ(r2_engine_isend(r.conn, data, LEN, 0, NULL, &reqs[2]), 0);
    CHECK_EQ(remote_cts(a, &r, 2, LEN), 0);
    CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, 0);
    CHECK(n > 0);
    remote_end(&r);
}

/* It takes all there is: what it waits for is the application. */
TEST(nothing_waits)
{
    struct r2_bulk c;
    int n;

    start(1, (const uint64_t[]){MIDDLE}, 1);
    CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, 0);
    CHECK(!limited());
    remote_end(&r);
}

static void under_way(struct r2_ep *ep, uint64_t bytes, bool ends)
{
    struct r2_path *path = ep->params.owner;
    struct r2_rate_stamp stamp;

    r2_peer_lock(path->peer);
    if (ends)
        r2_pathrate_on_lost(&path->rate, bytes);
    else
        r2_pathrate_on_send(&path->rate, bytes, r2_now_ns(), &stamp);
    r2_peer_unlock(path->peer);
}

/* Less waits than all have room for: who has least under way is asked, whatever its number; else
 * the last of many NICs would never carry anything. Once more where this thread lost its core for
 * so long that what is under way seems overdue. */
TEST(emptiest_is_asked)
{
    static const uint64_t had[] = {8 * LEN, LEN / 4, LEN / 8}; /* that of home is full */
    bool asked = false;

    for (int turn = 0; turn < 5 && !asked; turn++) {
        struct r2_ep *by[3];
        struct r2_bulk one;
        int kicks[3];

        start(3, (const uint64_t[]){SLOW, SLOW, SLOW}, 0);
        for (int i = 0; i < 3; i++) {
            by[i] = fake_find(r.id, i, i, 0);
            under_way(by[i], had[i], false);
            kicks[i] = atomic_load(&by[i]->kicks);
        }
        CHECK_EQ(r2_engine_isend(r.conn, data, CHUNK, 0, NULL, &reqs[0]), 0);
        CHECK_EQ(remote_cts(a, &r, 0, CHUNK), 0);
        asked = atomic_load(&by[2]->kicks) > kicks[2] && atomic_load(&by[1]->kicks) == kicks[1];
        CHECK(!fake_next(by[0], &one) && fake_next(by[2], &one));
        for (int i = 0; i < 3; i++)
            under_way(by[i], had[i], true);
        remote_end(&r);
    }
    CHECK(asked);
}

/* One of which nothing is known comes before all, even with a higher number than one that is idle.
 */
TEST(unknown_is_asked)
{
    struct r2_ep *idle, *unknown;
    int kicks[2];

    start(3, (const uint64_t[]){SLOW, SLOW, 0}, 0);
    idle = fake_find(r.id, 1, 1, 0);
    unknown = fake_find(r.id, 2, 2, 0);
    under_way(a, 8 * LEN, false);
    kicks[0] = atomic_load(&idle->kicks);
    kicks[1] = atomic_load(&unknown->kicks);
    CHECK_EQ(r2_engine_isend(r.conn, data, CHUNK, 0, NULL, &reqs[0]), 0);
    CHECK_EQ(remote_cts(a, &r, 0, CHUNK), 0);
    CHECK(atomic_load(&unknown->kicks) > kicks[1]);
    CHECK_EQ(atomic_load(&idle->kicks), kicks[0]);
    under_way(a, 8 * LEN, true);
    remote_end(&r);
}

/* A fast one, one of which little is known, and so many that one thread could not carry them. */
TEST(others_are_not_slow)
{
    static const uint64_t beds[][3] = {
        {SLOW, FAST, 0}, {SLOW, 0, 0}, {MIDDLE, MIDDLE, MIDDLE}, {FAST, SLOW, 0}};
    static const int paths[] = {2, 2, 3, 2};

    for (int i = 0; i < 4; i++) {
        struct r2_bulk c;
        int n;

        start(paths[i], beds[i], MESSAGES);
        CHECK_EQ(fill(&c, &n) & R2_BULK_LIMITED, 0);
        CHECK_MSG(!limited(), "bed %d", i);
        remote_end(&r);
    }
    start(2, (const uint64_t[]){SLOW, FAST}, MESSAGES);
    fake_fail(fake_find(r.id, 1, 1, 0), ECONNRESET, false); /* slow ones are left */
    fill(&(struct r2_bulk){0}, &(int){0});
    CHECK(limited());
    remote_end(&r);
    for (int pairs = 0; pairs < 2; pairs++) { /* nobody stands in for what watches queue pairs */
        struct r2_path *other;

        start(2, (const uint64_t[]){SLOW, SLOW}, MESSAGES);
        other = fake_find(r.id, 1, 1, 0)->params.owner;
        r2_peer_lock(other->peer);
        other->transport = pairs ? R2_VIA_VERBS : R2_VIA_TCP;
        r2_peer_unlock(other->peer);
        fill(&(struct r2_bulk){0}, &(int){0});
        CHECK_EQ(limited(), !pairs);
        r2_peer_lock(other->peer);
        other->transport = R2_VIA_TCP;
        r2_peer_unlock(other->peer);
        remote_end(&r);
    }
    start(3, (const uint64_t[]){SLOW, SLOW, SLOW}, MESSAGES);
    fill(&(struct r2_bulk){0}, &(int){0});
    CHECK(limited());
    remote_end(&r);
}

/* The next chunk of the path when all before it have arrived. */
static uint32_t next_flags(struct r2_bulk *c)
{
    CHECK(fake_next(a, c));
    CHECK(fake_chunk_sent(a, c));
    return c->flags & R2_BULK_LIMITED;
}

/* A path that was full. Its chunks are not marked, though more waits all the time, once its rate is
 * known to be higher. The same goes if nothing of it is known, as of a new generation. */
TEST(not_any_more)
{
    for (int i = 0; i < 2; i++) {
        struct r2_path *path;
        struct r2_bulk c;
        int n;

        start(1, (const uint64_t[]){SLOW}, MESSAGES);
        fill(&c, &n);
        CHECK(limited());
        all_came(&c);
        path = a->params.owner;
        r2_peer_lock(path->peer);
        if (i == 0)
            path->rate.bucket[path->rate.bucket_now] = UINT64_C(2500000000);
        else
            path->rate.startup = true;
        r2_peer_unlock(path->peer);
        CHECK_EQ(next_flags(&c), 0);
        remote_end(&r);
    }
}

/* Where callers may not help nobody would stand in: threads go on polling. */
TEST(no_help)
{
    struct r2_bulk c;
    int n;

    help(false);
    start(1, (const uint64_t[]){SLOW}, MESSAGES);
    fill(&c, &n);
    all_came(&c);
    CHECK_EQ(next_flags(&c), R2_BULK_LIMITED); /* the other end may */
    CHECK(!limited());
    help(true);
    remote_end(&r);
}

static const char env[] = "R2CCL_IO_THREADS=3";

/* Either end's own NIC is known to be fast: something else is slow. In a process of its own, where
 * no peer of another case looks at the NIC while it is changed. */
static void fast_nic(void)
{
    struct r2_nic *nic;
    struct r2_bulk c;
    int n;

    remote_engine(3, env);
    nic = (struct r2_nic *)(uintptr_t)r2_engine_nic(0);
    nic->speed_known = true;
    nic->speed_mbps = 100000;
    start(1, (const uint64_t[]){SLOW}, MESSAGES);
    fill(&c, &n);
    all_came(&c);
    CHECK_EQ(next_flags(&c), 0);
    CHECK(!limited());
    c.flags = R2_BULK_LIMITED;
    r2_peer_lock(r.conn->peer);
    r2_limited_marked(a->params.owner, &c);
    r2_peer_unlock(r.conn->peer);
    CHECK(!limited());
    remote_end(&r);
}

static int fast_nic_status;

TEST(fast_nic)
{
    CHECK_EQ(fast_nic_status, 0);
}

/* By the receiver: what the sender marked. */
TEST(marked)
{
    struct r2_req *req = NULL;
    uint64_t said;
    bool now = false;
    struct r2_ep *ep;
    struct r2_bulk c;

    nothing_limits();
    remote_new(&r, false, 2);
    CHECK(remote_open(&r, 1));
    ep = fake_find(r.id, 0, 0, 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, LEN, 0, NULL, &req), 0);
    for (int marked = 0; marked < 2; marked++) {
        c = remote_chunk(&r, 0, (uint64_t)marked * CHUNK, CHUNK, LEN);
        c.flags |= marked ? R2_BULK_LIMITED : 0;
        CHECK_EQ(fake_claim(ep, &c), 0);
        CHECK(fake_done(ep, &c));
        CHECK_EQ(limited(), marked);
    }
    fake_pass_ms(10);
    said = atomic_load(&r.conn->peer->limited_until);
    CHECK_EQ(fake_claim(ep, &c), 1); /* is here already: says nothing */
    CHECK_EQ(atomic_load(&r.conn->peer->limited_until), said);
    for (int i = 0; i < 100 && !now; i++) { /* this thread may be off its core for longer */
        r2_peer_lock(r.conn->peer);
        r2_limited_marked(ep->params.owner, &c);
        r2_peer_unlock(r.conn->peer);
        now = r2_pause_limited(r2_now_ns()) && r2_limited_now(r.conn->peer, r2_now_ns());
    }
    CHECK(now);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    pid_t pid = fork();

    CHECK_GE(pid, 0);
    if (pid == 0) {
        alarm(60);
        fast_nic();
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &fast_nic_status, 0), pid);
    remote_engine(3, env);
    return check_main(argc, argv);
}
