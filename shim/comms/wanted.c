/* What R2CCL_ALLREDUCE, R2CCL_PLAN and R2CCL_MODE ask for. */
#include "comms/inside.h"
#include "comms/leader.h"
#include "settings/settings.h"
#include "util/log.h"

bool r2_leader_always(void)
{
    return r2_settings_get()->allreduce == R2_ALLREDUCE_DIRECT;
}

bool r2_leader_plans(void)
{
    return r2_leader_always() || r2_settings_get()->plan != R2_PLAN_SETTING_OFF;
}

bool r2_leader_carries(void)
{
    return r2_leader_always() || r2_settings_get()->plan == R2_PLAN_SETTING_AUTO;
}

enum r2_plan_wish r2_leader_wish(void)
{
    if (r2_leader_always())
        return R2_PLAN_ALWAYS_DIRECT;
    switch (r2_settings_get()->mode) {
    case R2_MODE_ALLREDUCE:
        return R2_PLAN_WISH_R2CCL;
    case R2_MODE_OPTIMAL:
        return R2_PLAN_WISH_DIRECT;
    default:
        return R2_PLAN_BEST;
    }
}

bool r2_leader_asked(void)
{
    const char *plan = r2_settings_getenv("R2CCL_PLAN");
    int mode = r2_settings_get()->mode;

    return r2_leader_always() || (plan && plan[0]) ||
           (mode > R2_MODE_BALANCE && mode != R2_MODE_AUTO);
}

void r2_leader_none(struct r2_comm *comm, const char *why)
{
    static atomic_flag told = ATOMIC_FLAG_INIT;
    unsigned long long id = r2_comms_id(comm);

    r2_comm_row_plan(comm, NULL, why);
    if (r2_leader_always())
        R2_WARN("communicator %016llx: AllReduce is NCCL's own, although R2CCL_ALLREDUCE=direct: "
                "%s",
                id, why);
    else if (!r2_leader_asked() || atomic_flag_test_and_set(&told))
        R2_INFO("communicator %016llx has no plans: %s", id, why);
    else
        R2_WARN("communicator %016llx has no plans, which R2CCL_PLAN or R2CCL_MODE asks for: %s",
                id, why);
}
