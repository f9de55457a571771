/* One communicator: its ranks meet, hear of each other and report to the leader. */
#define _GNU_SOURCE
#include "comms/follow.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comms/follow_inside.h"
#include "plan/plan.h"
#include "real/conf.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/log.h"

#define WIRE 7 /* of what must be equal on all ranks, with the settings below */

static uint64_t hash_text(const char *text, uint64_t hash)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return hash;
}

/* As NCCL tells nodes apart: NCCL_HOSTID, or host name and boot id. */
static uint64_t node_key(void)
{
    const char *id = getenv("NCCL_HOSTID");
    char text[256] = "";
    FILE *file;

    if (id && *id)
        return hash_text(id, UINT64_C(0xcbf29ce484222325));
    gethostname(text, 128);
    file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        size_t at = strlen(text), n = fread(text + at, 1, 64, file);

        text[at + n] = '\0';
        fclose(file);
    }
    return hash_text(text, UINT64_C(0xcbf29ce484222325));
}

bool r2_follow_wanted(void)
{
    return r2_leader_plans() || r2_settings_get()->tell_errors > 0;
}

void r2_follow_lacks(struct r2_comm *comm, const char *why)
{
    if (!r2_follow_wanted())
        return;
    if (comm && r2_leader_plans())
        r2_comm_row_plan(comm, NULL, why);
    if (r2_leader_plans() && r2_leader_asked())
        R2_WARN_ONCE("a communicator has no plans, and its ranks are not told of each other's "
                     "errors: %s",
                     why);
    else
        R2_INFO("a communicator has no plans, and its ranks are not told of each other's errors: "
                "%s",
                why);
}

void r2_follow_sign(struct r2_nccl_id *id, int version)
{
    char why[R2_AGREE_WHY] = "";
    struct r2_conf_value value;

    /* Then each rank may make the id by itself, and all are the same but for what is put there. */
    if (r2_conf_get(&value, "NCCL_COMM_ID", version))
        r2_follow_lacks(NULL, "NCCL_COMM_ID is set, so ranks may make their ids themselves");
    else if (r2_agree_id_sign((uint8_t *)id->bytes, why))
        r2_follow_lacks(NULL, why);
}

/* ---- what shim/agree tells; service thread */

static int number_nodes(const struct r2_agree_member *members, int nranks, int *rank_node)
{
    int nodes = 0;

    for (int r = 0; r < nranks; r++) {
        int at = 0;

        while (at < r && members[at].node != members[r].node)
            at++;
        rank_node[r] = at < r ? rank_node[at] : nodes++;
    }
    return nodes;
}

/* It calls for its ranks within groups, which are NCCL's, while other processes may not. */
static bool several_in_a_process(const struct r2_agree_member *members, int nranks)
{
    for (int r = 0; r < nranks; r++)
        for (int q = 0; q < r; q++)
            if (members[q].process == members[r].process && members[q].node == members[r].node)
                return true;
    return false;
}

/* Whether its ranks may have plans; else it was said why not. */
static bool plans_for(struct r2_follow *f, const struct r2_agree_member *members,
                      const int *rank_node, int nodes)
{
    const char *never = r2_plan_never(nodes);

    if (!r2_leader_plans())
        return false;
    if ((!never || f->vote) && several_in_a_process(members, f->nranks)) {
        never = "a process has several ranks";
        if (f->vote)
            r2_vote_off(f->vote, never);
        else
            r2_leader_none(f->comm, never);
        return false;
    }
    if (f->vote ? !r2_vote_ready(f->vote, rank_node, nodes) : never != NULL) {
        if (!f->vote)
            r2_leader_none(f->comm, never);
        return false;
    }
    return !f->leader || r2_leader_ready(f->leader, rank_node, nodes);
}

