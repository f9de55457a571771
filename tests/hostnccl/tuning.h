/* Which protocol an operation takes: by its size and NCCL_PROTO. */
#ifndef HOSTNCCL_TUNING_H
#define HOSTNCCL_TUNING_H

#include "kernels.h"

/* p2p: point to point, where NCCL has no LL128. */
enum hn_proto hn_tuning_protocol(size_t bytes, bool p2p);

#endif
