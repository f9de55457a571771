/* News about NICs is repeated until it is acknowledged, over a scripted transport (rung 2): frames
 * and acknowledgements that are lost, come twice, cross, overtake each other, or never come. */
#include "engine/locate/round.h"
#include "health_bed.h"

#define QUIET_MS 1300 /* longer than the longest time between two repetitions, with its tick */

static uint32_t epoch_of(int nic)
{
    return atomic_load(&r2_eng.nic_state[nic].epoch);
}

/* Words about NIC `nic` on the endpoint that were not taken yet; the newest of them. */
static int words(struct r2_ep *e, int nic, struct r2_msg_nic *last)
{
    int n = 0;

    fake_pull(e);
    for (int i = 0; i < e->n_frames; i++) {
        struct r2_msg_nic m;

        if (e->frames[i].taken || e->frames[i].type != R2_F_NIC)
            continue;
        memcpy(&m, e->frames[i].body, sizeof(m));
        if (m.nic != nic)
            continue;
        e->frames[i].taken = true;
        *last = m;
        n++;
    }
    return n;
}

/* Both paths, for so long. */
static int words_in(int ms, int nic, struct r2_msg_nic *last, int *each)
{
    uint64_t end = r2_now_ns() + (uint64_t)ms * R2_NS_PER_MS;
    int n[2] = {0};

    while (r2_now_ns() < end) {
        for (int i = 0; i < 2; i++)
            n[i] += words(ep[i], nic, last);
        fake_pass_ms(2);
    }
    if (each)
        memcpy(each, n, sizeof(n));
    return n[0] + n[1];
}

static bool hear_word(int nic, enum r2_nic_word word, struct r2_msg_nic *m)
{
    for (int i = 0; i < REMOTE_WAIT_MS; i++) {
        for (int k = 0; k < 2; k++) {
            if (words(ep[k], nic, m) && m->word == word)
                return true;
        }
        fake_pass_ms(1);
    }
    return false;
}

static int say_heard(struct r2_ep *e, int nic, uint32_t number)
{
    struct r2_msg_heard m = {.nic = (uint8_t)nic, .number = number};

    return fake_ctrl(e, R2_F_HEARD, &m, sizeof(m));
}

/* All that this process has ever said. */
static void hear_all(struct r2_ep *e)
{
    for (int i = 0; i < 2; i++)
        CHECK_EQ(say_heard(e, i, epoch_of(i)), 0);
    remote_forget(ep[0]);
    remote_forget(ep[1]);
}

static void start(bool out)
{
    begin(out);
    hear_all(ep[1]);
}

static bool heard(struct r2_ep *e, struct r2_msg_heard *m)
{
    return remote_hear(e, R2_F_HEARD, m, sizeof(*m)) >= 0;
}

static void give_back(void)
{
    CHECK(remote_command(remote_undrain, 0));
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
}

/* The word is lost, and its repetitions: they go on, over one path and the other, ever less often,
 * until one is heard; then there is no other, whatever becomes of paths. */
TEST(lost_words)
{
    struct r2_msg_nic m = {0};
    struct r2_ep *next;
    int each[2], n;

    start(true);
    post(MSG);
    CHECK_EQ(words_in(QUIET_MS, 0, &m, NULL), 0); /* nothing to say */
    r2_nicstate_announce(0);
    n = words_in(5000, 0, &m, each); /* at 0, 0.1, 0.3, 0.7, 1.5, 2.5, 3.5, 4.5 s */
    CHECK(n >= 5 && n <= 9);
    CHECK(each[0] >= 2 && each[1] >= 2);
    CHECK_EQ(m.epoch, epoch_of(0));
    CHECK_EQ(say_heard(ep[1], 0, m.epoch), 0);
    words_in(5, 0, &m, NULL);
    CHECK_EQ(words_in(QUIET_MS, 0, &m, NULL), 0);
    fake_fail(ep[1], ECONNRESET, false);
    next = remote_path(&r, 1, ep[1]->params.gen);
    CHECK(next);
    fake_pass_ms(200);
    CHECK_EQ(words(next, 0, &m), 0);
    CHECK_EQ(words(ep[0], 0, &m), 0);
    remote_end(&r);
}

