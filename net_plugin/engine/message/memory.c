/* Memory of connections: registered, and let go of while something may be under way. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/message/message.h"
#include "util/lock.h"

int r2_engine_reg_dmabuf(struct r2_conn *c, void *data, size_t size, int type, uint64_t offset,
                         int fd, struct r2_mr **out)
{
    R2_UNCANCELLED;
    struct r2_memory m = {.data = data,
                          .size = size,
                          .device = type != R2_MEMORY_TYPE_HOST,
                          .dmabuf_fd = fd,
                          .dmabuf_offset = offset};
    struct r2_mr *mr = calloc(1, sizeof(*mr));
    int rc;

    *out = NULL;
    if (!mr)
        return -ENOMEM;
    if (atomic_load(&r2_eng.inert) || (m.device && !r2_eng.device_memory)) {
        free(mr);
        return m.device ? -EINVAL : -EPERM;
    }
    mr->data = data;
    mr->size = size;
    mr->device = m.device;
    r2_list_init(&mr->node);
    rc = r2_eng.ops->reg(&m, &mr->keys);
    if (rc) {
        free(mr);
        return rc;
    }
    r2_peer_lock(c->peer);
    r2_list_add_tail(&c->mrs, &mr->node);
    r2_peer_leave(c->peer);
    *out = mr;
    return 0;
}

int r2_engine_reg(struct r2_conn *c, void *data, size_t size, int type, struct r2_mr **out)
{
    return r2_engine_reg_dmabuf(c, data, size, type, 0, -1, out);
}

/* There are messages that the peer was told to write into this memory, and that have not arrived.
 */
static bool written_yet(const struct r2_conn *c)
{
    return !c->peer->out && c->cum < c->next_seq &&
           R2_ANY_PATH(path, c->peer, r2_path_one_sided(path));
}

int r2_conn_detach(struct r2_conn *c, bool *revoke)
{
    struct r2_ep *eps[2 * R2_PATHS_MAX];
    int n, rc = 0;
    bool cleared = written_yet(c);

    if (cleared) {
        r2_peer_unlock(c->peer);
        cleared = !r2_revoke(c);
        r2_peer_lock(c->peer);
    }
    *revoke = cleared;
    n = r2_peer_eps(c->peer, eps, 2 * R2_PATHS_MAX);
    r2_peer_unlock(c->peer);
    for (int i = 0; i < n; i++) {
        int one = r2_eng.ops->detach(eps[i], c->id, 0, UINT64_MAX, cleared);

        rc = one ? one : rc;
        r2_eng.ops->put(eps[i]);
    }
    if (rc)
        R2_WARN("a NIC does not confirm that it no longer uses a connection's memory: %s",
                strerror(-rc));
    return rc;
}

static bool uses(const struct r2_req *r, const struct r2_mr *mr)
{
    if (r->copy) /* in memory of the engine's, which may be where the application's was */
        return false;
    return r->mr == mr ||
           (r->data && r->data < mr->data + mr->size && r->data + r->size > mr->data);
}

int r2_engine_dereg(struct r2_conn *c, struct r2_mr *mr)
{
    R2_UNCANCELLED;
    bool busy = false, revoke = false;
    int rc = 0, gone;

    if (!mr || atomic_load(&r2_eng.inert))
        return 0;
    r2_peer_lock(c->peer);
    r2_list_del(&mr->node);
    for (int i = 0; i < R2_MAX_REQUESTS; i++)
        busy |= c->reqs[i].attached && uses(&c->reqs[i], mr);
    if (busy)
        r2_conn_fail(c, -ECANCELED);
    if (c->state >= R2_CONN_FAILED) {
        rc = r2_conn_detach(c, &revoke);
    } else {
        r2_peer_unlock(c->peer);
    }
    gone = r2_eng.ops->dereg(mr->keys, revoke);
    free(mr);
    return rc ? rc : gone;
}
