/* What ledgers can tell: what is under way, what has arrived. */
#include "engine/core/ledger.h"

void r2_send_unacked(const struct r2_send_ledger *l, r2_send_report_fn cb, void *arg)
{
    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_send_rec *rec = r2_send_rec_at(l, i);
        struct r2_send_report r = {
            .off = rec->off,
            .len = rec->len,
            .bytes = rec->len - (uint32_t)r2_ranges_overlap(&l->acked, rec->off, rec->len),
            .path = rec->path,
            .gen = rec->gen,
            .doubled = rec->copy || rec->copied,
            .copy = rec->copy,
            .t_sent_ns = rec->t_sent_ns,
            .stamp = rec->stamp,
        };

        if (!rec->lost)
            cb(arg, &r);
    }
}

void r2_recv_arrived(const struct r2_recv_ledger *l, r2_range_fn cb, void *arg)
{
    for (uint32_t i = 0; i < l->done.count; i++) {
        const struct r2_range *r = r2_ranges_at(&l->done, i);

        if (!cb(arg, r->off, r->end - r->off)) {
            return;
        }
    }
}

bool r2_send_on_path(const struct r2_send_ledger *l, uint16_t path)
{
    const struct r2_send_rec *recs = l->heap ? l->heap : l->small;

    for (uint32_t i = 0; i < l->count; i++) {
        if (recs[i].path == path && (recs[i].reading || !recs[i].lost))
            return true;
    }
    return false;
}
