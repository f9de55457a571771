/* Which NCCL a call belongs to; see real.h for the order. */
#define _GNU_SOURCE
#include "real/real.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "real/nest.h"
#include "settings/settings.h"
#include "util/log.h"

#define PROBE "ncclCommInitRank" /* what makes a library an NCCL */
#define SITES 512                /* buckets of known call sites */
#define SITES_MAX 8192           /* more call sites are looked up every time */
#define OBJECTS 1024             /* loaded libraries that are looked at */

struct site {
    const void *caller;
    struct r2_real *real;
    bool internal;
    struct site *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards adding to `reals` */
static struct r2_real *reals[R2_REAL_MAX];
static atomic_int real_count;
/* Pushed at the front and never removed: the release of the push pairs with the acquire of the
 * reader, who then sees a whole node. */
static _Atomic(struct site *) sites[SITES];
static atomic_int site_count;

/* ---- ourselves */

static Dl_info own;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void find_own(void)
{
    if (!dladdr((const void *)&find_own, &own))
        own = (Dl_info){.dli_fname = ""};
}

const void *r2_real_own_base(void)
{
    pthread_once(&own_once, find_own);
    return own.dli_fbase;
}

const char *r2_real_own_path(void)
{
    pthread_once(&own_once, find_own);
    return own.dli_fname;
}

static const void *base_of(const void *address)
{
    Dl_info info;

    return address && dladdr(address, &info) ? info.dli_fbase : NULL;
}

/* dlsym has an interposer of ours (api/dlsym.c), so it is looked up by version. */
R2_UNSANITIZED r2_real_dlsym_fn r2_real_dlsym_address(void)
{
    static _Atomic(r2_real_dlsym_fn) found;
    r2_real_dlsym_fn fn = atomic_load_explicit(&found, memory_order_relaxed);

    if (!fn) {
        static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};

        for (size_t i = 0; i < sizeof(versions) / sizeof(*versions) && !fn; i++)
            fn = (r2_real_dlsym_fn)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        atomic_store_explicit(&found, fn, memory_order_relaxed);
    }
    return fn;
}

void *r2_real_dlsym(void *handle, const char *name)
{
    r2_real_dlsym_fn fn = r2_real_dlsym_address();
    void *found = fn ? fn(handle, name) : NULL;

    return found; /* no tail call: RTLD_NEXT goes by the return address */
}

void *r2_real_own_symbol(const char *name)
{
    void *handle = dlopen(r2_real_own_path(), RTLD_NOLOAD | RTLD_LAZY);
    void *found = handle ? r2_real_dlsym(handle, name) : NULL;

    if (handle)
        dlclose(handle);
    return found && base_of(found) == r2_real_own_base() ? found : NULL;
}

/* ---- NCCLs */

static void *function(const struct r2_real *real, const char *name)
{
    void *fn = r2_real_dlsym(real->handle ? real->handle : RTLD_NEXT, name);

    return fn && base_of(fn) != r2_real_own_base() ? fn : NULL;
}

void *r2_real_symbol(struct r2_real *real, const char *name)
{
    return function(real, name);
}

static void read_version(struct r2_real *real)
{
    int (*get)(int *) = real->fn[R2_API_ncclGetVersion];

    r2_call_nest();
    if (!get || get(&real->version))
        real->version = 0;
    r2_call_unnest();
    R2_INFO("NCCL %d.%d.%d: %s", real->version / 10000, real->version / 100 % 100,
            real->version % 100, real->path);
}

/* The known NCCL at this base, or NULL. */
static struct r2_real *known(const void *base)
{
    int count = atomic_load(&real_count);

    for (int i = 0; i < count; i++)
        if (reals[i]->base == base)
            return reals[i];
    return NULL;
}

void r2_real_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void r2_real_after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* Makes the entry public, unless another thread was faster or there are too many. */
static struct r2_real *publish(struct r2_real *real)
{
    struct r2_real *first;
    int count;

    pthread_mutex_lock(&lock);
    count = atomic_load(&real_count);
    first = known(real->base);
    if (!first && count < R2_REAL_MAX) {
        reals[count] = first = real;
        atomic_store(&real_count, count + 1);
    }
    pthread_mutex_unlock(&lock);
    if (first != real)
        free(real);
    else
        r2_real_tell_lacking(real);
    return first;
}

/* The entry for the NCCL whose function lies at `probe`. handle NULL: RTLD_NEXT. */
static struct r2_real *add(void *handle, const void *probe)
{
    struct r2_real *real;
    Dl_info info;

    if (!dladdr(probe, &info))
        return NULL;
    real = known(info.dli_fbase);
    if (real || !(real = calloc(1, sizeof(*real))))
        return real;
    real->handle = handle;
    real->base = info.dli_fbase;
    snprintf(real->path, sizeof(real->path), "%s", info.dli_fname);
    for (int id = 0; id < R2_API_COUNT; id++)
        real->fn[id] = function(real, r2_api_names[id]);
    read_version(real);
    return publish(real);
}

bool r2_real_several(void)
{
    return atomic_load_explicit(&real_count, memory_order_relaxed) > 1;
}

