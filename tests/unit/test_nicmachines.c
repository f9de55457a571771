/* engine/core/nicmachines (rung 1): every state of the two machines with every event. What it
 * cannot prove: that the engine says the right events (engine_links, engine_port,
 * engine_unreached).
 */
#include "check.h"

#include "engine/core/nicmachines.h"

/* Only FOUND ends that it is missing, and it is up only by the word about its link. */
TEST(place)
{
    unsigned reached = 1u << R2_PLACE_DOWN;

    for (int round = 0; round < R2_PLACES; round++) {
        for (int s = 0; s < R2_PLACES; s++) {
            for (int e = 0; e < R2_PLACE_EVENTS; e++)
                reached |= reached >> s & 1 ? 1u << r2_place_next(s, e) : 0;
        }
    }
    CHECK_EQ(reached, (1u << R2_PLACES) - 1);
    for (int s = 0; s < R2_PLACES; s++) {
        bool missing = s == R2_PLACE_MISSING;

        CHECK_EQ(r2_place_next(s, R2_PLACE_EV_LOST), R2_PLACE_MISSING);
        CHECK_EQ(r2_place_next(s, R2_PLACE_EV_FOUND), missing ? R2_PLACE_DOWN : s);
        CHECK_EQ(r2_place_next(s, R2_PLACE_EV_LINK_UP), missing ? s : R2_PLACE_UP);
        CHECK_EQ(r2_place_next(s, R2_PLACE_EV_LINK_DOWN), missing ? s : R2_PLACE_DOWN);
    }
}

/* Who has met somebody has for ever; a warning is given once, and taken back once, if at all. */
TEST(reach)
{
    for (int s = 0; s < R2_NICREACHES; s++) {
        bool met = r2_nicreach_met(s);

        CHECK_EQ(met, s == R2_NICREACH_LATE || s == R2_NICREACH_MET);
        for (int e = 0; e < R2_NICREACH_EVENTS; e++)
            CHECK_EQ(r2_nicreach_met(r2_nicreach_next(s, e)), met || e == R2_NICREACH_EV_MEET);
        CHECK_EQ(r2_nicreach_next(s, R2_NICREACH_EV_WARN),
                 s == R2_NICREACH_NOBODY ? R2_NICREACH_WARNED : s);
        CHECK_EQ(r2_nicreach_next(s, R2_NICREACH_EV_MEET), s == R2_NICREACH_NOBODY ? R2_NICREACH_MET
                                                           : s == R2_NICREACH_WARNED
                                                               ? R2_NICREACH_LATE
                                                               : s);
        CHECK_EQ(r2_nicreach_next(s, R2_NICREACH_EV_TAKE_BACK),
                 s == R2_NICREACH_LATE ? R2_NICREACH_MET : s);
    }
}
