/* Rung 1: rows, journal and mailbox of the control segment with several threads at work (to be run
 * under TSan too). The readers here follow the rules that other processes follow. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "check.h"
#include "control/control.h"
#include "control/impl.h"

#define WRITERS 4

static struct r2_control *ctl;
static atomic_bool stop;

static void start(void)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1, .hidden = 1};

    atomic_store(&stop, false);
    CHECK_EQ(r2_control_open(&ctl, &info), 0);
}

static void words(void *to, const void *from, size_t n)
{
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t value = __atomic_load_n((const uint64_t *)from + i, __ATOMIC_ACQUIRE);

        memcpy((char *)to + i * 8, &value, 8);
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Cause, generation and weight all tell the same number, from every writer. */
static void *write_rows(void *arg)
{
    uint64_t number = (uint64_t)(uintptr_t)arg;
    char cause[64];

    for (int i = 0; !atomic_load(&stop); i++, number += WRITERS) {
        snprintf(cause, sizeof(cause), "%" PRIu64 " %0*d", number, 1 + i % 30, 0);
        r2_control_path_state(ctl, 0, R2_SEG_PATH_UP + i % 2 * 2, number, cause);
        r2_count(&r2_control_path_counters(ctl, 0)->tx_bytes, 1);
    }
    return (void *)(uintptr_t)((number - (uint64_t)(uintptr_t)arg) / WRITERS);
}

static bool read_row(struct r2_seg_path *out)
{
    struct r2_seg_path *row = &r2_control_segment(ctl)->paths[0];
    uint32_t seq = __atomic_load_n(&row->seq, __ATOMIC_ACQUIRE);

    if (seq & 1) {
        return false;
    }
    words(out, row, sizeof(*out));
    return __atomic_load_n(&row->seq, __ATOMIC_ACQUIRE) == seq;
}

TEST(rows_are_whole)
{
    pthread_t threads[WRITERS];
    uint64_t total = 0, good = 0;

    start();
    CHECK_EQ(r2_control_path_add(ctl, 0, 0, "nic0"), 0);
    for (uintptr_t i = 0; i < WRITERS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, write_rows, (void *)(i + 1)), 0);
    }
    for (uint64_t deadline = r2_control_clock(CLOCK_MONOTONIC) + 300000000;
         r2_control_clock(CLOCK_MONOTONIC) < deadline || good < 10;) {
        struct r2_seg_path row;

        if (!read_row(&row) || row.generation == 0) {
            sched_yield();
            continue;
        }
        good++;
        CHECK_EQ(strtoull(row.cause, NULL, 10), row.generation);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < WRITERS; i++) {
        void *count;

        CHECK_EQ(pthread_join(threads[i], &count), 0);
        total += (uintptr_t)count;
    }
    CHECK_EQ(r2_control_path_counters(ctl, 0)->tx_bytes, total);
    r2_control_close(ctl);
}

static void *churn_paths(void *arg)
{
    int peer = (int)(intptr_t)arg;

    for (int i = 0; i < 2000; i++) {
        int path = r2_control_path_add(ctl, peer, 0, "nic1");

        if (path < 0) {
            check_fail(__FILE__, __LINE__, "the table is full");
        }
        r2_control_path_state(ctl, path, R2_SEG_PATH_UP, 1, NULL);
        if (r2_control_segment(ctl)->paths[path].peer != (uint32_t)peer) {
            check_fail(__FILE__, __LINE__, "row %d has two owners", path);
        }
        if (i % 3) {
            r2_control_path_remove(ctl, path);
        } else if (i % 30 == 0) {
            r2_control_peer_remove(ctl, peer);
        }
    }
    r2_control_peer_remove(ctl, peer);
    return NULL;
}

TEST(rows_have_one_owner)
{
    pthread_t threads[WRITERS];

    start();
    for (intptr_t i = 0; i < WRITERS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, churn_paths, (void *)i), 0);
    }
    for (int i = 0; i < WRITERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(r2_control_gauges(ctl)->paths_total, 0);
    CHECK_EQ(r2_control_gauges(ctl)->paths_up, 0);
    CHECK_EQ(r2_control_counters(ctl)->rows_refused, 0);
    r2_control_close(ctl);
}

/* ---- journal --------------------------------------------------------------------------------- */

#define EVENTS_EACH 5000

static void *write_events(void *arg)
{
    uint64_t writer = (uint64_t)(uintptr_t)arg;
    char cause[32];

    for (uint64_t i = 0; i < EVENTS_EACH; i++) {
        snprintf(cause, sizeof(cause), "%" PRIu64, writer * 1000000 + i);
        r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_REPLAY,
                                                           .generation = writer,
                                                           .bytes = writer * 1000000 + i,
                                                           .cause = cause});
    }
    return NULL;
}

static bool read_event(uint64_t number, struct r2_seg_journal_entry *out)
{
    struct r2_seg_journal_entry *e = &r2_control_segment(ctl)->events[number % R2_SEG_MAX_EVENTS];

    if (__atomic_load_n(&e->stamp, __ATOMIC_ACQUIRE) != 2 * number + 2) {
        return false;
    }
    words(out, e, sizeof(*out));
    return __atomic_load_n(&e->stamp, __ATOMIC_ACQUIRE) == 2 * number + 2;
}

