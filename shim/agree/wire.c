#include "agree/wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "util/siphash.h"

#define R2_TAIL_MAGIC UINT64_C(0x6565726761326372) /* "rc2agree" */
#define R2_FRAME_MAGIC UINT32_C(0x41433252)        /* "R2CA" */

static void r2_put(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t r2_get(const uint8_t *in, int bytes)
{
    uint64_t value = 0;

    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

/* 20 bytes: family, a zero, port, address. */
static void r2_addr_put(uint8_t *out, const struct r2_agree_addr *a)
{
    out[0] = a->family;
    out[1] = 0;
    r2_put(out + 2, a->port, 2);
    memcpy(out + 4, a->ip, 16);
}

static bool r2_addr_get(const uint8_t *in, struct r2_agree_addr *a)
{
    a->family = in[0];
    a->port = (uint16_t)r2_get(in + 2, 2);
    memcpy(a->ip, in + 4, 16);
    return in[1] == 0 && (a->family == 0 || ((a->family == 4 || a->family == 6) && a->port != 0));
}

/* --- unique ids: magic 8, version 4, address 20, token 16, tag 16 -------------------------- */

static void r2_tail_tag(const uint8_t id[R2_AGREE_ID], uint8_t tag[16])
{
    const uint8_t *t = id + R2_AGREE_ID - R2_AGREE_TAIL;

    r2_siphash128(t + 32, id, R2_AGREE_ID - 32, tag); /* NCCL's part is bound to ours */
}

int r2_agree_tail_encode(uint8_t id[R2_AGREE_ID], const struct r2_agree_tail *tail)
{
    uint8_t *t = id + R2_AGREE_ID - R2_AGREE_TAIL;

    for (int i = 0; i < R2_AGREE_TAIL; i++) {
        if (t[i] != 0) {
            return -EEXIST;
        }
    }
    r2_put(t, R2_TAIL_MAGIC, 8);
    r2_put(t + 8, R2_AGREE_VERSION, 4);
    r2_addr_put(t + 12, &tail->addr);
    memcpy(t + 32, tail->token, R2_AGREE_TOKEN);
    r2_tail_tag(id, t + 48);
    return 0;
}

int r2_agree_tail_decode(const uint8_t id[R2_AGREE_ID], struct r2_agree_tail *tail)
{
    const uint8_t *t = id + R2_AGREE_ID - R2_AGREE_TAIL;
    uint8_t tag[16];

    if (r2_get(t, 8) != R2_TAIL_MAGIC) {
        return -ENOENT;
    }
    r2_tail_tag(id, tag);
    if (r2_get(t + 8, 4) != R2_AGREE_VERSION || !r2_addr_get(t + 12, &tail->addr) ||
        tail->addr.family == 0 || !r2_tag_equal(tag, t + 48)) {
        return -EPROTO;
    }
    memcpy(tail->token, t + 32, R2_AGREE_TOKEN);
    return 0;
}

void r2_agree_token_derive(uint8_t out[R2_AGREE_TOKEN], const uint8_t parent[R2_AGREE_TOKEN],
                           uint64_t n, uint64_t salt)
{
    uint8_t text[24] = "r2child";

    r2_put(text + 8, n, 8);
    r2_put(text + 16, salt, 8);
    r2_siphash128(parent, text, sizeof(text), out);
}

/* --- frames ------------------------------------------------------------------------------- */

void r2_agree_frame_encode(uint8_t out[R2_AGREE_HEADER], const struct r2_agree_frame *f)
{
    memset(out, 0, R2_AGREE_HEADER);
    r2_put(out, R2_FRAME_MAGIC, 4);
    r2_put(out + 4, R2_AGREE_VERSION, 2);
    r2_put(out + 6, f->kind, 2);
    r2_put(out + 8, f->len, 4);
    r2_put(out + 12, f->from, 4);
    r2_put(out + 16, f->to, 4);
    memcpy(out + 32, f->token, R2_AGREE_TOKEN);
}

int r2_agree_frame_decode(const uint8_t in[R2_AGREE_HEADER], struct r2_agree_frame *f)
{
    uint64_t kind = r2_get(in + 6, 2);

    f->len = (uint32_t)r2_get(in + 8, 4);
    f->from = (uint32_t)r2_get(in + 12, 4);
    f->to = (uint32_t)r2_get(in + 16, 4);
    memcpy(f->token, in + 32, R2_AGREE_TOKEN);
    if (r2_get(in, 4) != R2_FRAME_MAGIC || r2_get(in + 4, 2) != R2_AGREE_VERSION || kind == 0 ||
        kind >= R2_FRAME_KINDS || f->len > R2_AGREE_FRAME || f->from >= R2_AGREE_RANKS ||
        f->to >= R2_AGREE_RANKS || r2_get(in + 20, 8) != 0 || r2_get(in + 28, 4) != 0) {
        return -EPROTO;
    }
    f->kind = (enum r2_agree_kind)kind;
    return 0;
}

void r2_agree_hello_encode(uint8_t out[R2_AGREE_HELLO_BYTES], const struct r2_agree_hello *h)
{
    memcpy(out, h->process, 16);
    r2_addr_put(out + 16, &h->addr);
}

int r2_agree_hello_decode(const uint8_t *in, size_t len, struct r2_agree_hello *h)
{
    if (len != R2_AGREE_HELLO_BYTES || !r2_addr_get(in + 16, &h->addr)) {
        return -EPROTO;
    }
    memcpy(h->process, in, 16);
    return 0;
}

void r2_agree_register_encode(uint8_t out[R2_AGREE_REGISTER_BYTES],
                              const struct r2_agree_register *r)
{
    memcpy(out, r->family, R2_AGREE_TOKEN);
    r2_put(out + 16, r->nranks, 4);
    r2_put(out + 20, r->version, 4);
    r2_put(out + 24, r->settings, 8);
    r2_put(out + 32, r->node, 8);
}

int r2_agree_register_decode(const uint8_t *in, size_t len, struct r2_agree_register *r)
{
    if (len != R2_AGREE_REGISTER_BYTES) {
        return -EPROTO;
    }
    memcpy(r->family, in, R2_AGREE_TOKEN);
    r->nranks = (uint32_t)r2_get(in + 16, 4);
    r->version = (uint32_t)r2_get(in + 20, 4);
    r->settings = r2_get(in + 24, 8);
    r->node = r2_get(in + 32, 8);
    return r->nranks < 1 || r->nranks > R2_AGREE_RANKS ? -EPROTO : 0;
}

size_t r2_agree_roster_encode(uint8_t *out, size_t room, const struct r2_agree_roster *r)
{
    size_t need = 8 + (size_t)r->nprocesses * R2_AGREE_HELLO_BYTES + (size_t)r->nranks * 12;

    if (need > room) {
        return need;
    }
    r2_put(out, r->nranks, 4);
    r2_put(out + 4, r->nprocesses, 4);
    out += 8;
    for (uint32_t i = 0; i < r->nprocesses; i++, out += R2_AGREE_HELLO_BYTES) {
        r2_agree_hello_encode(out, &r->processes[i]);
    }
    for (uint32_t i = 0; i < r->nranks; i++, out += 12) {
        r2_put(out, r->seats[i].process, 4);
        r2_put(out + 4, r->seats[i].node, 8);
    }
    return need;
}

int r2_agree_roster_decode(const uint8_t *in, size_t len, struct r2_agree_roster *r)
{
    *r = (struct r2_agree_roster){0};
    if (len < 8) {
        return -EPROTO;
    }
    r->nranks = (uint32_t)r2_get(in, 4);
    r->nprocesses = (uint32_t)r2_get(in + 4, 4);
    if (r->nranks < 1 || r->nranks > R2_AGREE_RANKS || r->nprocesses < 1 ||
        r->nprocesses > r->nranks ||
        len != 8 + (size_t)r->nprocesses * R2_AGREE_HELLO_BYTES + (size_t)r->nranks * 12) {
        return -EPROTO;
    }
    r->processes = calloc(r->nprocesses, sizeof(*r->processes));
    r->seats = calloc(r->nranks, sizeof(*r->seats));
    if (!r->processes || !r->seats) {
        r2_agree_roster_free(r);
        return -ENOMEM;
    }
    in += 8;
    for (uint32_t i = 0; i < r->nprocesses; i++, in += R2_AGREE_HELLO_BYTES) {
        if (r2_agree_hello_decode(in, R2_AGREE_HELLO_BYTES, &r->processes[i]) != 0) {
            r2_agree_roster_free(r);
            return -EPROTO;
        }
    }
    for (uint32_t i = 0; i < r->nranks; i++, in += 12) {
        r->seats[i].process = (uint32_t)r2_get(in, 4);
        r->seats[i].node = r2_get(in + 4, 8);
        if (r->seats[i].process >= r->nprocesses) {
            r2_agree_roster_free(r);
            return -EPROTO;
        }
    }
    return 0;
}

void r2_agree_roster_free(struct r2_agree_roster *r)
{
    free(r->processes);
    free(r->seats);
    *r = (struct r2_agree_roster){0};
}

void r2_agree_msg_encode(uint8_t out[R2_AGREE_MSG_BYTES], const struct r2_agree_msg *m)
{
    r2_put(out, m->type, 8);
    r2_put(out + 8, m->epoch, 8);
    r2_put(out + 16, m->at, 8);
    r2_put(out + 24, m->next, 8);
    r2_put(out + 32, m->decided, 8);
    r2_put(out + 40, m->committed, 8);
}

int r2_agree_msg_decode(const uint8_t *in, size_t len, struct r2_agree_msg *m, const uint8_t **plan,
                        size_t *plan_len)
{
    uint64_t type;

    if (len < R2_AGREE_MSG_BYTES) {
        return -EPROTO;
    }
    type = r2_get(in, 8);
    m->epoch = r2_get(in + 8, 8);
    m->at = r2_get(in + 16, 8);
    m->next = r2_get(in + 24, 8);
    m->decided = r2_get(in + 32, 8);
    m->committed = r2_get(in + 40, 8);
    *plan = in + R2_AGREE_MSG_BYTES;
    *plan_len = len - R2_AGREE_MSG_BYTES;
    if (type < R2_AGREE_PROPOSE || type >= R2_AGREE_TYPES || m->epoch == 0 ||
        m->committed > m->decided || *plan_len > R2_AGREE_PLAN ||
        (type != R2_AGREE_PROPOSE && *plan_len != 0)) {
        return -EPROTO;
    }
    m->type = (enum r2_agree_type)type;
    return 0;
}

void r2_agree_report_encode(uint8_t out[R2_AGREE_REPORT_BYTES], uint64_t number,
                            const struct r2_agree_report *r)
{
    r2_put(out, number, 8);
    r2_put(out + 8, r->capacity, 8);
    r2_put(out + 16, r->share, 4);
    r2_put(out + 20, r->flags, 4);
    for (int i = 0; i < R2_AGREE_WORDS; i++) {
        r2_put(out + 24 + 8 * i, r->words[i], 8);
    }
}

int r2_agree_report_decode(const uint8_t *in, size_t len, uint64_t *number,
                           struct r2_agree_report *r)
{
    if (len != R2_AGREE_REPORT_BYTES) {
        return -EPROTO;
    }
    *number = r2_get(in, 8);
    r->capacity = r2_get(in + 8, 8);
    r->share = (uint32_t)r2_get(in + 16, 4);
    r->flags = (uint32_t)r2_get(in + 20, 4);
    for (int i = 0; i < R2_AGREE_WORDS; i++) {
        r->words[i] = r2_get(in + 24 + 8 * i, 8);
    }
    return r->share > 65536 ? -EPROTO : 0;
}

void r2_agree_failure_encode(uint8_t out[R2_AGREE_FAILURE_BYTES], const struct r2_agree_failure *f)
{
    r2_put(out, f->rank, 4);
    r2_put(out + 4, f->error, 4);
}

int r2_agree_failure_decode(const uint8_t *in, size_t len, struct r2_agree_failure *f)
{
    if (len != R2_AGREE_FAILURE_BYTES) {
        return -EPROTO;
    }
    f->rank = (uint32_t)r2_get(in, 4);
    f->error = (uint32_t)r2_get(in + 4, 4);
    return f->rank >= R2_AGREE_RANKS || f->error == 0 ? -EPROTO : 0;
}
