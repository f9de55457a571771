/* What all layers of the engine share. */
#include "engine/internal.h"

struct r2_engine r2_eng = {.lock = PTHREAD_MUTEX_INITIALIZER};
