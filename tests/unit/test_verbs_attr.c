/* What users set with NCCL's names reaches the queue pairs: read from the attributes with which the
 * stand-in for libibverbs was asked to connect them (rung 3; verbs_bed.h says what it cannot prove;
 * no switch honours anything here). A process each, because settings are read once. */
#define _GNU_SOURCE
#include <sys/wait.h>

#include "util/log.h"
#include "verbs_bed.h"

#define ROCE "fv0=127.0.1.1,fv1=127.0.2.1"
#define INFINIBAND "fvib=ib:127.0.3.1+ib:127.0.4.1"
#define END (-99)

struct wanted {
    const char *name;
    int value;
};

static const char *heard_of = "service level"; /* warnings that say this */
static atomic_int heard;
static char heard_text[512];

__attribute__((format(printf, 5, 6))) static void hear(int level, unsigned long flags,
                                                       const char *file, int line,
                                                       const char *format, ...)
{
    char text[sizeof(heard_text)];
    va_list ap;

    (void)level, (void)flags, (void)file, (void)line;
    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    if (!strstr(text, heard_of))
        return;
    memcpy(heard_text, text, sizeof(text));
    atomic_fetch_add(&heard, 1);
}

/* `env`: NAME, VALUE, ..., NULL. `told`: what one warning of `heard_of` says; NULL: there is none.
 */
static void connected_told(const char *const *env, const struct wanted *wanted, const char *told)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct bed bed;

        for (; *env; env += 2)
            setenv(env[0], env[1], 1);
        setenv("R2_FAKEVERBS", ROCE, 1);
        r2_log_set(hear);
        bed_open(&bed, 2);
        for (; wanted->name; wanted++)
            CHECK_MSG(bed_attr(wanted->name) == wanted->value, "%s is %d, not %d", wanted->name,
                      bed_attr(wanted->name), wanted->value);
        CHECK(r2_log_settle(10 * R2_NS_PER_S));
        CHECK_EQ(heard, told ? 1 : 0);
        CHECK_MSG(!told || strstr(heard_text, told), "%s", heard_text);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

static void connected_with(const char *const *env, const struct wanted *wanted)
{
    connected_told(env, wanted, NULL);
}

TEST(defaults)
{
    static const char *const env[] = {NULL};
    static const struct wanted wanted[] = {
        {"sl", 0},        {"tc", 0},  {"pkey_index", 0}, {"timeout", 16},    {"retry_cnt", 7},
        {"rnr_retry", 7}, {"mtu", 3}, {"sgid_index", 1}, {"hop_limit", 255}, {NULL, 0}};

    bed_library(); /* or skip */
    connected_with(env, wanted);
}

TEST(settings)
{
    static const char *const env[] = {"NCCL_IB_SL",
                                      "0x3",
                                      "NCCL_IB_TC",
                                      "0x6a",
                                      "NCCL_IB_PKEY",
                                      "2",
                                      "NCCL_IB_TIMEOUT",
                                      "18",
                                      "NCCL_IB_RETRY_CNT",
                                      "5",
                                      NULL};
    static const struct wanted wanted[] = {{"sl", 3},       {"tc", 106},      {"pkey_index", 2},
                                           {"timeout", 18}, {"retry_cnt", 5}, {"rnr_retry", 7},
                                           {NULL, 0}};

    bed_library();
    connected_with(env, wanted);
}

/* What the first communicators ask for, as NCCL hands it over; `warnings` of a class that is no
 * service level. */
static void classes(const int *asked, const char *devices, const char *const *env,
                    const struct wanted *wanted, int warnings)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct bed bed;

        for (; *env; env += 2)
            setenv(env[0], env[1], 1);
        setenv("R2_FAKEVERBS", devices, 1);
        if (strcmp(devices, INFINIBAND) == 0)
            bed_nics = "127.0.1.1,fvib:1,fvib:2";
        r2_log_set(hear);
        for (; *asked != END; asked++)
            r2_engine_ask_traffic_class(*asked);
        bed_open(&bed, 2);
        for (; wanted->name; wanted++)
            CHECK_MSG(bed_attr(wanted->name) == wanted->value, "%s is %d, not %d", wanted->name,
                      bed_attr(wanted->name), wanted->value);
        CHECK(r2_log_settle(10 * R2_NS_PER_S));
        CHECK_EQ(heard, warnings);
        CHECK(!warnings || (strstr(heard_text, "106") && strstr(heard_text, "NCCL_IB_SL")));
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

/* Out of bounds or no number: the default, not some other bits. */
TEST(nonsense)
{
    static const char *const env[] = {"NCCL_IB_SL",
                                      "16",
                                      "NCCL_IB_TC",
                                      "256",
                                      "NCCL_IB_PKEY",
                                      "-1",
                                      "NCCL_IB_TIMEOUT",
                                      "99",
                                      "NCCL_IB_RETRY_CNT",
                                      "all",
                                      NULL};
    static const struct wanted wanted[] = {{"sl", 0},       {"tc", 0},        {"pkey_index", 0},
                                           {"timeout", 16}, {"retry_cnt", 7}, {NULL, 0}};

    bed_library();
    connected_with(env, wanted);
}

