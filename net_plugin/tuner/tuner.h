/* The tuner inside the net plugin's library: NCCL looks there when neither NCCL_TUNER_PLUGIN nor a
 * libnccl-tuner.so gives it another (2.21 and later). It answers for communicators whose maker left
 * a want (want.h) and is silent for all others; in a process without a shim that could leave one,
 * NCCL finds no tuner. */
#ifndef R2_TUNER_TUNER_H
#define R2_TUNER_TUNER_H

#include <stdbool.h>

#define R2_TUNER_EXPORT __attribute__((visibility("default")))

struct r2ccl_tuner_want;

/* Whether r2ccl_tuner_expect was ever called in this process. */
bool r2_tuner_announced(void);

/* The want that holds for a communicator which the calling thread is making; false if there is
 * none. Counts it as taken. */
bool r2_tuner_take_want(struct r2ccl_tuner_want *want);

#endif
