/* The settings (rung 1): the table, the parsers, names, and the JSON that r2ccl-ctl reads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>

#include "check.h"
#include "control/segment.h"
#include "settings/settings.h"
#include "settings/table.h"
#include "settings/values.h"

/* A made-up environment: pairs of name and value. */
static const char *env_pairs[20][2];
static int env_count;

static char *fake_getenv(const char *name)
{
    for (int i = 0; i < env_count; i++) {
        if (strcmp(env_pairs[i][0], name) == 0) {
            return (char *)(uintptr_t)env_pairs[i][1];
        }
    }
    return NULL;
}

static void set_env(const char *name, const char *value)
{
    env_pairs[env_count][0] = name;
    env_pairs[env_count++][1] = value;
}

static int parse_one(const char *name, const char *value, struct r2_settings *out, char *err,
                     size_t errlen)
{
    env_count = 0;
    set_env(name, value);
    return r2_settings_parse(out, fake_getenv, err, errlen);
}

TEST(defaults)
{
    struct r2_settings s;
    char err[512];

    env_count = 0;
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), 0);
    CHECK_STR(err, "");
    CHECK_EQ(s.mode, R2_MODE_AUTO);
    CHECK_STR(s.nics, "");
    CHECK_EQ(s.eager, 8192);
    CHECK_EQ(s.chunk, 512 * 1024);
    CHECK_EQ(s.spin_ns, 200000);
    CHECK_EQ(s.heartbeat_ns, 100000000);
    CHECK_EQ(s.heartbeat_idle_ns, 1000000000);
    CHECK_EQ(s.heartbeat_misses, 3);
    CHECK_EQ(s.no_path_timeout_ns, 60000000000);
    CHECK_EQ(s.damp_ns, 600000000000);
    CHECK_EQ(s.damp_suppress, 3000);
    CHECK(s.help_progress && s.shm && !s.verify);
    CHECK_EQ(s.ports.low, 0);
    CHECK_EQ(s.ports.high, 0);
    CHECK_EQ(s.log, R2_LOG_SETTING_WARN);
}

TEST(table)
{
    for (int i = 0; i < r2_setting_row_count; i++) {
        const struct r2_setting_row *row = &r2_setting_rows[i];

        CHECK_MSG(strlen(row->doc) > 10, "%s has no doc", row->name);
        CHECK_MSG(row->foreign == (strncmp(row->name, "R2CCL_", 6) != 0), "%s", row->name);
        for (int k = 0; k < i; k++) {
            CHECK_MSG(strcmp(row->name, r2_setting_rows[k].name), "%s twice", row->name);
        }
    }
}

TEST(values)
{
    struct r2_settings s;
    char err[512];

    env_count = 0;
    set_env("R2CCL_MODE", "Balance");
    set_env("R2CCL_EAGER", "4k");
    set_env("R2CCL_CHUNK", "1MiB");
    set_env("R2CCL_HEARTBEAT", "50");
    set_env("R2CCL_DAMP", "0");
    set_env("R2CCL_NO_PATH_TIMEOUT", "1.5s");
    set_env("R2CCL_SPIN", "0");
    set_env("R2CCL_PORT_RANGE", "40000-40100");
    set_env("R2CCL_CPUS", "0-3,8");
    set_env("R2CCL_VERIFY", "on");
    set_env("R2CCL_NICS", "127.0.1.1,127.0.2.1");
    set_env("R2CCL_LOG", "3");
    set_env("NCCL_SOCKET_IFNAME", "^docker");
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), 0);
    CHECK_EQ(s.mode, R2_MODE_BALANCE);
    CHECK_EQ(s.eager, 4096);
    CHECK_EQ(s.chunk, 1 << 20);
    CHECK_EQ(s.heartbeat_ns, 50000000);
    CHECK_EQ(s.heartbeat_idle_ns, 500000000);
    CHECK_EQ(s.damp_suppress, 0);
    CHECK_EQ(s.no_path_timeout_ns, 1500000000);
    CHECK_EQ(s.spin_ns, 0);
    CHECK_EQ(s.ports.low, 40000);
    CHECK_EQ(s.ports.high, 40100);
    CHECK_STR(s.cpus, "0-3,8");
    CHECK(s.verify);
    CHECK_STR(s.nics, "127.0.1.1,127.0.2.1");
    CHECK_EQ(s.log, R2_LOG_SETTING_TRACE);
    CHECK_STR(s.nccl_socket_ifname, "^docker");
}

