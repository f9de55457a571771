/* Waiting for something that another process or thread does. */
#ifndef R2_TESTS_AWAIT_H
#define R2_TESTS_AWAIT_H

#include <unistd.h>

#include "check.h"
#include "util/clock.h"

/* Bounded: the test has failed if it is not so within 40 s. */
#define AWAIT(cond)                                                                                \
    do {                                                                                           \
        uint64_t begun = r2_now_ns();                                                              \
        while (!(cond)) {                                                                          \
            CHECK_MSG(r2_now_ns() - begun < 40 * R2_NS_PER_S, "waited in vain for %s", #cond);     \
            usleep(500);                                                                           \
        }                                                                                          \
    } while (0)

#endif
