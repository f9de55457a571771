/* Where the ranks of an id meet: the process that signed it. When all have registered, each gets
 * the roster; from then on the ranks speak to each other. Service thread only. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agree/internal.h"
#include "settings/settings.h"

#define R2_RENDEZVOUS_GROUPS 65536

struct r2_seat {
    bool taken, left;
    struct r2_agree_hello process;
    uint64_t node;
};

struct r2_group {
    struct r2_list node;
    uint8_t token[R2_AGREE_TOKEN];
    uint32_t nranks, taken, left;
    uint32_t version;
    uint64_t settings;
    bool complete, off, said;
    char why[R2_AGREE_WHY]; /* off */
    uint64_t since_ns;
    uint8_t *roster; /* encoded, when complete */
    size_t roster_len;
    struct r2_seat seats[];
};

static struct r2_list r2_groups = R2_LIST_INIT(r2_groups);
static size_t r2_ngroups;

static void r2_group_free(struct r2_group *g)
{
    r2_list_del(&g->node);
    r2_ngroups--;
    free(g->roster);
    free(g);
}

static struct r2_group *r2_group_find(const uint8_t token[R2_AGREE_TOKEN])
{
    struct r2_list *it;

    R2_LIST_FOR_EACH (it, &r2_groups) {
        struct r2_group *g = R2_CONTAINER_OF(it, struct r2_group, node);

        if (memcmp(g->token, token, R2_AGREE_TOKEN) == 0) {
            return g;
        }
    }
    return NULL;
}

static struct r2_group *r2_group_make(const uint8_t token[R2_AGREE_TOKEN],
                                      const struct r2_agree_register *r, uint64_t now)
{
    struct r2_group *g;

    if (r2_ngroups >= R2_RENDEZVOUS_GROUPS) {
        return NULL;
    }
    g = calloc(1, sizeof(*g) + r->nranks * sizeof(g->seats[0]));
    if (!g) {
        return NULL;
    }
    memcpy(g->token, token, R2_AGREE_TOKEN);
    g->nranks = r->nranks;
    g->version = r->version;
    g->settings = r->settings;
    g->since_ns = now;
    r2_list_add_head(&r2_groups, &g->node); /* the newest is asked for most */
    r2_ngroups++;
    return g;
}

/* --- telling ------------------------------------------------------------------------------ */

static void r2_group_send_to(const struct r2_group *g, uint32_t rank,
                             const struct r2_agree_hello *to, enum r2_agree_kind kind,
                             const void *payload, size_t len)
{
    struct r2_agree_frame f = {.kind = kind, .to = rank, .len = (uint32_t)len};

    memcpy(f.token, g->token, R2_AGREE_TOKEN);
    r2_agree_service_send(to->process, &to->addr, &f, payload, len, NULL);
}

static void r2_group_send(const struct r2_group *g, uint32_t rank, enum r2_agree_kind kind,
                          const void *payload, size_t len)
{
    const struct r2_seat *seat = &g->seats[rank];

    if (seat->taken && !seat->left) {
        r2_group_send_to(g, rank, &seat->process, kind, payload, len);
    }
}

/* The payload of OFF: 1 for good or 0 for now, then the reason. */
static size_t r2_group_off_text(char text[R2_AGREE_WHY + 1], const char *why, bool good)
{
    int len = snprintf(text + 1, R2_AGREE_WHY, "%s", why);

    text[0] = (char)good;
    return (size_t)(len < R2_AGREE_WHY ? len : R2_AGREE_WHY - 1) + 1;
}

static void r2_group_send_off(const struct r2_group *g, uint32_t rank, const char *why, bool good)
{
    char text[R2_AGREE_WHY + 1];

    r2_group_send(g, rank, R2_FRAME_OFF, text, r2_group_off_text(text, why, good));
}

__attribute__((format(printf, 2, 3))) static void r2_group_off(struct r2_group *g, const char *fmt,
                                                               ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(g->why, sizeof(g->why), fmt, ap);
    va_end(ap);
    g->off = true;
    for (uint32_t i = 0; i < g->nranks; i++) {
        r2_group_send_off(g, i, g->why, true);
    }
}

