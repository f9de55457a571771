/* Weights of paths, and who carries what. Part of engine/internal.h, which includes it. */
#ifndef R2_ENGINE_SCHED_PATHWEIGHT_H
#define R2_ENGINE_SCHED_PATHWEIGHT_H

/* ---- pathweight.c: weights of paths; all under the lock */
/* What waits first of some connection no other path may take now: they cannot carry it, have had
 * their share as well, or do not answer. Then shares are no reason to wait. */
bool r2_path_sole_carrier(const struct r2_path *path);
/* Fills r2_eng.near, once the NICs are known. */
void r2_near_find(void);
/* A path of the NIC that the connection's chunks go over first is well. */
bool r2_conn_home_alive(const struct r2_conn *c);
/* Whether connections keep to one NIC at a time. */
static inline bool r2_conn_narrow(void)
{
    return r2_eng.set->mode == R2_MODE_MIGRATE;
}
/* The NIC that the connection keeps to now, or -1: none, it goes over all. With R2CCL_MODE=migrate
 * it is the home NIC while it is up and at full weight, slow or not (nothing would show that it is
 * well again), else the nearest one that is. */
int r2_conn_stays(const struct r2_conn *c);
/* Memory may be registered with some NICs only. If those only stand by, have weight 0 or are not
 * the home NIC, its messages would wait for ever: finds such connections, for which these rules do
 * not hold (r2_conn.any_path). */
void r2_peer_allow_any_path(struct r2_peer *p);
/* The same for a message that begins to wait for a bulk lane, before its connection is listed. */
void r2_conn_begins(struct r2_conn *c, const struct r2_req *r);
/* S: what waits has no path that may carry it, as sockets may not: for so long, then it fails. */
void r2_peer_check_stuck(struct r2_peer *p, uint64_t now);
/* S: some message that waits could go over a path that is up; or none but those that wait for the
 * receiver's word. `proven`: paths that are being tested do not count, and what any path may carry
 * has a way while none is proven: that ends with the peer. */
bool r2_conn_has_way(struct r2_conn *c, bool proven);
/* Some path's weight or usability may have changed: weighs all of the peer's anew. */
void r2_peer_weigh(struct r2_peer *p);
/* The path is slow or lossy against its siblings: `permille` of its weight is shown (1000: all is
 * well again), which limits nothing. Journalled with the reason: call it when either changes. */
void r2_path_set_grey(struct r2_path *path, unsigned permille, const char *reason);

#endif
