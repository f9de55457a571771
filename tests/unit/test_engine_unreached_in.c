/* NICs over which nobody ever came to a process that only receives, over a scripted transport
 * (rung 2): it asks its senders over them itself. Four NICs, which count as real ones; paths to a
 * sender come up over the first only. Nothing answers a question unless the test says so. It
 * cannot prove what a firewall looks like to sockets: test_lab_health.py. */
#include <errno.h>

#define NICS 4
#include "reach_looks.h"

enum answer { NONE, KERNEL, REFUSAL, PROCESS };
static enum answer answers[NICS];

static void answer(int nic)
{
    struct r2_ep *probe = fake_probe_at(r.id, nic, nic);

    if (!probe)
        return;
    if (answers[nic] == KERNEL)
        atomic_store(&probe->connected, true);
    else if (answers[nic] == REFUSAL)
        fake_fail(probe, ECONNREFUSED, true);
    else if (answers[nic] == PROCESS)
        fake_fail(probe, EALREADY, false);
}

static void looks(int n)
{
    while (n--)
        one_look(answer);
}

static bool answers_beats(void)
{
    struct r2_peer *p = r.conn->peer;
    bool yes;

    r2_peer_lock(p);
    yes = r2_path_hb_answers(p->paths[0], 0);
    pthread_mutex_unlock(&p->lock);
    return yes;
}

/* A sender that NIC 0 serves. */
static void begin(int nics)
{
    memset(answers, 0, sizeof(answers));
    remote_new(&r, false, nics);
    CHECK(remote_open(&r, 1));
    FAKE_AWAIT(WAIT_MS, answers_beats());
}

static void nothing(int from)
{
    looks(2 * LOOKS);
    for (int i = from; i < NICS; i++) {
        CHECK_STR(cause_of(i), "");
        CHECK_EQ(warned(i, WORD), 0);
    }
}

static int asked(void)
{
    return (int)__atomic_load_n(&r2_eng.n->locate_probes, __ATOMIC_RELAXED);
}

/* The sender's host stands still: nobody is asked. */
TEST(host_stands_still)
{
    int before;

    begin(NICS);
    atomic_store(&fake_find(r.id, 0, 0, 0)->silent, true);
    FAKE_AWAIT(WAIT_MS, remote_suspect(&r));
    looks(1);
    before = asked();
    nothing(1);
    CHECK_EQ(asked(), before);
    remote_end(&r);
}

/* Its kernel takes the connections, and its process has no time for them. */
TEST(stopped_process)
{
    begin(NICS);
    for (int i = 0; i < NICS; i++)
        answers[i] = KERNEL;
    nothing(1);
    remote_end(&r);
}

/* It says that its NICs are down, or has a single one, which is in no subnet of our others. */
TEST(nobody_to_ask)
{
    int before;

    begin(NICS);
    for (int i = 1; i < NICS; i++)
        CHECK_EQ(remote_nic(fake_find(r.id, 0, 0, 0), i, false, 5), 0);
    looks(1);
    before = asked();
    nothing(1);
    CHECK_EQ(asked(), before);
    remote_end(&r);
    begin(1);
    nothing(1);
    CHECK_EQ(asked(), before);
    remote_end(&r);
}

/* NIC 1: silence. 2: refusals. 3: the sender answers, whether or not it comes over it. What is said
 * is said once, and taken back when somebody answers. */
TEST(told)
{
    uint64_t began = r2_now_ns();
    int before;

    begin(NICS);
    answers[2] = REFUSAL;
    answers[3] = PROCESS;
    looks(LOOKS / 3);
    CHECK(!marked(1) || r2_now_ns() - began > 4 * R2_NS_PER_S); /* it looked by itself */
    looks(LOOKS);
    CHECK(marked(1));
    CHECK(marked(2));
    CHECK(!marked(3));
    CHECK_EQ(warned(3, WORD), 0);
    CHECK_EQ(
        __atomic_load_n(&r2_eng.ctl->seg->nics[r2_eng.nic_state[1].row].state, __ATOMIC_RELAXED),
        R2_SEG_NIC_HEALTHY);
    answers[1] = PROCESS;
    looks(LOOKS + 1); /* asked more rarely by now */
    CHECK(!marked(1));
    CHECK(marked(2));
    CHECK_EQ(warned(1, WORD), 1);
    CHECK_EQ(warned(1, "reaches a peer"), 1);
    CHECK_EQ(warned(2, WORD), 1);
    CHECK(remote_path(&r, 2, 0));
    looks(1);
    CHECK(!marked(2));
    CHECK_EQ(warned(2, "reaches a peer"), 1);
    before = asked();
    looks(LOOKS); /* all have met somebody */
    CHECK_EQ(asked(), before);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    static const char *const env[] = {
        "R2CCL_DAMP", "0", "R2CCL_NO_PATH_TIMEOUT", "60s", "R2CCL_GREY", "0", NULL};

    remote_wired = true;
    remote_engine(NICS, env);
    for (int i = 0; i < NICS; i++)
        remote_command(set_subnet, i);
    return check_main(argc, argv);
}
