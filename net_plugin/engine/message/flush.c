/* iflush: what NICs wrote into memory of a device becomes visible to the device.
 *
 * A receive completes when its head has been seen in host memory; on the way to a GPU its bytes may
 * still be behind. A read of the GPU's memory by the NIC that wrote pushes them, and nothing else
 * the NIC does is a proof. So each NIC is asked that wrote what no flush of the connection has
 * shown yet: one that is still under way has not. The GPU's driver stands in for one that has
 * failed since and cannot be asked any more: cuFlushGPUDirectRDMAWrites orders the writes of all
 * NICs. The process has loaded it if it has such memory. Where that fails as well, the request ends
 * with an error: a wrong result is worse.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

#include "engine/message/message.h"
#include "util/lock.h"

#define FLUSH_NS (1 * R2_NS_PER_S) /* for a NIC to answer */
#define CU_FLUSH_CURRENT_CTX 0
#define CU_FLUSH_TO_OWNER 100

struct r2_flush {
    uint64_t begin;
    uint32_t asked;             /* bit per NIC */
    uint32_t wait;              /* of them, those that have not answered */
    uint32_t failed;            /* NICs that have to be stood in for */
    uint32_t upto[R2_MAX_NICS]; /* r2_conn.wrote when it was asked */
    uint64_t ticket[R2_MAX_NICS];
};

/* 0, or -EIO. */
static int driver_flush(void)
{
    int (*flush)(int target, int scope);

    *(void **)(void *)&flush = dlsym(RTLD_DEFAULT, "cuFlushGPUDirectRDMAWrites");
    if (!flush) {
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

        *(void **)(void *)&flush = cuda ? dlsym(cuda, "cuFlushGPUDirectRDMAWrites") : NULL;
        if (cuda)
            dlclose(cuda);
    }
    return flush && flush(CU_FLUSH_CURRENT_CTX, CU_FLUSH_TO_OWNER) == 0 ? 0 : -EIO;
}

void r2_flush_note(struct r2_req *r, const struct r2_path *path)
{
    if (r->mr && r->mr->device)
        r->conn->wrote[path->lnic]++;
}

/* What it wrote and did not tell of belongs to a message that is still missing something. */
static bool awaits_device_bytes(struct r2_conn *c)
{
    R2_FOR_EACH_REQ (r, c) {
        if (!r->arrived && r->mr && r->mr->device)
            return true;
    }
    return false;
}

void r2_flush_note_fenced(const struct r2_path *path)
{
    if (!r2_eng.device_memory || path->transport == R2_VIA_TCP)
        return;
    R2_FOR_EACH_CONN (c, path->peer) {
        if (!c->peer->out && awaits_device_bytes(c))
            c->wrote[path->lnic]++;
    }
}

/* What there is to show now, by NIC. */
static void unseen(struct r2_conn *c, struct r2_flush *f)
{
    r2_peer_lock(c->peer);
    for (int i = 0; i < r2_local.n; i++) {
        f->upto[i] = c->wrote[i];
        if (c->wrote[i] != c->shown[i])
            f->asked |= 1u << i;
    }
    r2_peer_leave(c->peer);
}

static void seen(struct r2_conn *c, const struct r2_flush *f)
{
    r2_peer_lock(c->peer);
    for (int i = 0; i < r2_local.n; i++) {
        if ((f->asked >> i & 1) && (int32_t)(f->upto[i] - c->shown[i]) > 0)
            c->shown[i] = f->upto[i];
    }
    r2_peer_leave(c->peer);
}

int r2_engine_iflush(struct r2_conn *c, void *data, struct r2_mr *mr, struct r2_req **out)
{
    R2_UNCANCELLED;
    struct r2_flush now = {0}, *f;
    struct r2_req *r;

    *out = NULL;
    if (atomic_load(&r2_eng.inert))
        return -EPERM;
    if (!c || c->peer->out)
        return -EINVAL;
    if (!mr || !mr->device)
        return 0;
    unseen(c, &now);
    if (!now.asked)
        return 0;
    r = calloc(1, sizeof(*r));
    f = calloc(1, sizeof(*f));
    if (!r || !f) {
        free(r);
        free(f);
        return -ENOMEM;
    }
    *f = now;
    r->conn = c;
    r->flush = f;
    f->begin = r2_now_ns();
    for (int i = 0; i < r2_local.n; i++) {
        if (!(f->asked >> i & 1))
            continue;
        if (r2_eng.ops->flush_memory(i, mr->keys, data, &f->ticket[i]))
            f->failed |= 1u << i;
        else
            f->wait |= 1u << i;
    }
    *out = r;
    return 0;
}

int r2_flush_test(struct r2_req *r, int *done)
{
    R2_UNCANCELLED;
    struct r2_flush *f = r->flush;
    bool late = r2_now_ns() - f->begin > FLUSH_NS;
    int rc = 0;

    for (int i = 0; i < r2_local.n; i++) {
        int got = f->wait >> i & 1 ? r2_eng.ops->flushed(i, f->ticket[i]) : 0;

        if (!got && !late)
            continue;
        if (got <= 0)
            f->failed |= f->wait & 1u << i;
        f->wait &= ~(1u << i);
    }
    *done = !f->wait;
    if (!*done)
        return 0;
    if (f->failed) {
        rc = driver_flush();
        if (rc)
            R2_WARN(
                "NIC %s wrote into GPU memory and has failed since, and the GPU's driver cannot "
                "flush in its place: what it wrote may not be visible",
                r2_nic_name(__builtin_ctz(f->failed)));
    }
    if (rc)
        *done = 0;
    else
        seen(r->conn, f);
    free(f);
    free(r);
    return rc;
}
