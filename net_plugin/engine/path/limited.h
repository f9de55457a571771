/* Slow NICs are what a peer waits for: noted here by whoever finds it (sched/slownics.c decides for
 * what is sent, the sender's mark for what is received). Under the peer's lock. */
#ifndef R2_ENGINE_PATH_LIMITED_H
#define R2_ENGINE_PATH_LIMITED_H

#include <stdbool.h>
#include <stdint.h>

struct r2_bulk;
struct r2_path;
struct r2_peer;

/* The path's NIC is known to be so fast that nobody waits for it. */
bool r2_limited_never(const struct r2_path *path);
/* `bytes` of the peer's wait for slow NICs now. */
void r2_limited_note(struct r2_peer *p, uint64_t bytes);
/* R: a marked chunk (R2_BULK_LIMITED) has begun to come. */
void r2_limited_marked(struct r2_path *path, const struct r2_bulk *bulk);
/* The peer is one of those that are waited for: what it sends comes by sockets whose threads are
 * stood in for. A hint; any thread, no lock. */
bool r2_limited_now(const struct r2_peer *p, uint64_t now);

#endif
