/* What the engine makes of evidence, over a scripted transport (rung 2): the round is made by hand,
 * so nothing here is about how evidence comes to be (test_engine_locate.c). */
#include "check.h"
#include "engine/locate/round.h"
#include "enginelib/remote.h"

#define NICS 2

static struct remote x, y;

/* ---- I/O thread 0, whose rounds are */

static int judged; /* pairs */
static uint64_t failed_at;

/* NIC 0 is silent to both, and another node reaches x: if y's silence counted it would be broken.
 * But y's own node has said by now that its NIC is out of order. */
static void judge_both(int nic)
{
    static const struct r2_wire_addr third = {.family = 4, .ip = {127, 9, 9, 9}};
    struct r2_wire_addr at_x = remote_addr(&x, nic), at_y = remote_addr(&y, nic);
    uint64_t now = r2_now_ns();
    struct r2_round *r;
    int own, to_x, to_y;

    r2_rounds_failed(x.conn->peer, nic, nic, R2_VIA_TCP, now);
    r2_rounds_failed(y.conn->peer, nic, nic, R2_VIA_TCP, now);
    r = r2_round_open(nic);
    if (!r)
        return;
    r2_peer_lock(y.conn->peer);
    y.conn->peer->rnics[nic].word = R2_NIC_FAILED;
    r2_peer_unlock(y.conn->peer);
    own = r2_own_index(&r->ev, nic);
    to_x = r2_evidence_nic(&r->ev, &at_x, "x");
    to_y = r2_evidence_nic(&r->ev, &at_y, "y");
    r2_evidence_add(&r->ev, own, to_x, R2_SEEN_SILENT, true, now);
    r2_evidence_add(&r->ev, own, to_y, R2_SEEN_SILENT, true, now);
    r2_evidence_add(&r->ev, r2_evidence_nic(&r->ev, &third, "third"), to_x, R2_SEEN_ANSWERED, true,
                    now);
    judged = r->n_suspects;
    r2_round_conclude(r, now);
    r2_round_free(r, now);
    r2_peer_lock(y.conn->peer);
    y.conn->peer->rnics[nic].word = R2_NIC_USABLE;
    r2_peer_unlock(y.conn->peer);
}

/* NIC 0 is silent to x and to another node, while x works. */
static void judge_alone(int nic)
{
    static const struct r2_wire_addr third = {.family = 4, .ip = {127, 9, 9, 9}},
                                     fourth = {.family = 4, .ip = {127, 9, 9, 10}};
    struct r2_wire_addr at_x = remote_addr(&x, nic);
    uint64_t now = r2_now_ns();
    struct r2_round *r;
    int own, to_x;

    r2_rounds_failed(x.conn->peer, nic, nic, R2_VIA_TCP, failed_at);
    r = r2_round_open(nic);
    if (!r)
        return;
    own = r2_own_index(&r->ev, nic);
    to_x = r2_evidence_nic(&r->ev, &at_x, "x");
    r2_evidence_add(&r->ev, own, to_x, R2_SEEN_SILENT, true, now);
    r2_evidence_add(&r->ev, own, r2_evidence_nic(&r->ev, &third, "third"), R2_SEEN_SILENT, true,
                    now);
    r2_evidence_add(&r->ev, r2_evidence_nic(&r->ev, &fourth, "fourth"), to_x, R2_SEEN_ANSWERED,
                    true, now);
    judged = r->n_suspects;
    r2_round_conclude(r, now);
    r2_round_free(r, now);
}

/* ---- cases */

/* The word about the second NIC is known when the first pair is judged. */
TEST(words_before_verdicts)
{
    remote_new(&x, true, NICS);
    CHECK(remote_open(&x, NICS));
    remote_new(&y, false, NICS);
    CHECK(remote_open(&y, NICS));
    CHECK(remote_command(judge_both, 0));
    CHECK_EQ(judged, 2);
    CHECK(r2_nic_usable(0));
    remote_end(&x);
    remote_end(&y);
}

/* Few NICs are probed, and new connections may find no room where old ones work: a NIC over which a
 * heartbeat was answered after the failure is not at fault. One before it says nothing. */
TEST(heartbeats_count)
{
    remote_new(&x, true, NICS);
    CHECK(remote_open(&x, NICS));
    remote_new(&y, false, NICS);
    CHECK(remote_open(&y, NICS));
    for (int before = 0; before < 2; before++) {
        fake_pass_ms(1500); /* a verdict on a pair stands for a second */
        failed_at = r2_now_ns();
        fake_pass_ms(before ? 0 : 200);
        judged = 0;
        CHECK(remote_command(judge_alone, 0));
        CHECK_EQ(judged, 1);
        CHECK_EQ(r2_nic_usable(0), !before);
    }
    remote_end(&x);
    remote_end(&y);
    remote_nic_back(0);
}

int main(int argc, char **argv)
{
    remote_engine(NICS, remote_outlives);
    return check_main(argc, argv);
}
