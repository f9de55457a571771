/* Finds and loads the network as NCCL 2.30 does:
 *   NCCL_NET_PLUGIN unset -> libnccl-net.so; "none" or "" -> nothing external (up to net API v9,
 *   before NCCL 2.27, "" as unset); else a comma-separated list, each verbatim and then as
 *   libnccl-net-<name>.so; the built-in Socket comes last.
 *   Under the name librccl.so.1 the files are librccl-net.so and librccl-net-<name>.so.
 *   In each library the newest symbol ncclNetPlugin_v12 ... v6 counts (HOSTNCCL_NET_VERSION caps).
 *   A candidate with an error, without devices or of another name than NCCL_NET is passed over.
 * Once an external plugin is in use, all other external ones are disabled for the process.
 */
#define _GNU_SOURCE
#include "net.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { CANDIDATES = 16 };
enum { READY, LOADED, DISABLED };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything here */
static struct hn_net nets[CANDIDATES];
static int net_count;

/* Under the name of RCCL it looks for what RCCL looks for. */
static const char *prefix(void)
{
    Dl_info info;
    const char *file = dladdr((void *)&net_count, &info) ? strrchr(info.dli_fname, '/') : NULL;

    return file && !strncmp(file + 1, "librccl", 7) ? "librccl-net" : "libnccl-net";
}

static void list_candidates(void)
{
    char standard[32];

    if (net_count)
        return;
    const char *wanted = getenv("NCCL_NET_PLUGIN");
    snprintf(standard, sizeof(standard), "%s.so", prefix());
    /* Before NCCL 2.27 an empty one was none that is set. */
    bool old = hn_util_env("HOSTNCCL_NET_VERSION", 12, 6, 12) < 10;
    if (!wanted || (!*wanted && old))
        wanted = standard;
    char list[2048];
    char *rest = NULL;
    snprintf(list, sizeof(list), "%s", wanted);
    bool none = !strcasecmp(list, "none");
    for (char *name = none ? NULL : strtok_r(list, ",", &rest); name && net_count < CANDIDATES - 1;
         name = strtok_r(NULL, ",", &rest)) {
        size_t len = strlen(name);
        if (len >= sizeof(nets[0].file)) { /* a name cut short would be another file */
            HN_WARN("NET/Plugin: a name in NCCL_NET_PLUGIN is longer than %zu, passed over",
                    sizeof(nets[0].file) - 1);
            continue;
        }
        memcpy(nets[net_count++].file, name, len + 1);
    }
    nets[net_count++].file[0] = '\0';
}

static void *open_library(const char *name)
{
    void *dl = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (dl) {
        HN_INFO("NET/Plugin: loaded %s", name);
        return dl;
    }
    HN_INFO("NET/Plugin: could not load %s: %s", name, dlerror());
    size_t len = strlen(name);
    bool is_file = strchr(name, '/') ||
                   (!strncmp(name, "lib", 3) && len > 3 && !strcmp(name + len - 3, ".so"));
    if (is_file)
        return NULL;
    char file[300];
    if ((size_t)snprintf(file, sizeof(file), "%s-%s.so", prefix(), name) >= sizeof(file))
        return NULL;
    dl = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (dl)
        HN_INFO("NET/Plugin: loaded %s", file);
    else
        HN_INFO("NET/Plugin: could not load %s: %s", file, dlerror());
    return dl;
}

static bool load(struct hn_net *net)
{
    if (net->state != READY)
        return net->state == LOADED;
    if (!net->file[0]) {
        net->table = &hn_socketnet;
        net->version = 12;
        net->state = LOADED;
        return true;
    }
    int cap = (int)hn_util_env("HOSTNCCL_NET_VERSION", 12, 6, 12);
    net->dl = open_library(net->file);
    for (int v = cap; net->dl && v >= 6; v--) {
        char symbol[32];
        snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", v);
        net->table = dlsym(net->dl, symbol);
        net->version = v;
        if (net->table) {
            HN_INFO("NET/Plugin: using %s of %s, network %s", symbol, net->file, hn_net_name(net));
            net->state = LOADED;
            return true;
        }
    }
    if (net->dl) {
        HN_INFO("NET/Plugin: no symbol ncclNetPlugin_v%d ... v6 in %s", cap, net->file);
        dlclose(net->dl);
    }
    net->dl = NULL;
    net->state = DISABLED;
    return false;
}

