/* News about NICs is repeated until it is acknowledged, over a scripted transport (rung 2): frames
 * and acknowledgements that are lost, come twice, cross, overtake each other, or never come. */
#include "engine/locate/round.h"
#include "health_bed.h"

#define QUIET_MS 1300 /* longer than the longest time between two repetitions, with its tick */

static uint32_t newest(void)
{
    return atomic_load(&r2_eng.news);
}

/* INFO frames on the endpoint that were not taken yet; the newest of them. */
static int words(struct r2_ep *e, struct remote_info *last)
{
    int n = 0;

    fake_pull(e);
    for (int i = 0; i < e->n_frames; i++) {
        if (e->frames[i].taken || e->frames[i].type != R2_F_INFO)
            continue;
        memcpy(last, e->frames[i].body, sizeof(last->m) + 2 * sizeof(last->nics[0]));
        e->frames[i].taken = true;
        n++;
    }
    return n;
}

/* Both paths, for so long. */
static int words_in(int ms, struct remote_info *last, int *each)
{
    uint64_t end = r2_now_ns() + (uint64_t)ms * R2_NS_PER_MS;
    int n[2] = {0};

    while (r2_now_ns() < end) {
        for (int i = 0; i < 2; i++)
            n[i] += words(ep[i], last);
        fake_pass_ms(2);
    }
    if (each)
        memcpy(each, n, sizeof(n));
    return n[0] + n[1];
}

static bool hear_word(int nic, enum r2_nic_word word, struct remote_info *m)
{
    for (int i = 0; i < REMOTE_WAIT_MS; i++) {
        for (int k = 0; k < 2; k++) {
            if (words(ep[k], m) && m->nics[nic].word == word)
                return true;
        }
        fake_pass_ms(1);
    }
    return false;
}

static int say_heard(struct r2_ep *e, uint32_t number)
{
    struct r2_msg_heard m = {.number = number};

    return fake_ctrl(e, R2_F_HEARD, &m, sizeof(m));
}

/* All that this process has ever said. */
static void hear_all(struct r2_ep *e)
{
    CHECK_EQ(say_heard(e, newest()), 0);
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
    struct remote_info m = {0};
    struct r2_ep *next;
    int each[2], n;

    start(true);
    post(MSG);
    CHECK_EQ(words_in(QUIET_MS, &m, NULL), 0); /* nothing to say */
    r2_nicstate_announce(0);
    n = words_in(5000, &m, each); /* at 0, 0.1, 0.3, 0.7, 1.5, 2.5, 3.5, 4.5 s */
    CHECK(n >= 5 && n <= 9);
    CHECK(each[0] >= 2 && each[1] >= 2);
    CHECK_EQ(m.m.number, newest());
    CHECK_EQ(say_heard(ep[1], m.m.number), 0);
    words_in(5, &m, NULL);
    CHECK_EQ(words_in(QUIET_MS, &m, NULL), 0);
    fake_fail(ep[1], ECONNRESET, false);
    next = remote_path(&r, 1, ep[1]->params.gen);
    CHECK(next);
    fake_pass_ms(200);
    CHECK_EQ(words(next, &m), 1); /* its first frame */
    CHECK_EQ(words(ep[0], &m), 0);
    remote_end(&r);
}

/* The answer is lost with its path: the word comes again at once over what is left. */
TEST(lost_answer)
{
    struct remote_info m = {0};

    start(true);
    post(MSG);
    r2_nicstate_announce(0);
    CHECK(hear_word(0, R2_NIC_USABLE, &m));
    fake_fail(ep[1], ECONNRESET, false);
    CHECK(say_heard(ep[1], m.m.number) <= 0); /* of a dead generation: not believed */
    CHECK(words(ep[0], &m) > 0);
    CHECK_EQ(m.m.number, newest());
    CHECK_EQ(say_heard(ep[0], m.m.number), 0);
    remote_forget(ep[0]);
    fake_pass_ms(QUIET_MS);
    CHECK_EQ(words(ep[0], &m), 0);
    remote_end(&r);
}

/* News while the last is unheard: the newest is repeated, its number counts, and what was heard of
 * older ones, sooner or later, does not end it. */
TEST(newer_words)
{
    struct remote_info first = {0}, m = {0};

    start(true);
    post(MSG);
    CHECK(remote_command(remote_drain, 0));
    CHECK(hear_word(0, R2_NIC_DRAINED, &first));
    CHECK(remote_command(remote_undrain, 0));
    CHECK(hear_word(0, R2_NIC_USABLE, &m));
    CHECK(m.m.number > first.m.number);
    CHECK_EQ(say_heard(ep[1], first.m.number), 0);
    CHECK(words_in(QUIET_MS, &m, NULL) > 0);
    CHECK_EQ(m.m.number, newest());
    CHECK_EQ(m.nics[0].word, R2_NIC_USABLE);
    CHECK_EQ(say_heard(ep[1], m.m.number), 0);
    CHECK_EQ(say_heard(ep[1], first.m.number), 0); /* overtaken */
    words_in(5, &m, NULL);
    CHECK_EQ(words_in(QUIET_MS, &m, NULL), 0);
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
}

