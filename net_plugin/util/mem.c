#include "util/mem.h"

atomic_long r2_mem_held;
