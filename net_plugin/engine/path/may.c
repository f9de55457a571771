/* What a path may carry now. Under the peer's lock. The first two are in engine/objects.h.
 *
 *   word          means                                              implies
 *   is_up         STARTING, TESTING or PROVEN                        -
 *   takes_frames  TESTING or PROVEN: INFO is queued                  is_up
 *   suffices      is_up, and carries whatever memory may be taken    is_up
 *   serves        PROVEN, and not drained                            takes_frames
 *   able          PROVEN, in a state of health that carries chunks   serves
 *   carries       ... and it is no spare                             able
 *   usable        ... and it has weight, or no path has              carries
 *   unlimited     ... and no sibling has a higher weight             usable
 *   well          ... and nobody calls it slow or lossy              unlimited
 */
#include "engine/internal.h"

/* Where memory of devices is taken, sockets are not enough. */
bool r2_path_suffices(const struct r2_path *path)
{
    return r2_path_is_up(path) && (path->transport != R2_VIA_TCP || !r2_eng.device_memory);
}

bool r2_path_serves(const struct r2_path *path)
{
    return path->state == R2_PATH_PROVEN && path->health.state != R2_HEALTH_DRAINED;
}

bool r2_path_able(const struct r2_path *path)
{
    return path->state == R2_PATH_PROVEN && r2_health_carries(path->health.state);
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
