/* How a rank of a communicator joins the others, and what it reports to the leader. Service
 * thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agree/internal.h"
#include "util/clock.h"

#define R2_MEMBER_REGISTER_NS R2_NS_PER_S /* first repetition; doubles */
#define R2_MEMBER_REGISTER_MOST_NS (30 * R2_NS_PER_S)

/* Reports that came before the roster, and with it the knowledge of which process the rank is: the
 * last one of each of the first few that say they are it. So one that was started again, or is not
 * it, does not take the place of the one that registered. */
#define R2_JOIN_CLAIMS 4
struct r2_agree_early {
    int claims;
    struct {
        uint8_t process[16];
        uint8_t report[R2_AGREE_REPORT_BYTES];
    } claim[R2_JOIN_CLAIMS];
};

/* --- joining ------------------------------------------------------------------------------ */

static void r2_join_no_root(struct r2_agree *a, const char *why)
{
    if (!a->said_off && a->ops && a->ops->off) {
        a->ops->off(a->user, why);
    }
    a->said_off = true;
}

void r2_agree_join_register(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_register r = {.nranks = (uint32_t)a->nranks,
                                  .version = R2_AGREE_VERSION,
                                  .settings = a->settings,
                                  .node = a->node};
    uint8_t text[R2_AGREE_REGISTER_BYTES];

    if (now >= a->register_ns) {
        memcpy(r.family, a->family, R2_AGREE_TOKEN);
        r2_agree_register_encode(text, &r);
        r2_agree_member_to_root(a, R2_FRAME_REGISTER, text, sizeof(text));
        a->register_wait_ns = a->register_wait_ns ? a->register_wait_ns * 2 : R2_MEMBER_REGISTER_NS;
        if (a->register_wait_ns > R2_MEMBER_REGISTER_MOST_NS) {
            a->register_wait_ns = R2_MEMBER_REGISTER_MOST_NS;
        }
        a->register_ns = now + a->register_wait_ns;
    }
    a->deadline_ns = a->register_ns;
    a->joining_ns = a->joining_ns ? a->joining_ns : now;
    if (now >= a->joining_ns + 2 * a->timeout_ns) { /* the root is silent, too */
        r2_join_no_root(a, "the process that made the unique id does not answer");
    } else if (a->root_refused >= R2_AGREE_REFUSALS) {
        r2_join_no_root(a, "the process that made the unique id has ended");
    }
}

void r2_agree_member_refused(struct r2_agree *a, const struct r2_agree_addr *addr, uint64_t now)
{
    if (a->roster.seats) {
        r2_agree_exchange_refused(a, addr, now);
    } else if (r2_agree_addr_equal(&a->root, addr)) {
        a->root_refused++;
        a->deadline_ns = 0;
    }
}

void r2_agree_join_early(struct r2_agree *a, const uint8_t process[16],
                         const struct r2_agree_frame *f, const uint8_t *payload)
{
    struct r2_agree_early *early;
    int i = 0;

    if (a->rank != R2_AGREE_LEADER || f->from >= (uint32_t)a->nranks ||
        f->len != R2_AGREE_REPORT_BYTES || a->destroyed_ns) {
        return;
    }
    if (!a->early) {
        a->early = calloc((size_t)a->nranks, sizeof(*a->early));
    }
    early = a->early ? &a->early[f->from] : NULL;
    while (early && i < early->claims && memcmp(early->claim[i].process, process, 16) != 0) {
        i++;
    }
    if (early && i < R2_JOIN_CLAIMS) {
        early->claims = i < early->claims ? early->claims : i + 1;
        memcpy(early->claim[i].process, process, sizeof(early->claim[i].process));
        memcpy(early->claim[i].report, payload, sizeof(early->claim[i].report));
    }
}

bool r2_agree_join_knows(const struct r2_agree *a, uint32_t rank, const uint8_t process[16])
{
    return a->roster.seats && rank < a->roster.nranks &&
           memcmp(a->roster.processes[a->roster.seats[rank].process].process, process, 16) == 0;
}

/* As if they came now: those of processes that are not the rank's are dropped. */
static void r2_join_take_early(struct r2_agree *a)
{
    struct r2_agree_early *early = a->early;

    a->early = NULL;
    for (int r = 0; early && r < a->nranks; r++) {
        struct r2_agree_frame f = {
            .kind = R2_FRAME_REPORT, .from = (uint32_t)r, .len = R2_AGREE_REPORT_BYTES};

        for (int i = 0; i < early[r].claims; i++) {
            if (r2_agree_join_knows(a, f.from, early[r].claim[i].process)) {
                r2_agree_join_reported(a, f.from, &f, early[r].claim[i].report);
            }
        }
    }
    free(early);
}

