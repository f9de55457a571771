/* Health of paths over a scripted transport (rung 2): test chunks before job data, ramps, words
 * about NICs, drains that lose nothing, damping. Times: health_bed.h. */
#include "health_bed.h"
#include "journal_look.h"

/* A path that is back hands out test chunks only, and small messages do not take it either, until
 * the other side has them all. */
TEST(proven_before_data)
{
    struct r2_msg_test m;
    struct r2_ep *back;
    struct r2_bulk b;
    uint32_t bytes = 0;

    begin(true);
    CHECK_EQ(health_of(0), R2_HEALTH_HEALTHY); /* the first time nothing has to be proven */
    fake_fail(ep[0], ECONNRESET, false);
    CHECK(wait_health(0, R2_HEALTH_PROBING, 1000));
    back = again(0, ep[0]->params.gen);
    post(MSG);
    CHECK_EQ(remote_cts(ep[1], &r, 0, MSG), 0);
    CHECK_GE(remote_hear(back, R2_F_TEST, &m, sizeof(m)), 0);
    CHECK_EQ(m.gen, back->params.gen);
    CHECK_GE(m.bytes, 128 * KB); /* bulk, not only words */
    while (fake_next(back, &b)) {
        CHECK_EQ(b.conn, R2_CONN_TEST);
        bytes += b.len;
        CHECK(fake_chunk_sent(back, &b));
    }
    CHECK_EQ(bytes, m.bytes);
    fake_fail(ep[1], ECONNRESET, false); /* even with no other path left */
    CHECK_EQ(r2_engine_isend(r.conn, data, 64, 0, NULL, &(struct r2_req *){NULL}), 0);
    CHECK_EQ(remote_hear_ms(back, R2_F_EAGER, NULL, 0, 100), -1);
    CHECK(!fake_next(back, &b));
    m.bytes -= 1;
    CHECK_EQ(fake_ctrl(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK(!fake_next(back, &b)); /* one byte is missing */
    m.bytes += 1;
    m.gen--;
    CHECK_EQ(fake_ctrl(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK(!fake_next(back, &b)); /* of another generation */
    m.gen++;
    CHECK_EQ(fake_ctrl(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    CHECK(fake_next(back, &b));
    CHECK_EQ(b.conn, r.conn_id);
    CHECK_GE(remote_hear(back, R2_F_EAGER, NULL, 0), 0);
    remote_end(&r);
}

/* Test chunks that do not arrive end the attempt, and the next one comes. */
TEST(unproven_is_given_up)
{
    struct r2_ep *back;

    begin(true);
    post(MSG);
    fake_fail(ep[0], ECONNRESET, false);
    back = again(0, ep[0]->params.gen);
    CHECK(remote_wait_flag(&back->is_shut));
    CHECK_EQ(health_of(0), R2_HEALTH_PROBING); /* not another failure */
    CHECK(fake_find(r.id, 0, 0, back->params.gen));
    CHECK_LT(penalty_of(0), 1500);
    remote_end(&r);
}

TEST(ramp_in_the_engine)
{
    uint32_t last = 0, now = 0;

    begin(true);
    fake_fail(ep[0], ECONNRESET, false);
    CHECK(remote_path(&r, 0, ep[0]->params.gen));
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    post(MSG);
    for (int i = 0; i < 3000 && health_of(0) == R2_HEALTH_RAMPING; i++) {
        now = weight_of(0);
        CHECK(now >= last && now > 0);
        if (!last)
            CHECK_LT(now, 700);
        last = now;
        fake_pass_ms(5);
    }
    CHECK_EQ(health_of(0), R2_HEALTH_HEALTHY);
    fake_pass_ms(60);
    CHECK_EQ(weight_of(0), 1000);
    remote_end(&r);
}

/* Trouble during the ramp: it begins again. */
TEST(trouble_in_the_ramp)
{
    struct r2_ep *back;
    uint64_t began;

    begin(true);
    fake_fail(ep[0], ECONNRESET, false);
    back = remote_path(&r, 0, ep[0]->params.gen);
    CHECK(back);
    began = since_of(0);
    post(MSG);
    atomic_store(&back->silent, true);
    for (int i = 0; i < REMOTE_WAIT_MS && since_of(0) == began; i++)
        fake_pass_ms(1);
    CHECK_GT(since_of(0), began);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    remote_end(&r);
}

TEST(suspect_and_answer)
{
    begin(true);
    post(MSG);
    atomic_store(&ep[0]->silent, true);
    CHECK(wait_health(0, R2_HEALTH_SUSPECT, REMOTE_WAIT_MS));
    CHECK(remote_up(&r, 0));
    atomic_store(&ep[0]->silent, false);
    CHECK(wait_health(0, R2_HEALTH_HEALTHY, REMOTE_WAIT_MS));
    CHECK(!atomic_load(&ep[0]->is_shut));
    remote_end(&r);
}

/* The receiver drains its NIC: no new chunks, those under way are acknowledged, then the path is
 * closed, and not a byte is sent again. */
TEST(drained_by_the_peer)
{
    uint64_t replayed = __atomic_load_n(&r2_eng.n->replayed_bytes, __ATOMIC_RELAXED);
    struct r2_bulk b, more;
    struct r2_ep *back;

    begin(true);
    post(MSG);
    CHECK_EQ(remote_cts(ep[1], &r, 0, MSG), 0);
    CHECK(fake_next(ep[0], &b));
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 3), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    CHECK(!fake_next(ep[0], &more));
    fake_pass_ms(150);
    CHECK(!atomic_load(&ep[0]->is_shut)); /* a chunk is under way */
    CHECK(fake_chunk_sent(ep[0], &b));
    fake_pass_ms(100);
    CHECK(!atomic_load(&ep[0]->is_shut)); /* and not acknowledged */
    CHECK_EQ(remote_ack_range(ep[1], &r, b.seq, b.offset, b.len), 0);
    fake_pull(ep[0]);
    for (int i = 0; i < REMOTE_WAIT_MS && !atomic_load(&ep[0]->is_shut); i++) {
        fake_pull(ep[0]);
        fake_pass_ms(1);
    }
    CHECK(atomic_load(&ep[0]->is_shut));
    CHECK(fake_next(ep[1], &more)); /* the other path goes on */
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    fake_pass_ms(300);
    CHECK_EQ(remote_state(&r, 0), R2_PATH_WAIT); /* nobody tries it */
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 1000, 4), 0);
    back = remote_path(&r, 0, ep[0]->params.gen);
    CHECK(back);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    CHECK_EQ(__atomic_load_n(&r2_eng.n->replayed_bytes, __ATOMIC_RELAXED), replayed);
    remote_end(&r);
}

/* FAILED: not used, but probed; DOWN: not even tried while another path is up. */
TEST(failed_is_probed)
{
    struct r2_ep *next;

    begin(true);
    post(MSG);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_FAILED, 1000, 3), 0);
    CHECK(remote_wait_flag(&ep[0]->is_shut));
    next = fake_find(r.id, 0, 0, ep[0]->params.gen);
    CHECK(next);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DOWN, 1000, 4), 0);
    CHECK(remote_wait_flag(&next->is_shut));
    fake_pass_ms(1300);
    CHECK_EQ(remote_state(&r, 0), R2_PATH_WAIT);
    remote_end(&r);
}

