/* Whether a process still exists, over a scripted transport (rung 2): what refusals prove, and how
 * long questions are waited for. The time without a path is 20 s. It cannot prove what kernels
 * answer. */
#include "liveness_bed.h"

/* A listener that is not there in one moment, and is in the next. */
TEST(one_refusal)
{
    for (int out = 0; out < 2; out++) {
        lose(out, 2);
        for (int n = 0; n < 2; n++) /* once at each NIC */
            end_trial(await_trial(n), ECONNREFUSED);
        CHECK_EQ(remote_test(req, 1500, NULL), 0);
        back(0);
        CHECK_EQ(remote_test(req, 50, NULL), 0);
        remote_end(&r);
    }
}

/* A process that is gone: its host refuses at every NIC, and goes on to. Another process that has
 * its address is as good. */
TEST(process_is_gone)
{
    static const int how[] = {ECONNREFUSED, ESRCH};

    for (int i = 0; i < 4; i++) {
        uint64_t t0 = r2_now_ns(), took;
        int rc;

        lose(i & 1, 2);
        CHECK_GE(refuse(3, how[i / 2], 5000, &rc), 2);
        took = r2_now_ns() - t0;
        CHECK_EQ(rc, -ECONNRESET);
        CHECK_GE(took, 500 * R2_NS_PER_MS);
        CHECK_LT(took, 3000 * R2_NS_PER_MS); /* 0.6 s on a machine with time */
        remote_end(&r);
    }
}

/* One NIC refuses, the other neither refuses nor answers: the process may listen there. Not for
 * ever, for that one may be dead. */
TEST(the_other_one_is_silent)
{
    for (int out = 0; out < 2; out++) {
        uint64_t t0;
        int rc;

        lose(out, 2);
        t0 = r2_now_ns();
        CHECK_GE(refuse(1, ECONNREFUSED, 1500, &rc), 2);
        CHECK_EQ(rc, 0);
        refuse(1, ECONNREFUSED, 6000, &rc);
        CHECK_EQ(rc, -ECONNRESET);
        CHECK_GE(r2_now_ns() - t0, 2 * R2_NS_PER_S);
        remote_end(&r);
    }
}

/* It has refused once, in the moment in which its interface was made anew. It listens again by the
 * next attempt, which may be out for longer than the other one has to refuse. */
TEST(the_other_one_refused_once)
{
    for (int out = 0; out < 2; out++) {
        uint64_t t0;
        int rc;

        lose(out, 2);
        t0 = r2_now_ns();
        end_trial(await_trial(1), ECONNREFUSED);
        CHECK_GE(refuse(1, ECONNREFUSED, 1300, &rc), 2);
        CHECK_EQ(rc, 0);
        refuse(1, ECONNREFUSED, 6000, &rc);
        CHECK_EQ(rc, -ECONNRESET);
        CHECK_GE(r2_now_ns() - t0, 2 * R2_NS_PER_S);
        remote_end(&r);
    }
}

/* It was silent, and refuses for the first time: its interface is just coming back. */
TEST(the_other_one_comes_back)
{
    for (int out = 0; out < 2; out++) {
        uint64_t t0, refused;
        int rc;

        do { /* time enough to look at it before it is waited for no longer */
            lose(out, 2);
            t0 = r2_now_ns();
            refuse(1, ECONNREFUSED, 700, &rc);
            CHECK_EQ(rc, 0);
            end_trial(await_trial(1), ECONNREFUSED);
            refused = r2_now_ns() - t0;
            rc = remote_test(req, 150, NULL);
            if (refused > 1900 * R2_NS_PER_MS)
                remote_end(&r);
        } while (refused > 1900 * R2_NS_PER_MS);
        CHECK_EQ(rc, 0);
        back(1);
        CHECK_EQ(remote_test(req, 50, NULL), 0);
        remote_end(&r);
    }
}

/* S: one NIC refuses; behind the other the process answers that it wants no path there, for an
 * operator has drained it or it knows a newer one: it lives. */
