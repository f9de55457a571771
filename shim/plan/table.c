/* Layout of a shipped table, all little-endian, no padding:
 *   u32 magic, u16 version, u16 ncomms, u16 nentries, u16 reason length, u32 nranks
 *   reason (no NUL)
 *   per comm: u64 key, 128 bytes id, u32 ranks[nranks]
 *   per entry: u8 coll, class, schedule, segments; u64 from, below; per segment u32 comm, boundary
 *   u32 CRC32C of everything before */
#include "plan/table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/crc32c.h"
#include "util/siphash.h"

#define R2_TABLE_MAGIC UINT32_C(0x4c503252) /* "R2PL" */
#define R2_TABLE_VERSION 1
#define R2_TABLE_RANKS 65536

struct r2_cursor {
    unsigned char *out;      /* writing, NULL: only counts */
    const unsigned char *in; /* reading */
    size_t at, end;
    bool short_of;
};

static void r2_table_put(struct r2_cursor *c, const void *data, size_t len)
{
    if (c->out && c->at + len <= c->end) {
        memcpy(c->out + c->at, data, len);
    }
    c->at += len;
}

static void r2_table_put_int(struct r2_cursor *c, uint64_t value, int bytes)
{
    unsigned char b[8];

    for (int i = 0; i < bytes; i++) {
        b[i] = (unsigned char)(value >> (8 * i));
    }
    r2_table_put(c, b, (size_t)bytes);
}

static const unsigned char *r2_table_take(struct r2_cursor *c, size_t len)
{
    const unsigned char *p = c->in + c->at;

    if (c->short_of || c->end - c->at < len) {
        c->short_of = true;
        return NULL;
    }
    c->at += len;
    return p;
}

static uint64_t r2_table_take_int(struct r2_cursor *c, int bytes)
{
    const unsigned char *p = r2_table_take(c, (size_t)bytes);
    uint64_t value = 0;

    for (int i = 0; p && i < bytes; i++) {
        value |= (uint64_t)p[i] << (8 * i);
    }
    return value;
}

/* --- what a table must be ----------------------------------------------------------------- */

static bool r2_table_entry_valid(const struct r2_plan_table *t, const struct r2_plan_entry *e)
{
    if (e->coll >= R2_PLAN_COLLS || e->type_class >= R2_PLAN_CLASSES ||
        (e->schedule != R2_PLAN_STOCK && e->schedule != R2_PLAN_TREE) || e->segments < 1 ||
        e->segments > R2_PLAN_ORDERS || e->from_bytes >= e->below_bytes || e->boundary[0] != 0) {
        return false;
    }
    for (int i = 0; i < e->segments; i++) {
        if ((e->schedule == R2_PLAN_TREE && e->comm[i] >= (uint32_t)t->ncomms) ||
            e->boundary[i] > R2_PLAN_UNIT || (i > 0 && e->boundary[i] < e->boundary[i - 1])) {
            return false;
        }
    }
    return true;
}

static bool r2_table_permutation(const uint32_t *ranks, int n)
{
    unsigned char *seen = calloc((size_t)n, 1);
    bool good = seen != NULL;

    for (int i = 0; good && i < n; i++) {
        good = ranks[i] < (uint32_t)n && !seen[ranks[i]]++;
    }
    free(seen);
    return good;
}

static bool r2_table_valid(const struct r2_plan_table *t)
{
    if (t->nranks < 1 || t->nranks > R2_TABLE_RANKS || t->ncomms < 0 ||
        t->ncomms > R2_PLAN_ORDERS || t->nentries < 0 || t->nentries > R2_PLAN_ENTRIES) {
        return false;
    }
    for (int i = 0; i < t->ncomms; i++) {
        if (!t->comms[i].key || !r2_table_permutation(t->comms[i].ranks, t->nranks)) {
            return false;
        }
        for (int j = 0; j < i; j++) {
            if (t->comms[j].key == t->comms[i].key) {
                return false;
            }
        }
    }
    for (int i = 0; i < t->nentries; i++) {
        if (!r2_table_entry_valid(t, &t->entries[i])) {
            return false;
        }
    }
    return true;
}

/* --- encode and decode -------------------------------------------------------------------- */

static void r2_table_put_entry(struct r2_cursor *c, const struct r2_plan_entry *e)
{
    r2_table_put_int(c, e->coll, 1);
    r2_table_put_int(c, e->type_class, 1);
    r2_table_put_int(c, e->schedule, 1);
    r2_table_put_int(c, e->segments, 1);
    r2_table_put_int(c, e->from_bytes, 8);
    r2_table_put_int(c, e->below_bytes, 8);
    for (int i = 0; i < e->segments; i++) {
        r2_table_put_int(c, e->comm[i], 4);
        r2_table_put_int(c, e->boundary[i], 4);
    }
}

