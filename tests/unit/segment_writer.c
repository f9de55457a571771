/* A process with a control segment and no network: the tests of r2ccl-ctl run against it.
 *
 * Usage: segment_writer [--seconds N] [--job NAME] [--rank R] [--nics K] [--plan P] [--deaf].
 * Opens a segment, fills every table, journals, answers commands until N seconds have passed or
 * stdin ends; then closes in order. Prints "ready NAME-OF-THE-OBJECT" first. --deaf never answers;
 * --plan: a number of enum r2_seg_plan.
 *
 * A line "OFFSET HEX" on stdin: these bytes go into its own rows there, and are published; "done".
 */
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control/control.h"
#include "control/impl.h"
#include "util/clock.h"

#define TICK_MS 10
#define MAX_NICS R2_SEG_MAX_NICS

struct writer {
    struct r2_control *ctl;
    int nics;
    int paths[MAX_NICS];
    bool failed[MAX_NICS];
    bool drained[MAX_NICS];
    uint64_t until_ns[MAX_NICS];
    uint64_t generation;
};

struct options {
    unsigned seconds;
    const char *job;
    int rank;
    int nics;
    bool deaf;
    const char *peer; /* its host */
};

static const char *nic_name(int nic)
{
    static char names[MAX_NICS][32];

    snprintf(names[nic], sizeof(names[nic]), "127.0.%d.1", nic + 1);
    return names[nic];
}

static void say(struct writer *w, enum r2_seg_event event, int nic, uint64_t bytes,
                uint64_t duration_us, const char *cause)
{
    r2_control_journal(w->ctl, &(struct r2_control_event){
                                   .event = event,
                                   .nic = nic_name(nic),
                                   .remote_nic = "127.0.9.1",
                                   .peer_host = "node-b",
                                   .peer_pid = 4711,
                                   .generation = w->generation,
                                   .bytes = bytes,
                                   .duration_us = duration_us,
                                   .cause = cause,
                               });
}

static void fail(struct writer *w, int nic, const char *fault)
{
    say(w, R2_EV_FAULT_INJECTED, nic, 0, 0, fault);
    r2_control_nic_fault(w->ctl, nic, fault);
    r2_control_nic_state(w->ctl, nic, R2_SEG_NIC_FAILED, "3 heartbeats unanswered");
    r2_control_path_state(w->ctl, w->paths[nic], R2_SEG_PATH_DOWN, ++w->generation,
                          "3 heartbeats unanswered");
    say(w, R2_EV_NIC_DOWN, nic, 0, 0, "3 heartbeats unanswered");
    say(w, R2_EV_REPLAY, nic, 1048576, 0, NULL);
    say(w, R2_EV_RESUME, nic, 0, 21000, NULL);
    r2_count(&r2_control_counters(w->ctl)->failovers, 1);
    r2_count_time(&r2_control_counters(w->ctl)->resume, 21 * R2_NS_PER_MS);
    r2_count(&r2_control_counters(w->ctl)->replayed_bytes, 1048576);
    w->failed[nic] = true;
}

static void recover(struct writer *w, int nic)
{
    say(w, R2_EV_FAULT_CLEARED, nic, 0, 0, NULL);
    r2_control_nic_fault(w->ctl, nic, NULL);
    r2_control_nic_state(w->ctl, nic, R2_SEG_NIC_HEALTHY, "probe answered");
    r2_control_path_state(w->ctl, w->paths[nic], R2_SEG_PATH_UP, ++w->generation, NULL);
    say(w, R2_EV_NIC_UP, nic, 0, 0, "probe answered");
    w->failed[nic] = false;
    w->until_ns[nic] = 0;
}

