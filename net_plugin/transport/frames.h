/* Control frames out of a byte stream. */
#ifndef R2_TRANSPORT_FRAMES_H
#define R2_TRANSPORT_FRAMES_H

#include "transport/transport.h"

/* Hands over the whole frames among the first *len bytes of `buf` and moves the rest to its
 * beginning. 0, or -errno for a protocol violation. */
int r2_frames_take(const struct r2_transport_events *ev, void *owner, struct r2_ep *ep,
                   uint8_t *buf, size_t *len);

#endif