long r2_plan_table_encode(const struct r2_plan_table *t, void *out, size_t room)
{
    struct r2_cursor c = {.out = out, .end = room};
    size_t reason = strnlen(t->reason, sizeof(t->reason) - 1);
    uint32_t crc = 0;

    if (!r2_table_valid(t)) {
        return -EINVAL;
    }
    r2_table_put_int(&c, R2_TABLE_MAGIC, 4);
    r2_table_put_int(&c, R2_TABLE_VERSION, 2);
    r2_table_put_int(&c, (uint64_t)t->ncomms, 2);
    r2_table_put_int(&c, (uint64_t)t->nentries, 2);
    r2_table_put_int(&c, reason, 2);
    r2_table_put_int(&c, (uint64_t)t->nranks, 4);
    r2_table_put(&c, t->reason, reason);
    for (int i = 0; i < t->ncomms; i++) {
        r2_table_put_int(&c, t->comms[i].key, 8);
        r2_table_put(&c, t->comms[i].id, sizeof(t->comms[i].id));
        for (int r = 0; r < t->nranks; r++) {
            r2_table_put_int(&c, t->comms[i].ranks[r], 4);
        }
    }
    for (int i = 0; i < t->nentries; i++) {
        r2_table_put_entry(&c, &t->entries[i]);
    }
    if (out && c.at + 4 <= room) {
        crc = r2_crc32c(0, out, c.at);
    }
    r2_table_put_int(&c, crc, 4);
    return (long)c.at;
}

int r2_plan_table_pack(const struct r2_plan_table *t, void **out, size_t *len)
{
    long bytes = r2_plan_table_encode(t, NULL, 0);

    if (bytes < 0) {
        return (int)bytes;
    }
    *out = malloc((size_t)bytes);
    if (!*out) {
        return -ENOMEM;
    }
    *len = (size_t)bytes;
    r2_plan_table_encode(t, *out, *len);
    return 0;
}

static void r2_table_take_comms(struct r2_cursor *c, struct r2_plan_table *t, uint32_t *ranks)
{
    for (int i = 0; i < t->ncomms; i++) {
        struct r2_plan_comm *comm = &t->comms[i];
        const unsigned char *id;

        comm->key = r2_table_take_int(c, 8);
        id = r2_table_take(c, sizeof(comm->id));
        if (id) {
            memcpy(comm->id, id, sizeof(comm->id));
        }
        comm->ranks = ranks + (size_t)i * (size_t)t->nranks;
        for (int r = 0; r < t->nranks; r++) {
            ranks[(size_t)i * (size_t)t->nranks + (size_t)r] = (uint32_t)r2_table_take_int(c, 4);
        }
    }
}

static void r2_table_take_entries(struct r2_cursor *c, struct r2_plan_table *t)
{
    for (int i = 0; i < t->nentries; i++) {
        struct r2_plan_entry *e = &t->entries[i];

        e->coll = (uint8_t)r2_table_take_int(c, 1);
        e->type_class = (uint8_t)r2_table_take_int(c, 1);
        e->schedule = (uint8_t)r2_table_take_int(c, 1);
        e->segments = (uint8_t)r2_table_take_int(c, 1);
        e->from_bytes = r2_table_take_int(c, 8);
        e->below_bytes = r2_table_take_int(c, 8);
        for (int k = 0; k < e->segments && k < R2_PLAN_ORDERS; k++) {
            e->comm[k] = (uint32_t)r2_table_take_int(c, 4);
            e->boundary[k] = (uint32_t)r2_table_take_int(c, 4);
        }
    }
}

struct r2_table_block {
    struct r2_plan_table table;
    uint32_t ranks[];
};

int r2_plan_table_decode(struct r2_plan_table **out, const void *data, size_t len, int nranks)
{
    struct r2_cursor c = {.in = data, .end = len >= 4 ? len - 4 : 0};
    struct r2_cursor tail = {.in = data, .at = c.end, .end = len};
    uint64_t magic = r2_table_take_int(&c, 4);
    uint64_t version = r2_table_take_int(&c, 2);
    uint64_t ncomms = r2_table_take_int(&c, 2);
    uint64_t nentries = r2_table_take_int(&c, 2);
    uint64_t nreason = r2_table_take_int(&c, 2);
    uint64_t ranks = r2_table_take_int(&c, 4);
    struct r2_table_block *block;
    const unsigned char *reason;

    *out = NULL;
    if (c.short_of || magic != R2_TABLE_MAGIC || version != R2_TABLE_VERSION ||
        ranks != (uint64_t)nranks || nranks < 1 || nranks > R2_TABLE_RANKS ||
        ncomms > R2_PLAN_ORDERS || nentries > R2_PLAN_ENTRIES || nreason >= R2_PLAN_REASON ||
        ncomms * (136 + 4 * ranks) > len ||
        r2_table_take_int(&tail, 4) != r2_crc32c(0, data, len - 4)) {
        return -EINVAL;
    }
    block = calloc(1, sizeof(*block) + (size_t)(ncomms * ranks) * sizeof(uint32_t));
    if (!block) {
        return -ENOMEM;
    }
    block->table.nranks = nranks;
    block->table.ncomms = (int)ncomms;
    block->table.nentries = (int)nentries;
    reason = r2_table_take(&c, (size_t)nreason);
    if (reason && !memchr(reason, 0, (size_t)nreason)) {
        memcpy(block->table.reason, reason, (size_t)nreason);
    }
    r2_table_take_comms(&c, &block->table, block->ranks);
    r2_table_take_entries(&c, &block->table);
    if (c.short_of || c.at != c.end || strlen(block->table.reason) != nreason ||
        !r2_table_valid(&block->table)) {
        free(block);
        return -EINVAL;
    }
    *out = &block->table;
    return 0;
}