/* The weight that the peer gives its NIC counts as one of ours. */
TEST(weight_of_the_peer)
{
    struct r2_bulk b;

    begin(true);
    post(MSG);
    CHECK_EQ(remote_cts(ep[1], &r, 0, MSG), 0);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 0, 3), 0);
    CHECK(!fake_next(ep[0], &b));
    CHECK(fake_next(ep[1], &b));
    fake_fail(ep[1], ECONNRESET, false);
    CHECK(fake_next(ep[0], &b)); /* a warm spare */
    remote_end(&r);
}

/* Three failures in a row: left alone; then tried again, or at once when nothing else is left, or
 * when the peer's operator says so. */
static void damped(void)
{
    struct r2_ep *e;

    begin(true);
    post(MSG);
    e = ep[0];
    for (int i = 0; i < 3; i++) {
        if (i)
            e = remote_path(&r, 0, e->params.gen);
        CHECK(e);
        fake_fail(e, ECONNRESET, false);
    }
    CHECK_EQ(health_of(0), R2_HEALTH_DAMPED);
    fake_pass_ms(300);
    CHECK_EQ(remote_state(&r, 0), R2_PATH_WAIT);
    CHECK_EQ(health_of(0), R2_HEALTH_DAMPED);
}

TEST(damped_until_it_fades)
{
    uint64_t t0;

    damped();
    t0 = r2_now_ns();
    CHECK(wait_health(0, R2_HEALTH_PROBING, 5000));
    CHECK_GT(r2_now_ns() - t0, 500 * R2_NS_PER_MS);
    remote_end(&r);
}