static void unload(struct hn_net *net, int state)
{
    if (net->dl && !hn_util_env("NCCL_NET_PLUGIN_REF_COUNT", 0, 0, 1)) {
        dlclose(net->dl);
        net->dl = NULL;
        net->table = NULL;
        net->ndev = 0;       /* the names in props were the library's */
        if (state == LOADED) /* can be loaded again, by the same name */
            state = READY;
    }
    net->state = state;
}

static int read_devices(struct hn_net *net)
{
    if (net->ndev)
        return R2_NCCL_SUCCESS;
    int ndev = (int)0xa5a5a5a5;
    int rc = hn_net_devices(net, &ndev);
    if (rc || ndev <= 0)
        return rc ? rc : R2_NCCL_SYSTEM_ERROR;
    if (ndev > HN_MAX_DEVS)
        ndev = HN_MAX_DEVS;
    for (int d = 0; d < ndev && !rc; d++) {
        rc = hn_net_properties(net, d, &net->props[d]);
        for (int other = 0; other < d && !rc; other++)
            if (!strcmp(net->props[d].name, net->props[other].name))
                HN_WARN("NET/%s: devices %d and %d have one name %s: NCCL would see one NIC",
                        hn_net_name(net), other, d, net->props[d].name);
    }
    if (!rc && net->props[0].netdev_type != R2_NCCL_NETDEV_HOST)
        rc = R2_NCCL_INTERNAL_ERROR;
    if (!rc)
        net->ndev = ndev;
    return rc;
}

/* 0 when `net` now serves `ctx`. */
static int try_net(struct hn_net *net, struct hn_netctx *ctx, uint64_t comm_id, const char *name)
{
    if (!load(net))
        return -1;
    ctx->net = net;
    int rc = hn_net_init(net, ctx, comm_id);
    if (rc) {
        HN_INFO("NET/%s: init returned %d: passed over", hn_net_name(net), rc);
    } else if (name && *name && strcasecmp(name, hn_net_name(net))) {
        HN_INFO("NET/%s: passed over, NCCL_NET=%s is wanted", hn_net_name(net), name);
        hn_net_finalize(ctx);
        if (!net->contexts)
            unload(net, LOADED);
        return -1;
    } else if ((rc = read_devices(net))) {
        HN_INFO("NET/%s: no usable device: passed over", hn_net_name(net));
        hn_net_finalize(ctx);
    }
    if (rc) {
        if (!net->contexts)
            unload(net, DISABLED);
        return -1;
    }
    net->contexts++;
    return 0;
}

static void disable_others(const struct hn_net *used)
{
    for (int i = 0; i < net_count && used->file[0]; i++)
        if (&nets[i] != used && nets[i].file[0] && !nets[i].contexts)
            nets[i].state = DISABLED;
}

ncclResult_t hn_net_open(uint64_t comm_id, const char *net_name, int traffic_class,
                         struct hn_netctx **out)
{
    struct hn_netctx *ctx = calloc(1, sizeof(*ctx));
    if (!ctx)
        return hn_util_fail(ncclSystemError, "out of memory");
    ctx->config.traffic_class = traffic_class;
    ctx->users = 1;
    pthread_mutex_lock(&lock);
    list_candidates();
    int found = -1;
    for (int i = 0; i < net_count && found < 0; i++) {
        ctx->ctx = NULL;
        if (!try_net(&nets[i], ctx, comm_id, net_name))
            found = i;
    }
    if (found >= 0)
        disable_others(&nets[found]);
    pthread_mutex_unlock(&lock);
    if (found < 0) {
        free(ctx);
        return hn_util_fail(ncclInvalidUsage,
                            "no network usable: NCCL_NET_PLUGIN=%s NCCL_NET=%s; NCCL_DEBUG=INFO "
                            "says why each was passed over",
                            getenv("NCCL_NET_PLUGIN") ? getenv("NCCL_NET_PLUGIN") : "(unset)",
                            net_name ? net_name : "(unset)");
    }
    HN_INFO("Using network %s, %d devices", hn_net_name(ctx->net), ctx->net->ndev);
    *out = ctx;
    return ncclSuccess;
}

void hn_net_share(struct hn_netctx *ctx)
{
    pthread_mutex_lock(&lock);
    ctx->users++;
    pthread_mutex_unlock(&lock);
}

void hn_net_close(struct hn_netctx *ctx)
{
    pthread_mutex_lock(&lock);
    if (--ctx->users == 0) {
        struct hn_net *net = ctx->net;
        int rc = hn_net_finalize(ctx);
        if (rc)
            HN_WARN("NET/%s: finalize returned %d", hn_net_name(net), rc);
        if (--net->contexts == 0)
            unload(net, LOADED);
        free(ctx);
    }
    pthread_mutex_unlock(&lock);
}
