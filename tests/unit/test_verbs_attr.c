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

/* The next of "NAME=VALUE NAME=VALUE"; NULL: there is none. */
static char *next_of(char **rest, char **value)
{
    char *name = strsep(rest, " ");

    *value = name;
    if (name)
        strsep(value, "=");
    return name && *name ? name : NULL;
}

static void set_all(const char *env)
{
    char copy[256], *rest = copy, *name, *value;

    snprintf(copy, sizeof(copy), "%s", env);
    while ((name = next_of(&rest, &value)))
        setenv(name, value, 1);
}

/* What all queue pairs were connected with. */
static void check_all(const char *wanted)
{
    char copy[256], *rest = copy, *name, *value;

    snprintf(copy, sizeof(copy), "%s", wanted);
    while ((name = next_of(&rest, &value)))
        CHECK_MSG(bed_attr(name) == atoi(value), "%s is %d, not %s", name, bed_attr(name), value);
}

/* `asked`: what the first communicators ask for, as NCCL hands it over. `told`: what one warning of
 * `heard_of` says; NULL: there is none. */
static void connected(const int *asked, const char *devices, const char *env, const char *wanted,
                      const char *told)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct bed bed;

        set_all(env);
        setenv("R2_FAKEVERBS", devices, 1);
        if (strcmp(devices, INFINIBAND) == 0)
            bed_nics = "127.0.1.1,fvib:1,fvib:2";
        r2_log_set(hear);
        for (; *asked != END; asked++)
            r2_engine_ask_traffic_class(*asked);
        bed_open(&bed, 2);
        check_all(wanted);
        CHECK(r2_log_settle(10 * R2_NS_PER_S));
        CHECK_EQ(heard, told ? 1 : 0);
        CHECK_MSG(!told || strstr(heard_text, told), "%s", heard_text);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

static void connected_told(const char *env, const char *wanted, const char *told)
{
    connected((int[]){END}, ROCE, env, wanted, told);
}

static void connected_with(const char *env, const char *wanted)
{
    connected_told(env, wanted, NULL);
}

TEST(settings)
{
    bed_library(); /* or skip */
    connected_with("", "sl=0 tc=0 pkey_index=0 timeout=16 retry_cnt=7 rnr_retry=7 mtu=3 "
                       "sgid_index=1 hop_limit=255");
    connected_with("NCCL_IB_SL=0x3 NCCL_IB_TC=0x6a NCCL_IB_PKEY=2 NCCL_IB_TIMEOUT=18 "
                   "NCCL_IB_RETRY_CNT=5",
                   "sl=3 tc=106 pkey_index=2 timeout=18 retry_cnt=5 rnr_retry=7");
    /* Out of bounds or no number: the default, not some other bits. */
    connected_with("NCCL_IB_SL=16 NCCL_IB_TC=256 NCCL_IB_PKEY=-1 NCCL_IB_TIMEOUT=99 "
                   "NCCL_IB_RETRY_CNT=all",
                   "sl=0 tc=0 pkey_index=0 timeout=16 retry_cnt=7");
}

/* The queue pair that shows a NIC's writes to a GPU goes to the same switch: one of another
 * partition, service level or size than those of data would not come back. That it is among those
 * looked at shows its timeout, which is its own. */
TEST(flush_queue_pair)
{
    bed_library();
    connected_with("NCCL_IB_SL=3 NCCL_IB_TC=106 NCCL_IB_PKEY=2 NCCL_IB_TIMEOUT=18 "
                   "R2CCL_GPU_MEMORY=direct",
                   "timeout=-2 sl=3 tc=106 pkey_index=2 mtu=3 sgid_index=1 hop_limit=255");
}

/* R2CCL_IB_MTU lowers the active one, and never raises it; no such size is no setting. */
TEST(mtu)
{
    bed_library();
    connected_with("R2CCL_IB_MTU=512 R2CCL_GPU_MEMORY=direct", "mtu=2 timeout=-2");
    connected_with("R2CCL_IB_MTU=4096 R2_FAKEVERBS_MTU=2048", "mtu=4");
    connected_with("R2CCL_IB_MTU=1500", "mtu=3");
    connected_with("R2CCL_IB_MTU=auto R2_FAKEVERBS_MTU=4096", "mtu=5");
}

/* The entry of the GID tables by setting. R2CCL's own wins over NCCL's. -1 and what is no number,
 * or more than queue pairs can name, leave it to the rule. That takes the first one with the NIC's
 * address (1; here 3 has it too). All but -1 of these is told of once. 259 has the low byte of 3.
 */
