/* Questions about links while the kernel does not answer (rung 2): I/O thread 0 goes on, and an
 * answer that is older than an event does not count. Two NICs, both on interface 1; the kernel is
 * this program (links_bed.h). */
#define _GNU_SOURCE
#include "await.h"
#include "links_bed.h"

#include <sys/wait.h>

static struct remote r;
static struct r2_ep *ep[2];
static bool alone; /* only the first NIC is on lo */

static bool link_is(bool up)
{
    return r2_nic_is_up(0) == up && (alone || r2_nic_is_up(1) == up);
}

static void wait_link(bool up)
{
    AWAIT(link_is(up));
}

/* Grows with every change that peers hear of. */
static unsigned changes(void)
{
    return atomic_load(&r2_eng.news);
}

static void settle(void)
{
    set(&kernel.up, true);
    tell(true);
    wait_link(true);
    AWAIT(r2_nic_usable(0) && r2_nic_usable(1));
}

static atomic_int fired;

static void fire(struct r2_timer *t, uint64_t now)
{
    (void)t;
    (void)now;
    atomic_fetch_add(&fired, 1);
}

/* ---- cases */

/* The kernel is busy with some interface: operators are served, timers fire, peers hear heartbeats,
 * and no more than one thread waits. */
TEST(goes_on)
{
    struct r2_timer timer;
    int asked;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    for (int i = 0; i < 2; i++)
        CHECK((ep[i] = fake_find(r.id, i, i, 0)));
    set(&kernel.hold_questions, true);
    wait_for(&kernel.inside, 1);
    CHECK(remote_command(remote_drain, 1));
    CHECK(!r2_nic_usable(1));
    CHECK(remote_command(remote_undrain, 1));
    r2_timer_init(&timer, r2_io_at(0), fire);
    r2_timer_set(&timer, r2_now_ns());
    AWAIT(atomic_load(&fired));
    for (int i = 0; i < 2; i++) {
        remote_forget(ep[i]);
        CHECK_GE(remote_hear_ms(ep[i], R2_F_HEARTBEAT, NULL, 0, WAIT_MS), 0);
    }
    asked = look(&kernel.links);
    /* Each NIC is looked at again meanwhile, while the kernel is busy. */
    fake_pass_ms(2000);
    CHECK(look(&kernel.inside) == 1 && look(&kernel.links) == asked && link_is(true));
    set(&kernel.hold_questions, false);
    wait_for(&kernel.links, asked + 2);
    remote_end(&r);
}

static void ask_link(int nic)
{
    r2_niclink_ask(nic);
}

/* What the kernel has said is under way, behind the last question that was told: says `up`. */
static void hold_answer(bool up)
{
    bool held = !up;

    set(&kernel.hold_links, true);
    CHECK(remote_command(ask_link, 0));
    wait_for(&kernel.inside, 1);
    set(&kernel.up, up);
    WHILE_MS (WAIT_MS, held != up) { /* those of before the change go by */
        pthread_mutex_lock(&kernel.lock);
        held = kernel.inside ? kernel.held_up : !up;
        if (kernel.inside && held != up) {
            kernel.pass = 1;
            pthread_cond_broadcast(&kernel.go);
        }
        pthread_mutex_unlock(&kernel.lock);
    }
    CHECK_EQ(held, up);
    CHECK_EQ(look(&kernel.inside), 1);
}

/* Lets it go, and waits for later ones of both NICs: nothing has come of it. */
static void nothing_changes(bool up)
{
    unsigned before = changes();
    int answers = look(&kernel.links);

    CHECK(link_is(up));
    set(&kernel.hold_links, false);
    wait_for(&kernel.links, answers + 4);
    CHECK(link_is(up));
    CHECK_EQ(changes(), before);
}

/* An "up" that is older than the event that says "down". */
TEST(old_up)
{
    settle();
    hold_answer(true);
    set(&kernel.up, false);
    tell(false);
    nothing_changes(false);
    settle();
}

/* A "down" that is older than an event that says "up", which repeats what was known. */
TEST(old_down)
{
    settle();
    hold_answer(false);
    set(&kernel.up, true);
    tell(true);
    nothing_changes(true);
    settle();
}

/* Tables that say "up" and are older than the last event. */
TEST(old_tables)
{
    unsigned before;
    int tables;

    settle();
    set(&kernel.only_tables, true);
    set(&kernel.hold_tables, true);
    tell(false); /* who is down looks for a place, and may find that it is up */
    wait_for(&kernel.inside, 1);
    CHECK(link_is(false));
    set(&kernel.up, false);
    tell(false);
    before = changes();
    tables = look(&kernel.tables);
    set(&kernel.hold_tables, false);
    wait_for(&kernel.tables, tables + 3); /* two to a reading */
    CHECK(link_is(false));
    CHECK_EQ(changes(), before);
    set(&kernel.up, true); /* and newer ones count */
    wait_link(true);
    set(&kernel.only_tables, false);
    settle();
}