static void fault_text(const struct r2_control_cmd *cmd, char *text, size_t size)
{
    static const char *const kinds[] = {"none", "blackhole", "error", "slow", "loss"};
    static const char *const directions[] = {"none", "tx", "rx", "both"};
    int n = snprintf(text, size, "%s %s", kinds[cmd->fault], directions[cmd->direction]);

    if (cmd->rate)
        n += snprintf(text + n, size - (size_t)n, " %llu B/s", (unsigned long long)cmd->rate);
    if (cmd->loss_ppm)
        n += snprintf(text + n, size - (size_t)n, " %u ppm", cmd->loss_ppm);
    if (cmd->after_bytes)
        n += snprintf(text + n, size - (size_t)n, " after %llu B",
                      (unsigned long long)cmd->after_bytes);
    if (cmd->after_ops)
        n += snprintf(text + n, size - (size_t)n, " at operation %llu",
                      (unsigned long long)cmd->after_ops);
    if (cmd->for_ms)
        snprintf(text + n, size - (size_t)n, " for %llu ms", (unsigned long long)cmd->for_ms);
}

static int on_command(void *arg, const struct r2_control_cmd *cmd, char *result, size_t size)
{
    struct writer *w = arg;
    int nic = cmd->nic;
    char fault[80];

    switch (cmd->verb) {
    case R2_SEG_VERB_FAIL_NIC:
        fault_text(cmd, fault, sizeof(fault));
        if (w->failed[nic]) {
            snprintf(result, size, "%s has failed already", nic_name(nic));
            return 0;
        }
        fail(w, nic, fault);
        w->until_ns[nic] = cmd->for_ms ? r2_now_ns() + cmd->for_ms * R2_NS_PER_MS : 0;
        snprintf(result, size, "%s: %s", nic_name(nic), fault);
        return 0;
    case R2_SEG_VERB_RECOVER_NIC:
        if (w->failed[nic])
            recover(w, nic);
        return 0;
    case R2_SEG_VERB_SET_WEIGHT:
        r2_control_nic_weight(w->ctl, nic, cmd->weight);
        return 0;
    case R2_SEG_VERB_RECORD:
        r2_control_recording(w->ctl, cmd->record ? R2_SEG_RECORDING_ON : R2_SEG_RECORDING_OFF);
        return 0;
    default:
        return -EOPNOTSUPP;
    }
}

static void fill(struct writer *w, const char *peer_host)
{
    int peer = r2_control_peer_add(
        w->ctl, &(struct r2_control_peer){
                    .process_id = {7}, .host = peer_host, .pid = 4711, .state = R2_SEG_PEER_UP});

    r2_control_peer_connections(w->ctl, peer, 4, R2_SEG_DIR_BOTH);
    for (int nic = 0; nic < w->nics; nic++) {
        struct r2_control_nic row = {.name = nic_name(nic),
                                     .addr = nic_name(nic),
                                     .ifname = nic ? "lo" : "lo0",
                                     .speed_mbps = 10000,
                                     .numa = -1,
                                     .weight = 100,
                                     .state = R2_SEG_NIC_HEALTHY,
                                     .link = R2_SEG_LINK_UP};

        r2_control_nic_add(w->ctl, &row);
        w->paths[nic] = r2_control_path_add(w->ctl, peer, nic, "127.0.9.1");
        r2_control_path_state(w->ctl, w->paths[nic], R2_SEG_PATH_UP, ++w->generation, NULL);
        r2_gauge(&r2_control_path_counters(w->ctl, w->paths[nic])->rtt_us, 120);
        say(w, R2_EV_PATH_UP, nic, 0, 0, NULL);
    }
    r2_control_recording(w->ctl, R2_SEG_RECORDING_OFF);
    r2_control_timing(w->ctl,
                      &(struct r2_control_timing){.comm = 7,
                                                  .rank = 1,
                                                  .ranks = 2,
                                                  .op = R2_SEG_COLL_ALL_REDUCE,
                                                  .up_to = 4096,
                                                  .bus_bytes = 4000},
                      20000);
    r2_control_set_missing(w->ctl, R2_SEG_MISSING_NETLINK | R2_SEG_MISSING_TCP_INFO);
    r2_gauge(&r2_control_gauges(w->ctl)->threads, 2);
    r2_control_publish(w->ctl, false);
}