TEST(the_last_is_not_damped)
{
    damped();
    fake_fail(ep[1], ECONNRESET, false);
    CHECK(wait_health(0, R2_HEALTH_PROBING, 300));
    remote_end(&r);
}

TEST(forgiven)
{
    struct r2_info_nic said = {.word = R2_NIC_USABLE, .forgiven = 1};

    damped();
    CHECK_EQ(remote_word_of(ep[1], 0, &said, 9), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_PROBING);
    CHECK(penalty_of(0) == 0);
    remote_end(&r);
}

/* The accepting side: test chunks are taken, answered once all are there, and written nowhere. */
TEST(answers_tests)
{
    struct r2_msg_test m = {.bytes = 128 * KB};
    struct r2_bulk b = {.conn = R2_CONN_TEST, .len = 64 * KB, .total = 64 * KB};
    struct r2_ep *back;

    begin(false);
    post(MSG);
    fake_fail(ep[0], ECONNRESET, false);
    CHECK_EQ(health_of(0), R2_HEALTH_FAILED);
    back = again(0, ep[0]->params.gen);
    CHECK_EQ(health_of(0), R2_HEALTH_PROBING);
    m.gen = back->params.gen;
    CHECK_EQ(fake_claim(back, &b), 0); /* ahead of the word about it: other lanes, other order */
    CHECK(b.data < data || b.data >= data + sizeof(data));
    memset(b.data, 1, b.len);
    CHECK(fake_done(back, &b));
    CHECK_EQ(fake_ctrl(back, R2_F_TEST, &m, sizeof(m)), 0);
    CHECK_EQ(remote_hear_ms(back, R2_F_TEST_ACK, NULL, 0, 50), -1);
    CHECK_EQ(health_of(0), R2_HEALTH_PROBING);
    CHECK_EQ(fake_claim(back, &b), 0);
    CHECK(fake_dropped(back, &b, false)); /* half a chunk does not count */
    CHECK_EQ(remote_hear_ms(back, R2_F_TEST_ACK, NULL, 0, 50), -1);
    CHECK_EQ(fake_claim(back, &b), 0);
    CHECK(fake_done(back, &b));
    CHECK_GE(remote_hear(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(m.bytes, 128 * KB);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    b.len = 65 * KB;
    CHECK_EQ(fake_claim(back, &b), -EPROTO);
    m.bytes = UINT32_MAX;
    CHECK_EQ(fake_ctrl(back, R2_F_TEST, &m, sizeof(m)), -EPROTO);
    remote_end(&r);
}

/* Word about a NIC is lost with the path that it was said on: it is said again on the next one, and
 * the peer's own, which crosses it, is repeated too, and changes nothing the second time. */
TEST(said_again)
{
    struct remote_info m;
    struct r2_ep *next;

    begin(true);
    post(MSG);
    remote_forget(ep[1]);
    CHECK(remote_command(remote_drain, 0));
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 5), 0); /* they cross */
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    fake_fail(ep[1], ECONNRESET, false); /* nobody has read what was said there */
    next = remote_path(&r, 1, ep[1]->params.gen);
    CHECK(next);
    CHECK_GE(remote_hear(next, R2_F_INFO, &m, sizeof(m)), 0);
    CHECK_EQ(m.nics[0].word, R2_NIC_DRAINED);
    CHECK_EQ(remote_word(next, 0, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    CHECK(remote_command(remote_undrain, 0));
    do
        CHECK_GE(remote_hear(next, R2_F_INFO, &m, sizeof(m)), 0);
    while (m.nics[0].word != R2_NIC_USABLE);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED); /* the peer's half of it stands */
    CHECK_EQ(remote_word(next, 0, R2_NIC_USABLE, 1000, 6), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING); /* its path was up all the time */
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
}

/* A bulk lane that takes nothing is not proven, and neither is the path. */
TEST(every_lane_is_proven)
{
    uint32_t bytes = 0, lanes = 0;
    struct r2_msg_test m;
    struct r2_ep *back;
    struct r2_bulk b;

    begin(true);
    fake_fail(ep[0], ECONNRESET, false);
    back = again(0, ep[0]->params.gen);
    CHECK_GE(remote_hear(back, R2_F_TEST, &m, sizeof(m)), 0);
    back->asking = 3; /* of four */
    for (int i = 0; i < 32; i++) {
        if (!fake_next(back, &b))
            continue;
        bytes += b.len;
        lanes |= 1u << b.lane;
        CHECK(fake_chunk_sent(back, &b));
    }
    CHECK_EQ(lanes, 7);
    CHECK_EQ(bytes, m.bytes / 4 * 3);
    back->asking = 4;
    for (int i = 0; i < 8; i++) {
        if (!fake_next(back, &b))
            continue;
        bytes += b.len;
        CHECK_EQ(b.lane, 3);
        CHECK(fake_chunk_sent(back, &b));
    }
    CHECK_EQ(bytes, m.bytes);
    CHECK_EQ(fake_ctrl(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    remote_end(&r);
}

static bool warned_of_packets(void)
{
    struct r2_segment *seg = r2_control_segment(r2_eng.ctl);

    for (uint64_t n = journal_tail(seg); n < journal_head(seg); n++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, n);

        if (e && e->event == R2_EV_WARNING && strstr(e->cause, "large packets"))
            return true;
    }
    return false;
}

/* Attempts with large packets fail, one with small packets does not, but so many of its segments
 * are sent again. */
static void small_after_large(int retransmits)
{
    uint32_t gen = ep[0]->params.gen;
    struct r2_msg_test m;
    struct r2_ep *back;

    fake_fail(ep[0], ECONNRESET, false);
    for (int i = 0; i < 2; i++) {
        back = again(0, gen);
        gen = back->params.gen;
        CHECK_EQ(back->params.packet, 0);
        CHECK(remote_wait_flag(&back->is_shut));
    }
    back = again(0, gen);
    CHECK_EQ(back->params.packet, 1280);
    CHECK_GE(remote_hear(back, R2_F_TEST, &m, sizeof(m)), 0);
    atomic_store(&back->segments, 200);
    atomic_store(&back->retransmits, retransmits);
    CHECK_EQ(fake_ctrl(back, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(health_of(0), R2_HEALTH_RAMPING);
    ep[0] = back;
}

/* Packets of any size get lost at random: that is no matter of the MTU. */
TEST(loss_is_no_matter_of_packets)
{
    struct r2_ep *back;

    begin(true);
    small_after_large(60);
    fake_pass_ms(300); /* heartbeats */
    CHECK(!warned_of_packets());
    fake_fail(ep[0], ECONNRESET, false);
    back = again(0, ep[0]->params.gen);
    CHECK_EQ(back->params.packet, 0); /* the next one is made as any other */
    remote_end(&r);
}

TEST(small_packets_alone_arrive)
{
    begin(true);
    small_after_large(0);
    FAKE_AWAIT(5000, warned_of_packets());
    remote_end(&r);
}

int main(int argc, char **argv)
{
    return bed_main(argc, argv);
}