static void on_ready(void *user, const struct r2_agree_member *members, int nranks)
{
    struct r2_follow *f = user;
    int here = 0, nodes, *rank_node;

    if (nranks < 1 || nranks != f->nranks)
        return;
    for (int r = 0; r < nranks; r++)
        here += members[r].node == f->node;
    rank_node = calloc((size_t)nranks, sizeof(*rank_node));
    nodes = rank_node ? number_nodes(members, nranks, rank_node) : 0;
    r2_comm_row_nodes(f->comm, nodes, here);
    if (rank_node && plans_for(f, members, rank_node, nodes))
        atomic_store(&f->ready, true);
    free(rank_node);
    r2_watch_wake();
}

static void on_off(void *user, const char *why)
{
    struct r2_follow *f = user;

    r2_follow_lacks(f->comm, why);
    if (f->vote && r2_leader_always())
        r2_vote_off(f->vote, why);
}

static void on_reported(void *user, int rank, const struct r2_agree_report *report)
{
    struct r2_follow *f = user;

    if (f->leader)
        r2_leader_reported(f->leader, rank, report);
}

static void on_decided(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why)
{
    struct r2_follow *f = user;
    char line[64];

    snprintf(line, sizeof(line), "plan %llu is agreed, from operation %llu on",
             (unsigned long long)epoch, (unsigned long long)at);
    if (committed)
        r2_watch_journal(line);
    else
        R2_INFO("communicator %016llx: plan %llu from operation %llu was not agreed: %s",
                (unsigned long long)f->comm->id, (unsigned long long)epoch, (unsigned long long)at,
                why);
    if (f->leader)
        r2_leader_decided(f->leader, epoch, committed);
}

static int on_accept(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    struct r2_follow *f = user;

    (void)epoch;
    return f->vote ? r2_vote_accept(f->vote, plan, len, object) : -EOPNOTSUPP;
}

static void on_release(void *user, void *object)
{
    (void)user;
    free(object);
}

static void on_failed(void *user, int rank, uint32_t error)
{
    struct r2_follow *f = user;

    r2_comms_told(f->comm, rank, (int)error);
    if (f->vote)
        r2_vote_failed(f->vote);
}

static void on_exchanged(void *user, uint32_t round, const void *const *offers, const size_t *len)
{
    struct r2_follow *f = user;

    if (f->vote)
        r2_vote_exchanged(f->vote, round, offers, len);
}

static void on_invited(void *user)
{
    struct r2_follow *f = user;

    if (f->vote && atomic_load(&f->ready))
        r2_vote_invited(f->vote);
}

static const struct r2_agree_ops ops = {.ready = on_ready,
                                        .off = on_off,
                                        .reported = on_reported,
                                        .decided = on_decided,
                                        .failed = on_failed,
                                        .exchanged = on_exchanged,
                                        .invited = on_invited,
                                        .accept = on_accept,
                                        .release = on_release};

/* ---- the watching thread */

static void show(struct r2_follow *f)
{
    struct r2_comm_plans plans;
    struct r2_agree_stats agree;

    r2_agree_get_stats(f->agree, &agree);
    plans = (struct r2_comm_plans){.messages = agree.sent,
                                   .wait_ns = agree.wait_max_ns,
                                   .proposals = (uint32_t)agree.proposals,
                                   .agreed = (uint32_t)agree.commits};
    if (f->leader)
        r2_leader_counts(f->leader, &plans.events, &plans.rounds);
    r2_comm_row_plans(f->comm, &plans);
}

#define STANDS_NS (10 * R2_NS_PER_S) /* no AllReduce since then */

/* Whether rank 0 is to hear of it. Lock held. */
static bool stands(struct r2_follow *f, uint64_t now)
{
    uint64_t count = r2_calls_count(&f->calls);

    /* Relaxed: if it is of another call, this is looked at again. */
    if (count == f->stood ||
        now < atomic_load_explicit(&f->called_ns, memory_order_relaxed) + STANDS_NS)
        return false;
    f->stood = count;
    return r2_vote_state(f->vote) == R2_VOTE_YES;
}

