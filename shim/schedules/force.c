#define _GNU_SOURCE
#include "schedules/force.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <strings.h>

#include "settings/settings.h"
#include "tuner/want.h"
#include "util/log.h"

#define SONAME "libnccl-net.so"
/* NCCL asks the net plugin's file for a tuner since 2.21, and aborts several communicators together
 * in a group since 2.22: before, the abort of one waits for what another has on the same stream. */
#define FIRST 22200

static int (*expect)(const struct r2ccl_tuner_want *want);
static bool usable;

static const char *obstacle(void)
{
    const char *tuner = getenv("NCCL_TUNER_PLUGIN"), *algo = getenv("NCCL_ALGO");
    void *plugin = dlopen(SONAME, RTLD_NOLOAD | RTLD_LAZY);

    expect = plugin ? (int (*)(const struct r2ccl_tuner_want *))r2_real_dlsym(plugin,
                                                                              "r2ccl_tuner_expect")
                    : NULL;
    if (tuner && *tuner)
        return "NCCL_TUNER_PLUGIN is set";
    if (algo && *algo)
        return "NCCL_ALGO is set";
    return expect ? NULL : "the net plugin in use has no tuner of R2CCL's";
}

static void look(void)
{
    const char *why = obstacle();

    usable = !why || !r2_settings_get()->plan_force;
    if (!usable)
        R2_WARN("%s, so that Tree cannot be forced on single communicators: AllReduce stays with "
                "NCCL's own choice, whatever R2CCL_PLAN says",
                why);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

bool r2_force_available(const struct r2_real *real)
{
    if (real->version && real->version < FIRST) {
        R2_WARN_ONCE("NCCL %d.%d is too old for R2CCL_PLAN, which needs 2.22: AllReduce stays with "
                     "NCCL's own choice",
                     real->version / 10000, real->version / 100 % 100);
        return false;
    }
    pthread_once(&once, look);
    return usable;
}

void r2_force_begin(void)
{
    struct r2ccl_tuner_want want = {.size = sizeof(want), .algo = R2CCL_TUNER_TREE};

    if (expect)
        expect(&want);
}

bool r2_force_end(void)
{
    int taken = expect ? expect(NULL) : 0;

    return taken > 0 || !r2_settings_get()->plan_force;
}
