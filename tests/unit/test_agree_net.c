/* The agreement between processes: registration, changes, and everything that may be missing. Rung
 * 3: processes over loopback. It cannot prove anything between hosts. */
#define _GNU_SOURCE
#include "agree/internal.h"
#include "agree_ranks.h"
#include "settings/settings.h"
#include "util/siphash.h"

#include <sys/resource.h>
#include <time.h>

/* --- it works ----------------------------------------------------------------------------- */

PROCESSES(change, 3)
{
    struct r2_agree *members[2];
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    for (int k = 0; k < 2; k++) {
        struct r2_agree_report report = {.capacity = 7,
                                         .share = 1000 + (uint32_t)(me + k * processes)};

        members[k] = member(id, me + k * processes, 2 * processes);
        CHECK_EQ(r2_agree_report(members[k], &report), -EAGAIN);
        CHECK_EQ(operate(members[k], 0, &epoch), 0);
    }
    for (int k = 0; k < 2; k++) {
        struct r2_agree_report report = {.capacity = 7,
                                         .share = 1000 + (uint32_t)(me + k * processes)};

        AWAIT(state_of(members[k]) == R2_AGREE_READY);
        CHECK_EQ(r2_agree_report(members[k], &report), 0);
        CHECK_EQ(r2_agree_propose(members[k], "a pla", 5), me + k == 0 ? 0 : -EPERM);
    }
    epoch = change(members, 2, 0, 1);
    if (me == 0) {
        AWAIT(r2_agree_propose(members[0], "a pla", 5) == 0);
        CHECK_EQ(r2_agree_propose(members[0], "a pla", 5), -EBUSY);
    }
    change(members, 2, 0, epoch + 1);
    AWAIT(atomic_load(&sh->reports) == 2 * processes);
    r2_agree_destroy(members[0]);
    r2_agree_destroy(members[1]);
}

PROCESSES(objects, 2)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    epoch = 0;
    for (int i = 0; i < 5; i++) {
        AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
        epoch = change(&a, 1, 0, epoch + 1);
    }
    r2_agree_destroy(a);
    if (me == 0) {
        AWAIT(atomic_load(&sh->accepted) >= 5 * processes &&
              atomic_load(&sh->accepted) == atomic_load(&sh->released));
    }
}

static int accept_late(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    AWAIT(atomic_load(&sh->stuck));
    return on_accept(user, epoch, plan, len, object);
}

/* From the proposal until its end, while the leader watches and while it waits for promises. */
PROCESSES(one_proposal_at_a_time, 2)
{
    struct r2_agree_stats stats = {.proposals = 0};
    struct r2_agree *a;
    uint64_t epoch;

    ops.accept = me == 1 ? accept_late : on_accept;
    a = meet();
    if (me == 0) {
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
        AWAIT((r2_agree_get_stats(a, &stats), stats.proposals == 1));
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), -EBUSY);
        AWAIT((r2_agree_get_stats(a, &stats), stats.promised == 1));
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), -EBUSY);
        CHECK_EQ(stats.commits + stats.aborts, 0);
        atomic_store(&sh->stuck, 1);
    }
    AWAIT(atomic_load(&sh->stuck));
    epoch = change(&a, 1, 0, 1);
    AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
    change(&a, 1, 0, epoch + 1);
    r2_agree_destroy(a);
}

static int accept_large(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    const uint8_t *p = plan;

    CHECK_EQ(len, 100000);
    CHECK(p[0] == 7 && p[len - 1] == 7);
    return on_accept(user, epoch, "a pla", 5, object);
}

/* The leader is not where the ranks met, so that a plan is the first thing that it says to them;
 * and nobody comes near the index, so that nobody asks. */