TEST(the_other_one_wants_none)
{
    int rc;

    lose(true, 2);
    CHECK_GE(answer((int[2]){ECONNREFUSED, ESTALE}, 4000, &rc), 4);
    CHECK_EQ(rc, 0);
    CHECK_GE(refuse(3, ECONNREFUSED, 5000, &rc), 2);
    CHECK_EQ(rc, -ECONNRESET);
    remote_end(&r);
}

/* The same, whatever becomes of the attempt or question after the process has answered it. */
TEST(the_other_one_answers)
{
    for (int out = 0; out < 2; out++) {
        int rc;

        lose(out, 2);
        speaks = true;
        CHECK_GE(answer((int[2]){ECONNREFUSED, out ? ENOMEM : EACCES}, 4000, &rc), 4);
        speaks = false;
        CHECK_EQ(rc, 0);
        CHECK_GE(refuse(3, ECONNREFUSED, 5000, &rc), 2);
        CHECK_EQ(rc, -ECONNRESET);
        remote_end(&r);
    }
}

/* ... unless it is known to be down, and has no say. */
TEST(the_other_one_is_down)
{
    uint64_t took = UINT64_MAX;

    /* 0.6 s; whoever lets it have a say takes 2 s each time, and a busy machine now and then. */
    for (int i = 0; i < 8 && took >= 2 * R2_NS_PER_S; i++) {
        uint64_t t0;
        int rc;

        begin(true, 2);
        CHECK_EQ(remote_nic(fake_find(r.id, 0, 0, 0), 1, false, 5), 0);
        CHECK(remote_wait_state(&r, 1, R2_PATH_WAIT));
        t0 = r2_now_ns();
        lose_one(0);
        refuse(1, ECONNREFUSED, 15000, &rc);
        CHECK_EQ(rc, -ECONNRESET);
        took = r2_now_ns() - t0;
        remote_end(&r);
    }
    CHECK_LT(took, 2 * R2_NS_PER_S);
}

/* NICs that have no say: one over which the process never was met, one that the peer calls down. A
 * host may answer there for another of its NICs, where nobody listens. */
TEST(refused_elsewhere)
{
    int rc;

    for (int out = 0; out < 2; out++) {
        lose(out, 1);
        CHECK_GE(refuse(2, ECONNREFUSED, 2500, &rc), out ? 2 : 0);
        CHECK_EQ(rc, 0);
        remote_end(&r);
        begin(out, 2);
        CHECK_EQ(remote_nic(fake_find(r.id, 1, 1, 0), 0, false, 5), 0);
        CHECK(remote_wait_state(&r, 0, R2_PATH_WAIT));
        lost[0] = fake_find(r.id, 0, 0, 0)->params.gen;
        lose_one(1);
        CHECK_GE(refuse(1, ECONNREFUSED, 2500, &rc), out ? 2 : 0);
        CHECK_EQ(rc, 0);
        remote_end(&r);
    }
}

/* One NIC refuses, the kernel behind the other takes connections: a process that is stopped, and
 * one of whose interfaces was made anew. */
TEST(the_other_one_listens)
{
    for (int out = 0; out < 2; out++) {
        struct r2_ep *e = NULL;
        int rc;

        lose(out, 2);
        for (int i = 0; i < REMOTE_WAIT_MS && !(e = trial(1)); i++)
            refuse(1, ECONNREFUSED, 1, &rc);
        CHECK(e);
        atomic_store(&e->connected, true);
        CHECK_GE(refuse(1, ECONNREFUSED, 3000, &rc), out ? 2 : 0);
        CHECK_EQ(rc, 0);
        CHECK_EQ(trial(1), e);
        end_trial(e, ETIMEDOUT); /* its time is over; whoever stands still does so still */
        CHECK_GE(refuse(1, ECONNREFUSED, 1000, &rc), 1);
        CHECK_EQ(rc, 0);
        back(0);
        CHECK_EQ(remote_test(req, 50, NULL), 0);
        remote_end(&r);
    }
}

