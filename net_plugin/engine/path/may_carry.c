/* What a path may carry now (core/pathstate.h). Under the peer's lock. */
#include "engine/path/path.h"

enum r2_path_may r2_path_may(const struct r2_path *path)
{
    const struct r2_share_set *shares = &path->peer->shares;
    struct r2_path_facts facts = {
        .state = path->state,
        .health = path->health.state,
        .spare = path->role == R2_ROLE_SPARE,
        .barred = !path->share.weight && shares->max,
        .limited = !r2_share_free(shares, &path->share),
        .slow = path->flow.grey != R2_WEIGHT_FULL,
    };

    return r2_path_may_carry(&facts);
}

/* Where memory of devices is taken, sockets are not enough. */
bool r2_path_suffices(const struct r2_path *path)
{
    return r2_path_is_up(path) && (path->transport != R2_VIA_TCP || !r2_eng.device_memory);
}