PROCESSES(large_plan, 4)
{
    static uint8_t plan[100000];
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    memset(plan, 7, sizeof(plan));
    ops.accept = accept_large;
    ops.ready = NULL;
    get_id(id);
    a = member(id, (me + 1) % processes, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    if (me == processes - 1) {
        CHECK_EQ(r2_agree_propose(a, plan, R2_AGREE_PLAN + 1), -E2BIG);
        CHECK_EQ(r2_agree_propose(a, plan, sizeof(plan)), 0);
    }
    AWAIT(atomic_load(&sh->step) == 1);
    CHECK_EQ(atomic_load(&sh->decided_well), 1);
    change(&a, 1, 0, 1);
    r2_agree_destroy(a);
}

static void hear(struct r2_agree *a, char process, enum r2_agree_kind kind, uint32_t from,
                 const uint8_t *payload, size_t len)
{
    struct r2_agree_frame f = {.kind = kind, .from = from, .len = (uint32_t)len};
    uint8_t id[16];

    memset(id, process, sizeof(id));
    r2_agree_member_frame(a, id, &f, payload);
}

/* What another process than the rank's says never gets to be reported: on_reported would not have
 * its capacity. */
static void hear_report(struct r2_agree *a, char process, uint32_t from, uint64_t number)
{
    struct r2_agree_report report = {.capacity = process == 'A' + (char)from ? 7 : 8,
                                     .share = 1000 + from};
    uint8_t text[R2_AGREE_REPORT_BYTES];

    r2_agree_report_encode(text, number, &report);
    hear(a, process, R2_FRAME_REPORT, from, text, sizeof(text));
}

/* A rank that has the roster before the leader has it reports at once, and only once. Rank 0, of
 * process A; B is rank 1, C rank 2 and X to Z neither, whatever they say before or after it. No
 * thread of ours runs yet. */
PROCESSES(early_report, 1)
{
    struct r2_agree_hello processes3[3] = {{.process = {0}}};
    struct r2_agree_seat seats[3];
    struct r2_agree_roster roster = {3, 3, processes3, seats};
    uint8_t id[R2_AGREE_ID], text[1024];
    struct r2_agree *a;
    size_t len;

    get_id(id);
    a = member(id, 0, 3);
    a->state = R2_AGREE_JOINING;
    hear_report(a, 'Y', 1, 5);
    hear_report(a, 'B', 1, 1);
    hear_report(a, 'X', 1, 9);
    hear_report(a, 'B', 1, 2);
    for (char other = 'X'; other <= 'Z'; other++) {
        hear_report(a, other, 1, 9);
        hear_report(a, other, 2, 1);
    }
    hear_report(a, 'V', 1, 9); /* one too many */
    hear_report(a, 'B', 0, 1); /* for another rank */
    CHECK_EQ(atomic_load(&sh->reports), 0);
    for (int r = 0; r < 3; r++) {
        memset(processes3[r].process, 'A' + r, 16);
        seats[r] = (struct r2_agree_seat){(uint32_t)r, 100};
    }
    len = r2_agree_roster_encode(text, sizeof(text), &roster);
    CHECK_LE(len, sizeof(text));
    hear(a, 'A', R2_FRAME_ROSTER, 0, text, len);
    CHECK_EQ(state_of(a), R2_AGREE_READY);
    CHECK_EQ(atomic_load(&sh->reports), 1);
    hear_report(a, 'B', 1, 2);
    CHECK_EQ(atomic_load(&sh->reports), 1);
    hear_report(a, 'C', 2, 1);
    CHECK_EQ(atomic_load(&sh->reports), 2);
    r2_agree_destroy(a);
}

/* Two halves of a split, and one rank that is in neither. */
PROCESSES(split, 5)
{
    struct r2_agree *parent, *child;
    uint8_t id[R2_AGREE_ID];
    int color = me % 2;
    struct r2_agree_config config;
    uint64_t epoch;

    get_id(id);
    parent = member(id, me, processes);
    if (me == 4) {
        CHECK_EQ(r2_agree_derive(NULL, parent, 0, NULL), 0);
        r2_agree_destroy(parent);
        return;
    }
    config = config_of(NULL, me / 2, 2);
    ops.ready = NULL; /* other nodes than those that on_ready knows */
    CHECK_EQ(r2_agree_derive(&child, parent, (uint64_t)color, &config), 0);
    CHECK_EQ(operate(child, color, &epoch), 0);
    AWAIT(state_of(child) == R2_AGREE_READY);
    if (me / 2 == 0) {
        CHECK_EQ(r2_agree_propose(child, "a pla", 5), 0);
    }
    change(&child, 1, color, 1);
    r2_agree_destroy(parent);
    r2_agree_destroy(child);
}

/* Out of descriptors: who waits to be accepted does not keep the thread busy, and comes in later.
 */
PROCESSES(no_descriptors, 2)
{
    struct rlimit was, none;
    struct timespec before, after;
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;
    double spent;

    get_id(id);
    a = member(id, me, processes);
    if (me == 0) {
        CHECK_EQ(operate(a, 0, &epoch), 0); /* its thread runs */
        CHECK_EQ(getrlimit(RLIMIT_NOFILE, &was), 0);
        none = (struct rlimit){.rlim_cur = 1, .rlim_max = was.rlim_max};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
        atomic_store(&sh->step, 1);
        AWAIT(atomic_load(&sh->step) == 2);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
        pause_us(1500000);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
        spent =
            (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) / 1e9;
        CHECK_MSG(spent < 0.1, "%.3f s of the processor in 1.5 s", spent);
        CHECK_EQ(state_of(a), R2_AGREE_JOINING);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &was), 0);
    } else {
        AWAIT(atomic_load(&sh->step) == 1);
        CHECK_EQ(operate(a, 0, &epoch), 0);
        atomic_store(&sh->step, 2);
    }
    AWAIT(state_of(a) == R2_AGREE_READY);
    atomic_fetch_add(&sh->switched, 1);
    AWAIT(atomic_load(&sh->switched) == processes);
    r2_agree_destroy(a);
}

