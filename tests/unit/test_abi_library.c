/* The built library: what it exports, and that it can be loaded and dropped as NCCL does. Rung 3:
 * it finds NICs on loopback, and connects nothing. It cannot prove what NCCL makes of it. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "check.h"
#include "nccl_abi/nccl_net_abi.h"

static const char *library;

TEST(exports)
{
    static const char *const wanted[] = {
        "ncclNetPlugin_v6",     "ncclNetPlugin_v7",       "ncclNetPlugin_v8",
        "ncclNetPlugin_v9",     "ncclNetPlugin_v10",      "ncclNetPlugin_v11",
        "ncclNetPlugin_v12",    "r2ccl_control_segment",  "r2ccl_settings_json",
        "r2ccl_settings_notes", "r2ccl_shim_uses_plugin", "r2ccl_nics_json",
        "r2ccl_nics_order",     "r2ccl_local_speed",      "ncclProfiler_v5"};
    const int count = sizeof(wanted) / sizeof(wanted[0]);
    char command[PATH_MAX + 100];
    char line[512];
    int found = 0;
    FILE *f;

    if (system("nm --version >/dev/null 2>&1") != 0) {
        CHECK_SKIP("there is no nm");
    }
    snprintf(command, sizeof(command), "nm -D --defined-only '%s'", library);
    f = popen(command, "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof(line), f)) {
        char name[256] = "";
        bool known = false;

        CHECK_MSG(sscanf(line, "%*s %*s %255s", name) == 1, "nm says: %s", line);
        for (int i = 0; i < count; i++) {
            known |= strcmp(name, wanted[i]) == 0;
        }
        /* The sanitizers put a few of their own there. */
        known |= strncmp(name, "__asan", 6) == 0 || strncmp(name, "__odr_asan", 10) == 0 ||
                 strncmp(name, "__ubsan", 7) == 0 || strncmp(name, "__tsan", 6) == 0;
        CHECK_MSG(known, "%s is exported and should not be", name);
        found += strncmp(name, "__", 2) != 0;
    }
    CHECK_EQ(pclose(f), 0);
    CHECK_EQ(found, count);
}

TEST(no_other_plugin)
{
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    char name[64];

    CHECK_MSG(h != NULL, "%s", dlerror());
    for (int v = 1; v < 20; v++) {
        snprintf(name, sizeof(name), "ncclCollNetPlugin_v%d", v);
        CHECK(dlsym(h, name) == NULL);
        snprintf(name, sizeof(name), "ncclTunerPlugin_v%d", v);
        CHECK(dlsym(h, name) == NULL);
        snprintf(name, sizeof(name), "ncclProfiler_v%d", v);
        CHECK_EQ(dlsym(h, name) != NULL, v == 5);
    }
    dlclose(h);
}

static void silent(int level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
}

/* NCCL drops the library with the last communicator and loads it again for the next one. */
TEST(load_a_hundred_times)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    for (int i = 0; i < 100; i++) {
        void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        const struct r2_ncclnet_v12 *net;
        struct r2_ncclnet_config config = {R2_NCCL_TRAFFIC_CLASS_UNDEF};
        struct r2_ncclnet_props_v12 p;
        void *ctx = NULL;
        int n = -1;

        CHECK_MSG(h != NULL, "%s", dlerror());
        net = dlsym(h, "ncclNetPlugin_v12");
        CHECK(net != NULL);
        CHECK_EQ(net->init(&ctx, (uint64_t)i, &config, silent, NULL), 0);
        CHECK_EQ(net->devices(&n), 0);
        CHECK_EQ(n, 2);
        CHECK_EQ(net->get_properties(1, &p), 0);
        CHECK_STR(p.name, "127.0.2.1");
        CHECK_EQ(net->finalize(ctx), 0);
        CHECK_EQ(dlclose(h), 0);
    }
}

int main(int argc, char **argv)
{
    library = check_built("libnccl-net-r2ccl.so");
    if (access(library, R_OK) != 0) {
        fprintf(stderr, "%s is not built\n", library);
        return 1;
    }
    return check_main(argc, argv);
}