static uint64_t check_ring(uint64_t head)
{
    uint64_t from = head > R2_SEG_MAX_EVENTS ? head - R2_SEG_MAX_EVENTS : 1, good = 0;

    for (uint64_t number = from < 1 ? 1 : from; number < head; number++) {
        struct r2_seg_journal_entry e;

        if (!read_event(number, &e)) {
            continue;
        }
        good++;
        CHECK_EQ(strtoull(e.cause, NULL, 10), e.bytes);
        CHECK_EQ(e.bytes / 1000000, e.generation);
    }
    return good;
}

TEST(events_are_whole)
{
    struct r2_segment *seg;
    pthread_t threads[WRITERS];
    uint64_t head;

    start();
    seg = r2_control_segment(ctl);
    for (uintptr_t i = 0; i < WRITERS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, write_events, (void *)(i + 1)), 0);
    }
    do {
        head = __atomic_load_n(&seg->header.event_head, __ATOMIC_RELAXED);
        check_ring(head);
    } while (head < WRITERS * EVENTS_EACH + 1);
    for (int i = 0; i < WRITERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    /* What is missing in the last ring was counted as dropped. */
    CHECK_GE(check_ring(head) + seg->counters.journal_dropped, R2_SEG_MAX_EVENTS);
    r2_control_close(ctl);
}

/* ---- mailbox --------------------------------------------------------------------------------- */

struct seen {
    struct r2_control_cmd last;
    int calls;
    int answer;
};

static int note(void *arg, const struct r2_control_cmd *cmd, char *result, size_t size)
{
    struct seen *seen = arg;

    seen->last = *cmd;
    seen->calls++;
    if (seen->answer == 0) {
        snprintf(result, size, "done %d", cmd->nic);
    }
    return seen->answer;
}

static struct r2_seg_command *post(int slot, struct r2_seg_command command)
{
    struct r2_seg_command *at = &r2_control_segment(ctl)->commands[slot];

    command.state = R2_SEG_CMD_FREE;
    r2_row_bytes(at, &command, sizeof(command));
    __atomic_store_n(&at->state, R2_SEG_CMD_POSTED, __ATOMIC_RELEASE);
    return at;
}

static struct r2_seg_command fail_nic(const char *nic)
{
    struct r2_seg_command command = {.verb = R2_SEG_VERB_FAIL_NIC,
                                     .request_id = 42,
                                     .fault = R2_SEG_FAULT_BLACKHOLE,
                                     .direction = R2_SEG_DIR_BOTH};

    snprintf(command.nic, sizeof(command.nic), "%s", nic);
    return command;
}

static void add_nics(void)
{
    r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic0", .addr = "10.0.0.1"});
    r2_control_nic_add(ctl, &(struct r2_control_nic){.name = "nic1", .addr = "10.1.0.1"});
}

TEST(commands)
{
    struct r2_seg_command command = fail_nic("10.1.0.1"), *slot;
    struct seen seen = {0};

    start();
    add_nics();
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 0);
    command.after_bytes = 7;
    command.for_ms = 9;
    command.rate = 5; /* not of a black hole */
    slot = post(3, command);
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
    CHECK_EQ(slot->state, R2_SEG_CMD_DONE);
    CHECK_STR(slot->result, "done 1");
    CHECK_EQ(slot->answered_id, 42);
    CHECK_EQ(seen.last.nic, 1);
    CHECK_EQ(seen.last.after_bytes, 7);
    CHECK_EQ(seen.last.for_ms, 9);
    CHECK_EQ(seen.last.rate, 0);
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 0);
    CHECK_EQ(seen.calls, 1);

    seen.answer = -EALREADY;
    slot = post(0, fail_nic("nic0"));
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
    CHECK_EQ(slot->state, R2_SEG_CMD_FAILED);
    CHECK_EQ(slot->code, -EALREADY);
    CHECK_STR(slot->result, strerror(EALREADY));

    post(1, (struct r2_seg_command){.verb = R2_SEG_VERB_PING, .request_id = 1});
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
    CHECK_STR(r2_control_segment(ctl)->commands[1].result, "pong");
    CHECK_EQ(seen.calls, 2);
    r2_control_close(ctl);
}