/* --- it is off ---------------------------------------------------------------------------- */

static void one_comes_late(void)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    a = member(id, me, processes);
    if (me == 2) {
        AWAIT(atomic_load(&sh->off) == 2);
        CHECK_STR(sh->why, "1 of 3 ranks have not registered (2): is the shim there?");
    }
    WHILE_MS (30000, state_of(a) != R2_AGREE_READY) {
        uint64_t before = r2_now_ns();

        CHECK_EQ(operate(a, 0, &epoch), 0);
        CHECK(epoch == 0 && r2_now_ns() - before < 20 * R2_NS_PER_S);
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), me == 0 ? -EAGAIN : -EPERM);
    }
    AWAIT(atomic_load(&sh->ready) == 3);
    CHECK_EQ(atomic_load(&sh->off), 2); /* one warning each */
    r2_agree_destroy(a);
}

/* Rank 1 comes when rank 0 has been told, and rank 2 when rank 1 has. */
static void one_comes_after_the_word(void)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    a = member(id, me, processes);
    AWAIT(atomic_load(&sh->off) == me);
    if (me == 2) {
        CHECK_STR(sh->why, "1 of 3 ranks have not registered (2): is the shim there?");
    } else if (me == 1) {
        CHECK_STR(sh->why, "2 of 3 ranks have not registered (1, 2): is the shim there?");
    }
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(atomic_load(&sh->ready) == 3);
    CHECK_EQ(atomic_load(&sh->off), 2);
    r2_agree_destroy(a);
}

/* As agree_timeout_ns of the settings, which users cannot set. */
static void wait_for_answers(uint64_t ns)
{
    ((struct r2_settings *)(uintptr_t)r2_settings_get())->agree_timeout_ns = ns;
}

/* Rank 0, whose process made the id, ends before it has registered. */
PROCESSES(maker_ends, 3)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes);
    if (me == 0) {
        return;
    }
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(atomic_load(&sh->off) == 2);
    CHECK_STR(sh->why, "the process that made the unique id has ended");
    CHECK_EQ(operate(a, 0, &epoch), 0);
    r2_agree_destroy(a);
}

TEST(missing_rank)
{
    wait_for_answers(300 * R2_NS_PER_MS);
    run_processes(3, one_comes_late);
    wait_for_answers(60 * R2_NS_PER_S);
}

TEST(who_comes_after_the_word)
{
    wait_for_answers(300 * R2_NS_PER_MS);
    run_processes(3, one_comes_after_the_word);
    wait_for_answers(60 * R2_NS_PER_S);
}

/* The last process is rank 2 once more: one that was started again knows the id, and is no member.
 * What it says about rank 2 changes nothing for those who have met. */
