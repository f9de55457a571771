/* The traffic class that communicators ask for: one for the process (transport.h). */
#include <stdatomic.h>

#include "transport/transport.h"
#include "util/log.h"

static atomic_int traffic_class = -1;

void r2_traffic_class_ask(int asked)
{
    int none = -1;

    if (asked < 0)
        return;
    if (asked > 255) {
        R2_WARN_LIMIT("a communicator's traffic class is %d; it must be from 0 to 255, and has no "
                      "effect",
                      asked);
    } else if (!atomic_compare_exchange_strong(&traffic_class, &none, asked) && none != asked) {
        R2_WARN_LIMIT(
            "a communicator's traffic class is %d, but an earlier one's was %d: paths are "
            "shared by all communicators, and keep the first",
            asked, none);
    }
}

int r2_traffic_class(void)
{
    return atomic_load(&traffic_class);
}