void r2_agree_join_roster(struct r2_agree *a, const struct r2_agree_frame *f,
                          const uint8_t *payload)
{
    struct r2_agree_member *members;
    struct r2_agree_roster roster;
    bool joining;

    if (a->roster.seats || r2_agree_roster_decode(payload, f->len, &roster) != 0) {
        return;
    }
    members = calloc((size_t)a->nranks, sizeof(*members));
    if (!members || roster.nranks != (uint32_t)a->nranks) {
        free(members);
        r2_agree_roster_free(&roster);
        return;
    }
    a->roster = roster;
    for (int r = 0; r < a->nranks; r++) {
        members[r].node = roster.seats[r].node;
        memcpy(&members[r].process, roster.processes[roster.seats[r].process].process,
               sizeof(members[r].process));
    }
    pthread_mutex_lock(&a->lock);
    joining = a->state == R2_AGREE_JOINING && a->life == R2_LIFE_ON;
    if (joining) {
        a->state = R2_AGREE_READY;
        a->why[0] = '\0';
    }
    pthread_mutex_unlock(&a->lock);
    if (joining && a->ops && a->ops->ready) {
        a->ops->ready(a->user, members, a->nranks);
    }
    free(members);
    r2_join_take_early(a);
}

void r2_agree_join_off(struct r2_agree *a, const struct r2_agree_frame *f, const uint8_t *payload)
{
    char why[R2_AGREE_WHY];
    bool say;

    if (f->len < 2 || f->len > R2_AGREE_WHY) {
        return;
    }
    snprintf(why, sizeof(why), "%.*s", (int)f->len - 1, (const char *)payload + 1);
    for (char *p = why; *p; p++) {
        *p = *p < ' ' || *p > '~' ? '?' : *p; /* it goes into logs */
    }
    pthread_mutex_lock(&a->lock);
    say = a->state == R2_AGREE_JOINING && !a->said_off;
    if (a->state == R2_AGREE_JOINING) {
        memcpy(a->why, why, sizeof(why));
        a->state = payload[0] ? R2_AGREE_OFF : R2_AGREE_JOINING;
    }
    pthread_mutex_unlock(&a->lock);
    a->said_off = a->said_off || say;
    if (say && !a->destroyed_ns && a->ops && a->ops->off) {
        a->ops->off(a->user, why);
    }
}

/* --- reports ------------------------------------------------------------------------------ */

void r2_agree_join_report(struct r2_agree *a)
{
    uint8_t text[R2_AGREE_REPORT_BYTES];
    struct r2_agree_report report;
    bool any;

    pthread_mutex_lock(&a->lock);
    any = a->report_new && a->state == R2_AGREE_READY;
    a->report_new = a->report_new && !any;
    report = a->report;
    pthread_mutex_unlock(&a->lock);
    if (any) {
        r2_agree_report_encode(text, ++a->report_number, &report);
        r2_agree_member_send(a, R2_AGREE_LEADER, R2_FRAME_REPORT, text, sizeof(text), NULL, 0);
    }
}

void r2_agree_join_reported(struct r2_agree *a, uint32_t from, const struct r2_agree_frame *f,
                            const uint8_t *payload)
{
    struct r2_agree_report report;
    uint64_t number;

    if (a->rank != R2_AGREE_LEADER || a->destroyed_ns ||
        r2_agree_report_decode(payload, f->len, &number, &report) != 0 ||
        number <= a->report_seen[from]) {
        return;
    }
    a->report_seen[from] = number;
    if (a->ops && a->ops->reported) {
        a->ops->reported(a->user, (int)from, &report);
    }
}

void r2_agree_member_lost(struct r2_agree *a, const uint8_t process[16])
{
    if (a->roster.seats &&
        memcmp(a->roster.processes[a->roster.seats[R2_AGREE_LEADER].process].process, process,
               16) == 0) {
        pthread_mutex_lock(&a->lock);
        a->report_new = a->report_number > 0; /* the last one may be lost */
        pthread_mutex_unlock(&a->lock);
        if (a->failure.error && a->failure_rounds == 0 && a->tell_ns != UINT64_MAX) {
            a->tell_ns = 0; /* it was told, and has told nobody yet */
        }
        a->deadline_ns = 0;
    }
}