TEST(plans_of_modes)
{
    static const struct {
        const char *mode, *plan;
        int want;
    } cases[] = {
        {"auto", NULL, R2_PLAN_SETTING_AUTO},          {"auto", "off", R2_PLAN_SETTING_OFF},
        {"off", "auto", R2_PLAN_SETTING_OFF},          {"migrate", "auto", R2_PLAN_SETTING_OFF},
        {"balance", "shadow", R2_PLAN_SETTING_OFF},    {"3", NULL, R2_PLAN_SETTING_AUTO},
        {"optimal", NULL, R2_PLAN_SETTING_AUTO},       {"optimal", "off", R2_PLAN_SETTING_OFF},
        {"optimal", "shadow", R2_PLAN_SETTING_SHADOW}, {"optimal", "", R2_PLAN_SETTING_AUTO},
    };
    struct r2_settings s;
    char err[512];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        env_count = 0;
        set_env("R2CCL_MODE", cases[i].mode);
        if (cases[i].plan)
            set_env("R2CCL_PLAN", cases[i].plan);
        CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), 0);
        CHECK_MSG(s.plan == cases[i].want, "%s, %s: %d", cases[i].mode,
                  cases[i].plan ? cases[i].plan : "-", s.plan);
    }
}

TEST(bad_values)
{
    static const char *const bad[][2] = {
        {"R2CCL_MODE", "6"},
        {"R2CCL_MODE", "bal"},
        {"R2CCL_MODE", "off 0"},
        {"R2CCL_EAGER", "8X"},
        {"R2CCL_EAGER", "-1"},
        {"R2CCL_EAGER", "128K"},
        {"R2CCL_CHUNK", "99999999999999999999"},
        {"R2CCL_CHUNK", "17179869184G"},
        {"R2CCL_HEARTBEAT", "1"},
        {"R2CCL_HEARTBEAT", "100 ms"},
        {"R2CCL_HEARTBEAT", "1.ms"},
        {"R2CCL_HEARTBEAT", "x"},
        {"R2CCL_TELL_ERRORS", "-1"},
        {"R2CCL_LANES", "1e1"},
        {"R2CCL_IO_THREADS", "-1"},
        {"R2CCL_PORT_RANGE", "70000"},
        {"R2CCL_PORT_RANGE", "9-5"},
        {"R2CCL_PORT_RANGE", "0-5"},
        {"R2CCL_CPUS", "3-1"},
        {"R2CCL_CPUS", "0,"},
        {"R2CCL_CPUS", "99999"},
        {"R2CCL_VERIFY", "2"},
        {"R2CC_MODE", "9"},
    };
    struct r2_settings s;
    struct r2_settings defaults;
    char err[512];

    env_count = 0;
    r2_settings_parse(&defaults, fake_getenv, err, sizeof(err));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char want[256];

        CHECK_MSG(parse_one(bad[i][0], bad[i][1], &s, err, sizeof(err)) == -EINVAL, "%s=%s",
                  bad[i][0], bad[i][1]);
        snprintf(want, sizeof(want), "%s=%s is not valid: allowed is ", bad[i][0], bad[i][1]);
        CHECK_MSG(strncmp(err, want, strlen(want)) == 0 && err[strlen(want)], "%s", err);
        CHECK_MEM(&s, &defaults, sizeof(s));
    }
    /* The others are still read. */
    set_env("R2CCL_VERIFY", "1");
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), -EINVAL);
    CHECK(s.verify);
    CHECK_EQ(s.mode, R2_MODE_AUTO);
}