/* Events are lost, and the tables stand in for them when the kernel has time. */
TEST(loss)
{
    settle();
    set(&kernel.only_tables, true);
    set(&kernel.hold_questions, true);
    pthread_mutex_lock(&kernel.lock);
    kernel.losses = 1;
    kernel.up = false;
    pthread_mutex_unlock(&kernel.lock);
    CHECK(remote_command(read_events, 0));
    wait_for(&kernel.inside, 1);
    CHECK(remote_command(read_events, 0)); /* it does not wait */
    CHECK(link_is(true));
    set(&kernel.hold_questions, false);
    wait_link(false);
    set(&kernel.only_tables, false);
    settle();
}

static bool trusted(int nic)
{
    return r2_nic_trusted(nic);
}

/* Nobody needs the tables. */
static void settle_for_good(void)
{
    settle();
    AWAIT(trusted(0) && trusted(1));
    wait_for(&kernel.links, look(&kernel.links) + 4);
}

/* The next look at the links is a second away. */
static void looked(int unused)
{
    (void)unused;
    for (int i = 0; i < 2; i++)
        r2_eng.nic_state[i].shown_at = r2_now_ns();
}

/* A NIC that needs a place is not forgotten when the tables could not be read: nothing else asks
 * for them, no event and no look. */
TEST(failed_reading_is_repeated)
{
    int before;

    settle_for_good();
    set(&kernel.up, false);
    set(&kernel.no_tables, true);
    before = look(&kernel.tables);
    tell(false);
    wait_link(false);
    WHILE_MS (WAIT_MS, look(&kernel.tables) < before + 8) {
        CHECK(remote_command(looked, 0));
    }
    CHECK_GE(look(&kernel.tables), before + 8);
    set(&kernel.no_tables, false);
    settle();
}

static void only_the_first(int unused)
{
    (void)unused;
    r2_local.nics[1].loopback = true; /* its link is not asked for */
    r2_local.nics[1].ifindex = -1;
    alone = true;
}

/* In the second that follows a look at the links the carrier goes, without an event, and with it a
 * path. Whether that is known before the next look. */
static bool fails_without_carrier(void)
{
    uint64_t start;

    wait_for(&kernel.links, look(&kernel.links) + 1);
    start = r2_now_ns();
    set(&kernel.up, false);
    fake_fail(ep[0], ETIMEDOUT, false);
    wait_link(false);
    return r2_now_ns() - start < 500 * R2_NS_PER_MS;
}

/* Without a thread for them questions are put all the same. */
TEST(no_thread)
{
    const char *self = "/proc/self/exe";
    int status;
    pid_t pid;

    CHECK_SKIP_EMULATED("it cannot start itself anew");
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        setenv("R2_LINKS_NO_THREAD", "1", 1);
        execl(self, self, (char *)NULL);
        _exit(127);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A path fails whose NIC's carrier is gone, which the kernel has not told yet: the kernel is asked.
 * The last test: it changes a NIC. */
TEST(carrier_is_asked_for)
{
    bool known = false;

    settle();
    CHECK(remote_command(only_the_first, 0));
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    CHECK((ep[0] = fake_find(r.id, 0, 0, 0)));
    for (int tries = 0; tries < 5 && !known; tries++) { /* threads may have to wait for a core */
        settle();
        CHECK(!tries || (ep[0] = remote_path(&r, 0, ep[0]->params.gen)));
        known = fails_without_carrier();
    }
    CHECK(known);
    remote_end(&r);
}

static void asks_itself(void)
{
    set(&kernel.up, false);
    wait_link(false);
    settle();
    set(&kernel.hold_questions, true);
    wait_for(&kernel.inside, 1);
    set(&kernel.hold_questions, false);
    CHECK_GT(atomic_load(&refused), 0);
}

int main(int argc, char **argv)
{
    no_thread = getenv("R2_LINKS_NO_THREAD") != NULL;
    remote_wired = true;
    remote_engine(2, remote_outlives);
    if (!r2_eng.watch) {
        printf("skip all: the kernel tells nothing about links here\n");
        return CHECK_SKIPPED;
    }
    if (!no_thread)
        return check_main(argc, argv);
    asks_itself();
    return 0;
}
