/* One communicator: its ranks meet, hear of each other and report to the leader. */
#define _GNU_SOURCE
#include "comms/follow.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comms/follow_inside.h"
#include "real/conf.h"
#include "schedules/force.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/log.h"

#define WIRE 4 /* of what must be equal on all ranks, with the settings below */

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

static bool planning(void)
{
    return r2_settings_get()->plan != R2_PLAN_SETTING_OFF;
}

static bool direct(void)
{
    return r2_settings_get()->allreduce == R2_ALLREDUCE_DIRECT;
}

bool r2_follow_wanted(void)
{
    return planning() || direct() || r2_settings_get()->tell_errors > 0;
}

bool r2_follow_weighs(const struct r2_follow *f)
{
    return f->vote && !planning();
}

static bool on(void)
{
    return r2_settings_get()->plan == R2_PLAN_SETTING_ON;
}

void r2_follow_lacks(const char *why)
{
    if (!r2_follow_wanted())
        return;
    if (planning())
        R2_WARN_ONCE(
            "a communicator has no plans, and its ranks are not told of each other's errors: "
            "%s",
            why);
    else
        R2_INFO("the ranks of a communicator are not told of each other's errors: %s", why);
}

void r2_follow_sign(struct r2_nccl_id *id, int version)
{
    char why[R2_AGREE_WHY] = "";
    struct r2_conf_value value;

    /* Then each rank may make the id by itself, and all are the same but for what is put there. */
    if (r2_conf_get(&value, "NCCL_COMM_ID", version))
        r2_follow_lacks("NCCL_COMM_ID is set, so ranks may make their ids themselves");
    else if (r2_agree_id_sign((uint8_t *)id->bytes, why))
        r2_follow_lacks(why);
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

static void on_ready(void *user, const struct r2_agree_member *members, int nranks)
{
    struct r2_follow *f = user;
    int here = 0;

    if (nranks < 1 || nranks != f->nranks)
        return;
    for (int r = 0; r < nranks; r++)
        here += members[r].node == f->node;
    pthread_mutex_lock(&f->lock);
    f->rank_node = calloc((size_t)nranks, sizeof(*f->rank_node));
    f->nnodes = f->rank_node ? number_nodes(members, nranks, f->rank_node) : 0;
    f->nodes = calloc((size_t)f->nnodes + 1, sizeof(*f->nodes));
    for (int n = 0; f->nodes && n < f->nnodes; n++)
        f->nodes[n].share = 1;
    f->ready = f->nodes != NULL;
    pthread_mutex_unlock(&f->lock);
    r2_comm_row_nodes(f->comm, f->nnodes, here);
    if (f->vote)
        r2_vote_ready(f->vote, f->rank_node, f->nnodes);
    r2_watch_wake();
}

static void on_off(void *user, const char *why)
{
    struct r2_follow *f = user;

    r2_follow_lacks(why);
    if (planning())
        r2_comm_row_plan(f->comm, NULL, why);
    if (f->vote)
        r2_vote_off(f->vote, why);
    r2_trace_off(f);
}

static void on_reported(void *user, int rank, const struct r2_agree_report *report)
{
    struct r2_follow *f = user;

    if (r2_follow_weighs(f)) {
        r2_vote_reported(f->vote, rank, report);
        r2_watch_wake();
        return;
    }
    pthread_mutex_lock(&f->lock);
    if (f->ready && rank >= 0 && rank < f->nranks && r2_trace_replays(&f->trace)) {
        f->words[rank] = report->flags;
        r2_trace_reported(f, rank, report->flags);
    } else if (f->ready && rank >= 0 && rank < f->nranks) {
        r2_leader_reported(f, rank, report);
    }
    pthread_mutex_unlock(&f->lock);
    r2_watch_wake();
}

static void on_decided(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why)
{
    struct r2_follow *f = user;

    if (!committed)
        R2_INFO("communicator %016llx: plan %llu from operation %llu was not agreed: %s",
                (unsigned long long)f->comm->id, (unsigned long long)epoch, (unsigned long long)at,
                why);
    if (r2_follow_weighs(f)) {
        r2_vote_decided(f->vote, committed);
        return;
    }
    pthread_mutex_lock(&f->lock);
    if (r2_trace_replays(&f->trace))
        r2_trace_decided(f, epoch, committed, why);
    else
        r2_leader_decided(f, epoch, committed);
    pthread_mutex_unlock(&f->lock);
    r2_watch_wake();
}

/* May this rank promise it? What it is to run on must be made here; what is only to be made is
 * begun when its index is reached. */
static int on_accept(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    struct r2_follow *f = user;
    struct r2_plan_table *table;
    int rc;

    (void)epoch;
    if (r2_follow_weighs(f))
        return r2_vote_accept(f->vote, plan, len, object);
    if (!f->seconds)
        return -EOPNOTSUPP;
    rc = r2_plan_table_decode(&table, plan, len, f->nranks);
    if (rc)
        return rc;
    if (!r2_trace_accept(f, table) || !r2_seconds_ready(f->seconds, table)) {
        r2_plan_table_free(table);
        return -EAGAIN;
    }
    *object = table;
    return 0;
}

static void on_release(void *user, void *object)
{
    if (r2_follow_weighs(user))
        free(object);
    else
        r2_plan_table_free(object);
}

static void on_failed(void *user, int rank, uint32_t error)
{
    struct r2_follow *f = user;

    r2_comms_told(f->comm, rank, (int)error);
    if (f->vote)
        r2_vote_abort(f->vote);
}

static void on_exchanged(void *user, uint32_t round, const void *const *offers, const size_t *len)
{
    struct r2_follow *f = user;

    if (f->vote)
        r2_vote_exchanged(f->vote, round, offers, len);
}

static const struct r2_agree_ops ops = {.ready = on_ready,
                                        .off = on_off,
                                        .reported = on_reported,
                                        .decided = on_decided,
                                        .failed = on_failed,
                                        .exchanged = on_exchanged,
                                        .accept = on_accept,
                                        .release = on_release};

/* ---- the watching thread */

static uint32_t words_of(struct r2_follow *f, bool stop)
{
    bool failed = false;
    uint64_t made = f->seconds ? r2_seconds_made(f->seconds, &failed) : 0;
    uint32_t words = (uint32_t)made & R2_FOLLOW_EPOCH;

    if (!made) /* as it was */
        words = f->told.flags & (R2_FOLLOW_EPOCH | R2_FOLLOW_FAILED);
    return words | (made && failed ? R2_FOLLOW_FAILED : 0) | (stop ? R2_FOLLOW_STOP : 0) |
           (f->unable ? R2_FOLLOW_UNABLE : 0) | r2_trace_words(f);
}

static void show(struct r2_follow *f)
{
    struct r2_seconds_stats seconds;
    struct r2_comm_plans plans;
    struct r2_agree_stats agree;

    r2_agree_get_stats(f->agree, &agree);
    plans = (struct r2_comm_plans){.messages = agree.sent,
                                   .proposals = (uint32_t)agree.proposals,
                                   .agreed = (uint32_t)agree.commits};
    pthread_mutex_lock(&f->lock);
    plans.events = f->events;
    plans.rounds = f->rounds;
    pthread_mutex_unlock(&f->lock);
    r2_comm_row_plans(f->comm, &plans);
    if (!f->seconds)
        return;
    r2_seconds_stats(f->seconds, &seconds);
    r2_comm_row_seconds(f->comm, &(struct r2_comm_seconds){.made = seconds.made,
                                                           .making = seconds.making,
                                                           .bytes = seconds.bytes,
                                                           .make_ns = seconds.make_ns,
                                                           .wait_ns = agree.wait_max_ns});
}

/* Tells the leader what is new about this node and rank; the leader plans. */
static void look(struct r2_watch_entry *entry, uint64_t capacity, uint32_t share, uint64_t now)
{
    struct r2_follow *f = (struct r2_follow *)((char *)entry - offsetof(struct r2_follow, entry));
    struct r2_agree_report report = {.capacity = capacity, .share = share};
    bool tell;

    pthread_mutex_lock(&f->lock);
    report.flags = words_of(f, r2_watch_stop());
    tell = f->ready && (capacity || r2_trace_replays(&f->trace)) &&
           (!f->told_any || f->told.share != share || f->told.flags != report.flags);
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
    pthread_mutex_lock(&f->lock);
    if (f->ready && f->rank == 0 && !r2_follow_weighs(f))
        (r2_trace_replays(&f->trace) ? r2_trace_turn : r2_leader_turn)(f, now);
    pthread_mutex_unlock(&f->lock);
    if (f->rank == 0 && r2_follow_weighs(f))
        r2_vote_lead(f->vote);
}

/* ---- life */

static void unmake(struct r2_follow *f)
{
    r2_leader_free(f);
    r2_trace_end(f);
    r2_seconds_free(f->seconds);
    r2_vote_free(f->vote);
    pthread_mutex_destroy(&f->lock);
    free(f->rank_node);
    free(f->nodes);
    free(f);
}

static void make_seconds(struct r2_follow *f, const struct r2_follow_birth *birth)
{
    struct r2_seconds_config config = {.real = f->comm->real,
                                       .rank = birth->rank,
                                       .nranks = birth->nranks,
                                       .device = birth->device,
                                       .has_config = birth->has_config,
                                       .config = birth->config,
                                       .net_name = birth->net_name,
                                       .changed = r2_watch_wake};

    if (!on())
        return;
    if (r2_force_available(config.real))
        f->seconds = r2_seconds_new(&config);
    f->unable = !f->seconds;
}

static struct r2_follow *make(struct r2_comm *comm, const struct r2_follow_birth *birth,
                              struct r2_follow *parent, uint64_t salt)
{
    struct r2_follow *f = calloc(1, sizeof(*f));
    struct r2_policy_config config = R2_POLICY_DEFAULT;

    if (!f)
        return NULL;
    config.hold_ns = r2_settings_get()->plan_hold_ns;
    f->comm = comm;
    f->rank = birth->rank;
    f->nranks = birth->nranks;
    f->family = parent ? parent->family : birth->nranks;
    f->device = birth->device;
    f->node = node_key();
    f->entry.look = look;
    pthread_mutex_init(&f->lock, NULL);
    r2_policy_init(&f->policy, &config);
    make_seconds(f, birth);
    if (direct())
        f->vote = r2_vote_new(comm, birth->rank, birth->nranks, birth->device);
    if ((birth->rank == 0 && r2_leader_init(f)) || r2_trace_begin(f, parent, salt)) {
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
        r2_follow_lacks(strerror(-rc));
        unmake(f);
        return NULL;
    }
    if (f->vote)
        r2_vote_bind(f->vote, f->agree);
    r2_agree_get_stats(f->agree, &stats);
    /* From the start, of which `off` says nothing. */
    if (stats.state == R2_AGREE_OFF && stats.why[0] && f->nranks > 1)
        r2_follow_lacks(stats.why);
    if (stats.state == R2_AGREE_OFF && f->vote)
        r2_vote_off(f->vote, stats.why);
    if (planning() || f->vote)
        r2_watch_add(&f->entry);
    if (r2_trace_replays(&f->trace) || f->vote)
        r2_agree_lookup(f->agree, true, &view); /* meets: the first plan, or AllReduce, is near */
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
                    (uint64_t)r2_settings_get()->capture_plan << 16 | r2_trace_mark(f) << 24,
        .ops = &ops,
        .user = f,
    };
}

