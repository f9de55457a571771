/* Which pairs of NICs may have a path.
 *
 * Paths are never taken apart while their peer lives, so their number is bounded, for each
 * transport by itself: queue pairs that fail leave the sockets their room. The connecting side
 * chooses, and the accepting one has a path only where the other has one. Up to 8 NICs on both
 * sides every pair has room. With more, each local NIC has an equal part of it: first for its best
 * pair, then for the peer's NICs that fall to it in turn, last for the next best ones. So every NIC
 * of the peer's is met by somebody.
 *
 * A pair is connected by queue pairs where both NICs offer them. Where some NICs of the two nodes
 * do and others do not, these others would have nothing to do. So sockets use them beside the queue
 * pairs. While queue pairs serve, only the sockets of these NICs carry. */
#include <string.h>

#include "engine/path/path.h"
#include "topology/nettables.h"

struct r2_path *r2_path_find(struct r2_peer *p, int lnic, int rnic, int transport)
{
    R2_FOR_EACH_PATH (path, p) {
        if (path->lnic == lnic && path->rnic == rnic && path->transport == transport)
            return path;
    }
    return NULL;
}

/* NICs that are met elsewhere are told apart by their order alone. */
static int bare_rail(int nic)
{
    int rail = 0;

    for (int i = 0; i < nic; i++)
        rail += r2_local.nics[i].bare;
    return rail;
}

static bool has_family(const struct r2_nic *nic, const struct r2_wire_addr *addr)
{
    return addr->family && r2_nic_addr(nic, addr->family == 4   ? AF_INET
                                            : addr->family == 6 ? AF_INET6
                                                                : 0);
}

static const struct r2_wire_addr *addr_for(const struct r2_rnic *r, const struct r2_nic *nic)
{
    return !has_family(nic, &r->addr) && has_family(nic, &r->second) ? &r->second : &r->addr;
}

/* The local NIC as it is now; one that has no address is met at another one. */
static void local_now(int lnic, struct r2_nic *out)
{
    r2_local_now(r2_local.nics[lnic].bare ? r2_nic_meeting() : lnic, out);
}

const struct r2_wire_addr *r2_pair_addr(const struct r2_peer *p, int lnic, int rnic)
{
    struct r2_nic nic;

    local_now(lnic, &nic);
    return addr_for(&p->rnics[rnic], &nic);
}

int r2_pairs_candidates(const struct r2_peer *p, int lnic, int transport, int *order)
{
    struct sockaddr_storage addrs[R2_MAX_NICS];
    int back[R2_MAX_NICS], found[R2_MAX_NICS], n = 0, m;
    struct r2_wire_addr local;
    struct r2_nic nic;
    bool bare = r2_local.nics[lnic].bare;

    if (r2_eng.ops->address(lnic, &local))
        return 0;
    local_now(lnic, &nic);
    for (int r = 0; r < p->n_rnics; r++) {
        socklen_t len;

        if (p->rnics[r].known && r2_transport_fits(transport, &local, &p->rnics[r].addr) &&
            r2_wire_to_sockaddr(addr_for(&p->rnics[r], &nic), &addrs[n], &len) == 0)
            back[n++] = r;
    }
    m = r2_rail_candidates(&nic, bare ? bare_rail(lnic) : lnic, addrs, n, found);
    for (int i = 0; i < m; i++)
        order[i] = back[found[i]];
    return m;
}

bool r2_pair_on_link(const struct r2_peer *p, int lnic, int rnic)
{
    const struct sockaddr_storage *own;
    struct sockaddr_storage addr;
    struct r2_nic nic;
    socklen_t len;

    r2_local_now(lnic, &nic);
    if (nic.bare || r2_wire_to_sockaddr(addr_for(&p->rnics[rnic], &nic), &addr, &len))
        return false;
    own = r2_nic_addr(&nic, addr.ss_family);
    return own &&
           r2_sockaddr_in_prefix((const struct sockaddr *)own, (const struct sockaddr *)&addr,
                                 own == &nic.addr ? nic.prefixlen : nic.second_prefixlen);
}

int r2_pairs_keep(struct r2_peer *p, int lnic, int via, int *order, int n)
{
    int room = R2_PATHS_VIA / r2_local.n, kept = 0;
    bool keep[R2_MAX_NICS] = {false};

    if (!p->pid) /* the handle names some NICs only: others may be better */
        room = (room + 1) / 2;
    R2_FOR_EACH_PATH (path, p)
        room -= path->lnic == lnic && path->transport == via;
    for (int i = 0; i < n; i++)
        keep[i] = r2_path_find(p, lnic, order[i], via);
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < n && room > 0; i++) {
            if (keep[i] || (turn == 0 && i) || (turn == 1 && order[i] % r2_local.n != lnic))
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

#define RDMA (R2_OFFER_INFINIBAND | R2_OFFER_ROCE)

static uint8_t rdma_of(int lnic)
{
    struct r2_wire_addr local;

    return r2_eng.ops->address(lnic, &local) ? 0 : local.offers & RDMA;
}

/* What is offered does not change, so neither does the answer, whatever fails. */
unsigned r2_pairs_beside(const struct r2_peer *p, int lnic)
{
    int order[R2_MAX_NICS], n;
    uint8_t theirs = 0, ours = 0;
    bool lacks = false;

    for (int r = 0; r < p->n_rnics; r++)
        theirs |= p->rnics[r].known ? p->rnics[r].addr.offers & RDMA : 0;
    if (!(rdma_of(lnic) & theirs))
        return ~0u;
    for (int l = 0; l < r2_local.n; l++)
        ours |= rdma_of(l);
    for (int r = 0; r < p->n_rnics; r++)
        lacks |= p->rnics[r].known && !(p->rnics[r].addr.offers & ours);
    n = lacks ? r2_pairs_candidates(p, lnic, R2_VIA_TCP, order) : 0;
    return n && !(p->rnics[order[0]].addr.offers & ours) ? 1u << order[0] : 0;
}
