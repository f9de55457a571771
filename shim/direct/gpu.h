/* Buffers in a GPU's memory, for the direct AllReduce: copies that are queued ahead
 * (device/copies.h). Its user is a struct r2_copies, whose window it takes. */
#ifndef R2_DIRECT_GPU_H
#define R2_DIRECT_GPU_H

#include "direct/direct.h"

extern const struct r2_direct_device r2_direct_gpu;

#endif