/* The process is known to be gone while another NIC's question is still out: that one ends as well,
 * though nobody needs its answer, and the peer is forgotten. Where the last refusal finds no other
 * question out, once more. */
TEST(gone_while_one_asks)
{
    bool out = false;

    for (int turn = 0; turn < 8 && !out; turn++) {
        int rc = 0;

        lose(false, 2);
        for (int i = 0; !rc && i < 4 * REMOTE_WAIT_MS; i++) {
            if (trial(0) && trial(1))
                end_trial(trial(i % 2), ECONNREFUSED);
            rc = remote_test(req, 1, NULL);
        }
        CHECK_EQ(rc, -ECONNRESET);
        out = trial(0) || trial(1);
        CHECK_EQ(r2_engine_close(r.conn), 0);
        r2_engine_close_listen(r.listen);
        for (int ms = 0; ms < REMOTE_WAIT_MS && remote_there(&r); ms++)
            fake_pass_ms(1);
        CHECK(!remote_there(&r) && !trial(0) && !trial(1));
    }
    CHECK(out);
}

/* Once the process has answered, what was refused before proves nothing. */
TEST(answers_between)
{
    for (int out = 0; out < 2; out++) {
        lose(out, 1);
        for (int i = 0; i < 3; i++) {
            end_trial(await_trial(0), ECONNREFUSED);
            CHECK_EQ(remote_test(req, 300, NULL), 0);
            if (out)
                end_trial(back(0), ECONNRESET);
            else
                end_trial(await_trial(0), EALREADY);
        }
        CHECK_EQ(remote_test(req, 0, NULL), 0);
        remote_end(&r);
    }
}

/* What was refused while another path was up says nothing about the time after it. */
TEST(refused_before_the_loss)
{
    int rc;

    begin(true, 2);
    lose_one(0);
    CHECK_GE(refuse(1, ECONNREFUSED, 2500, &rc), 2);
    lose_one(1);
    end_trial(await_trial(1), ECONNREFUSED);
    CHECK_EQ(remote_test(req, 250, NULL), 0);
    refuse(3, ECONNREFUSED, 3000, &rc);
    CHECK_EQ(rc, -ECONNRESET);
    remote_end(&r);
}

/* R: one NIC is left that has met both of the peer's: each of them is asked. */
TEST(every_nic_is_asked)
{
    struct r2_ep *e = NULL;

    lose(false, 1);
    r2_peer_lock(r.conn->peer);
    r.conn->peer->reached[0] |= 2;
    r2_peer_unlock(r.conn->peer);
    for (int i = 0; i < REMOTE_WAIT_MS && !(e = trial_of(0, 1)); i++) {
        if (trial(0))
            end_trial(trial(0), ECONNREFUSED);
        fake_pass_ms(1);
    }
    CHECK(e);
    remote_end(&r);
}

/* R: the same. One of the peer's NICs has refused, and again when a moment was over, the other one
 * is silent: the first goes on being asked, and so the process is found to be gone. */
TEST(silence_of_one_keeps_no_other)
{
    struct r2_liveness *a;
    uint64_t now;
    int rc;

    lose(false, 1);
    r2_peer_lock(r.conn->peer);
    r.conn->peer->reached[0] |= 2;
    a = &r.conn->peer->liveness;
    now = r2_now_ns();
    a->refused_from = a->nic_refused_from[0] = now - 600 * R2_NS_PER_MS;
    a->refused_at = a->nic_refused_at[0] = now;
    r2_peer_unlock(r.conn->peer);
    CHECK_GE(refuse(1, ECONNREFUSED, 12000, &rc), 1);
    CHECK_EQ(rc, -ECONNRESET);
    remote_end(&r);
}

/* Refusals that went on, and then none for longer than they are remembered: no proof, whatever has
 * changed since about who can have a say. */
