/* A message that waits at its sender: what of it bulk lanes may take, which paths can carry it, and
 * the chunk that one gets. Under the peer's lock. */
#include <string.h>

#include "engine/message/message.h"

uint64_t r2_send_waiting(const struct r2_req *r)
{
    if (r2_send_is_eager(r) || r->conn->revocation || !r2_send_cts(r->conn, r->seq))
        return 0;
    return r2_send_waiting_bytes(&r->led.send);
}

const struct r2_req *r2_send_first_waiting(struct r2_conn *c)
{
    R2_FOR_EACH_REQ (r, c) {
        if (r2_send_waiting(r))
            return r;
    }
    return NULL;
}

bool r2_send_device(const struct r2_req *r)
{
    const struct r2_cts_slot *cts = r2_send_cts(r->conn, r->seq);

    return (r->mr && r->mr->device) || (cts && cts->device);
}

bool r2_send_carries(const struct r2_path *path, const struct r2_req *r)
{
    const struct r2_cts_slot *cts = r2_send_cts(r->conn, r->seq);

    if (path->transport == R2_VIA_TCP)
        return !r2_send_device(r);
    /* Queue pairs write alone: a message that is whole with a copy's bytes is over while a write to
     * its place is still under way. */
    return cts && cts->keys[path->rnic] && !r2_send_doubled(&r->led.send) && r->mr &&
           r2_eng.ops->registered(path->ep, r->mr->keys);
}

void r2_send_fill(struct r2_path *path, struct r2_conn *c, struct r2_req *r,
                  const struct r2_chunk *chunk, struct r2_bulk *bulk)
{
    const struct r2_cts_slot *cts = r2_send_cts(c, r->seq);
    uint64_t now = r2_peer_now(path->peer);
    struct r2_rate_stamp stamp;

    memset(bulk, 0, sizeof(*bulk));
    bulk->conn = c->id;
    bulk->seq = r->seq;
    bulk->offset = chunk->off;
    bulk->total = r->size;
    bulk->len = chunk->len;
    bulk->data = r->data + chunk->off;
    bulk->remote_addr = cts ? cts->addr + chunk->off : 0;
    bulk->remote_key = cts ? cts->keys[path->rnic] : 0;
    bulk->keys = r->mr ? r->mr->keys : NULL;
    r2_revoke_count(c, path);
    r2_trial_took(&path->trial, r2_grey_path_doubted(path), path->flow.chunk_at, chunk->len, now);
    path->flow.chunk_at = now;
    r2_pathrate_on_send(&path->rate, chunk->len, now, &stamp);
    r2_path_tell_inflight(path);
    r2_send_stamp(&r->led.send, chunk, &stamp);
}