TEST(alias_and_empty)
{
    struct r2_settings s;
    char err[512];

    CHECK_EQ(parse_one("R2CC_MODE", "2", &s, err, sizeof(err)), 0);
    CHECK_EQ(s.mode, R2_MODE_BALANCE);
    CHECK_EQ(s.r2cc_mode, R2_MODE_BALANCE);
    set_env("R2CCL_MODE", "migrate");
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), 0);
    CHECK_EQ(s.mode, R2_MODE_MIGRATE);
    CHECK_EQ(s.r2cc_mode, 0);
    CHECK_EQ(parse_one("R2CCL_CHUNK", "", &s, err, sizeof(err)), 0);
    CHECK_EQ(s.chunk, 512 * 1024);
}

TEST(of_shim)
{
    struct r2_settings s;
    char err[512], names[128];

    CHECK_EQ(parse_one("R2CC_MODE", "2", &s, err, sizeof(err)), 0);
    set_env("R2CCL_EAGER", "4K");
    r2_settings_of_shim(&s, fake_getenv, names, sizeof(names));
    CHECK_STR(names, "");
    CHECK_EQ(parse_one("R2CC_MODE", "3", &s, err, sizeof(err)), 0);
    set_env("R2CCL_DLSYM", "1");
    r2_settings_of_shim(&s, fake_getenv, names, sizeof(names));
    CHECK_STR(names, "R2CC_MODE=3, R2CCL_DLSYM=1");
}

TEST(long_text)
{
    struct r2_settings s;
    char text[R2_SETTING_TEXT + 1];
    char err[512];

    memset(text, 'a', sizeof(text));
    text[R2_SETTING_TEXT - 1] = '\0';
    CHECK_EQ(parse_one("R2CCL_NICS", text, &s, err, sizeof(err)), 0);
    CHECK_STR(s.nics, text);
    text[R2_SETTING_TEXT - 1] = 'a';
    text[R2_SETTING_TEXT] = '\0';
    CHECK_EQ(parse_one("R2CCL_NICS", text, &s, err, sizeof(err)), -EINVAL);
    CHECK_STR(s.nics, "");
}

/* The control segment would cut a longer one, and two jobs would have one name. */
TEST(long_job)
{
    struct r2_settings s;
    char text[sizeof(((struct r2_seg_process *)0)->job) + 1];
    char err[512];

    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 2] = '\0';
    CHECK_EQ(parse_one("R2CCL_JOB", text, &s, err, sizeof(err)), 0);
    CHECK_STR(s.job, text);
    text[sizeof(text) - 2] = 'a';
    text[sizeof(text) - 1] = '\0';
    CHECK_EQ(parse_one("R2CCL_JOB", text, &s, err, sizeof(err)), -EINVAL);
    CHECK_STR(s.job, "");
    CHECK_MSG(strstr(err, "allowed is a text of at most 63 bytes"), "%s", err);
}

