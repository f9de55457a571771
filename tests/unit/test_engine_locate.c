/* Localisation and what two ends tell each other, over a scripted transport (rung 2). The engine
 * has three NICs; two remote processes on nodes of their own, one of them sent to, one received
 * from, have three each. Nothing answers a probe unless the test says so.
 *
 * It proves who is probed and told, and what follows; not that a real probe is answered. */
#include "check.h"
#include "engine/locate/round.h"
#include "enginelib/remote.h"

#define NICS 3
#define ROUND_MS 700 /* a round is over by then, on a slow machine too */

static struct remote x, y; /* x: the engine sends to it; y: receives from it */
static uint8_t data[65536];

static struct r2_ep *path_of(struct remote *r, int nic)
{
    struct r2_ep *ep = fake_find(r->id, nic, nic, 0);

    CHECK(ep);
    return ep;
}

static void begin(void)
{
    struct r2_req *req;

    remote_new(&x, true, NICS);
    CHECK(remote_open(&x, NICS));
    remote_new(&y, false, NICS);
    CHECK(remote_open(&y, NICS));
    CHECK_EQ(r2_engine_isend(x.conn, data, sizeof(data), 0, NULL, &req), 0);
    CHECK_EQ(r2_engine_irecv(y.conn, data, sizeof(data), 0, NULL, &req), 0);
}

static void end(void)
{
    remote_end(&x);
    remote_end(&y);
    for (int i = 0; i < NICS; i++) { /* what a verdict took out comes back: nobody is left */
        FAKE_AWAIT(5000, r2_nic_usable(i));
    }
    fake_pass_ms(50);
}

/* For `ms`: every probe of a pair that `answers` says yes to is answered. */
static void play(bool (*answers)(const struct remote *r, int lnic, int rnic), int ms)
{
    struct remote *all[] = {&x, &y};

    for (int t = 0; t < ms; t += 5) {
        for (int i = 0; i < 2; i++) {
            for (int l = 0; l < NICS; l++) {
                for (int r = 0; r < NICS; r++) {
                    struct r2_ep *p = fake_probe_at(all[i]->id, l, r);

                    if (p && answers(all[i], l, r))
                        fake_fail(p, EALREADY, false);
                }
            }
        }
        fake_pass_ms(5);
    }
}

static bool nobody(const struct remote *r, int lnic, int rnic)
{
    (void)r;
    (void)lnic;
    (void)rnic;
    return false;
}

static bool everybody(const struct remote *r, int lnic, int rnic)
{
    (void)r;
    (void)lnic;
    (void)rnic;
    return true;
}

static bool only_y(const struct remote *r, int lnic, int rnic)
{
    (void)lnic;
    (void)rnic;
    return r == &y;
}

static bool hears_ms(struct remote *r, uint8_t type, void *body, size_t cap, int ms)
{
    for (int t = 0; t <= ms; t++) {
        for (int i = 0; i < NICS; i++) {
            if (remote_up(r, i) && remote_hear_ms(path_of(r, i), type, body, cap, 0) >= 0)
                return true;
        }
        if (t < ms)
            fake_pass_ms(1);
    }
    return false;
}

/* A path to NIC 0 of the remote process fails; the round for ours has begun when it returns. */
static struct r2_ep *fail(struct remote *r, int err)
{
    struct r2_ep *gone = path_of(r, 0);

    fake_fail(gone, err, false);
    fake_pass_ms(30);
    return gone;
}

/* The remote process says what its NIC `nic`, or another process, saw. */
static void tells(struct remote *r, int via, int nic, struct r2_wire_addr from,
                  struct r2_wire_addr to, enum r2_seen outcome)
{
    struct {
        struct r2_msg_seen m;
        struct r2_wire_seen s;
    } __attribute__((packed)) f = {.m = {.nic = remote_addr(r, nic), .seen = 1}};

    f.s.from = from;
    f.s.to = to;
    f.s.outcome = (uint8_t)outcome;
    f.s.reached = 1;
    memset(f.s.from_label, 'x', sizeof(f.s.from_label)); /* no end: it is untrusted */
    CHECK_EQ(fake_ctrl(path_of(r, via), R2_F_SEEN, &f, sizeof(f)), 0);
}

/* The verdict that the row of our NIC's path to theirs shows. */
static const char *verdict_on(struct remote *r, int nic)
{
    static char text[R2_FINDING_WHY];
    struct r2_path *path;

    r2_peer_lock(r->conn->peer);
    path = r2_path_find(r->conn->peer, nic, nic, R2_VIA_TCP);
    snprintf(text, sizeof(text), "%s", path->shown.verdict);
    r2_peer_unlock(r->conn->peer);
    return text;
}

