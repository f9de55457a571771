#include "transport/frames.h"

#include <errno.h>
#include <string.h>

int r2_frames_take(const struct r2_transport_events *ev, void *owner, struct r2_ep *ep,
                   uint8_t *buf, size_t *len)
{
    size_t off = 0;
    int rc = 0;

    while (rc >= 0 && *len - off >= sizeof(struct r2_frame)) {
        struct r2_frame f;
        const uint8_t *body = buf + off + sizeof(f);

        memcpy(&f, buf + off, sizeof(f));
        if (f.version != R2_WIRE_VERSION)
            return -EPROTO;
        if (*len - off < sizeof(f) + f.len)
            break;
        rc = r2_wire_check(f.type, body, f.len);
        if (rc == 0)
            rc = ev->ctrl(owner, ep, f.type, body, f.len);
        off += sizeof(f) + f.len;
    }
    if (off) {
        memmove(buf, buf + off, *len - off);
        *len -= off;
    }
    return rc < 0 ? rc : 0;
}
