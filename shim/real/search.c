/* A libnccl.so.2 on disk, for the library that took NCCL's name: nothing else loads the real one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "real/real.h"
#include "util/log.h"

#ifdef R2_NAMED_NCCL
#define NCCL "libnccl.so.2"

/* The mark of this library, for its copies. */
R2_EXPORT extern const int r2ccl_shim_named;
const int r2ccl_shim_named = 1;

static const char *const folders[] = {
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/nccl/lib",
    "/usr/local/cuda/lib64",
};

/* Opens folder/libnccl.so.2 unless it is not there, or is this library. */
static void *try(const char *folder, size_t len)
{
    struct stat there, own;
    char path[1024];
    void *handle;

    if (len == 0 ||
        snprintf(path, sizeof(path), "%.*s/" NCCL, (int)len, folder) >= (int)sizeof(path))
        return NULL;
    if (stat(path, &there) || stat(r2_real_own_path(), &own) ||
        (there.st_dev == own.st_dev && there.st_ino == own.st_ino))
        return NULL;
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        R2_WARN("%s cannot be loaded: %s", path, dlerror());
    /* Another copy of the shim is no NCCL. */
    if (handle && r2_real_dlsym(handle, "r2ccl_shim_named")) {
        dlclose(handle);
        handle = NULL;
    }
    return handle;
}

static void *try_packages(const char *path)
{
    static const char *const roots[] = {"/site-packages/", "/dist-packages/"};
    char folder[1024];

    for (int i = 0; i < 2; i++) {
        const char *at = strstr(path, roots[i]);
        void *handle;

        if (!at)
            continue;
        snprintf(folder, sizeof(folder), "%.*s%snvidia/nccl/lib", (int)(at - path), path, roots[i]);
        handle = try(folder, strlen(folder));
        if (handle)
            return handle;
    }
    return NULL;
}

struct places {
    char *list[256];
    int count;
};

static int take(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct places *places = arg;

    (void)size;
    if (info->dlpi_name && strstr(info->dlpi_name, "-packages/") && places->count < 256)
        places->list[places->count++] = strdup(info->dlpi_name);
    return 0;
}

void *r2_real_search(void)
{
    const char *path = getenv("LD_LIBRARY_PATH");
    struct places places = {.count = 0};
    void *handle = NULL;

    while (path && *path && !handle) {
        size_t len = strcspn(path, ":;");

        handle = try(path, len);
        path += len + (path[len] != '\0');
    }
    dl_iterate_phdr(take, &places);
    for (int i = 0; i < places.count; i++) {
        if (!handle && places.list[i])
            handle = try_packages(places.list[i]);
        free(places.list[i]);
    }
    for (size_t i = 0; i < sizeof(folders) / sizeof(*folders) && !handle; i++)
        handle = try(folders[i], strlen(folders[i]));
    return handle;
}
#else
void *r2_real_search(void)
{
    return NULL; /* the application brings its NCCL itself */
}
#endif