void r2_plan_table_free(struct r2_plan_table *t)
{
    free(t); /* the table is the first member of its block */
}

/* --- use ---------------------------------------------------------------------------------- */

const struct r2_plan_entry *r2_plan_table_find(const struct r2_plan_table *t, int coll,
                                               int type_class, uint64_t bytes)
{
    for (int i = 0; i < t->nentries; i++) {
        const struct r2_plan_entry *e = &t->entries[i];

        if (e->coll == coll && (e->type_class == R2_PLAN_ANY_TYPE || e->type_class == type_class) &&
            bytes >= e->from_bytes && bytes < e->below_bytes) {
            return e;
        }
    }
    return NULL;
}

/* elements * boundary / UNIT without overflow, rounded down to `align`. */
static uint64_t r2_table_cut(uint64_t elements, uint32_t boundary, uint64_t align)
{
    uint64_t high = elements / R2_PLAN_UNIT * boundary;
    uint64_t low = elements % R2_PLAN_UNIT * boundary / R2_PLAN_UNIT;

    return boundary == R2_PLAN_UNIT ? elements : (high + low) / align * align;
}

void r2_plan_entry_part(const struct r2_plan_entry *e, int part, uint64_t elements, uint64_t align,
                        uint64_t *first, uint64_t *count)
{
    uint64_t end = part + 1 < e->segments
                       ? r2_table_cut(elements, e->boundary[part + 1], align ? align : 1)
                       : elements;

    *first = r2_table_cut(elements, e->boundary[part], align ? align : 1);
    *count = end - *first;
}

/* Names the order: the same permutation has the same key. */
static uint64_t r2_table_key(const uint32_t *ranks, int n)
{
    static const uint8_t zero[16];
    uint8_t tag[16];
    uint64_t key = 0;

    r2_siphash128(zero, ranks, (size_t)n * sizeof(*ranks), tag);
    for (int i = 0; i < 8; i++) {
        key |= (uint64_t)tag[i] << (8 * i);
    }
    return key ? key : 1;
}

int r2_plan_table_from_plan(struct r2_plan_table **out, const struct r2_plan *plan, bool make_only)
{
    struct r2_table_block *block;
    struct r2_plan_table *t;

    *out = NULL;
    if (plan->nranks < 1 || plan->nranks > R2_TABLE_RANKS || plan->norders > R2_PLAN_ORDERS) {
        return -EINVAL;
    }
    block = calloc(1, sizeof(*block) + (size_t)plan->norders * (size_t)plan->nranks * 4);
    if (!block) {
        return -ENOMEM;
    }
    t = &block->table;
    t->nranks = plan->nranks;
    t->ncomms = plan->norders;
    memcpy(t->reason, plan->reason, sizeof(t->reason));
    for (int k = 0; k < plan->norders; k++) {
        uint32_t *ranks = block->ranks + (size_t)k * (size_t)plan->nranks;

        for (int r = 0; r < plan->nranks; r++) {
            ranks[r] = (uint32_t)plan->orders[k].ranks[r];
        }
        t->comms[k].ranks = ranks;
        t->comms[k].key = r2_table_key(ranks, plan->nranks);
    }
    if (plan->norders > 0 && !make_only) {
        struct r2_plan_entry *e = &t->entries[t->nentries++];

        *e = (struct r2_plan_entry){.coll = R2_PLAN_ALLREDUCE,
                                    .schedule = R2_PLAN_TREE,
                                    .segments = (uint8_t)plan->norders,
                                    .from_bytes = plan->from_bytes,
                                    .below_bytes = UINT64_MAX};
        for (int k = 0; k < plan->norders; k++) {
            e->comm[k] = (uint32_t)k;
            e->boundary[k] = plan->orders[k].boundary;
        }
    }
    *out = t;
    return 0;
}
