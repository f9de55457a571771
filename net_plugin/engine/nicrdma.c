/* The RDMA half of NICs: what the verbs transport says about them, and what is published. */
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

void r2_nic_transport(int nic, int transport, bool up, const char *cause)
{
    struct r2_peer **peers;
    int n;

    (void)cause; /* its endpoints have ended with a reason of their own */
    if (!up)
        return;
    peers = r2_peer_all(&n);
    for (int i = 0; i < n; i++) {
        r2_peer_lock(peers[i]);
        for (int k = 0; k < peers[i]->n_paths; k++) {
            if (peers[i]->paths[k]->lnic == nic && peers[i]->paths[k]->transport == transport)
                peers[i]->paths[k]->next_at = 0;
        }
        r2_peer_unlock(peers[i]);
        r2_peer_wake(peers[i]);
        r2_peer_put(peers[i]);
    }
    free(peers);
}

void r2_nic_publish_rdma(void)
{
    for (int i = 0; i < r2_eng.n_nics; i++) {
        struct r2_rdma_info info;
        struct r2_control_rdma row;

        if (!r2_eng.ops->rdma(i, &info))
            continue;
        row = (struct r2_control_rdma){.device = info.device,
                                       .port = info.port,
                                       .state = info.state,
                                       .phys = info.phys,
                                       .link = info.link,
                                       .gbps = info.gbps,
                                       .queue_pairs = info.queue_pairs};
        memcpy(row.gid, info.gid, sizeof(row.gid));
        r2_control_nic_rdma(r2_eng.ctl, r2_eng.nic_state[i].row, &row);
    }
}