PROCESSES(started_again, 4)
{
    int ranks = processes - 1;
    bool again = me == ranks;
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    ops.ready = NULL;
    get_id(id);
    if (again) {
        AWAIT(atomic_load(&sh->step) == ranks);
    }
    a = member(id, again ? 2 : me, ranks);
    CHECK_EQ(operate(a, again, &epoch), 0);
    AWAIT(state_of(a) == (again ? R2_AGREE_OFF : R2_AGREE_READY));
    if (again) {
        AWAIT(atomic_load(&sh->off) == 1); /* says it after it is */
        CHECK_STR(sh->why, "two processes are rank 2");
        CHECK_EQ(r2_agree_tell(a, 6), -ENOTCONN);
        atomic_store(&sh->stuck, 1);
    } else {
        atomic_fetch_add(&sh->step, 1);
        AWAIT(atomic_load(&sh->stuck));
        CHECK_EQ(state_of(a), R2_AGREE_READY);
        AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
        change(&a, 1, 0, 1);
        CHECK_EQ(atomic_load(&sh->off), 1); /* the newcomer alone */
    }
    r2_agree_destroy(a);
}

/* Rank 1 has other settings, so nobody changes plans. The last process is rank 2 once more: it
 * hears why, too. */
PROCESSES(started_again_when_off, 4)
{
    int ranks = processes - 1;
    bool again = me == ranks;
    struct r2_agree_config config;
    struct r2_agree_stats stats;
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    get_id(id);
    if (again) {
        AWAIT(atomic_load(&sh->off) == ranks);
    }
    config = config_of(id, again ? 2 : me, ranks);
    config.settings = me == 1 ? 77 : 5;
    CHECK_EQ(r2_agree_create(&a, &config), 0);
    CHECK_EQ(operate(a, again, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_OFF);
    r2_agree_get_stats(a, &stats);
    CHECK_MSG(strstr(stats.why, "has other R2CCL settings"), "%s", stats.why);
    AWAIT(atomic_load(&sh->off) == processes); /* nobody leaves before */
    r2_agree_destroy(a);
}

PROCESSES(unsigned_id, 1)
{
    uint8_t id[R2_AGREE_ID] = {1, 2, 3};
    struct r2_agree_stats stats;
    struct r2_agree *a;
    uint64_t epoch;

    for (int i = 0; i < 3; i++) {
        id[100] = i == 2; /* somebody else's tail */
        a = member(i == 0 ? NULL : id, 0, 2);
        CHECK_EQ(operate(a, 0, &epoch), 0);
        r2_agree_get_stats(a, &stats);
        CHECK_EQ(stats.state, R2_AGREE_OFF);
        CHECK_STR(stats.why, "the unique id does not come from a process with the shim");
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), -EAGAIN);
        r2_agree_abort(a);
        CHECK_EQ(operate(a, 0, &epoch), -ECANCELED);
        r2_agree_destroy(a);
    }
    r2_agree_destroy(NULL);
}

/* Signed by a build that speaks otherwise. */
PROCESSES(id_of_another_version, 2)
{
    struct r2_agree_stats stats;
    uint8_t id[R2_AGREE_ID], *tail = id + R2_AGREE_ID - R2_AGREE_TAIL;
    struct r2_agree *a;
    uint64_t epoch;

    get_id(id);
    CHECK_EQ(tail[8], R2_AGREE_VERSION);
    tail[8]--;
    r2_siphash128(tail + 32, id, R2_AGREE_ID - 32, tail + 48); /* a right one of its kind */
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    r2_agree_get_stats(a, &stats);
    CHECK_EQ(stats.state, R2_AGREE_OFF);
    CHECK_STR(stats.why, "the unique id was signed by another version of R2CCL");
    CHECK_EQ(stats.sent, 0);
    r2_agree_destroy(a);
}

PROCESSES(refusal, 3)
{
    struct r2_agree *a;
    uint8_t id[R2_AGREE_ID];
    uint64_t epoch;

    atomic_store(&sh->refuse, 2);
    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    if (me == 0) {
        CHECK_EQ(r2_agree_propose(a, "a pla", 5), 0);
    }
    WHILE_MS (40000, atomic_load(&sh->step) == 0) {
        CHECK_EQ(operate(a, 0, &epoch), 0);
    }
    CHECK_STR(sh->why, "a rank has refused it");
    atomic_store(&sh->refuse, 0); /* and the next one is taken */
    AWAIT(me != 0 || r2_agree_propose(a, "a pla", 5) == 0);
    change(&a, 1, 0, 2);
    r2_agree_destroy(a);
}

int main(int argc, char **argv)
{
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    return check_main(argc, argv);
}
