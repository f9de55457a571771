/* Which pairs of NICs may have a path.
 *
 * Paths are never taken apart while their peer lives, so their number is bounded, for each
 * transport by itself: queue pairs that fail leave the sockets their room. The connecting side
 * chooses, and the accepting one has a path only where the other has one. Up to 8 NICs on both
 * sides every pair has room. With more, each local NIC has an equal part of it: for its best pair,
 * then for the peer's NICs that fall to it in turn, so that every NIC of the peer's is met by
 * somebody, then for the next best ones. */
#include <string.h>

#include "engine/internal.h"

int r2_pairs_keep(struct r2_peer *p, int lnic, int via, int *order, int n)
{
    int room = R2_PATHS_VIA / r2_eng.n_nics, kept = 0;
    bool keep[R2_MAX_NICS] = {false};

    if (!p->pid) /* the handle names some NICs only: others may be better */
        room = (room + 1) / 2;
    for (int i = 0; i < p->n_paths; i++)
        room -= p->paths[i]->lnic == lnic && p->paths[i]->transport == via;
    for (int i = 0; i < n; i++)
        keep[i] = r2_path_find(p, lnic, order[i], via);
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < n && room > 0; i++) {
            if (keep[i] || (turn == 0 && i) || (turn == 1 && order[i] % r2_eng.n_nics != lnic))
                continue;
            keep[i] = true;
            room--;
        }
    }
    for (int i = 0; i < n; i++) {
        if (keep[i])
            order[kept++] = order[i];
    }
    return kept;
}
