/* Brings the net plugin in. Its SONAME is libnccl-net.so, which NCCL 2.4 to 2.32 opens when nothing
 * else is asked for (RCCL: librccl-net.so): the dynamic linker then finds it loaded already. No
 * variable is needed that children would inherit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "real/conf.h"
#include "real/real.h"
#include "settings/settings.h"
#include "util/log.h"

#define RCCL "librccl"
#define EMPTY_IS_NONE 22700 /* NCCL_NET_PLUGIN without a name: no plugin; before, the default */

/* File and SONAME of the plugin, by the name of the library that will look for it. */
static const struct names {
    const char *plugin, *soname;
} of_nccl = {"libnccl-net-r2ccl.so", "libnccl-net.so"},
  of_rccl = {"librccl-net.so", "librccl-net.so"};
static const struct names *names = &of_nccl;

static bool is_rccl(struct r2_real *real)
{
    const char *file;
    Dl_info info;

    if (!dladdr(r2_real_symbol(real, "ncclGetVersion"), &info) || !info.dli_fname)
        return false;
    file = strrchr(info.dli_fname, '/');
    return strncmp(file ? file + 1 : info.dli_fname, RCCL, strlen(RCCL)) == 0;
}

/* Whether one of the names in NCCL_NET_PLUGIN's list leads to our plugin. */
static bool names_ours(const char *list)
{
    const char *const ours[] = {"r2ccl", names->soname, names->plugin, NULL};
    char copy[1024], *rest = NULL;

    snprintf(copy, sizeof(copy), "%s", list);
    for (char *name = strtok_r(copy, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const char *file = strrchr(name, '/');

        if (file && !strcmp(file + 1, names->plugin))
            return true;
        for (int i = 0; ours[i]; i++)
            if (!strcmp(name, ours[i]))
                return true;
    }
    return false;
}

/* Of the NCCL whose call is the first: where it looks depends on it. */
static __thread int version __attribute__((tls_model("initial-exec")));

static bool user_wants_another(void)
{
    struct r2_conf_value value;
    const char *plugin = r2_conf_get(&value, "NCCL_NET_PLUGIN", version), *net;

    if (plugin && (*plugin ? !names_ours(plugin) : version >= EMPTY_IS_NONE)) {
        R2_WARN("NCCL_NET_PLUGIN=%s is set%s, so NCCL uses %s and not the R2CCL plugin: a "
                "failed NIC ends the job. Unset it to use R2CCL",
                plugin, value.where, *plugin ? "that" : "none");
        return true;
    }
    net = r2_conf_get(&value, "NCCL_NET", version);
    if (net && *net && strcasecmp(net, "R2CCL")) {
        R2_WARN("NCCL_NET=%s is set%s, so NCCL does not use the R2CCL plugin: a failed NIC ends "
                "the job. Unset it to use R2CCL",
                net, value.where);
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
        snprintf(path, size, "%.*s%s%s", folder, own, places[i], names->plugin);
        if (access(path, R_OK) == 0)
            return true;
    }
    snprintf(path, size, "%.*s%s", folder, own, names->plugin);
    return false;
}

static void warn_bypassed(void)
{
    struct r2_conf_value value;
    const char *collnet = r2_conf_get(&value, "NCCL_COLLNET_ENABLE", version), *gin;

    if (collnet && !strcmp(collnet, "1"))
        R2_WARN("NCCL_COLLNET_ENABLE=1%s: reductions in the switches (SHARP) need a plugin of "
                "their own and are not available with R2CCL; NCCL falls back to rings and trees",
                value.where);
    gin = r2_conf_get(&value, "NCCL_GIN_ENABLE", version);
    if (gin && *gin && strcmp(gin, "0"))
        R2_WARN("NCCL_GIN_ENABLE=%s%s: traffic that GPUs start themselves (GIN) bypasses R2CCL "
                "and does not survive a failed NIC. NCCL_GIN_ENABLE=0 turns it off",
                gin, value.where);
}

/* Whether any call of the application has come through: the plugin asks, by this name, since it
 * may be used by an NCCL whose calls do not (linked statically, opened with dlopen). */
R2_EXPORT extern int r2ccl_shim_reached;
int r2ccl_shim_reached;

static void *plugin; /* its handle; set once */

static void greet(void *found)
{
    int *uses;

    plugin = found;
    *(void **)&uses = r2_real_dlsym(found, "r2ccl_shim_uses_plugin");
    if (uses)
        __atomic_store_n(uses, 1, __ATOMIC_RELAXED);
}

static void load(struct r2_real *real)
{
    char path[1024];
    void *found;

    version = real->version;
    if (is_rccl(real))
        names = &of_rccl;
    __atomic_store_n(&r2ccl_shim_reached, 1, __ATOMIC_RELAXED);
    if (user_wants_another())
        return;
    found = dlopen(names->soname, RTLD_NOLOAD | RTLD_LAZY);
    if (found && r2_real_dlsym(found, "r2ccl_settings_json")) {
        greet(found);
        return;
    }
    if (found) {
        R2_WARN(
            "another library by the name %s is loaded already: NCCL uses that and not the R2CCL "
            "plugin",
            names->soname);
        return;
    }
    if (!find_plugin(path, sizeof(path))) {
        R2_WARN(
            "%s is not there: install libr2ccl.so and %s in one folder. NCCL runs without R2CCL",
            path, names->plugin);
        return;
    }
    found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!found) {
        R2_WARN("the plugin cannot be loaded (%s): NCCL runs without R2CCL", dlerror());
        return;
    }
    greet(found);
    R2_INFO("net plugin: %s", path);
    warn_bypassed();
}

void r2_real_plugin_load(struct r2_real *real)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static atomic_bool loaded;

    /* Each call of the application comes here. Acquire: what `load` has left is there. */
    if (atomic_load_explicit(&loaded, memory_order_acquire))
        return;
    pthread_mutex_lock(&lock);
    if (!atomic_load_explicit(&loaded, memory_order_relaxed))
        load(real);
    atomic_store_explicit(&loaded, true, memory_order_release);
    pthread_mutex_unlock(&lock);
}

void *r2_real_plugin_symbol(const char *name)
{
    return plugin ? r2_real_dlsym(plugin, name) : NULL;
}
