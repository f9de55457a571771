/* Brings the net plugin in. Its SONAME is libnccl-net.so, which NCCL 2.4 to 2.32 opens when nothing
 * else is asked for: the dynamic linker then finds it loaded already. No variable is needed that
 * children would inherit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "api/call.h"
#include "real/real.h"
#include "settings/settings.h"
#include "tuner/want.h"
#include "util/log.h"

#define PLUGIN "libnccl-net-r2ccl.so"
#define SONAME "libnccl-net.so"

/* Whether one of the names in NCCL_NET_PLUGIN's list leads to our plugin. */
static bool names_ours(const char *list)
{
    static const char *const ours[] = {"r2ccl", SONAME, PLUGIN, NULL};
    char copy[1024], *rest = NULL;

    snprintf(copy, sizeof(copy), "%s", list);
    for (char *name = strtok_r(copy, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const char *file = strrchr(name, '/');

        if (file && !strcmp(file + 1, PLUGIN))
            return true;
        for (int i = 0; ours[i]; i++)
            if (!strcmp(name, ours[i]))
                return true;
    }
    return false;
}

static bool user_wants_another(void)
{
    const char *plugin = getenv("NCCL_NET_PLUGIN");
    const char *net = getenv("NCCL_NET");

    if (plugin && *plugin && !names_ours(plugin)) {
        R2_WARN(
            "NCCL_NET_PLUGIN=%s is set, so NCCL uses that and not the R2CCL plugin: failed NICs "
            "are not survived. Unset it to use R2CCL",
            plugin);
        return true;
    }
    if (net && *net && strcasecmp(net, "R2CCL")) {
        R2_WARN("NCCL_NET=%s is set, so NCCL passes the R2CCL plugin over: failed NICs are not "
                "survived. Unset it to use R2CCL",
                net);
        return true;
    }
    return false;
}

/* In the shim's own folder, or up to two above it (a build folder's tests and variants). */
static bool find_plugin(char *path, size_t size)
{
    static const char *const places[] = {"", "../", "../../"};
    const char *own = r2_real_own_path();
    const char *slash = strrchr(own, '/');
    int folder = slash ? (int)(slash - own) + 1 : 0;

    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        snprintf(path, size, "%.*s%s" PLUGIN, folder, own, places[i]);
        if (access(path, R_OK) == 0)
            return true;
    }
    snprintf(path, size, "%.*s" PLUGIN, folder, own);
    return false;
}

static void warn_bypassed(void)
{
    const char *collnet = getenv("NCCL_COLLNET_ENABLE");
    const char *gin = getenv("NCCL_GIN_ENABLE");

    if (collnet && !strcmp(collnet, "1"))
        R2_WARN("NCCL_COLLNET_ENABLE=1: reductions in the switches (SHARP) need a plugin of their "
                "own and are not available with R2CCL; NCCL falls back to rings and trees");
    if (gin && *gin && strcmp(gin, "0"))
        R2_WARN(
            "NCCL_GIN_ENABLE=%s: traffic that GPUs start themselves (GIN) goes around R2CCL and "
            "does not survive a failed NIC. NCCL_GIN_ENABLE=0 keeps it off",
            gin);
}

/* Whether any call of the application has come through: the plugin asks, by this name, since it
 * may be used by an NCCL whose calls do not (linked statically, opened with dlopen). */
R2_EXPORT extern int r2ccl_shim_reached;
int r2ccl_shim_reached;

/* NCCL finds the plugin's tuner only in a process that may want something of it: tuner/want.h. */
static void announce(void *plugin)
{
    int (*expect)(const struct r2ccl_tuner_want *want);

    if (r2_settings_get()->plan <= R2_PLAN_SETTING_SHADOW)
        return;
    *(void **)&expect = r2_real_dlsym(plugin, "r2ccl_tuner_expect");
    if (expect)
        expect(NULL);
}

static void load(void)
{
    char path[1024];
    void *found;

    __atomic_store_n(&r2ccl_shim_reached, 1, __ATOMIC_RELAXED);
    if (user_wants_another())
        return;
    found = dlopen(SONAME, RTLD_NOLOAD | RTLD_LAZY);
    if (found && r2_real_dlsym(found, "r2ccl_settings_json")) {
        announce(found); /* it is loaded: preloaded, or by an NCCL that we did not see */
        return;
    }
    if (found) {
        R2_WARN("another library by the name " SONAME " is loaded already: NCCL uses that and not "
                "the R2CCL plugin");
        return;
    }
    if (!find_plugin(path, sizeof(path))) {
        R2_WARN("%s is not there: install libr2ccl.so and " PLUGIN " in one folder. NCCL runs "
                "without R2CCL",
                path);
        return;
    }
    found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!found) {
        R2_WARN("the plugin cannot be loaded (%s): NCCL runs without R2CCL", dlerror());
        return;
    }
    announce(found);
    R2_INFO("net plugin: %s", path);
    warn_bypassed();
}

void r2_real_plugin_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
}