TEST(old_refusals_prove_nothing)
{
    struct r2_liveness *a;
    uint64_t now;

    lose(true, 1);
    r2_peer_lock(r.conn->peer);
    a = &r.conn->peer->liveness;
    now = r2_now_ns();
    a->refused_from = a->nic_refused_from[0] = now - 10 * R2_NS_PER_S;
    a->refused_at = a->nic_refused_at[0] = now - 7 * R2_NS_PER_S;
    r2_peer_unlock(r.conn->peer);
    CHECK_EQ(remote_test(req, 500, NULL), 0);
    remote_end(&r);
}

/* Over a network that takes long, or loses the first packets, an answer comes after seconds: some
 * questions are waited for, and do not keep the others from being asked. */
TEST(some_questions_are_patient)
{
    struct r2_ep *out[2] = {NULL, NULL};
    uint64_t since[2] = {0, 0}, longest = 0, end;
    int asked = 0;

    lose(false, 2);
    end = r2_now_ns() + 6 * R2_NS_PER_S;
    while (r2_now_ns() < end) {
        for (int i = 0; i < 2; i++) {
            struct r2_ep *e = trial(i);
            uint64_t now = r2_now_ns();

            if (e == out[i])
                continue;
            if (out[i] && now - since[i] > longest)
                longest = now - since[i];
            asked += e != NULL;
            out[i] = e;
            since[i] = now;
        }
        fake_pass_ms(2);
    }
    CHECK_GE(longest, 1500 * R2_NS_PER_MS);
    CHECK_GE(asked, 8); /* 12 on a machine with time; one after the other: 6 */
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* R: one NIC is left that has met both of the peer's. While one of them is given time, the other is
 * asked. */
TEST(patience_keeps_no_other)
{
    struct r2_ep *was = NULL;
    uint64_t since = 0, end;
    bool both = false;

    lose(false, 1);
    r2_peer_lock(r.conn->peer);
    r.conn->peer->reached[0] |= 2;
    r2_peer_unlock(r.conn->peer);
    for (end = r2_now_ns() + 15 * R2_NS_PER_S; !both && r2_now_ns() < end;) {
        struct r2_ep *e = trial_of(0, 0);
        uint64_t now = r2_now_ns();

        since = e == was ? since : now;
        was = e;
        both = e && now - since > 400 * R2_NS_PER_MS && trial_of(0, 1);
        fake_pass_ms(1);
    }
    CHECK(both);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* R: refusals of one NIC have gone on, and another is being given time to answer: it is waited for,
 * and heard. */
TEST(the_patient_one_is_waited_for)
{
    bool heard = false;

    for (int i = 0; i < 5 && !heard; i++) { /* it may be over before it was looked at */
        struct r2_ep *was = NULL, *e = NULL;
        uint64_t since = r2_now_ns(), now = since, end = now + 15 * R2_NS_PER_S;
        struct r2_liveness *a;
        int rc;

        lose(false, 2);
        while (now < end && !(e && now - since > 500 * R2_NS_PER_MS)) {
            e = trial(1);
            now = r2_now_ns();
            since = e == was ? since : now;
            was = e;
            fake_pass_ms(1);
        }
        CHECK(e);
        r2_peer_lock(r.conn->peer);
        a = &r.conn->peer->liveness;
        now = r2_now_ns();
        a->refused_from = a->nic_refused_from[0] = now - 2500 * R2_NS_PER_MS;
        a->refused_at = a->nic_refused_at[0] = now;
        r2_peer_unlock(r.conn->peer);
        rc = remote_test(req, 300, NULL);
        if (trial(1) == e) {
            CHECK_EQ(rc, 0);
            end_trial(e, EALREADY);
            r2_peer_lock(r.conn->peer);
            heard = a->refused_from == 0;
            r2_peer_unlock(r.conn->peer);
        }
        remote_end(&r);
    }
    CHECK(heard);
}

int main(int argc, char **argv)
{
    remote_engine(2, remote_outlives);
    return check_main(argc, argv);
}