/* The answer is lost with its path: the word comes again at once over what is left. */
TEST(lost_answer)
{
    struct r2_msg_nic m = {0};

    start(true);
    post(MSG);
    r2_nicstate_announce(0);
    CHECK(hear_word(0, R2_NIC_USABLE, &m));
    fake_fail(ep[1], ECONNRESET, false);
    CHECK(say_heard(ep[1], 0, m.epoch) <= 0); /* of a dead generation: not believed */
    CHECK(words(ep[0], 0, &m) > 0);
    CHECK_EQ(m.epoch, epoch_of(0));
    CHECK_EQ(say_heard(ep[0], 0, m.epoch), 0);
    remote_forget(ep[0]);
    fake_pass_ms(QUIET_MS);
    CHECK_EQ(words(ep[0], 0, &m), 0);
    remote_end(&r);
}

/* News while the last is unheard: the newest is repeated, its number counts, and what was heard of
 * older ones, sooner or later, does not end it. */
TEST(newer_words)
{
    struct r2_msg_nic first = {0}, m = {0};

    start(true);
    post(MSG);
    CHECK(remote_command(remote_drain, 0));
    CHECK(hear_word(0, R2_NIC_DRAINED, &first));
    CHECK(remote_command(remote_undrain, 0));
    CHECK(hear_word(0, R2_NIC_USABLE, &m));
    CHECK(m.epoch > first.epoch);
    CHECK_EQ(say_heard(ep[1], 0, first.epoch), 0);
    CHECK(words_in(QUIET_MS, 0, &m, NULL) > 0);
    CHECK_EQ(m.epoch, epoch_of(0));
    CHECK_EQ(m.word, R2_NIC_USABLE);
    CHECK_EQ(say_heard(ep[1], 0, m.epoch), 0);
    CHECK_EQ(say_heard(ep[1], 0, first.epoch), 0); /* overtaken */
    words_in(5, 0, &m, NULL);
    CHECK_EQ(words_in(QUIET_MS, 0, &m, NULL), 0);
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
}

/* Nobody hears it any more, and then nobody is there: nothing is said without a path, all is said
 * with the first one. */
TEST(no_path_meanwhile)
{
    struct r2_msg_nic m = {0};
    struct r2_ep *next;

    start(true);
    post(MSG);
    r2_nicstate_announce(0);
    fake_fail(ep[0], ECONNRESET, false);
    fake_fail(ep[1], ECONNRESET, false);
    r2_nicstate_announce(0);
    fake_pass_ms(300);
    next = remote_path(&r, 1, ep[1]->params.gen);
    CHECK(next);
    for (int i = 0; i < 1000 && !words(next, 0, &m); i++)
        fake_pass_ms(1);
    CHECK_EQ(m.epoch, epoch_of(0));
    fake_fail(next, ECONNRESET, false);
    remote_end(&r); /* unheard */
    fake_pass_ms(300);
}

/* A peer that is made anew has heard nothing: it is told what there is once, and no more. */
TEST(new_peer)
{
    struct r2_msg_nic m = {0};

    r2_nicstate_announce(0);
    begin(true);
    CHECK(words_in(QUIET_MS, 0, &m, NULL) > 0);
    CHECK_EQ(m.epoch, epoch_of(0));
    hear_all(ep[0]);
    CHECK_EQ(words_in(QUIET_MS, 0, &m, NULL), 0);
    remote_end(&r);
}

/* The peer's words: each is answered with the newest that was heard, also one that came twice or
 * late, which changes nothing. */
TEST(answered)
{
    struct r2_msg_heard m;
    uint64_t since;

    start(true);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK(heard(ep[1], &m));
    CHECK(m.nic == 0 && m.number == 5);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    since = since_of(0);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK(heard(ep[1], &m));
    CHECK(m.nic == 0 && m.number == 5);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 1000, 4), 0);
    CHECK(heard(ep[1], &m));
    CHECK(m.nic == 0 && m.number == 5);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    CHECK_EQ(since_of(0), since);
    CHECK_EQ(remote_word(ep[1], 7, R2_NIC_DOWN, 1000, 4), 0); /* one without an address */
    CHECK(heard(ep[1], &m));
    CHECK(m.nic == 7 && m.number == 4);
    CHECK_EQ(remote_word(ep[1], R2_MAX_NICS, R2_NIC_DOWN, 1000, 4), -EPROTO);
    remote_end(&r);
}

/* The word ends the path that brought it: the answer takes another one. */
TEST(answered_elsewhere)
{
    struct r2_msg_heard m;

    start(true);
    post(MSG);
    CHECK_EQ(remote_word(ep[1], 1, R2_NIC_DOWN, 1000, 5), 0);
    CHECK(heard(ep[0], &m));
    CHECK(m.nic == 1 && m.number == 5);
    remote_end(&r);
}

