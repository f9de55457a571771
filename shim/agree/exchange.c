/* An exchange: every rank offers some bytes to the leader, which gives all of them to everybody.
 * Frames may be lost with their connection, so a rank repeats its offer until it has been
 * exchanged. The leader keeps the last complete round for those that ask again: nobody offers the
 * next round before it has this one. It may invite to the first round, and repeats that, too.
 *
 * A process that has died is found by its host's refusal, since everybody goes on calling whom it
 * waits for: ranks the leader, and the leader those that have not offered. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agree/internal.h"
#include "util/clock.h"

#define R2_EXCHANGE_AGAIN_NS (20 * R2_NS_PER_MS) /* doubles; the leader may not be ready */
#define R2_EXCHANGE_MOST_NS R2_NS_PER_S

/* What the leader has of the round after `done`, and the frame of `done`. */
struct r2_agree_offers {
    uint32_t done;
    int n;
    size_t bytes;
    uint8_t *text;
    size_t text_len;
    struct {
        bool there;
        uint8_t *data;
        uint32_t len;
        int refused; /* how often its host said that nobody listens */
    } of[];
};

static void r2_put32(uint8_t *out, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint32_t r2_get32(const uint8_t *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

/* --- any thread --------------------------------------------------------------------------- */

int r2_agree_offer(struct r2_agree *a, uint32_t round, const void *data, size_t len)
{
    uint8_t *copy;
    int rc = 0;

    if (atomic_load(&r2_agree_inert)) {
        return -EPERM;
    }
    if (len > R2_AGREE_OFFER) {
        return -E2BIG;
    }
    copy = malloc(4 + len);
    if (!copy) {
        return -ENOMEM;
    }
    r2_put32(copy, round);
    memcpy(copy + 4, data, len);
    pthread_mutex_lock(&a->lock);
    if (a->state != R2_AGREE_READY) {
        rc = -EAGAIN;
    } else if (a->offer.open || round != a->offer.round + 1) {
        rc = -EINVAL;
    } else {
        free(a->offer.data);
        a->offer.round = round;
        a->offer.open = true;
        a->offer.data = copy;
        a->offer.len = 4 + len;
        copy = NULL;
    }
    pthread_mutex_unlock(&a->lock);
    free(copy);
    if (rc == 0) {
        r2_agree_service_kick(a);
    }
    return rc;
}

int r2_agree_invite(struct r2_agree *a)
{
    int rc = 0;

    if (atomic_load(&r2_agree_inert) || a->rank != R2_AGREE_LEADER) {
        return -EPERM;
    }
    pthread_mutex_lock(&a->lock);
    rc = a->state == R2_AGREE_READY ? 0 : -EAGAIN;
    a->inviting = a->inviting || rc == 0;
    pthread_mutex_unlock(&a->lock);
    if (rc == 0) {
        r2_agree_service_kick(a);
    }
    return rc;
}

/* --- service thread ----------------------------------------------------------------------- */

/* Said now; again after twice the time. */
static void r2_exchange_again(struct r2_agree *a, uint64_t *at, uint64_t *wait, uint64_t now)
{
    if (now >= *at) {
        *wait = *wait ? 2 * *wait : R2_EXCHANGE_AGAIN_NS;
        *wait = *wait < R2_EXCHANGE_MOST_NS ? *wait : R2_EXCHANGE_MOST_NS;
        *at = now + *wait;
    }
    a->deadline_ns = *at < a->deadline_ns ? *at : a->deadline_ns;
}

/* Those that have not offered. */
static void r2_exchange_call(struct r2_agree *a, enum r2_agree_kind kind)
{
    for (int r = 0; r < a->nranks; r++) {
        if (!a->offers || !a->offers->of[r].there) {
            r2_agree_member_send(a, (uint32_t)r, kind, NULL, 0, NULL, 0);
        }
    }
}

static void r2_exchange_offer(struct r2_agree *a, uint64_t now)
{
    if (now >= a->offer_ns) {
        /* Nobody changes it while it is open. */
        r2_agree_member_send(a, R2_AGREE_LEADER, R2_FRAME_OFFER, a->offer.data, a->offer.len, NULL,
                             0);
        if (a->rank == R2_AGREE_LEADER && a->offer_wait_ns == R2_EXCHANGE_MOST_NS) {
            r2_exchange_call(a, R2_FRAME_CALL);
        }
    }
    r2_exchange_again(a, &a->offer_ns, &a->offer_wait_ns, now);
}

static void r2_exchange_invite(struct r2_agree *a, uint64_t now)
{
    if (now >= a->invite_ns) {
        r2_exchange_call(a, R2_FRAME_INVITE);
    }
    r2_exchange_again(a, &a->invite_ns, &a->invite_wait_ns, now);
}

void r2_agree_exchange_turn(struct r2_agree *a, uint64_t now)
{
    bool open, inviting;

    pthread_mutex_lock(&a->lock);
    open = a->offer.open;
    inviting = a->inviting;
    pthread_mutex_unlock(&a->lock);
    if (open) {
        r2_exchange_offer(a, now);
    } else {
        a->offer_ns = a->offer_wait_ns = 0;
    }
    if (inviting && a->rank == R2_AGREE_LEADER && !(a->offers && a->offers->done > 0)) {
        r2_exchange_invite(a, now);
    }
}

/* What there is of the offers; NULL: no memory. */
static struct r2_agree_offers *r2_exchange_offers(struct r2_agree *a)
{
    if (!a->offers) {
        a->offers = calloc(1, sizeof(*a->offers) + (size_t)a->nranks * sizeof(a->offers->of[0]));
    }
    return a->offers;
}

/* An exchange that the leader invited to is awaited by nobody. */
void r2_agree_exchange_refused(struct r2_agree *a, const struct r2_agree_addr *addr, uint64_t now)
{
    bool open, leader = a->rank == R2_AGREE_LEADER;

    pthread_mutex_lock(&a->lock);
    open = a->offer.open && !a->inviting && a->life == R2_LIFE_ON;
    pthread_mutex_unlock(&a->lock);
    for (int r = 0; open && r < (leader ? a->nranks : 1) && r2_exchange_offers(a); r++) {
        uint32_t process = a->roster.seats[r].process;

        if (!a->offers->of[r].there &&
            r2_agree_addr_equal(&a->roster.processes[process].addr, addr) &&
            ++a->offers->of[r].refused == R2_AGREE_REFUSALS) {
            r2_agree_tell_gone(a, (uint32_t)r, now);
        }
    }
}

/* Leader: the round is complete. */
static void r2_exchange_complete(struct r2_agree *a, struct r2_agree_offers *o)
{
    size_t len = 4 + 4 * (size_t)a->nranks + o->bytes;
    uint8_t *text = malloc(len), *end = text + 4;

    if (!text) {
        return; /* offers come again */
    }
    r2_put32(text, o->done + 1);
    for (int r = 0; r < a->nranks; r++) {
        r2_put32(end, o->of[r].len);
        memcpy(end + 4, o->of[r].data, o->of[r].len);
        end += 4 + o->of[r].len;
        free(o->of[r].data);
        memset(&o->of[r], 0, sizeof(o->of[r]));
    }
    free(o->text);
    o->text = text;
    o->text_len = len;
    o->done++;
    o->n = 0;
    o->bytes = 0;
    for (int r = 0; r < a->nranks; r++) {
        r2_agree_member_send(a, (uint32_t)r, R2_FRAME_OFFERS, text, len, NULL, 0);
    }
}

/* Leader. */
static void r2_exchange_offered(struct r2_agree *a, const struct r2_agree_frame *f,
                                const uint8_t *payload)
{
    struct r2_agree_offers *o = r2_exchange_offers(a);
    uint32_t round = r2_get32(payload), len = f->len - 4;

    if (!o || len > R2_AGREE_OFFER) {
        return;
    }
    if (round == o->done && o->text) {
        r2_agree_member_send(a, f->from, R2_FRAME_OFFERS, o->text, o->text_len, NULL, 0);
    }
    if (round != o->done + 1) {
        return;
    }
    if (!o->of[f->from].there) {
        o->of[f->from].data = malloc(len ? len : 1);
        if (!o->of[f->from].data) {
            return;
        }
        memcpy(o->of[f->from].data, payload + 4, len);
        o->of[f->from].len = len;
        o->of[f->from].there = true;
        o->bytes += len;
        o->n++;
    }
    if (o->n == a->nranks) {
        r2_exchange_complete(a, o);
    }
}

/* False: damaged. */
static bool r2_exchange_parse(int nranks, const uint8_t *at, size_t left, const void **offers,
                              size_t *lens)
{
    for (int r = 0; r < nranks; r++) {
        if (left < 4 || r2_get32(at) > R2_AGREE_OFFER || left - 4 < r2_get32(at)) {
            return false;
        }
        lens[r] = r2_get32(at);
        offers[r] = at + 4;
        at += 4 + lens[r];
        left -= 4 + lens[r];
    }
    return left == 0;
}

static void r2_exchange_have(struct r2_agree *a, const struct r2_agree_frame *f,
                             const uint8_t *payload)
{
    const void **offers = calloc((size_t)a->nranks, sizeof(*offers));
    size_t *lens = calloc((size_t)a->nranks, sizeof(*lens));
    uint32_t round = r2_get32(payload);
    bool mine = false;

    if (offers && lens && r2_exchange_parse(a->nranks, payload + 4, f->len - 4, offers, lens)) {
        pthread_mutex_lock(&a->lock);
        mine = a->offer.open && a->offer.round == round;
        a->offer.open = a->offer.open && !mine;
        pthread_mutex_unlock(&a->lock);
    }
    if (mine) {
        a->offer_ns = a->offer_wait_ns = 0;
    }
    if (mine && !a->destroyed_ns && a->ops && a->ops->exchanged) {
        a->ops->exchanged(a->user, round, offers, lens);
    }
    free(offers);
    free(lens);
}

static void r2_exchange_invited(struct r2_agree *a, const struct r2_agree_frame *f)
{
    if (f->from != R2_AGREE_LEADER) {
        return;
    }
    pthread_mutex_lock(&a->lock);
    a->inviting = true;
    pthread_mutex_unlock(&a->lock);
    if (!a->destroyed_ns && a->ops && a->ops->invited) {
        a->ops->invited(a->user);
    }
}

void r2_agree_exchange_frame(struct r2_agree *a, const struct r2_agree_frame *f,
                             const uint8_t *payload)
{
    if (f->kind == R2_FRAME_INVITE) {
        r2_exchange_invited(a, f);
        return;
    }
    if (f->len < 4) {
        return;
    }
    if (f->kind == R2_FRAME_OFFER && a->rank == R2_AGREE_LEADER) {
        r2_exchange_offered(a, f, payload);
    } else if (f->kind == R2_FRAME_OFFERS && f->from == R2_AGREE_LEADER) {
        r2_exchange_have(a, f, payload);
    }
}

void r2_agree_exchange_free(struct r2_agree *a)
{
    for (int r = 0; a->offers && r < a->nranks; r++) {
        free(a->offers->of[r].data);
    }
    if (a->offers) {
        free(a->offers->text);
    }
    free(a->offers);
    free(a->offer.data);
}
