/* The env plugin of NCCL 2.28.7 and later: all that NCCL reads of its own variables it asks of the
 * plugin, which may know what the environment does not. NCCL loads it before net plugins, so here
 * it is only looked for among what is loaded, under the names by which NCCL looks. Facts:
 * NVIDIA/nccl src/plugin/env.cc, src/plugin/plugin_open.cc. */
#include "settings/envplugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define STEM "libnccl-env"

/* The part that v1 and v2 have alike; init and finalize are for NCCL to call. */
struct plugin {
    const char *name;
    void (*init)(void);
    void (*finalize)(void);
    const char *(*get)(const char *name);
};

static const struct plugin *in_library(const char *file)
{
    static const char *const symbols[] = {"ncclEnvPlugin_v2", "ncclEnvPlugin_v1"};
    const struct plugin *found = NULL;
    void *lib = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);

    for (int i = 0; lib && !found && i < 2; i++)
        found = dlsym(lib, symbols[i]);
    if (lib)
        dlclose(lib);
    return found && found->get ? found : NULL;
}

static const struct plugin *find(void)
{
    const char *name = getenv("NCCL_ENV_PLUGIN");
    const struct plugin *found;
    char file[256];

    if (!name || !name[0])
        return in_library(STEM ".so");
    if (strcasecmp(name, "none") == 0)
        return NULL;
    if (strcasecmp(name, "STATIC_PLUGIN") == 0)
        return in_library(NULL);
    found = in_library(name);
    snprintf(file, sizeof(file), STEM "-%s.so", name);
    return found || strchr(name, '/') ? found : in_library(file);
}

const char *r2_envplugin_get(const char *name)
{
    const struct plugin *plugin = find();

    return plugin ? plugin->get(name) : getenv(name);
}
