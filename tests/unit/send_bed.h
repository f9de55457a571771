/* The engine as sender over a scripted transport whose script is the test; both ends' NICs are 0
 * and 1. One test thread. */
#ifndef R2_TESTS_SEND_BED_H
#define R2_TESTS_SEND_BED_H

#include "check.h"
#include "enginelib/remote.h"

static struct remote r;
static struct r2_ep *a, *b; /* paths of NIC 0 and NIC 1 */

static void begin(int paths)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, paths));
    a = fake_find(r.id, 0, 0, 0);
    b = paths > 1 ? fake_find(r.id, 1, 1, 0) : NULL;
    CHECK(a && (b || paths < 2));
}

#endif