TEST(bad_commands)
{
    struct {
        struct r2_seg_command command;
        int code;
    } cases[] = {
        {fail_nic("nic7"), -ENODEV},
        {fail_nic(""), -ENODEV},
        {fail_nic("nic0"), -EINVAL}, /* kind */
        {fail_nic("nic0"), -EINVAL}, /* direction */
        {fail_nic("nic0"), -EINVAL}, /* rate */
        {fail_nic("nic0"), -EINVAL}, /* loss */
        {fail_nic("nic0"), -EINVAL}, /* duration */
        {{.verb = R2_SEG_VERB_SET_WEIGHT, .nic = "nic0", .weight = 1000001}, -EINVAL},
        {{.verb = R2_SEG_VERB_DRAIN_NIC, .nic = "nic0", .force = 2}, -EINVAL},
        {{.verb = R2_SEG_VERB_PLAN, .plan = 2}, -EINVAL},
        {{.verb = 99, .nic = "nic0"}, -EOPNOTSUPP},
        {{.verb = R2_SEG_VERB_NONE, .nic = "nic0"}, -EOPNOTSUPP},
    };
    struct seen seen = {0};

    cases[2].command.fault = 77;
    cases[3].command.direction = 4;
    cases[4].command.fault = R2_SEG_FAULT_SLOW;
    cases[5].command.fault = R2_SEG_FAULT_LOSS;
    cases[5].command.loss_ppm = 1000001;
    cases[6].command.for_ms = UINT64_MAX;
    start();
    add_nics();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct r2_seg_command *slot = post(0, cases[i].command);

        CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
        CHECK_EQ(slot->code, cases[i].code);
        CHECK_EQ(slot->state, R2_SEG_CMD_FAILED);
        CHECK(slot->result[0] != '\0');
    }
    CHECK_EQ(seen.calls, 0);
    post(0, fail_nic("nic7"));
    CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
    CHECK_STR(r2_control_segment(ctl)->commands[0].result, "no NIC 'nic7'; NICs: nic0 nic1");
    r2_control_close(ctl);
}

TEST(answers_are_forgotten)
{
    struct r2_seg_command *slot;
    struct seen seen = {0};

    start();
    add_nics();
    slot = post(0, fail_nic("nic0"));
    r2_control_poll(ctl, note, &seen);
    r2_control_poll(ctl, note, &seen);
    CHECK_EQ(slot->state, R2_SEG_CMD_DONE);
    slot->answered_mono_ns -= UINT64_C(31000000000);
    r2_control_poll(ctl, note, &seen);
    CHECK_EQ(slot->state, R2_SEG_CMD_FREE);
    r2_control_close(ctl);
}

/* Random bytes in the mailbox, of the kind that a hostile client leaves. */
TEST(random_commands)
{
    struct seen seen = {0};

    start();
    add_nics();
    for (unsigned long round = 0; round < check_rounds(20000); round++) {
        struct r2_seg_command command;

        for (size_t i = 0; i < sizeof(command) / 8; i++) {
            uint64_t value = check_random();

            memcpy((char *)&command + i * 8, &value, 8);
        }
        command.verb = (uint32_t)check_below(9);
        if (check_below(4)) {
            command.fault = (uint32_t)check_below(7);
            command.direction = (uint32_t)check_below(6);
        }
        if (check_below(2)) {
            memcpy(command.nic, "nic1", 5);
        }
        seen.calls = 0;
        post((int)check_below(R2_SEG_MAX_COMMANDS), command);
        CHECK_EQ(r2_control_poll(ctl, note, &seen), 1);
        if (!seen.calls) {
            continue;
        }
        CHECK_EQ(seen.last.nic, 1);
        CHECK(seen.last.verb >= R2_SEG_VERB_FAIL_NIC && seen.last.verb <= R2_SEG_VERB_SET_WEIGHT);
        CHECK(seen.last.verb != R2_SEG_VERB_FAIL_NIC ||
              (seen.last.fault >= R2_SEG_FAULT_BLACKHOLE && seen.last.fault <= R2_SEG_FAULT_LOSS &&
               seen.last.direction >= R2_SEG_DIR_TX && seen.last.direction <= R2_SEG_DIR_BOTH &&
               seen.last.loss_ppm <= 1000000));
    }
    r2_control_close(ctl);
}

static void *poll_all(void *arg)
{
    while (!atomic_load(&stop)) {
        if (!r2_control_poll(ctl, note, arg)) {
            sched_yield();
        }
    }
    return NULL;
}

/* Clients give up at any moment: the slot is theirs again, a late answer is nobody's. */
TEST(clients_give_up)
{
    struct r2_seg_command *slot;
    struct seen seen = {0};
    pthread_t thread;

    start();
    add_nics();
    slot = &r2_control_segment(ctl)->commands[0];
    CHECK_EQ(pthread_create(&thread, NULL, poll_all, &seen), 0);
    for (unsigned long i = 1; i <= check_rounds(3000); i++) {
        uint64_t wait = check_below(20);
        uint32_t state;

        __atomic_store_n(&slot->request_id, i, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->verb, R2_SEG_VERB_PING, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->state, R2_SEG_CMD_POSTED, __ATOMIC_RELEASE);
        for (;; sched_yield()) {
            state = __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE);
            if (state == R2_SEG_CMD_DONE || (wait > 0 && --wait == 0)) {
                break;
            }
        }
        if (state == R2_SEG_CMD_DONE) {
            uint64_t id = __atomic_load_n(&slot->answered_id, __ATOMIC_RELAXED);

            CHECK_LE(id, i); /* of an earlier, abandoned one: the client posts again */
        }
        __atomic_store_n(&slot->state, R2_SEG_CMD_FREE, __ATOMIC_RELEASE);
    }
    atomic_store(&stop, true);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    r2_control_close(ctl);
}