TEST(gid_index)
{
    static const struct {
        const char *env, *wanted, *told;
    } cases[] = {
        {"NCCL_IB_GID_INDEX=3", "sgid_index=3", NULL},
        {"R2CCL_IB_GID_INDEX=3", "sgid_index=3", NULL},
        {"R2CCL_IB_GID_INDEX=3 NCCL_IB_GID_INDEX=1", "sgid_index=3", NULL},
        {"R2CCL_IB_GID_INDEX=1 NCCL_IB_GID_INDEX=3", "sgid_index=1", NULL},
        {"NCCL_IB_GID_INDEX=-1", "sgid_index=1", NULL},
        {"NCCL_IB_GID_INDEX=first", "sgid_index=1", "NCCL_IB_GID_INDEX=first "},
        {"NCCL_IB_GID_INDEX=256", "sgid_index=1", "NCCL_IB_GID_INDEX=256 "},
        {"R2CCL_IB_GID_INDEX=259", "sgid_index=1", "R2CCL_IB_GID_INDEX=259 "},
    };

    bed_library();
    heard_of = "index of a GID";
    setenv("R2_FAKEVERBS_GID", "3", 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        connected_told(cases[i].env, cases[i].wanted, cases[i].told);
    unsetenv("R2_FAKEVERBS_GID");
    heard_of = "service level";
}

/* Of a table with 127.x at 1 and fd00::x at 2: what is asked for comes first, what nobody has or
 * what makes no sense leaves it to the rule and is told of. */
TEST(gid_wants)
{
    static const struct {
        const char *env, *wanted, *told;
    } cases[] = {
        {"NCCL_IB_ADDR_FAMILY=AF_INET6", "sgid_index=2", NULL},
        {"NCCL_IB_ADDR_FAMILY=AF_INET", "sgid_index=1", NULL},
        {"NCCL_IB_ADDR_RANGE=fd00::/16", "sgid_index=2", NULL},
        {"NCCL_IB_ADDR_RANGE=127.0.0.0/8", "sgid_index=1", NULL},
        {"NCCL_IB_ADDR_FAMILY=AF_INET6 NCCL_IB_GID_INDEX=1", "sgid_index=1", NULL},
        {"NCCL_IB_ROCE_VERSION_NUM=2", "sgid_index=1", NULL},
        {"NCCL_IB_ADDR_RANGE=10.0.0.0/8", "sgid_index=1", "entry 1 is taken"},
        {"NCCL_IB_ADDR_RANGE=10.0.0.0", "sgid_index=1", "NCCL_IB_ADDR_RANGE=10.0.0.0 "},
        {"NCCL_IB_ADDR_RANGE=10.0.0.0/33", "sgid_index=1", "NCCL_IB_ADDR_RANGE=10.0.0.0/33 "},
        {"NCCL_IB_ADDR_FAMILY=AF_INET6 NCCL_IB_ADDR_RANGE=127.0.0.0/8", "sgid_index=2",
         "NCCL_IB_ADDR_RANGE=127.0.0.0/8 is no range of addresses of AF_INET6"},
        {"NCCL_IB_ADDR_FAMILY=inet", "sgid_index=1", "NCCL_IB_ADDR_FAMILY=inet "},
        {"NCCL_IB_QPS_PER_CONNECTION=16", "sgid_index=1",
         "NCCL_IB_QPS_PER_CONNECTION=16: a path has 8"},
        {"NCCL_IB_QPS_PER_CONNECTION=two", "sgid_index=1", "NCCL_IB_QPS_PER_CONNECTION=two is no"},
        {"NCCL_IB_ROCE_VERSION_NUM=3", "sgid_index=1", "NCCL_IB_ROCE_VERSION_NUM=3 "},
    };

    bed_library();
    setenv("R2_FAKEVERBS_GID6", "2", 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        /* Each device has a table of its own. */
        heard_of = cases[i].told && strstr(cases[i].told, "taken") ? "fv0 port 1: no" : "NCCL_IB_";
        connected_told(cases[i].env, cases[i].wanted, cases[i].told);
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

    bed_library();
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        without_rdma("NCCL_IB_DISABLE", numbers[i]);
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        char env[64];

        snprintf(env, sizeof(env), "NCCL_IB_DISABLE=%s", none[i]);
        connected_with(env, "mtu=3");
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

    bed_library();
    connected(one, ROCE, "R2CCL_GPU_MEMORY=direct", "tc=106 sl=0 timeout=-2", NULL);
    connected(one, ROCE, "NCCL_IB_TC=96 NCCL_IB_SL=3", "tc=96 sl=3", NULL);
    connected(high, ROCE, "R2CCL_GPU_MEMORY=direct", "tc=0 sl=0", NULL);
    connected(low, INFINIBAND, "R2CCL_GPU_MEMORY=direct", "sl=5 timeout=-2", NULL);
    connected(most, INFINIBAND, "R2CCL_GPU_MEMORY=direct", "sl=15", NULL);
    connected(one, INFINIBAND, "R2CCL_GPU_MEMORY=direct", "sl=0", "class is 106");
    connected(one, INFINIBAND, "NCCL_IB_SL=3", "sl=3", NULL);
    connected(one, INFINIBAND, "NCCL_IB_SL=16", "sl=0", "NCCL_IB_SL"); /* is no setting */
}
