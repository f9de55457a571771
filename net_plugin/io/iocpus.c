#define _GNU_SOURCE
#include "io/iocpus.h"

#include "settings/values.h"

int r2_iocpus_allowed(cpu_set_t *set)
{
    CPU_ZERO(set);
    if (sched_getaffinity(0, sizeof(*set), set) < 0)
        return 1;
    return CPU_COUNT(set);
}

bool r2_iocpus_narrow(const char *text, cpu_set_t *allowed)
{
    cpu_set_t want;

    if (r2_value_cpus(text, &want))
        return false;
    CPU_AND(&want, &want, allowed);
    if (CPU_COUNT(&want) == 0)
        return false;
    *allowed = want;
    return true;
}