struct r2_follow *r2_follow_new(struct r2_comm *comm, const struct r2_nccl_id *id,
                                const struct r2_follow_birth *birth)
{
    struct r2_follow *f = birth->nranks > 1 ? make(comm, birth, NULL, 0) : NULL;
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

    atomic_fetch_add(&parent->trace.children, 1);
    f = make(comm, birth, parent, salt);
    if (!f) {
        r2_agree_derive(NULL, parent->agree, salt, NULL);
        return NULL;
    }
    config = config_of(f);
    return begin(f, r2_agree_derive(&f->agree, parent->agree, salt, &config));
}

void r2_follow_skip(struct r2_follow *parent, uint64_t salt)
{
    atomic_fetch_add(&parent->trace.children, 1);
    r2_agree_derive(NULL, parent->agree, salt, NULL);
}

/* ---- the application's thread */

bool r2_follow_tells(const struct r2_follow *f)
{
    return f->family <= r2_settings_get()->tell_errors;
}

void r2_follow_tell(struct r2_follow *f, int error)
{
    if (r2_follow_tells(f))
        r2_agree_tell(f->agree, (uint32_t)error);
}

void r2_follow_after(struct r2_follow *f, uint64_t n)
{
    r2_agree_advance(f->agree, n);
}

const struct r2_plan_table *r2_follow_table(const struct r2_follow *f)
{
    return f->table;
}

struct r2_vote *r2_follow_vote(const struct r2_follow *f)
{
    return f->vote;
}

struct r2_seconds *r2_follow_seconds(const struct r2_follow *f)
{
    return f->seconds;
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
    if (f->seconds)
        r2_seconds_end(f->seconds, true);
}

void r2_follow_end(struct r2_follow *f)
{
    if (f->vote)
        r2_vote_finish(f->vote);
    if (f->seconds)
        r2_seconds_end(f->seconds, false);
}

void r2_follow_free(struct r2_follow *f)
{
    r2_watch_remove(&f->entry); /* not looked at any more */
    if (f->vote)
        r2_vote_close(f->vote);
    r2_agree_destroy(f->agree); /* no callbacks any more */
    if (f->seconds)
        r2_seconds_end(f->seconds, true);
    unmake(f);
}