/* The queue pair that shows a NIC's writes to a GPU goes to the same switch: one of another
 * partition, service level or size than those of data would not come back. That it is among those
 * looked at shows its timeout, which is its own. */
TEST(flush_queue_pair)
{
    static const char *const env[] = {"NCCL_IB_SL",
                                      "3",
                                      "NCCL_IB_TC",
                                      "106",
                                      "NCCL_IB_PKEY",
                                      "2",
                                      "NCCL_IB_TIMEOUT",
                                      "18",
                                      "R2CCL_GPU_MEMORY",
                                      "direct",
                                      NULL};
    static const struct wanted wanted[] = {{"timeout", -2},    {"sl", 3},  {"tc", 106},
                                           {"pkey_index", 2},  {"mtu", 3}, {"sgid_index", 1},
                                           {"hop_limit", 255}, {NULL, 0}};

    bed_library();
    connected_with(env, wanted);
}

/* R2CCL_IB_MTU lowers the active one, and never raises it; no such size is no setting. */
TEST(mtu)
{
    static const char *const low[] = {"R2CCL_IB_MTU", "512", "R2CCL_GPU_MEMORY", "direct", NULL};
    static const char *const high[] = {"R2CCL_IB_MTU", "4096", "R2_FAKEVERBS_MTU", "2048", NULL};
    static const char *const none[] = {"R2CCL_IB_MTU", "1500", NULL};
    static const char *const automatic[] = {"R2CCL_IB_MTU", "auto", "R2_FAKEVERBS_MTU", "4096",
                                            NULL};
    /* Flushes' queue pairs are among them: their timeout differs. */
    static const struct wanted is_512[] = {{"mtu", 2}, {"timeout", -2}, {NULL, 0}};
    static const struct wanted is_2048[] = {{"mtu", 4}, {NULL, 0}};
    static const struct wanted is_1024[] = {{"mtu", 3}, {NULL, 0}};
    static const struct wanted is_4096[] = {{"mtu", 5}, {NULL, 0}};

    bed_library();
    connected_with(low, is_512);
    connected_with(high, is_2048);
    connected_with(none, is_1024);
    connected_with(automatic, is_4096);
}

/* The entry of the GID tables by setting: R2CCL's own wins over NCCL's, -1 and what is no number,
 * or more than queue pairs can name, leave it to the rule, which takes the first one with the NIC's
 * address (1; here 3 has it too). All but -1 of these is told of once. 259 has the low byte of 3.
 */
TEST(gid_index)
{
    static const char *const cases[][5] = {
        {"NCCL_IB_GID_INDEX", "3", NULL},
        {"R2CCL_IB_GID_INDEX", "3", NULL},
        {"R2CCL_IB_GID_INDEX", "3", "NCCL_IB_GID_INDEX", "1", NULL},
        {"R2CCL_IB_GID_INDEX", "1", "NCCL_IB_GID_INDEX", "3", NULL},
        {"NCCL_IB_GID_INDEX", "-1", NULL},
        {"NCCL_IB_GID_INDEX", "first", NULL},
        {"NCCL_IB_GID_INDEX", "256", NULL},
        {"R2CCL_IB_GID_INDEX", "259", NULL},
    };
    static const char *const told[] = {NULL,
                                       NULL,
                                       NULL,
                                       NULL,
                                       NULL,
                                       "NCCL_IB_GID_INDEX=first ",
                                       "NCCL_IB_GID_INDEX=256 ",
                                       "R2CCL_IB_GID_INDEX=259 "};
    static const int index[] = {3, 3, 3, 1, 1, 1, 1, 1};

    bed_library();
    heard_of = "index of a GID";
    setenv("R2_FAKEVERBS_GID", "3", 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct wanted wanted[] = {{"sgid_index", index[i]}, {NULL, 0}};

        connected_told(cases[i], wanted, told[i]);
    }
    unsetenv("R2_FAKEVERBS_GID");
    heard_of = "service level";
}

/* Of a table with 127.x at 1 and fd00::x at 2: what is asked for comes first, what nobody has or
 * what makes no sense leaves it to the rule and is told of. */
