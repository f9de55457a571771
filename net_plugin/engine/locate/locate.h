/* Localisation: after a path has failed, which NIC is at fault? What the rest of the engine calls.
 *
 * A round belongs to one local NIC. It probes on sockets of its own, never on data connections. The
 * NIC probes NICs of the peer and of third nodes. Other local NICs probe the NIC at the failed
 * path's other end. The processes at both ends tell each other over living paths what they have
 * seen (SEEN). The pure part (verdict.h) decides with all of that. At most one round per NIC runs
 * at a time, however many connections and peers lost a path. It lasts 0.7 s at most.
 *
 * Threads: everything that decides runs on I/O thread 0. The functions marked [any] only put a
 * note into a bounded inbox and may be called under a peer's lock; the inbox is a leaf lock.
 */
#ifndef R2_ENGINE_LOCATE_LOCATE_H
#define R2_ENGINE_LOCATE_LOCATE_H

#include "engine/core/verdict.h"
#include "engine/nic/nics.h"

/* Once, when I/O threads and NICs are there. */
void r2_locate_start(void);
/* In a forked child. */
void r2_locate_child(void);

/* [any] A path that was up has failed for `err` (positive errno). Under the peer's lock. */
void r2_locate_path_failed(struct r2_path *path, int err);
/* [any] A local NIC became usable or not, for whatever reason. */
void r2_locate_nic_changed(int nic);
/* [any] A frame. Under the peer's lock. 0 or -EPROTO. */
int r2_locate_on_seen(struct r2_path *path, const uint8_t *body);
/* [any] Upcalls of endpoints whose parameters say `locate`: owner is the struct r2_probe. */
void r2_locate_probe_over(void *owner, int err, const struct r2_ep_health *health);
void r2_locate_probe_released(void *owner); /* one reference less */

/* The peer's kernel has taken the connection over it, so the way is there: its process is stopped,
 * or has much to do (invariant "silence is not failure"). Under the peer's lock. */
bool r2_path_reaches_kernel(const struct r2_path *path);
/* S: says once that no NIC here reaches the peer, which none ever did. Under its lock. */
void r2_noway_look(struct r2_peer *p, uint64_t now);
/* S: its host refuses at every best pair, and none was ever up; the same. */
void r2_noway_refused(struct r2_peer *p, uint64_t now);

#endif