/* Nobody hears it any more, and then nobody is there: nothing is said without a path, all is said
 * with the first one. */
TEST(no_path_meanwhile)
{
    struct remote_info m = {0};
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
    for (int i = 0; i < 1000 && !words(next, &m); i++)
        fake_pass_ms(1);
    CHECK_EQ(m.m.number, newest());
    fake_fail(next, ECONNRESET, false);
    remote_end(&r); /* unheard */
    fake_pass_ms(300);
}

/* A peer that is made anew has heard nothing: it is told what there is once, and no more. */
TEST(new_peer)
{
    struct remote_info m = {0};

    r2_nicstate_announce(0);
    begin(true);
    CHECK(words_in(QUIET_MS, &m, NULL) > 0);
    CHECK_EQ(m.m.number, newest());
    hear_all(ep[0]);
    CHECK_EQ(words_in(QUIET_MS, &m, NULL), 0);
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
    CHECK_EQ(m.number, 5);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    since = since_of(0);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK(heard(ep[1], &m));
    CHECK_EQ(m.number, 5);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 1000, 4), 0);
    CHECK(heard(ep[1], &m));
    CHECK_EQ(m.number, 5);
    CHECK_EQ(health_of(0), R2_HEALTH_DRAINED);
    CHECK_EQ(since_of(0), since);
    CHECK_EQ(remote_word(ep[1], 7, R2_NIC_DOWN, 1000, 6), 0); /* one without an address */
    CHECK(heard(ep[1], &m));
    CHECK_EQ(m.number, 6);
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
    CHECK_EQ(m.number, 5);
    remote_end(&r);
}

/* Both say something at once, on paths that die: in the end each has heard the other's. */
TEST(crossing)
{
    struct r2_msg_heard h;
    struct remote_info m = {0};

    start(true);
    post(MSG);
    CHECK(remote_command(remote_drain, 0));
    CHECK_EQ(remote_word(ep[0], 1, R2_NIC_DRAINED, 1000, 5), 0);
    fake_fail(ep[0], ECONNRESET, false); /* with its word, or its answer, or both */
    CHECK_EQ(remote_word(ep[1], 1, R2_NIC_DRAINED, 1000, 5), 0);
    CHECK(heard(ep[1], &h));
    CHECK_EQ(h.number, 5);
    CHECK(hear_word(0, R2_NIC_DRAINED, &m));
    CHECK_EQ(say_heard(ep[1], m.m.number), 0);
    CHECK_EQ(health_of(1), R2_HEALTH_DRAINED);
    words(ep[1], &m);
    fake_pass_ms(QUIET_MS);
    CHECK_EQ(words(ep[1], &m), 0);
    give_back();
}

/* What was never said cannot have been heard. */
TEST(strange_answers)
{
    start(true);
    CHECK_EQ(say_heard(ep[1], newest() + 1), -EPROTO);
    CHECK_EQ(say_heard(ep[1], UINT32_MAX), -EPROTO);
    remote_end(&r);
}

/* A peer that does not read: what is repeated for it does not pile up. */
TEST(not_read)
{
    struct remote_info m = {0};
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
    CHECK(words_in(QUIET_MS, &m, NULL) > 0);
    CHECK_EQ(m.m.number, newest());
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
    struct r2_info_nic said = {.word = R2_NIC_USABLE, .forgiven = 1};
    struct remote_info mine = {0};
    int was = atomic_load(&r2_eng.nic_state[0].forgiven);

    start(true);
    post(MSG);
    set_penalty(500);
    CHECK_EQ(remote_word_of(ep[1], 0, &said, 9), 0);
    CHECK(penalty_of(0) == 0);
    set_penalty(500);
    CHECK_EQ(remote_word_of(ep[1], 0, &said, 9), 0);  /* again */
    CHECK_EQ(remote_word_of(ep[0], 0, &said, 10), 0); /* other news */
    CHECK(penalty_of(0) > 0);
    said.forgiven = 2;
    CHECK_EQ(remote_word_of(ep[0], 0, &said, 11), 0);
    CHECK(penalty_of(0) == 0);
    CHECK(remote_command(forgive, 0));
    CHECK(words_in(300, &mine, NULL) >= 2);
    CHECK_EQ(mine.nics[0].forgiven, (uint8_t)(was + 1));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    return bed_main(argc, argv);
}