static void take_times(struct r2_follow *f)
{
    uint64_t note[R2_TIMING_NOTES], ns;

    while (f->timing && r2_timing_take(f->timing, &ns, note))
        r2_times_add(&f->times, note[R2_TIMING_EPOCH], note[R2_TIMING_PLANNED] != 0,
                     note[R2_TIMING_BYTES], ns);
    /* Relaxed: who sees an older one times an operation too many. */
    atomic_store_explicit(&f->timed, r2_times_done(&f->times), memory_order_relaxed);
}

/* Whether rank 0 knows less than that. Calls alone are no news, nor is an unknown capacity. */
static bool is_news(const struct r2_follow *f, const struct r2_agree_report *report)
{
    const size_t at = offsetof(struct r2_leader_word, medians) / sizeof(report->words[0]);
    const struct r2_agree_report *told = &f->told;
    bool node = !f->told_any || told->capacity != report->capacity ||
                told->share != report->share || told->flags != report->flags;

    return (report->capacity && node) ||
           memcmp(&told->words[at], &report->words[at], sizeof(struct r2_medians)) != 0;
}

/* Tells rank 0 what is new about this node; that one plans. */
static uint64_t look(struct r2_watch_entry *entry, uint64_t capacity, uint32_t share, uint64_t now)
{
    struct r2_follow *f = (struct r2_follow *)((char *)entry - offsetof(struct r2_follow, entry));
    struct r2_agree_report report = {
        .capacity = capacity, .share = share, .flags = r2_watch_stop() ? R2_LEADER_STOP : 0};
    bool ready = atomic_load(&f->ready), tell;
    struct r2_leader_word word;

    take_times(f);
    word = (struct r2_leader_word){.epoch = f->times.epoch, .medians = f->times.known};
    pthread_mutex_lock(&f->lock);
    if (!r2_calls_read(&f->calls, &word.calls))
        word.calls = (struct r2_calls){0};
    memcpy(report.words, &word, sizeof(report.words));
    tell = ready && is_news(f, &report);
    tell = (ready && stands(f, now)) || tell;
    pthread_mutex_unlock(&f->lock);
    if (tell && r2_agree_report(f->agree, &report) == 0) {
        pthread_mutex_lock(&f->lock);
        f->told = report;
        f->told_any = true;
        pthread_mutex_unlock(&f->lock);
    }
    show(f);
    if (f->vote)
        r2_vote_look(f->vote);
    return ready && f->leader ? r2_leader_turn(f->leader, now) : UINT64_MAX;
}

/* ---- life */