/* Which ranks are missing. */
static void r2_group_missing(const struct r2_group *g, char why[R2_AGREE_WHY])
{
    char list[96] = "";
    size_t at = 0;
    uint32_t missing = g->nranks - g->taken;
    uint32_t named = 0;

    for (uint32_t i = 0; i < g->nranks && named < 8; i++) {
        if (!g->seats[i].taken) {
            at += (size_t)snprintf(list + at, sizeof(list) - at, "%s%u", named ? ", " : "", i);
            named++;
        }
    }
    snprintf(why, R2_AGREE_WHY, "%u of %u ranks have not registered (%s%s): is the shim there?",
             missing, g->nranks, list, missing > named ? ", ..." : "");
}

/* Processes in the order of their lowest rank. */
static int r2_group_roster(struct r2_group *g)
{
    struct r2_agree_roster r = {.nranks = g->nranks};
    struct r2_hash seen;
    int rc = -ENOMEM;

    r2_hash_init(&seen);
    r.processes = calloc(g->nranks, sizeof(*r.processes));
    r.seats = calloc(g->nranks, sizeof(*r.seats));
    if (!r.processes || !r.seats) {
        goto out;
    }
    for (uint32_t i = 0; i < g->nranks; i++) {
        uint64_t key;
        uintptr_t at;

        memcpy(&key, g->seats[i].process.process, sizeof(key));
        at = (uintptr_t)r2_hash_get(&seen, key);
        if (!at) {
            r.processes[r.nprocesses] = g->seats[i].process;
            at = ++r.nprocesses;
            if (r2_hash_put(&seen, key, (void *)at) != 0) {
                goto out;
            }
        }
        r.seats[i] = (struct r2_agree_seat){(uint32_t)at - 1, g->seats[i].node};
    }
    g->roster_len = r2_agree_roster_encode(NULL, 0, &r);
    g->roster = malloc(g->roster_len);
    if (g->roster) {
        r2_agree_roster_encode(g->roster, g->roster_len, &r);
        g->complete = true;
        rc = 0;
    }
out:
    r2_hash_free(&seen);
    r2_agree_roster_free(&r);
    return rc;
}

/* --- what ranks say ----------------------------------------------------------------------- */

static bool r2_seat_of_another(const struct r2_seat *seat, const struct r2_agree_hello *from)
{
    return seat->taken && memcmp(seat->process.process, from->process, 16) != 0;
}

/* What makes plan changes impossible for good. */
static bool r2_group_differs(struct r2_group *g, uint32_t rank, const struct r2_agree_register *r,
                             const struct r2_agree_hello *from)
{
    const struct r2_seat *seat = &g->seats[rank];

    if (r->version != g->version) {
        r2_group_off(g, "ranks have different versions of the shim (%u and %u; rank %u)",
                     g->version, r->version, rank);
    } else if (r->settings != g->settings) {
        r2_group_off(g, "rank %u has other R2CCL settings than the ranks before it", rank);
    } else if (r->nranks != g->nranks) {
        r2_group_off(g, "rank %u counts %u ranks, others %u", rank, r->nranks, g->nranks);
    } else if (r2_seat_of_another(seat, from)) {
        r2_group_off(g, "two processes are rank %u", rank);
    }
    return g->off;
}

/* One that was started again, when the ranks have met or never will: it is no member, and they are
 * none the worse for it. It hears what keeps the others from plan changes, if anything does. False:
 * it is none such. */
static bool r2_group_refuses(const struct r2_group *g, uint32_t rank,
                             const struct r2_agree_hello *from)
{
    char two[64], text[R2_AGREE_WHY + 1];

    if (!r2_seat_of_another(&g->seats[rank], from) || (!g->complete && !g->off)) {
        return false;
    }
    snprintf(two, sizeof(two), "two processes are rank %u", rank);
    r2_group_send_to(g, rank, from, R2_FRAME_OFF, text,
                     r2_group_off_text(text, g->off ? g->why : two, true));
    return true;
}