static void check_verdict(struct remote *r, const char *begins)
{
    const char *text = verdict_on(r, 0);

    CHECK_MSG(strncmp(text, begins, strlen(begins)) == 0, "it is \"%s\"", text);
}

static void wait_nic_word(struct remote *r, int nic, int usable)
{
    struct remote_info m;

    for (int t = 0; t < 400; t++) {
        if (hears_ms(r, R2_F_INFO, &m, sizeof(m), 5) &&
            (m.nics[nic].word == R2_NIC_USABLE) == (usable != 0))
            return;
    }
    CHECK_MSG(false, "no word that NIC %d is %s", nic, usable ? "usable" : "down");
}

static struct r2_wire_addr own(int nic)
{
    struct r2_wire_addr a;

    fake_ops.address(nic, &a);
    return a;
}

/* x's NIC 0: our NIC 0 still reaches y, x's NIC 0 is silent to y as well. */
TEST(remote_nic)
{
    begin();
    fail(&x, ETIMEDOUT);
    tells(&x, 1, 0, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_SILENT);
    play(only_y, ROUND_MS);
    check_verdict(&x, "remote NIC: silent to");
    CHECK(r2_nic_usable(0));
    CHECK(remote_up(&y, 0));
    end();
}

/* Our NIC 0: silent to both, and they reach each other. It fails for all peers at once, all are
 * told, and it comes back with its first path. */
TEST(local_nic)
{
    struct r2_ep *gone;

    begin();
    gone = fail(&x, ETIMEDOUT);
    tells(&x, 1, 0, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_ANSWERED);
    play(nobody, ROUND_MS);
    check_verdict(&x, "local NIC: silent to");
    CHECK(!r2_nic_usable(0));
    CHECK(!remote_up(&y, 0));
    wait_nic_word(&y, 0, 0);
    wait_nic_word(&x, 0, 0);
    CHECK(remote_path(&x, 0, gone->params.gen)); /* its paths go on trying */
    wait_nic_word(&y, 0, 1);
    CHECK(r2_nic_usable(0));
    end();
}

/* Neither end reaches anybody, and both processes are there: no NIC is blamed. That x is there
 * counts only if it speaks of the path's own NIC. */
TEST(rail)
{
    begin();
    fail(&x, ETIMEDOUT);
    tells(&x, 1, 1, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_SILENT);
    play(nobody, ROUND_MS);
    check_verdict(&x, "undecided: the other end did not say");
    CHECK(remote_path(&x, 0, 0));
    fake_pass_ms(1500); /* a verdict on a pair stands for a second */
    fail(&x, ETIMEDOUT);
    tells(&x, 1, 0, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_SILENT);
    play(nobody, ROUND_MS);
    check_verdict(&x, "link or switch: neither end");
    CHECK(r2_nic_usable(0));
    end();
}

/* It works again by the time it is asked: nobody is blamed. */
TEST(transient)
{
    uint64_t before = __atomic_load_n(&r2_eng.n->verdicts, __ATOMIC_RELAXED);

    begin();
    fake_fail(path_of(&x, 0), ECONNRESET, false);
    play(everybody, ROUND_MS);
    CHECK(r2_nic_usable(0));
    CHECK_EQ(__atomic_load_n(&r2_eng.n->verdicts, __ATOMIC_RELAXED), before + 1);
    end();
}

/* Whatever x claims: our NIC answered a probe of ours, so it is not to blame. */
TEST(liar)
{
    begin();
    fail(&x, ETIMEDOUT);
    tells(&x, 1, 0, own(0), remote_addr(&y, 0), R2_SEEN_SILENT); /* about our own NIC */
    play(only_y, ROUND_MS);
    CHECK(r2_nic_usable(0));
    CHECK(remote_up(&y, 0));
    end();
}

/* Many paths of one NIC fail together, to several processes: one round. */
TEST(one_round)
{
    uint64_t before = __atomic_load_n(&r2_eng.n->locate_rounds, __ATOMIC_RELAXED);

    begin();
    fake_fail(path_of(&x, 0), ETIMEDOUT, false);
    fake_fail(path_of(&y, 0), ETIMEDOUT, false);
    play(nobody, ROUND_MS);
    CHECK_EQ(__atomic_load_n(&r2_eng.n->locate_rounds, __ATOMIC_RELAXED), before + 1);
    end();
}