/* The NCCL that dlsym on `handle` finds, if there is one that is not ourselves. The handle is kept
 * open for ever where the entry needs it. */
static struct r2_real *by_handle(void *handle)
{
    void *probe = handle ? r2_real_dlsym(handle, PROBE) : NULL;

    if (!probe || base_of(probe) == r2_real_own_base())
        return NULL;
    return add(handle, probe);
}

static struct r2_real *by_name(const char *name)
{
    void *handle = *name ? dlopen(name, RTLD_NOLOAD | RTLD_LAZY) : NULL;
    struct r2_real *real = by_handle(handle);

    if (handle && !real)
        dlclose(handle);
    return real;
}

static struct r2_real *by_setting(void)
{
    const char *path = r2_settings_get()->real_nccl;
    void *handle;
    struct r2_real *real;

    if (!*path)
        return NULL;
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    real = by_handle(handle);
    if (!handle)
        R2_WARN_ONCE("R2CCL_REAL_NCCL=%s cannot be loaded (%s): NCCL is searched for instead", path,
                     dlerror());
    else if (!real)
        R2_WARN_ONCE("R2CCL_REAL_NCCL=%s is no NCCL (it has no %s): NCCL is searched for instead",
                     path, PROBE);
    return real;
}

static struct r2_real *by_caller(const void *caller)
{
    struct link_map *map = NULL;
    Dl_info info;

    if (!dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
        return NULL;
    return by_name(map->l_name);
}

/* The NCCL that the caller lies in. */
static struct r2_real *itself(const void *caller)
{
    struct link_map *map = NULL;
    void *handle, *probe;
    Dl_info info;

    if (!dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) || !map || !*map->l_name ||
        info.dli_fbase == r2_real_own_base())
        return NULL;
    handle = dlopen(map->l_name, RTLD_NOLOAD | RTLD_LAZY);
    probe = handle ? r2_real_dlsym(handle, PROBE) : NULL;
    if (probe && base_of(probe) == info.dli_fbase)
        return add(handle, probe);
    if (handle)
        dlclose(handle);
    return NULL;
}

struct names {
    char *list[OBJECTS];
    int count;
};

static int take_name(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct names *names = arg;

    (void)size;
    if (info->dlpi_name && strchr(info->dlpi_name, '/') && names->count < OBJECTS)
        names->list[names->count++] = strdup(info->dlpi_name);
    return 0;
}

/* Every loaded library, first those with "nccl" in the name. dlopen must not be called from inside
 * dl_iterate_phdr, so the names are taken first. */
static struct r2_real *by_any(void)
{
    struct names *names = calloc(1, sizeof(*names));
    struct r2_real *real = NULL;

    if (!names)
        return NULL;
    dl_iterate_phdr(take_name, names);
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < names->count && !real; i++)
            if (names->list[i] && (strstr(names->list[i], "nccl") == NULL) == turn)
                real = by_name(names->list[i]);
    for (int i = 0; i < names->count; i++)
        free(names->list[i]);
    free(names);
    return real;
}

static struct r2_real *find(const void *caller)
{
    struct r2_real *real = by_setting();
    void *probe;

    if (real)
        return real;
    probe = r2_real_dlsym(RTLD_NEXT, PROBE);
    if (probe && base_of(probe) != r2_real_own_base())
        return add(NULL, probe);
    real = by_caller(caller);
    if (!real)
        real = by_name("libnccl.so.2");
    if (!real)
        real = by_name("librccl.so.1"); /* of AMD: the same functions */
    if (!real)
        real = by_any();
    if (!real)
        real = by_handle(r2_real_search());
    return real;
}

static void remember(_Atomic(struct site *) *bucket, const void *caller, struct r2_real *real,
                     bool internal)
{
    struct site *site;

    if (atomic_fetch_add(&site_count, 1) >= SITES_MAX || !(site = malloc(sizeof(*site))))
        return;
    *site = (struct site){caller, real, internal, atomic_load(bucket)};
    while (!atomic_compare_exchange_weak(bucket, &site->next, site))
        ;
}

struct r2_real *r2_real_for(const void *caller, bool *internal)
{
    uintptr_t key = (uintptr_t)caller;
    _Atomic(struct site *) *bucket = &sites[(key ^ (key >> 12)) % SITES];
    struct site *site = atomic_load_explicit(bucket, memory_order_acquire);
    struct r2_real *real;

    while (site && site->caller != caller)
        site = site->next;
    if (site) {
        *internal = site->internal;
        return site->real;
    }
    real = itself(caller);
    *internal = real != NULL;
    if (!real)
        real = find(caller);
    if (real)
        remember(bucket, caller, real, *internal);
    return real;
}

struct r2_real *r2_real_at(const void *address)
{
    const void *base = base_of(address);
    struct r2_real *real;
    bool internal;

    if (!base || base == r2_real_own_base())
        return NULL;
    /* What a call without a communicator from a caller that nobody knows would reach. */
    real = r2_real_for(r2_real_own_base(), &internal);
    return real && real->base == base ? real : NULL;
}
