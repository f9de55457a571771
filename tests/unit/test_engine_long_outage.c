/* A path is away for an hour and fails thousands of attempts. It is found within a second of being
 * mended. Transport and clock are scripted (rung 2). The clock is the machine's plus what the test
 * adds: it goes from one attempt to the next. Three NICs, the last of which stays up. It cannot
 * prove how soon a real NIC answers. */
#include "added_time.h"
#include "check.h"
#include "enginelib/remote.h"

#define NICS 3
#define HOUR_NS (3600 * R2_NS_PER_S)
#define CAP_NS R2_PROBE_NS
#define NONE_LEFT_NS (250 * R2_NS_PER_MS)
#define HUNDREDS 400
#define SLACK_NS (100 * R2_NS_PER_MS) /* in which the test and the engine get their cores */

static struct remote r;

struct view {
    uint32_t gen;
    int fails;
    uint64_t attempt_at, next_at;
};

static struct view view_of(int nic)
{
    struct r2_peer *p = r.conn->peer;
    const struct r2_path *path;
    struct view v;

    r2_peer_lock(p);
    path = r2_path_find(p, nic, nic, R2_VIA_TCP);
    v = (struct view){path->gen, path->attempt.fails, path->attempt.at, path->attempt.next_at};
    pthread_mutex_unlock(&p->lock);
    return v;
}

static void nothing(int unused)
{
    (void)unused;
}

/* The peer's task has run since. */
static void turn(void)
{
    r2_peer_wake(r.conn->peer);
    CHECK(remote_command(nothing, 0));
}

static void forward(uint64_t to)
{
    uint64_t now = r2_now_ns();

    if (to > now)
        add_time(to - now);
}

/* `nics` paths are lost, and nobody is found by connecting. */
static void lose(int nics)
{
    remote_new(&r, true, NICS);
    CHECK(remote_open(&r, NICS));
    fake_policy(r.id, -EHOSTUNREACH);
    for (int i = 0; i < nics; i++)
        fake_fail(fake_find(r.id, i, i, 0), ECONNRESET, false);
}

struct waits {
    uint64_t least, most;
    int n, same; /* as another NIC's at that time */
};

/* The clock goes on to the next attempt of any of the NICs, which fails; what it then waits is
 * added. `early`: attempts in a row that are still close together. */
static void step(int nics, uint64_t cap, int early, struct waits *w, uint64_t *last)
{
    struct view before[NICS], after;
    uint64_t next = UINT64_MAX;

    for (int i = 0; i < nics; i++) {
        before[i] = view_of(i);
        next = before[i].next_at < next ? before[i].next_at : next;
    }
    forward(next);
    turn();
    for (int i = 0; i < nics; i++) {
        uint64_t wait;

        after = view_of(i);
        if (after.gen == before[i].gen)
            continue;
        CHECK_LE(after.attempt_at, before[i].next_at + cap + SLACK_NS);
        wait = after.next_at - after.attempt_at;
        CHECK_LE(wait, cap);
        if (after.fails <= early)
            continue;
        CHECK_GE(wait, cap - cap / 5);
        w->least = wait < w->least ? wait : w->least;
        w->most = wait > w->most ? wait : w->most;
        w->n++;
        last[i] = wait;
        for (int k = 0; k < nics; k++)
            w->same += k != i && last[k] == wait;
    }
}

/* It answers again from now on. */
static void mend(int nic, uint64_t within)
{
    uint64_t from = r2_now_ns();
    struct view v = view_of(nic);

    fake_policy(r.id, 0);
    CHECK_LE(v.next_at, from + within + SLACK_NS);
    forward(v.next_at);
    turn();
    CHECK_EQ(view_of(nic).gen, v.gen + 1);
    CHECK(remote_path(&r, nic, v.gen));
    CHECK(remote_wait_state(&r, nic, R2_PATH_PROVEN));
}

static void away(int nics, uint64_t cap, int attempts)
{
    struct waits w = {.least = UINT64_MAX};
    uint64_t last[NICS] = {0}, from;

    lose(nics);
    from = r2_now_ns();
    while (attempts ? w.n < attempts : r2_now_ns() - from < HOUR_NS)
        step(nics, cap, 8, &w, last);
    CHECK_GE(w.n, HUNDREDS);
    CHECK_LE(w.least, cap - cap / 6); /* all of a fifth is made use of */
    CHECK_GE(w.most, cap - cap / 30);
    CHECK_LE(w.same, w.n / 50);
    mend(0, cap);
    remote_end(&r);
}

TEST(hundreds)
{
    away(1, CAP_NS, HUNDREDS);
}

/* Two paths, an hour of attempts: about four thousand of each. */
TEST(an_hour_later)
{
    away(2, CAP_NS, 0);
}

static uint64_t waits_since(void)
{
    struct r2_peer *p = r.conn->peer;
    uint64_t since;

    r2_peer_lock(p);
    since = p->no_path_since;
    pthread_mutex_unlock(&p->lock);
    return since;
}

/* A message of one chunk goes over the path, and is acknowledged. */
static void deliver(struct r2_ep *ep, uint64_t seq)
{
    static uint8_t message[64 << 10];
    struct r2_req *req = NULL;
    struct r2_bulk chunk;

    CHECK_EQ(r2_engine_isend(r.conn, message, sizeof(message), 0, NULL, &req), 0);
    CHECK(req);
    CHECK_EQ(remote_cts(ep, &r, seq, sizeof(message)), 0);
    CHECK(fake_next(ep, &chunk));
    CHECK(fake_chunk_sent(ep, &chunk));
    CHECK_EQ(remote_ack(ep, &r, seq + 1), 0);
    CHECK_EQ(remote_test(req, 3000, NULL), 1);
}

/* A path that comes back and delivers nothing does not end the wait, or a network that lets nothing
 * but test chunks through would be waited for without end. One that has delivered does: the next
 * loss has all of R2CCL_NO_PATH_TIMEOUT. */
TEST(what_ends_the_wait)
{
    uint64_t first, again;

    lose(NICS);
    first = waits_since();
    CHECK(first);
    for (int delivers = 0; delivers < 2; delivers++) {
        uint64_t seen = fake_find(r.id, 0, 0, 0)->params.gen;
        struct r2_ep *ep;

        forward(r2_now_ns() + 10 * R2_NS_PER_S);
        mend(0, NONE_LEFT_NS);
        ep = fake_find(r.id, 0, 0, seen);
        CHECK(ep);
        if (delivers) {
            deliver(ep, 0);
            fake_pass_ms(200); /* the peer's timer has looked */
        }
        fake_policy(r.id, -EHOSTUNREACH);
        fake_fail(ep, ECONNRESET, false);
        again = waits_since();
        if (!delivers)
            CHECK_EQ(again, first);
    }
    CHECK_GT(again, first + 20 * R2_NS_PER_S);
    remote_end(&r);
}

/* No path is left: the best pair of each NIC is tried more often, for as long as it is waited for.
 */
TEST(none_left)
{
    away(NICS, NONE_LEFT_NS, 3 * HUNDREDS);
}

int main(int argc, char **argv)
{
    remote_engine(NICS, "R2CCL_DAMP=0 R2CCL_NO_PATH_TIMEOUT=10h R2CCL_LOCATE=0 R2CCL_GREY=0 "
                        "heartbeat_misses=50");
    return check_main(argc, argv);
}
