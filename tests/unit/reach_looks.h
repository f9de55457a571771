/* Looks for NICs over which nobody came to a process that only receives, one at a time, over a
 * scripted transport: the engine looks by itself as well. Included with NICS defined. */
#ifndef R2_TESTS_REACH_LOOKS_H
#define R2_TESTS_REACH_LOOKS_H

#include "engine/locate/round.h"
#include "unreached_bed.h"

static bool asking;

static void look(int unused)
{
    (void)unused;
    r2_nicreach_look(r2_now_ns());
}

/* Loopback addresses of their own: else all would be in 127.0.0.0/8. */
static void set_subnet(int nic)
{
    r2_local.nics[nic].prefixlen = 24;
}

static void see_rounds(int unused)
{
    (void)unused;
    asking = r2_round_count(R2_ROUND_REACH) > 0;
}

/* One look, and the questions that it puts, to their end. answer: of the NIC's, time and again; or
 * NULL: nobody does. */
static void one_look(void (*answer)(int nic))
{
    int ms = 0;

    CHECK(remote_command(look, 0));
    do {
        for (int i = 0; answer && i < NICS; i++)
            answer(i);
        fake_pass_ms(5);
        CHECK(remote_command(see_rounds, 0));
    } while (asking && (ms += 5) < WAIT_MS);
    CHECK(!asking);
}

#endif