TEST(gid_wants)
{
    static const struct {
        const char *env[5];
        int index;
        const char *told;
    } cases[] = {
        {{"NCCL_IB_ADDR_FAMILY", "AF_INET6", NULL}, 2, NULL},
        {{"NCCL_IB_ADDR_FAMILY", "AF_INET", NULL}, 1, NULL},
        {{"NCCL_IB_ADDR_RANGE", "fd00::/16", NULL}, 2, NULL},
        {{"NCCL_IB_ADDR_RANGE", "127.0.0.0/8", NULL}, 1, NULL},
        {{"NCCL_IB_ADDR_FAMILY", "AF_INET6", "NCCL_IB_GID_INDEX", "1", NULL}, 1, NULL},
        {{"NCCL_IB_ROCE_VERSION_NUM", "2", NULL}, 1, NULL},
        {{"NCCL_IB_ADDR_RANGE", "10.0.0.0/8", NULL}, 1, "entry 1 is taken"},
        {{"NCCL_IB_ADDR_RANGE", "10.0.0.0", NULL}, 1, "NCCL_IB_ADDR_RANGE=10.0.0.0 "},
        {{"NCCL_IB_ADDR_RANGE", "10.0.0.0/33", NULL}, 1, "NCCL_IB_ADDR_RANGE=10.0.0.0/33 "},
        {{"NCCL_IB_ADDR_FAMILY", "AF_INET6", "NCCL_IB_ADDR_RANGE", "127.0.0.0/8", NULL},
         2,
         "NCCL_IB_ADDR_RANGE=127.0.0.0/8 is no range of addresses of AF_INET6"},
        {{"NCCL_IB_ADDR_FAMILY", "inet", NULL}, 1, "NCCL_IB_ADDR_FAMILY=inet "},
        {{"NCCL_IB_QPS_PER_CONNECTION", "16", NULL},
         1,
         "NCCL_IB_QPS_PER_CONNECTION=16: a path has 8"},
        {{"NCCL_IB_QPS_PER_CONNECTION", "two", NULL}, 1, "NCCL_IB_QPS_PER_CONNECTION=two is no"},
        {{"NCCL_IB_ROCE_VERSION_NUM", "3", NULL}, 1, "NCCL_IB_ROCE_VERSION_NUM=3 "},
    };

    bed_library();
    setenv("R2_FAKEVERBS_GID6", "2", 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct wanted wanted[] = {{"sgid_index", cases[i].index}, {NULL, 0}};

        /* Each device has a table of its own. */
        heard_of = cases[i].told && strstr(cases[i].told, "taken") ? "fv0 port 1: no" : "NCCL_IB_";
        connected_told(cases[i].env, wanted, cases[i].told);
    }
    unsetenv("R2_FAKEVERBS_GID6");
    heard_of = "service level";
}

/* A message between two ends whose user wants no RDMA. */
static void without_rdma(const char *name, const char *value)
{
    static uint8_t out[65536], in[sizeof(out)];
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct bed_memory memory = {.out = out, .in = in, .size = sizeof(out)};
        struct bed bed;

        setenv("R2_FAKEVERBS", ROCE, 1);
        setenv(name, value, 1);
        bed_open(&bed, 0);
        bed_register(&bed, &memory);
        bed_message(&bed, &memory, 1);
        CHECK_EQ(bed_paths(bed.tx), 0);
        CHECK_EQ(bed_attr("mtu"), -1); /* no queue pair */
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

/* NCCL takes any number but 0 for a yes, and what is no number for 0. */
TEST(no_rdma)
{
    static const char *const numbers[] = {"1", "2", "-1", "0x10", "7up"};
    static const char *const none[] = {"0", "", "0x0", "true", "99999999999999999999"};
    static const struct wanted wanted[] = {{"mtu", 3}, {NULL, 0}};

    bed_library();
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        without_rdma("NCCL_IB_DISABLE", numbers[i]);
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        const char *const env[] = {"NCCL_IB_DISABLE", none[i], NULL};

        connected_with(env, wanted);
    }
}

/* A communicator's traffic class is RoCE's type of service and InfiniBand's service level, also of
 * the queue pairs of flushes. What users set for the process wins; of several communicators the
 * first one counts, and what is out of bounds does not. A class that is no service level is told of
 * once, with the setting that counts there, and only where it would have been one. */
TEST(traffic_class)
{
    static const int one[] = {-1, 106, 7, -1, END}, low[] = {5, END}, high[] = {256, END};
    static const int most[] = {15, END};
    static const char *const none[] = {"R2CCL_GPU_MEMORY", "direct", NULL};
    static const char *const set[] = {"NCCL_IB_TC", "96", "NCCL_IB_SL", "3", NULL};
    static const char *const level[] = {"NCCL_IB_SL", "3", NULL};
    static const char *const wrong[] = {"NCCL_IB_SL", "16", NULL};
    static const struct wanted roce[] = {{"tc", 106}, {"sl", 0}, {"timeout", -2}, {NULL, 0}};
    static const struct wanted ib[] = {{"sl", 5}, {"timeout", -2}, {NULL, 0}};
    static const struct wanted by_user[] = {{"tc", 96}, {"sl", 3}, {NULL, 0}};
    static const struct wanted by_level[] = {{"sl", 3}, {NULL, 0}};
    static const struct wanted zero[] = {{"tc", 0}, {"sl", 0}, {NULL, 0}},
                               no_level[] = {{"sl", 0}, {NULL, 0}},
                               highest[] = {{"sl", 15}, {NULL, 0}};

    bed_library();
    classes(one, ROCE, none, roce, 0);
    classes(one, ROCE, set, by_user, 0);
    classes(high, ROCE, none, zero, 0);
    classes(low, INFINIBAND, none, ib, 0);
    classes(most, INFINIBAND, none, highest, 0);
    classes(one, INFINIBAND, none, no_level, 1);
    classes(one, INFINIBAND, level, by_level, 0);
    classes(one, INFINIBAND, wrong, no_level, 1); /* is no setting */
}
