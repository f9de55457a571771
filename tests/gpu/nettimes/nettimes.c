/* A net plugin that passes all on to another one and notes when each message was posted and when
 * NCCL found it done, on both sides: where a collective's time goes, whatever the transport.
 *
 *   NETTIMES_PLUGIN=FILE   the plugin, loaded by net API v6 (ours, FastSocket)
 *   NETTIMES_OUT=DIR       one file for each connection and side, written when it is closed;
 *                          nettimes.py reads them
 *
 * Built by hand: gcc -std=gnu11 -O2 -fPIC -shared -I net_plugin -o FILE nettimes.c
 * Threads: as NCCL's: those of one connection are its proxy thread's. Times are CLOCK_MONOTONIC, so
 * the processes have to be of one host. What does not fit (MOST messages) is passed on unnoted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nccl_abi/nccl_net_abi.h"

#define MOST 400000u
#define HANDLE 128
#define PENDING 64
#define RESULT_SYSTEM 2

static struct r2_ncclnet_v6 real;

/* One message at one side: ns; `call`: how long isend or irecv took. What nettimes.py reads. */
struct note {
    uint64_t posted, done;
    uint32_t size, call;
};

struct comm {
    void *real;
    uint64_t id; /* of the connection, the same on both sides */
    int recv;
    uint32_t n;
    struct note *notes;
};

struct listening {
    void *real;
    uint64_t id;
};

struct request {
    void *real;
    struct note *note; /* NULL: a flush, or one too many */
    int recv;
};

static uint64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* FNV-1a of the handle, which both sides know before the sender's plugin may write to it. */
static uint64_t identity(const uint8_t *handle)
{
    uint64_t h = 1469598103934665603u;

    for (int i = 0; i < HANDLE; i++)
        h = (h ^ handle[i]) * 1099511628211u;
    return h;
}

static struct comm *comm_new(void *of, uint64_t id, int recv)
{
    struct comm *c = calloc(1, sizeof(*c));

    if (c) {
        *c = (struct comm){.real = of, .id = id, .recv = recv};
        c->notes = malloc(sizeof(*c->notes) * MOST);
    }
    return c;
}

static void comm_end(struct comm *c)
{
    const char *dir = getenv("NETTIMES_OUT");
    char name[4096];
    FILE *f;

    snprintf(name, sizeof(name), "%s/%016" PRIx64 ".%s.%d", dir ? dir : ".", c->id,
             c->recv ? "recv" : "send", (int)getpid());
    f = c->notes ? fopen(name, "wb") : NULL;
    if (!f || fwrite(c->notes, sizeof(*c->notes), c->n, f) != c->n)
        fprintf(stderr, "nettimes: %s could not be written\n", name);
    if (f)
        fclose(f);
    free(c->notes);
    free(c);
}

static int t_init(r2_nccl_logger log)
{
    return real.init ? real.init(log) : RESULT_SYSTEM;
}

static int t_devices(int *n)
{
    return real.devices(n);
}

static int t_properties(int dev, struct r2_ncclnet_props_v6 *props)
{
    int rc = real.get_properties(dev, props);

    props->max_recvs = 1; /* a request is one message */
    return rc;
}

static int t_listen(int dev, void *handle, void **out)
{
    struct listening *l = calloc(1, sizeof(*l));
    int rc;

    if (!l)
        return RESULT_SYSTEM;
    memset(handle, 0, HANDLE);
    rc = real.listen(dev, handle, &l->real);
    l->id = identity(handle);
    *out = l;
    return rc;
}

/* Called again with the same handle until there is a connection. */
static int t_connect(int dev, void *handle, void **out)
{
    static _Thread_local struct {
        void *handle;
        uint64_t id;
    } pending[PENDING];
    void *comm = NULL;
    int at = -1, rc;

    for (int i = 0; i < PENDING && (at < 0 || pending[at].handle != handle); i++) {
        if (pending[i].handle == handle || (at < 0 && !pending[i].handle))
            at = i;
    }
    if (at < 0)
        return RESULT_SYSTEM;
    if (pending[at].handle != handle) {
        pending[at].handle = handle;
        pending[at].id = identity(handle);
    }
    *out = NULL;
    rc = real.connect(dev, handle, &comm);
    if (rc || comm)
        pending[at].handle = NULL;
    if (!rc && comm)
        *out = comm_new(comm, pending[at].id, 0);
    return rc ? rc : comm && !*out ? RESULT_SYSTEM : 0;
}

