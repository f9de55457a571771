#include "transport/verbs/card.h"

#include <errno.h>
#include <stddef.h>

#define QPN_MAX 0xffffffu

int r2_verbs_card_check(const struct r2_verbs_card *c, uint8_t link)
{
    if (c->magic != R2_VERBS_MAGIC || c->version != R2_VERBS_VERSION || c->len != sizeof(*c))
        return -EPROTO;
    if (c->status)
        return c->status < 4096 ? -(int)c->status : -EPROTO;
    if (c->link != link)
        return -EPROTONOSUPPORT;
    if (c->n_bulk < 1 || c->n_bulk > R2_VERBS_MAX_BULK || c->mtu < 1 || c->mtu > 5 || !c->ctrl ||
        c->ctrl > QPN_MAX || !c->beat || c->beat > QPN_MAX || c->psn > QPN_MAX)
        return -EPROTO;
    for (int i = 0; i < c->n_bulk; i++) {
        if (!c->bulk[i] || c->bulk[i] > QPN_MAX)
            return -EPROTO;
    }
    return 0;
}