static void unmake(struct r2_follow *f)
{
    r2_leader_free(f->leader);
    r2_timing_free(f->timing);
    r2_vote_free(f->vote);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

static bool make_parts(struct r2_follow *f, const struct r2_follow_birth *birth)
{
    if (!r2_leader_plans())
        return true;
    if (r2_leader_carries())
        f->vote =
            r2_vote_new(f->comm, birth->rank, birth->nranks, birth->device, r2_leader_always());
    if (birth->rank == 0)
        f->leader = r2_leader_new(f->comm, f->vote, birth->nranks);
    if (f->vote && r2_leader_wish() == R2_PLAN_BEST)
        f->timing = r2_timing_new(birth->device); /* without, plans are not measured */
    return (f->vote || !r2_leader_carries()) && (f->leader || birth->rank);
}

static struct r2_follow *make(struct r2_comm *comm, const struct r2_follow_birth *birth,
                              const struct r2_follow *parent)
{
    struct r2_follow *f = calloc(1, sizeof(*f));

    if (!f)
        return NULL;
    f->comm = comm;
    f->rank = birth->rank;
    f->nranks = birth->nranks;
    f->family = parent ? parent->family : birth->nranks;
    f->node = node_key();
    f->entry.look = look;
    pthread_mutex_init(&f->lock, NULL);
    if (!make_parts(f, birth)) {
        unmake(f);
        return NULL;
    }
    return f;
}

static struct r2_follow *begin(struct r2_follow *f, int rc)
{
    struct r2_agree_stats stats;
    struct r2_agree_view view;

    if (rc) {
        r2_follow_lacks(f->comm, strerror(-rc));
        unmake(f);
        return NULL;
    }
    if (f->vote)
        r2_vote_bind(f->vote, f->agree);
    if (f->leader)
        r2_leader_bind(f->leader, f->agree);
    r2_agree_get_stats(f->agree, &stats);
    /* From the start, of which `off` says nothing. */
    if (stats.state == R2_AGREE_OFF && stats.why[0] && f->nranks > 1)
        r2_follow_lacks(f->comm, stats.why);
    if (stats.state == R2_AGREE_OFF && f->vote && r2_leader_always())
        r2_vote_off(f->vote, stats.why);
    if (r2_leader_plans())
        r2_watch_add(&f->entry);
    if (f->vote && r2_leader_always())
        r2_agree_lookup(f->agree, true, &view); /* meets: the first AllReduce waits for it */
    return f;
}

static struct r2_agree_config config_of(struct r2_follow *f)
{
    return (struct r2_agree_config){
        .rank = f->rank,
        .nranks = f->nranks,
        .node = f->node,
        .settings = WIRE | (uint64_t)r2_settings_get()->plan << 8 |
                    (uint64_t)r2_settings_get()->allreduce << 12 |
                    (uint64_t)r2_settings_get()->mode << 16,
        .ops = &ops,
        .user = f,
    };
}

struct r2_follow *r2_follow_new(struct r2_comm *comm, const struct r2_nccl_id *id,
                                const struct r2_follow_birth *birth)
{
    struct r2_follow *f = birth->nranks > 1 ? make(comm, birth, NULL) : NULL;
    struct r2_agree_config config;

    if (!f)
        return NULL;
    config = config_of(f);
    config.id = id ? (const uint8_t *)id->bytes : NULL;
    return begin(f, r2_agree_create(&f->agree, &config));
}

struct r2_follow *r2_follow_child(struct r2_comm *comm, struct r2_follow *parent, uint64_t salt,
                                  const struct r2_follow_birth *birth)
{
    struct r2_agree_config config;
    struct r2_follow *f;

    f = make(comm, birth, parent);
    if (!f) {
        r2_agree_derive(NULL, parent->agree, salt, NULL);
        return NULL;
    }
    config = config_of(f);
    return begin(f, r2_agree_derive(&f->agree, parent->agree, salt, &config));
}

void r2_follow_skip(struct r2_follow *parent, uint64_t salt)
{
    r2_agree_derive(NULL, parent->agree, salt, NULL);
}

/* ---- the application's thread */

void r2_follow_after(struct r2_follow *f, uint64_t n)
{
    r2_agree_advance(f->agree, n);
}

/* ---- the end */

void r2_follow_revoked(struct r2_follow *f)
{
    atomic_store_explicit(&f->revoked, true, memory_order_relaxed);
    r2_agree_abort(f->agree);
    if (f->vote)
        r2_vote_abort(f->vote);
}

void r2_follow_abort(struct r2_follow *f)
{
    r2_timing_abort(f->timing);
    r2_agree_abort(f->agree);
    if (f->vote) {
        r2_vote_abort(f->vote);
        r2_vote_abort_node(f->vote);
    }
}

void r2_follow_end(struct r2_follow *f)
{
    if (f->vote)
        r2_vote_finish(f->vote);
}

void r2_follow_free(struct r2_follow *f)
{
    r2_watch_remove(&f->entry); /* not looked at any more */
    if (f->vote)
        r2_vote_close(f->vote);
    r2_agree_destroy(f->agree); /* no callbacks any more */
    unmake(f);
}