TEST(names)
{
    char *const quiet[] = {"PATH=/bin", "R2CCL_NICS=eth0", "R2CCL_LAB_DIR=/x", "R2CCL", NULL};
    char *const both[] = {"R2CC_MODE=2", "R2CCL_MODE=1", NULL};
    char *const loud[] = {
        "R2CCL_HEARTBEATS=1", "R2CC_MODE=2", "R2CCL_MODE=", "R2CCL_NIC=", "R2CCL_=",
        "R2CCL_UNASKED=64K",  NULL};
    char out[1024];
    char tiny[8];
    size_t len;

    CHECK_EQ(r2_settings_check_names(quiet, out, sizeof(out)), 0);
    CHECK_STR(out, "");
    CHECK_GT(r2_settings_check_names(both, out, sizeof(out)), 0);
    CHECK_STR(out, "R2CC_MODE has no effect: R2CCL_MODE is set\n");
    len = r2_settings_check_names(loud, out, sizeof(out));
    CHECK_EQ(len, strlen(out));
    CHECK(
        strstr(out, "R2CCL_HEARTBEATS is not a setting of R2CCL; did you mean R2CCL_HEARTBEAT?\n"));
    CHECK(strstr(out, "R2CC_MODE is read as an alias of R2CCL_MODE\n"));
    CHECK(strstr(out, "R2CCL_NIC is not a setting of R2CCL; did you mean R2CCL_NICS?\n"));
    CHECK(strstr(out, "R2CCL_UNASKED has no effect: messages over R2CCL_EAGER wait"));
    CHECK_EQ(r2_settings_check_names(loud, tiny, sizeof(tiny)), len);
    CHECK_EQ(r2_settings_check_names(loud, NULL, 0), len);
    CHECK_LT(strlen(tiny), sizeof(tiny));
}

TEST(names_long)
{
    char name[600];
    char *const env[] = {name, NULL};
    char out[1024];

    memset(name, 'A', sizeof(name));
    memcpy(name, "R2CCL_", 6);
    name[sizeof(name) - 1] = '\0';
    CHECK_GT(r2_settings_check_names(env, out, sizeof(out)), 0);
    CHECK(strstr(out, "did you mean R2CCL_"));
}

/* ---- values ---- */

TEST(round_trip)
{
    for (unsigned long i = check_rounds(20000); i > 0; i--) {
        uint64_t value = check_random() >> check_below(64);
        uint64_t back = 0;
        char text[64];

        r2_value_duration_text(value, text, sizeof(text));
        CHECK_EQ(r2_value_duration(text, "s", &back), 0);
        CHECK_EQ(back, value);
        r2_value_size_text(value, text, sizeof(text));
        CHECK_EQ(r2_value_size(text, &back), 0);
        CHECK_EQ(back, value);
    }
}

TEST(cpus)
{
    cpu_set_t set;

    CHECK_EQ(r2_value_cpus("0-3,8", &set), 0);
    CHECK_EQ(CPU_COUNT(&set), 5);
    CHECK(CPU_ISSET(8, &set) && !CPU_ISSET(4, &set));
    CHECK_EQ(r2_value_cpus("", &set), 0);
    CHECK_EQ(CPU_COUNT(&set), 0);
    CHECK_EQ(r2_value_cpus("1,,2", &set), -EINVAL);
    CHECK_EQ(r2_value_cpus(",1", &set), -EINVAL);
}

TEST(io_threads)
{
    struct r2_settings s = {.io_threads = 7};
    cpu_set_t allowed;

    CHECK_EQ(r2_settings_io_threads(&s, 2), 7);
    s.io_threads = 0;
    CHECK_EQ(r2_settings_io_threads(&s, 0), 1);
    CHECK_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    CHECK_LE(r2_settings_io_threads(&s, 64), CPU_COUNT(&allowed) * 3 / 8 + 1);
    CHECK_GE(r2_settings_io_threads(&s, 64), 1);
    strcpy(s.cpus, "0");
    CHECK_EQ(r2_settings_io_threads(&s, 64), 1);
}