/* Both say something at once, on paths that die: in the end each has heard the other's. */
TEST(crossing)
{
    struct r2_msg_heard h;
    struct r2_msg_nic m = {0};

    start(true);
    post(MSG);
    CHECK(remote_command(remote_drain, 0));
    CHECK_EQ(remote_word(ep[0], 1, R2_NIC_DRAINED, 1000, 5), 0);
    fake_fail(ep[0], ECONNRESET, false); /* with its word, or its answer, or both */
    CHECK_EQ(remote_word(ep[1], 1, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK(heard(ep[1], &h));
    CHECK(h.nic == 1 && h.number == 5);
    CHECK(hear_word(0, R2_NIC_DRAINED, &m));
    CHECK_EQ(say_heard(ep[1], 0, m.epoch), 0);
    CHECK_EQ(health_of(1), R2_HEALTH_DRAINED);
    words(ep[1], 0, &m);
    fake_pass_ms(QUIET_MS);
    CHECK_EQ(words(ep[1], 0, &m), 0);
    give_back();
}

/* What was never said cannot have been heard. */
TEST(strange_answers)
{
    start(true);
    CHECK_EQ(say_heard(ep[1], 0, epoch_of(0) + 1), -EPROTO);
    CHECK_EQ(say_heard(ep[1], 0, UINT32_MAX), -EPROTO);
    CHECK_EQ(say_heard(ep[1], 2, 0), -EPROTO);
    CHECK_EQ(say_heard(ep[1], 255, 0), -EPROTO);
    remote_end(&r);
}

/* A peer that does not read: what is repeated for it does not pile up. */
TEST(not_read)
{
    struct r2_msg_nic m = {0};
    struct r2_path *path;
    size_t before, after;

    start(true);
    path = path_of(0);
    r2_peer_lock(path->peer);
    for (int i = 0; i < 2; i++) {
        static uint8_t body[60000];

        while (!r2_out_full(path_of(i)))
            CHECK_EQ(r2_out_frame(path_of(i), R2_F_HEARTBEAT, body, sizeof(body), NULL, 0), 0);
    }
    before = path_of(0)->outbox.len + path_of(1)->outbox.len;
    pthread_mutex_unlock(&path->peer->lock);
    for (int i = 0; i < 200; i++)
        r2_nicstate_announce(0);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 1000, 5), 0);
    fake_pass_ms(500);
    r2_peer_lock(path->peer);
    after = path_of(0)->outbox.len + path_of(1)->outbox.len;
    for (int i = 0; i < 2; i++)
        path_of(i)->outbox.len = path_of(i)->outbox.off; /* it reads again */
    pthread_mutex_unlock(&path->peer->lock);
    CHECK(after < before + 1024);
    CHECK(words_in(QUIET_MS, 0, &m, NULL) > 0);
    CHECK_EQ(m.epoch, epoch_of(0));
    remote_end(&r);
}

static void forgive(int nic)
{
    r2_nicstate_forgive(nic, r2_now_ns());
}

static void set_penalty(double penalty)
{
    r2_peer_lock(r.conn->peer);
    path_of(0)->damp.penalty = penalty;
    pthread_mutex_unlock(&r.conn->peer->lock);
}

/* That failures are forgotten is said once for each time, however often it is repeated. */
TEST(forgiven_once)
{
    struct r2_msg_nic m = {.nic = 0, .word = R2_NIC_USABLE, .forgiven = 1, .epoch = 9}, mine = {0};
    int was = atomic_load(&r2_eng.nic_state[0].forgiven);

    start(true);
    post(MSG);
    set_penalty(500);
    CHECK_EQ(fake_ctrl(ep[1], R2_F_NIC, &m, sizeof(m)), 0);
    CHECK(penalty_of(0) == 0);
    set_penalty(500);
    CHECK_EQ(fake_ctrl(ep[1], R2_F_NIC, &m, sizeof(m)), 0); /* again */
    m.epoch = 10;
    CHECK_EQ(fake_ctrl(ep[0], R2_F_NIC, &m, sizeof(m)), 0); /* other news */
    CHECK(penalty_of(0) > 0);
    m.epoch = 11;
    m.forgiven = 2;
    CHECK_EQ(fake_ctrl(ep[0], R2_F_NIC, &m, sizeof(m)), 0);
    CHECK(penalty_of(0) == 0);
    CHECK(remote_command(forgive, 0));
    CHECK(words_in(300, 0, &mine, NULL) >= 2);
    CHECK_EQ(mine.forgiven, (uint8_t)(was + 1));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    return bed_main(argc, argv);
}