/* A process that is gone, or that no path reaches, starts no round (invariant "silence is not
 * failure"). Its paths fail at once: where the machine let time pass in between, the first ones
 * rightly start one, and it is tried again. */
TEST(no_path_left)
{
    struct r2_ep *eps[NICS];
    uint64_t before, begun;

    for (int t = 0; t < 20; t++) {
        begin();
        before = __atomic_load_n(&r2_eng.n->locate_rounds, __ATOMIC_RELAXED);
        for (int i = 0; i < NICS; i++)
            eps[i] = path_of(&x, i);
        begun = r2_now_ns();
        for (int i = 0; i < NICS; i++)
            fake_fail(eps[i], ECONNRESET, false);
        begun = r2_now_ns() - begun;
        fake_pass_ms(200);
        if (begun < R2_SETTLE_NS) {
            CHECK_EQ(__atomic_load_n(&r2_eng.n->locate_rounds, __ATOMIC_RELAXED), before);
            end();
            return;
        }
        fake_pass_ms(ROUND_MS);
        end();
    }
    CHECK_MSG(false, "no time to fail all paths at once");
}

static bool hear_seen(struct remote *r, struct r2_wire_seen *seen, struct r2_msg_seen *m, int ms)
{
    uint8_t body[sizeof(*m) + R2_WIRE_MAX_SEEN * sizeof(*seen)];

    if (!hears_ms(r, R2_F_SEEN, body, sizeof(body), ms))
        return false;
    memcpy(m, body, sizeof(*m));
    memcpy(seen, body + sizeof(*m), m->seen * sizeof(*seen));
    return true;
}

static enum r2_seen outcome(const struct r2_wire_seen *seen, uint32_t n, struct r2_wire_addr from,
                            struct r2_wire_addr to)
{
    for (uint32_t i = 0; i < n; i++) {
        if (r2_same_nic(&seen[i].from, &from) && r2_same_nic(&seen[i].to, &to))
            return (enum r2_seen)seen[i].outcome;
    }
    return R2_SEEN_NOTHING;
}

/* The other end hears what our NIC saw, over two paths; a third node does not. */
TEST(told)
{
    struct r2_wire_addr nic = own(0);
    struct r2_wire_seen seen[R2_WIRE_MAX_SEEN];
    struct r2_msg_seen m = {.seen = 0};

    begin();
    fail(&x, ETIMEDOUT);
    play(only_y, 450);
    CHECK(hear_seen(&x, seen, &m, 0) && hear_seen(&x, seen, &m, 0));
    CHECK(r2_same_nic(&m.nic, &nic));
    CHECK_EQ(outcome(seen, m.seen, own(0), remote_addr(&x, 0)), R2_SEEN_SILENT);
    CHECK_EQ(outcome(seen, m.seen, own(0), remote_addr(&y, 0)), R2_SEEN_ANSWERED);
    CHECK(!hear_seen(&x, seen, &m, 0) && !hear_seen(&y, seen, &m, 0));
    end();
}

/* What peers say unasked, and what they say again, begins nothing and changes nothing. */
TEST(flood)
{
    int before;

    begin();
    before = fake_count(x.id) + fake_count(y.id);
    for (int i = 0; i < 300; i++) {
        tells(&x, 1, i % NICS, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_ANSWERED);
        fake_pass_ms(1);
    }
    CHECK_EQ(fake_count(x.id) + fake_count(y.id), before);
    fail(&x, ETIMEDOUT);
    tells(&x, 1, 0, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_SILENT);
    for (int i = 0; i < 300; i++) /* takes its word back, and y speaks for x */
        tells(i % 2 ? &x : &y, 1, 0, remote_addr(&x, 0), remote_addr(&y, 0), R2_SEEN_ANSWERED);
    play(nobody, ROUND_MS);
    check_verdict(&x, "link or switch: neither end");
    CHECK(r2_nic_usable(0) && r2_nic_usable(1) && r2_nic_usable(2));
    end();
}

/* No answer counts as silence only of what had the time to answer. */
TEST(silence_takes_time)
{
    struct r2_wire_addr addr;

    begin();
    addr = remote_addr(&x, 1);
    for (int i = 0; i < 2; i++) {
        struct r2_round r = {.lnic = 1};
        uint64_t now = r2_now_ns();
        struct r2_target *t = r2_target_add(&r, 1, &addr, 1, x.id, "nic1@x", true);

        r.next_try =
            now + R2_TRY_NS; /* the round's next turn is far: a late one is asked at once */
        r2_targets_tick(&r, now);
        CHECK_EQ(t->tries, 1);
        r2_targets_close(&r, now + (i ? R2_TRY_NS : R2_TRY_NS / 2));
        CHECK(t->closed);
        CHECK_EQ(t->outcome, i ? R2_SEEN_SILENT : R2_SEEN_NOTHING);
    }
    end();
}