static void tick(struct writer *w)
{
    uint64_t now = r2_now_ns();

    for (int nic = 0; nic < w->nics; nic++) {
        if (w->until_ns[nic] && now >= w->until_ns[nic])
            recover(w, nic);
        if (w->failed[nic])
            continue;
        r2_count(&r2_control_nic_counters(w->ctl, nic)->tx_bytes, 1000000);
        r2_count(&r2_control_nic_counters(w->ctl, nic)->rx_bytes, 500000);
        r2_count(&r2_control_path_counters(w->ctl, w->paths[nic])->tx_bytes, 1000000);
        r2_count(&r2_control_counters(w->ctl)->bytes_sent, 1000000);
    }
}

static int digit(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *found = c ? strchr(digits, c) : NULL;

    return found ? (int)(found - digits) : -1;
}

/* False: it is no such line. */
static bool put(struct writer *w, const char *line)
{
    char *hex, *to = (char *)w->ctl->seg;
    size_t at = strtoull(line, &hex, 10);

    if (*hex++ != ' ')
        return false;
    for (; digit(hex[0]) >= 0 && digit(hex[1]) >= 0 && at < sizeof(*w->ctl->seg); hex += 2)
        to[at++] = (char)(digit(hex[0]) << 4 | digit(hex[1]));
    r2_control_publish(w->ctl, true);
    return *hex == '\n';
}

/* One line; who writes it waits for the answer. */
static bool on_line(struct writer *w)
{
    char line[1024];

    if (!fgets(line, sizeof(line), stdin))
        return false;
    puts(put(w, line) ? "done" : "no such line");
    fflush(stdout);
    return true;
}

static void run(struct writer *w, const struct options *options)
{
    uint64_t end = r2_now_ns() + options->seconds * R2_NS_PER_S;
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};

    while (r2_now_ns() < end) {
        if (poll(&in, 1, TICK_MS) > 0 && !on_line(w))
            return;
        if (!options->deaf)
            r2_control_poll(w->ctl, on_command, w);
        tick(w);
    }
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        {"seconds", required_argument, NULL, 's'},
        {"job", required_argument, NULL, 'j'},
        {"rank", required_argument, NULL, 'r'},
        {"nics", required_argument, NULL, 'k'},
        {"plan", required_argument, NULL, 'p'},
        {"deaf", no_argument, NULL, 'd'},
        {"host", required_argument, NULL, 'h'},
        {"peer", required_argument, NULL, 'o'},
        {NULL, 0, NULL, 0},
    };
    struct options options = {20, "test-job", -1, 2, false, "node-b"};
    struct r2_control_info info = {.host = "node-a", .mode = "auto"};
    struct writer w = {0};
    int opt, rc;

    while ((opt = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        switch (opt) {
        case 's':
            options.seconds = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 'j':
            options.job = optarg;
            break;
        case 'r':
            options.rank = atoi(optarg);
            break;
        case 'k':
            options.nics = atoi(optarg);
            break;
        case 'p':
            info.plan = (enum r2_seg_plan)atoi(optarg);
            break;
        case 'h':
            info.host = optarg;
            break;
        case 'o':
            options.peer = optarg;
            break;
        case 'd':
            options.deaf = true;
            break;
        default:
            return 2;
        }
    }
    w.nics = options.nics < MAX_NICS ? options.nics : MAX_NICS;
    info.job = options.job;
    info.rank = options.rank;
    rc = r2_control_open(&w.ctl, &info);
    if (rc) {
        fprintf(stderr, "segment_writer: no shared memory: %s\n", strerror(-rc));
        return 1;
    }
    fill(&w, options.peer);
    printf("ready %s\n", r2_control_name(w.ctl));
    fflush(stdout);
    run(&w, &options);
    r2_control_close(w.ctl);
    return 0;
}
