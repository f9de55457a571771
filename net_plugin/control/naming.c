/* What becomes known of a peer after its row was made. */
#include "control/impl.h"

void r2_control_peer_describe(struct r2_control *ctl, int peer, const char *host, uint32_t pid,
                              uint32_t rank)
{
    struct r2_seg_peer *row;

    if (peer < 0 || peer >= R2_SEG_MAX_PEERS)
        return;
    row = &ctl->seg->peers[peer];
    r2_row_begin(&row->seq);
    r2_row_text(row->host, sizeof(row->host), host);
    r2_row_u32(&row->pid, pid);
    r2_row_u32(&row->rank, rank);
    r2_row_end(&row->seq);
}

void r2_control_path_remote(struct r2_control *ctl, int path, const char *remote_nic)
{
    struct r2_seg_path *row;

    if (path < 0 || path >= R2_SEG_MAX_PATHS)
        return;
    row = &ctl->seg->paths[path];
    r2_row_begin(&row->seq);
    r2_row_text(row->remote_nic, sizeof(row->remote_nic), remote_nic);
    r2_row_end(&row->seq);
}

void r2_control_path_cause(struct r2_control *ctl, int path, const char *cause)
{
    struct r2_seg_path *row;

    if (path < 0 || path >= R2_SEG_MAX_PATHS)
        return;
    row = &ctl->seg->paths[path];
    r2_row_begin(&row->seq);
    r2_row_cause(row->cause, sizeof(row->cause), cause);
    r2_row_end(&row->seq);
}