/* ---- what two ends tell each other */

/* One side is blind: the word of the other is enough, over any living path, in either direction,
 * and saying it twice or late changes nothing. */
TEST(one_side_blind)
{
    struct r2_ep *a, *b, *again;

    begin();
    a = path_of(&y, 0); /* we receive: the sender says DOWN */
    CHECK_EQ(remote_down(path_of(&y, 1), a), 0);
    CHECK(remote_wait_flag(&a->is_shut));
    CHECK(remote_hear(path_of(&y, 1), R2_F_FENCED, NULL, 0) >= 0 ||
          remote_hear(path_of(&y, 2), R2_F_FENCED, NULL, 0) >= 0);
    again = remote_path(&y, 0, a->params.gen);
    CHECK(again);
    CHECK_EQ(remote_down(path_of(&y, 2), a), 0); /* late, over another path */
    CHECK_EQ(remote_down(path_of(&y, 1), a), 0);
    fake_pass_ms(50);
    CHECK(remote_up(&y, 0));
    CHECK(!atomic_load(&again->is_shut));

    b = path_of(&x, 0); /* we send: the receiver says that it has fenced it */
    CHECK_EQ(remote_fenced(path_of(&x, 1), b), 0);
    CHECK(remote_wait_flag(&b->is_shut));
    again = remote_path(&x, 0, b->params.gen);
    CHECK(again);
    CHECK_EQ(remote_fenced(path_of(&x, 2), b), 0);
    fake_pass_ms(50);
    CHECK(remote_up(&x, 0));
    end();
}

/* Both sides at the same instant: DOWN crosses FENCED, and each comes twice. */
TEST(both_at_once)
{
    struct r2_msg_path m;
    struct r2_ep *a, *b;

    begin();
    a = path_of(&y, 0);
    fake_fail(a, ETIMEDOUT, false);
    CHECK_EQ(remote_down(path_of(&y, 1), a), 0);
    CHECK_EQ(remote_down(path_of(&y, 2), a), 0);
    CHECK(remote_wait_flag(&a->is_shut));
    CHECK(hears_ms(&y, R2_F_FENCED, &m, sizeof(m), 1000));
    CHECK_EQ(m.gen, a->params.gen);
    CHECK(remote_up(&y, 1));

    b = path_of(&x, 0);
    fake_fail(b, ETIMEDOUT, false); /* our DOWN is on its way */
    CHECK_EQ(remote_fenced(path_of(&x, 1), b), 0);
    CHECK_EQ(remote_fenced(path_of(&x, 2), b), 0);
    CHECK(remote_wait_flag(&b->is_shut));
    CHECK(remote_path(&x, 0, b->params.gen));
    CHECK(remote_up(&x, 1));
    end();
}

/* Words about one NIC overtake each other on different paths: the newest epoch stands. */
TEST(words_reordered)
{
    struct r2_ep *a;

    begin();
    a = path_of(&x, 0);
    CHECK_EQ(remote_nic(path_of(&x, 2), 0, true, 7), 0); /* "back", said last, comes first */
    CHECK_EQ(remote_nic(path_of(&x, 1), 0, false, 6), 0);
    CHECK_EQ(remote_nic(path_of(&x, 1), 0, false, 6), 0);
    fake_pass_ms(100);
    CHECK(remote_up(&x, 0));
    CHECK(!atomic_load(&a->is_shut));
    CHECK_EQ(remote_nic(path_of(&x, 1), 0, false, 8), 0);
    CHECK(remote_wait_flag(&a->is_shut));
    CHECK_EQ(remote_nic(path_of(&x, 2), 0, true, 7), 0); /* late */
    fake_pass_ms(50);
    CHECK_EQ(remote_state(&x, 0), R2_PATH_WAIT);
    CHECK_EQ(remote_nic(path_of(&x, 1), 0, true, 9), 0);
    CHECK(remote_path(&x, 0, a->params.gen));
    end();
}

int main(int argc, char **argv)
{
    /* One NIC fails in many tests: without damping. */
    remote_engine(NICS, "R2CCL_NO_PATH_TIMEOUT=20s R2CCL_HEARTBEAT=10s heartbeat_idle=10s "
                        "R2CCL_DAMP=0 R2CCL_LOG=none");
    return check_main(argc, argv);
}
