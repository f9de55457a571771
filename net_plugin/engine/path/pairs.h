/* Which pairs of NICs may have a path, and by which transport (pairs.c). Of one peer, under its
 * lock; only the connecting side (S) asks. No function fails. */
#ifndef R2_ENGINE_PATH_PAIRS_H
#define R2_ENGINE_PATH_PAIRS_H

#include "engine/path/path.h"

/* Keeps of a local NIC's candidates, best first, those that there is room for; how many. */
int r2_pairs_keep(struct r2_peer *p, int lnic, int via, int *order, int n);
/* The peer's NICs that a transport can join to a local one, by rail, best first; how many. */
int r2_pairs_candidates(const struct r2_peer *p, int lnic, int transport, int *order);
/* Those, as bits, that a socket joins to it while queue pairs serve others. */
unsigned r2_pairs_beside(const struct r2_peer *p, int lnic);

/* Where a local NIC finds the peer's NIC: by an address of a family that it has, too, if there is
 * one. */
const struct r2_wire_addr *r2_pair_addr(const struct r2_peer *p, int lnic, int rnic);
/* The peer's NIC has an address of the local one's own subnet: what answers there is on its wire.
 */
bool r2_pair_on_link(const struct r2_peer *p, int lnic, int rnic);

#endif