TEST(default_io_threads)
{
    static const struct {
        int cores, nics, threads;
    } cases[] = {{64, 1, 8}, {64, 2, 12}, {64, 3, 16}, {64, 4, 16}, {64, 1 << 30, 16}, {32, 2, 12},
                 {32, 1, 8}, {16, 2, 6},  {8, 1, 3},   {2, 2, 1},   {1, 0, 1},         {64, 0, 1}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        CHECK_EQ(r2_settings_default_io_threads(cases[i].cores, cases[i].nics), cases[i].threads);
}

TEST(every_bad_value_is_named)
{
    struct r2_settings s;
    char err[512];
    char little[40];

    env_count = 0;
    set_env("R2CCL_EAGER", "lots");
    set_env("R2CCL_VERIFY", "2");
    set_env("R2CCL_CHUNK", "1M");
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, err, sizeof(err)), -EINVAL);
    CHECK_MSG(strstr(err, "R2CCL_EAGER=lots is not valid") && strstr(err, "\nR2CCL_VERIFY=2 is") &&
                  strstr(err, "allowed is 0 or 1; the default holds (0)") &&
                  strstr(err, "; the default holds (8K)\n") && !strstr(err, "R2CCL_CHUNK") &&
                  err[strlen(err) - 1] != '\n',
              "%s", err);
    CHECK_EQ(s.eager, 8192);
    CHECK_EQ(s.chunk, 1 << 20);
    CHECK_EQ(r2_settings_parse(&s, fake_getenv, little, sizeof(little)), -EINVAL);
    CHECK_EQ(strlen(little), sizeof(little) - 1);
}

/* Random text for every row: no crash; either the value is taken and its setting alone changes,
 * or the message names both and nothing changes. */
TEST(fuzz)
{
    static const char alphabet[] = "0123456789-+.,:^=*%kKmMgGiBsuhnx |\"\\\x80\xff\n\tabcdefoft";
    struct r2_settings s;
    struct r2_settings defaults;
    char err[512];
    char text[80];

    env_count = 0;
    r2_settings_parse(&defaults, fake_getenv, err, sizeof(err));
    for (unsigned long i = check_rounds(20000); i > 0; i--) {
        const struct r2_setting_row *row =
            &r2_setting_rows[check_below((uint64_t)r2_setting_row_count)];
        size_t len = check_below(check_below(8) ? 8 : sizeof(text));

        for (size_t k = 0; k < len; k++) {
            text[k] = alphabet[check_below(sizeof(alphabet) - 1)];
        }
        text[len] = '\0';
        if (parse_one(row->name, text, &s, err, sizeof(err)) == 0) {
            continue;
        }
        CHECK(strncmp(err, row->name, strlen(row->name)) == 0);
        CHECK_MEM(&s, &defaults, sizeof(s));
    }
}

/* ---- the process ---- */

static void *get_settings(void *arg)
{
    (void)arg;
    return (void *)(uintptr_t)r2_settings_get();
}

TEST(process)
{
    pthread_t threads[8];
    void *got;

    for (int i = 0; i < 8; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, get_settings, NULL), 0);
    }
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(pthread_join(threads[i], &got), 0);
        CHECK(got == (const void *)r2_settings_get());
    }
    CHECK_EQ(r2_settings_get()->lanes, 5);
    CHECK_EQ(r2_settings_get()->eager, 8192);
    CHECK(r2_settings_error() && strstr(r2_settings_error(), "R2CCL_EAGER=lots"));
    CHECK(strstr(r2_settings_warnings(), "R2CCL_HARTBEAT is not a setting"));
    /* Nothing was written, and later changes do not matter. */
    CHECK_STR(getenv("R2CCL_EAGER"), "lots");
    CHECK(getenv("R2CCL_CHUNK") == NULL);
    setenv("R2CCL_LANES", "9", 1);
    CHECK_EQ(r2_settings_get()->lanes, 5);
    setenv("R2CCL_LANES", "5", 1);
}

TEST(json)
{
    CHECK(strstr(r2ccl_settings_json(), "\"value\": \"a\\\"\\\\\\u000a\\ufffd\xc3\xa9\""));
}

int main(int argc, char **argv)
{
    unsetenv("R2CCL_CHUNK");
    unsetenv("R2CCL_MODE");
    setenv("R2CC_MODE", "2", 1);
    setenv("R2CCL_EAGER", "lots", 1);
    setenv("R2CCL_LANES", "5", 1);
    setenv("R2CCL_HARTBEAT", "1", 1);
    setenv("R2CCL_JOB", "a\"\\\n\xff\xc3\xa9", 1);
    return check_main(argc, argv);
}
