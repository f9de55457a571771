/* What a path may carry now, from the least to the most demanding word: able, carries, usable,
 * unlimited, well (engine/internal.h). Under the peer's lock. */
#include "engine/internal.h"

bool r2_path_able(const struct r2_path *path)
{
    return path->state == R2_PATH_UP && path->ctrl_ready && !path->testing &&
           r2_health_carries(path->health.state);
}

bool r2_path_carries(const struct r2_path *path)
{
    return r2_path_able(path) && !path->spare;
}

bool r2_path_usable(const struct r2_path *path)
{
    return r2_path_carries(path) && (path->share.weight || !path->peer->shares.max);
}

bool r2_path_unlimited(const struct r2_path *path)
{
    return r2_path_usable(path) && r2_share_free(&path->peer->shares, &path->share);
}

bool r2_path_well(const struct r2_path *path)
{
    return path->grey == R2_WEIGHT_FULL && r2_path_unlimited(path);
}
