#include "real/nest.h"

/* Real calls that this thread is inside of. */
static __thread int nested __attribute__((tls_model("initial-exec")));

void r2_call_nest(void)
{
    nested++;
}

void r2_call_unnest(void)
{
    nested--;
}

bool r2_call_nested(void)
{
    return nested > 0;
}