static int t_accept(void *listening, void **out)
{
    struct listening *l = listening;
    void *comm = NULL;
    int rc = real.accept(l->real, &comm);

    *out = !rc && comm ? comm_new(comm, l->id, 1) : NULL;
    return rc ? rc : comm && !*out ? RESULT_SYSTEM : 0;
}

static int t_regmr(void *comm, void *data, int size, int type, void **mr)
{
    return real.regmr(((struct comm *)comm)->real, data, size, type, mr);
}

static int t_deregmr(void *comm, void *mr)
{
    return real.deregmr(((struct comm *)comm)->real, mr);
}

/* Notes a request of the real plugin's; without one there is nothing to note. */
static int noted(struct comm *c, void *of, uint64_t posted, uint32_t size, void **out)
{
    struct request *r;

    *out = NULL;
    if (!of)
        return 0;
    r = calloc(1, sizeof(*r));
    if (!r)
        return RESULT_SYSTEM;
    r->real = of;
    if (c && c->notes && c->n < MOST) {
        r->note = &c->notes[c->n++];
        *r->note =
            (struct note){.posted = posted, .size = size, .call = (uint32_t)(now() - posted)};
        r->recv = c->recv;
    }
    *out = r;
    return 0;
}

static int t_isend(void *comm, void *data, int size, int tag, void *mr, void **out)
{
    struct comm *c = comm;
    uint64_t posted = now();
    void *of = NULL;
    int rc = real.isend(c->real, data, size, tag, mr, &of);

    return rc ? rc : noted(c, of, posted, (uint32_t)size, out);
}

static int t_irecv(void *comm, int n, void **data, int *sizes, int *tags, void **mrs, void **out)
{
    struct comm *c = comm;
    uint64_t posted = now();
    void *of = NULL;
    int rc = real.irecv(c->real, n, data, sizes, tags, mrs, &of);

    return rc ? rc : noted(c, of, posted, 0, out);
}

static int t_iflush(void *comm, int n, void **data, int *sizes, void **mrs, void **out)
{
    void *of = NULL;
    int rc = real.iflush(((struct comm *)comm)->real, n, data, sizes, mrs, &of);

    return rc ? rc : noted(NULL, of, 0, 0, out);
}

static int t_test(void *request, int *done, int *sizes)
{
    struct request *r = request;
    int got[8] = {0}, rc = real.test(r->real, done, got);

    if (sizes)
        *sizes = got[0];
    if (rc || !*done)
        return rc;
    if (r->note) {
        r->note->done = now();
        r->note->size = r->recv ? (uint32_t)got[0] : r->note->size;
    }
    free(r);
    return 0;
}

static int t_close_send(void *comm)
{
    int rc = real.close_send(((struct comm *)comm)->real);

    comm_end(comm);
    return rc;
}

static int t_close_recv(void *comm)
{
    int rc = real.close_recv(((struct comm *)comm)->real);

    comm_end(comm);
    return rc;
}

static int t_close_listen(void *listening)
{
    int rc = real.close_listen(((struct listening *)listening)->real);

    free(listening);
    return rc;
}

__attribute__((visibility("default"))) struct r2_ncclnet_v6 ncclNetPlugin_v6 = {
    .name = "nettimes",
    .init = t_init,
    .devices = t_devices,
    .get_properties = t_properties,
    .listen = t_listen,
    .connect = t_connect,
    .accept = t_accept,
    .regmr = t_regmr,
    .deregmr = t_deregmr,
    .isend = t_isend,
    .irecv = t_irecv,
    .iflush = t_iflush,
    .test = t_test,
    .close_send = t_close_send,
    .close_recv = t_close_recv,
    .close_listen = t_close_listen,
};

/* NCCL looks at the name (NCCL_NET) before it calls anything. */
__attribute__((constructor)) static void load(void)
{
    const char *file = getenv("NETTIMES_PLUGIN");
    void *lib = file ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : NULL;
    const struct r2_ncclnet_v6 *of = lib ? dlsym(lib, "ncclNetPlugin_v6") : NULL;

    if (!of) {
        fprintf(stderr, "nettimes: NETTIMES_PLUGIN=%s: %s\n", file ? file : "",
                !file  ? "set it to a net plugin"
                : !lib ? dlerror()
                       : "no net API v6");
        return;
    }
    real = *of;
    ncclNetPlugin_v6.name = of->name;
}