static void r2_rendezvous_register(const struct r2_agree_hello *from,
                                   const struct r2_agree_frame *f,
                                   const struct r2_agree_register *r, uint64_t now)
{
    struct r2_group *g = r2_group_find(f->token);
    struct r2_seat *seat;

    if (!g) {
        g = r2_group_make(f->token, r, now);
    }
    if (!g || f->from >= g->nranks) {
        return;
    }
    seat = &g->seats[f->from];
    if (r2_group_refuses(g, f->from, from)) {
        return;
    }
    if (g->off || r2_group_differs(g, f->from, r, from)) {
        if (!seat->taken) { /* it comes too late for the general message */
            seat->taken = true;
            seat->process = *from;
            g->taken++;
            r2_group_send_off(g, f->from, g->why, true);
        }
        return;
    }
    if (!seat->taken) {
        seat->taken = true;
        g->taken++;
    }
    if (seat->left) { /* over a new connection */
        seat->left = false;
        g->left--;
    }
    seat->process = *from;
    seat->node = r->node;
    if (g->complete) { /* it did not get the roster */
        r2_group_send(g, f->from, R2_FRAME_ROSTER, g->roster, g->roster_len);
    } else if (g->taken == g->nranks && r2_group_roster(g) == 0) {
        for (uint32_t i = 0; i < g->nranks; i++) {
            r2_group_send(g, i, R2_FRAME_ROSTER, g->roster, g->roster_len);
        }
    } else if (g->said) { /* it comes when the others have been told who is missing */
        char why[R2_AGREE_WHY];

        r2_group_missing(g, why);
        r2_group_send_off(g, f->from, why, false);
    }
}

/* A rank has gone; a group without ranks is forgotten. */
static void r2_group_leave(struct r2_group *g, uint32_t rank)
{
    struct r2_seat *seat = &g->seats[rank];

    if (!seat->taken || seat->left) {
        return;
    }
    if (!g->complete && !g->off) { /* it may come back over another connection */
        seat->taken = false;
        g->taken--;
    } else {
        seat->left = true;
        g->left++;
    }
    if (g->left == g->taken) {
        r2_group_free(g);
    }
}

bool r2_agree_rendezvous_frame(const struct r2_agree_hello *from, const struct r2_agree_frame *f,
                               const uint8_t *payload, uint64_t now)
{
    struct r2_agree_register r;
    struct r2_group *g;

    if (f->kind == R2_FRAME_LEAVE) {
        g = r2_group_find(f->token);
        if (g && f->from < g->nranks &&
            memcmp(g->seats[f->from].process.process, from->process, 16) == 0) {
            r2_group_leave(g, f->from);
        }
        return g != NULL;
    }
    if (r2_agree_register_decode(payload, f->len, &r) != 0 || !r2_agree_service_signed(r.family)) {
        return false;
    }
    r2_rendezvous_register(from, f, &r, now);
    return true;
}

void r2_agree_rendezvous_lost(const uint8_t process[16])
{
    struct r2_list *it, *tmp;

    R2_LIST_FOR_EACH_SAFE (it, tmp, &r2_groups) {
        struct r2_group *g = R2_CONTAINER_OF(it, struct r2_group, node);
        uint32_t nranks = g->nranks;
        uint32_t gone = 0;

        /* The last one that leaves frees the group: count first, then leave. */
        for (uint32_t i = 0; i < nranks; i++) {
            gone += g->seats[i].taken && !g->seats[i].left &&
                    memcmp(g->seats[i].process.process, process, 16) == 0;
        }
        for (uint32_t i = 0; i < nranks && gone > 0; i++) {
            if (g->seats[i].taken && !g->seats[i].left &&
                memcmp(g->seats[i].process.process, process, 16) == 0) {
                gone--;
                r2_group_leave(g, i);
            }
        }
    }
}

/* --- who is missing ----------------------------------------------------------------------- */

static void r2_group_say_missing(struct r2_group *g)
{
    char why[R2_AGREE_WHY];

    r2_group_missing(g, why);
    for (uint32_t i = 0; i < g->nranks; i++) {
        r2_group_send_off(g, i, why, false);
    }
    g->said = true;
}

uint64_t r2_agree_rendezvous_turn(uint64_t now)
{
    uint64_t patience = r2_settings_get()->agree_timeout_ns;
    uint64_t next = UINT64_MAX;
    struct r2_list *it;

    R2_LIST_FOR_EACH (it, &r2_groups) {
        struct r2_group *g = R2_CONTAINER_OF(it, struct r2_group, node);

        if (g->complete || g->off || g->said) {
            continue;
        }
        if (now >= g->since_ns + patience) {
            r2_group_say_missing(g);
        } else if (g->since_ns + patience < next) {
            next = g->since_ns + patience;
        }
    }
    return next;
}
