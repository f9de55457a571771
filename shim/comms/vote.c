#define _GNU_SOURCE
#include "comms/vote.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comms/inside.h"
#include "comms/leader.h"
#include "comms/node.h"
#include "comms/watch.h"
#include "device/copies.h"
#include "device/device.h"
#include "direct/direct.h"
#include "direct/gpu.h"
#include "plan/plan.h"
#include "plan/schedule.h"
#include "plan/sizes.h"
#include "real/nest.h"
#include "real/real.h"
#include "reduce/reduce.h"
#include "settings/launch.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

#define WHY 96

enum { FIRST_ROUND = 1, SECOND_ROUND };
/* REFUSED: this rank has said no, so it will be STOCK. */
enum outcome { OPEN, REFUSED, DIRECT, STOCK, ABORTED };

/* What a rank offers; in the first round its card follows. */
struct ballot {
    uint32_t yes, rank;
    char why[WHY];
    uint8_t node_id[R2_AGREE_ID]; /* of the first rank of a node with several */
};

struct r2_vote {
    struct r2_comm *comm; /* outlives it */
    struct r2_agree *agree;
    int rank, nranks, device;
    /* From ready on: nodes, ranks of each, my node, my place in it, and who has this place in each
     * node. */
    int nodes, per_node, node, place, first; /* first: the rank in place 0 of my node */
    int column[R2_DIRECT_RANKS];
    uint8_t node_id[R2_AGREE_ID];
    bool always;       /* from the first operation on: these wait for the outcome */
    uint64_t until_ns; /* ... no longer than this */

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t wake;
    enum outcome outcome;
    bool asked, refuses, closed, connecting, making;
    int awaited;   /* of connections and the node's communicator, until the second round */
    char why[WHY]; /* this rank refuses */
    struct r2_direct *direct;
    struct r2_copies *copies; /* NULL: the buffers are the host's */
    struct r2_node *within;   /* NULL: a node has one rank */

    /* The application's thread, once ranks have met. */
    struct r2_plan plan;  /* in force */
    const char *left_out; /* what was said of operations that stay with NCCL; NULL: nothing */
};

static void on_landed(void *user, uint64_t number)
{
    struct r2_vote *v = user;

    if (v->copies)
        r2_copies_open(v->copies, number);
}

/* ---- the outcome */

/* Lock held. The first one counts. */
static bool decide(struct r2_vote *v, enum outcome outcome)
{
    bool first = v->outcome == OPEN || v->outcome == REFUSED;

    if (first || outcome == ABORTED)
        v->outcome = outcome;
    pthread_cond_broadcast(&v->wake);
    return first;
}

static void say_direct(struct r2_vote *v)
{
    char line[112];

    if (!v->always) { /* a plan takes it, later */
        r2_watch_journal("the ranks of a communicator are connected: plans may begin");
        return;
    }
    snprintf(line, sizeof(line), "communicator %016llx: AllReduce is R2CCL's own (direct)",
             (unsigned long long)r2_comms_id(v->comm));
    R2_INFO("%s", line);
    r2_watch_journal(line);
    r2_comm_row_plan(v->comm, "direct", "R2CCL_ALLREDUCE=direct");
}

static void take_stock(struct r2_vote *v, const char *why)
{
    struct r2_copies *copies;
    struct r2_direct *direct;
    struct r2_node *within;
    bool first;

    pthread_mutex_lock(&v->lock);
    first = decide(v, STOCK);
    direct = v->direct;
    copies = v->copies;
    within = v->within;
    v->direct = NULL;
    v->copies = NULL;
    v->within = NULL;
    v->making = false;
    pthread_mutex_unlock(&v->lock);
    if (first)
        r2_leader_none(v->comm, why);
    r2_direct_free(direct);
    r2_copies_free(copies);
    if (within)
        r2_node_abort(within);
    r2_node_free(within);
}

/* ---- votes; `lock` is held */

static void offer(struct r2_vote *v, uint32_t round, const char *no)
{
    const struct r2_links_card *card =
        round == FIRST_ROUND && !no ? r2_direct_card(v->direct) : NULL;
    size_t bytes = card ? r2_links_card_bytes(card) : 0;
    struct {
        struct ballot ballot;
        struct r2_links_card card;
    } text = {.ballot = {.yes = !no, .rank = (uint32_t)v->rank}};

    snprintf(text.ballot.why, sizeof(text.ballot.why), "%s", no ? no : "");
    memcpy(text.ballot.node_id, v->node_id, sizeof(v->node_id));
    if (card)
        memcpy(&text.card, card, bytes);
    if (!v->closed)
        r2_agree_offer(v->agree, round, &text, offsetof(__typeof__(text), card) + bytes);
    if (no) /* nobody waits for the others' answers, which a dead one never gives */
        decide(v, REFUSED);
}

_Static_assert(sizeof(struct ballot) + sizeof(struct r2_links_card) <= R2_AGREE_OFFER,
               "a vote fits into an exchange");

/* Gates of operations that will not be carried out stay closed, as NCCL's kernels wait, until the
 * application ends the communicator. Lock held. */
static void open_gates(struct r2_vote *v)
{
    if (v->copies)
        r2_copies_open_all(v->copies);
}

/* One of those awaited is there, or never will be. Lock held. */
static void arrived(struct r2_vote *v, const char *no)
{
    if (no && !v->why[0])
        snprintf(v->why, sizeof(v->why), "%s", no);
    if (--v->awaited == 0)
        offer(v, SECOND_ROUND, v->why[0] ? v->why : NULL);
}

void r2_vote_look(struct r2_vote *v)
{
    enum r2_node_state state;

    pthread_mutex_lock(&v->lock);
    state = v->making ? r2_node_state(v->within) : R2_NODE_MAKING;
    if (state != R2_NODE_MAKING) {
        v->making = false;
        arrived(v, state == R2_NODE_MADE ? NULL : "NCCL made no communicator of the node");
    }
    pthread_mutex_unlock(&v->lock);
}

/* The progress thread: all connections are made or never will be; or all is over. */
static void on_changed(void *user)
{
    struct r2_vote *v = user;
    bool broken = false;
    int error = 0;

    pthread_mutex_lock(&v->lock);
    if (!v->connecting && v->direct && r2_direct_state(v->direct, &error) == R2_DIRECT_FAILED) {
        broken = v->copies && v->outcome == DIRECT && error != -ECANCELED;
        if (v->outcome == ABORTED)
            open_gates(v);
        else if (v->copies) /* who queues copies at present would wait for their turn */
            r2_copies_let_all(v->copies);
    }
    if (v->connecting && v->direct) {
        bool ready = r2_direct_state(v->direct, &error) == R2_DIRECT_READY;
        char no[WHY];

        v->connecting = false;
        snprintf(no, sizeof(no), "no connections to all ranks (%s)", strerror(-error));
        arrived(v, ready ? NULL : no);
    }
    pthread_mutex_unlock(&v->lock);
    /* On the host the call itself returns the error. */
    if (broken)
        r2_comms_broken(v->comm, error == -EMSGSIZE ? "ranks gave AllReduces that are not the same"
                                 : error == -ECONNRESET ? "a peer of an AllReduce is gone"
                                                        : "an AllReduce could not go on");
}

/* What a rank needs to take part. */
struct parts {
    struct r2_direct *direct;
    struct r2_copies *copies;
};

static void drop(const struct parts *parts)
{
    r2_direct_free(parts->direct);
    r2_copies_free(parts->copies);
}

/* Ranks of a node use its NICs at the same time: those of this communicator, or each with one of
 * its own. (The control segment has no NICs before the first connection.) */
static uint64_t nic_rate(const struct r2_vote *v)
{
    int here = r2_launch_local_ranks(getenv);
    uint64_t (*speed)(void);

    *(void **)&speed = r2_real_plugin_symbol("r2ccl_local_speed");
    return speed ? speed() / (uint64_t)(here > v->per_node ? here : v->per_node) : 0;
}

static int make(struct r2_vote *v, struct parts *out)
{
    struct r2_direct_config config = {.net = r2_real_plugin_symbol("ncclNetPlugin_v12"),
                                      .id = r2_comms_id(v->comm),
                                      .rank = v->node,
                                      .p = v->nodes,
                                      .per_node = v->per_node,
                                      .nic_rate = nic_rate(v),
                                      .changed = on_changed,
                                      .landed = on_landed,
                                      .caller = v};
    struct r2_sizes_window window = r2_sizes_window(v->nodes, config.nic_rate, v->per_node);
    int rc = config.net ? 0 : -ENOENT;

    *out = (struct parts){0};
    if (rc == 0 && r2_device_cuda())
        rc = r2_copies_new(&out->copies, v->device, r2_sizes_bytes(&window));
    if (out->copies) {
        config.device = &r2_direct_gpu;
        config.user = out->copies;
    }
    if (rc == 0 && v->per_node > 1 && v->place == 0 &&
        !r2_node_id(r2_comms_real(v->comm), v->node_id))
        rc = -ENOSYS;
    return rc ? rc : r2_direct_new(&out->direct, &config);
}

static const char *reason(int rc)
{
    switch (rc) {
    case -ENOENT:
        return "the R2CCL plugin is not in use";
    case -ENOTSUP:
        return "CUDA's driver has no stream waits";
    case -ENODEV:
        return "no NICs";
    case -ENOMEM:
        return "no memory for the window (64 MiB at most, with a GPU pinned)";
    case -ENOSYS:
        return "NCCL gives no id for the node's ranks";
    default:
        return strerror(-rc);
    }
}

/* Who is where. Why not, or NULL: the same on all ranks. */
static const char *place(struct r2_vote *v, const int *rank_node, int nodes)
{
    int here = 0, *places = calloc((size_t)nodes, sizeof(*places));

    if (!places)
        return "no memory";
    v->nodes = nodes;
    v->node = rank_node[v->rank];
    v->per_node = v->nranks / nodes;
    for (int r = v->nranks; r-- > 0;)
        if (rank_node[r] == v->node)
            v->first = r;
    for (int r = 0; r < v->rank; r++)
        here += rank_node[r] == v->node;
    v->place = here;
    for (int r = 0; r < v->nranks; r++)
        if (places[rank_node[r]]++ == here)
            v->column[rank_node[r]] = r;
    for (int n = 0; n < nodes && here >= 0; n++)
        here = places[n] == v->per_node ? here : -1;
    free(places);
    return here < 0 ? "nodes have unequal numbers of ranks" : NULL;
}

/* Once; the service thread. Meanwhile the application may end it. */
static void begin(struct r2_vote *v)
{
    struct parts parts = {0};
    bool refuses, again, over;
    int rc;

    pthread_mutex_lock(&v->lock);
    refuses = v->refuses;
    again = v->asked || v->closed || (v->outcome != OPEN && !refuses);
    v->asked = true;
    pthread_mutex_unlock(&v->lock);
    if (again)
        return;
    rc = refuses ? 0 : make(v, &parts);
    pthread_mutex_lock(&v->lock);
    over = v->closed || (v->outcome != OPEN && !refuses);
    if (!over) {
        v->direct = parts.direct;
        v->copies = parts.copies;
        offer(v, FIRST_ROUND, refuses ? v->why : rc ? reason(rc) : NULL);
    }
    pthread_mutex_unlock(&v->lock);
    if (over)
        drop(&parts);
}

/* Where there is nothing to vote about. */
static const char *never(struct r2_vote *v, const int *rank_node, int nodes)
{
    const char *why = r2_plan_never(nodes);

    if (v->always && nodes == 2)
        why = NULL; /* slower than the ring, but asked for */
    return why ? why : place(v, rank_node, nodes);
}

void r2_vote_invited(struct r2_vote *v)
{
    begin(v);
}

bool r2_vote_ready(struct r2_vote *v, const int *rank_node, int nodes)
{
    const char *why = never(v, rank_node, nodes);
    struct r2_plan equal;

    if (why) {
        take_stock(v, why);
        return false;
    }
    r2_plan_equal(&equal, nodes);
    v->plan.p = equal.p;
    memcpy(v->plan.weights, equal.weights, sizeof(equal.weights));
    if (v->always)
        begin(v);
    return true;
}

void r2_vote_off(struct r2_vote *v, const char *why)
{
    pthread_mutex_lock(&v->lock);
    v->refuses = true; /* if they meet after all */
    snprintf(v->why, sizeof(v->why), "%s", why);
    pthread_mutex_unlock(&v->lock);
    take_stock(v, why);
}

/* ---- what all have said */

/* Whether all said yes; else who did not, and why. */
static bool unanimous(const struct r2_vote *v, const void *const *offers, const size_t *len,
                      char why[2 * WHY])
{
    for (int r = 0; r < v->nranks; r++) {
        struct ballot b;

        if (len[r] < sizeof(b)) {
            snprintf(why, 2 * WHY, "rank %d has another version of R2CCL", r);
            return false;
        }
        memcpy(&b, offers[r], sizeof(b));
        b.why[WHY - 1] = '\0';
        for (char *c = b.why; *c; c++)
            *c = *c < ' ' || *c > '~' ? '?' : *c; /* it goes into logs */
        if (!b.yes) {
            snprintf(why, 2 * WHY, "rank %d: %s", r, b.why);
            return false;
        }
    }
    return true;
}

static int meet_all(struct r2_vote *v, const void *const *offers, const size_t *len)
{
    int rc = v->direct ? 0 : -ECANCELED;

    for (int n = 0; n < v->nodes && rc == 0; n++) {
        int r = v->column[n];

        rc = r2_direct_meet(v->direct, n, (const char *)offers[r] + sizeof(struct ballot),
                            len[r] - sizeof(struct ballot));
    }
    return rc;
}

static int make_within(struct r2_vote *v, const void *const *offers)
{
    struct r2_node_config config = {.real = r2_comms_real(v->comm),
                                    .device = v->device,
                                    .rank = v->place,
                                    .nranks = v->per_node,
                                    .changed = r2_watch_wake};
    int rc;

    if (v->per_node == 1)
        return 0;
    memcpy(config.id, (const char *)offers[v->first] + offsetof(struct ballot, node_id),
           sizeof(config.id));
    v->awaited++;
    rc = r2_node_new(&v->within, &config);
    v->making = rc == 0;
    return rc;
}

static void connect_all(struct r2_vote *v, const void *const *offers, const size_t *len)
{
    int rc = meet_all(v, offers, len);

    v->connecting = rc == 0;
    v->awaited = 1;
    if (rc == 0 && make_within(v, offers))
        arrived(v, "no thread for the communicator of the node");
    if (rc)
        offer(v, SECOND_ROUND, "a rank's handles are damaged");
    else
        r2_direct_connect(v->direct);
}

void r2_vote_exchanged(struct r2_vote *v, uint32_t round, const void *const *offers,
                       const size_t *len)
{
    char why[2 * WHY];
    bool taken = false;

    if (!unanimous(v, offers, len, why)) {
        take_stock(v, why);
        return;
    }
    pthread_mutex_lock(&v->lock);
    if (round == FIRST_ROUND)
        connect_all(v, offers, len);
    else
        taken = decide(v, DIRECT);
    pthread_mutex_unlock(&v->lock);
    if (taken) {
        say_direct(v);
        r2_watch_wake();
    }
}

/* Lock held. */
static bool runs(const struct r2_vote *v)
{
    return v->outcome == DIRECT && v->direct && r2_direct_state(v->direct, NULL) == R2_DIRECT_READY;
}

enum r2_vote_state r2_vote_state(struct r2_vote *v)
{
    enum r2_vote_state is;

    pthread_mutex_lock(&v->lock);
    is = v->outcome == OPEN ? R2_VOTE_OPEN : runs(v) ? R2_VOTE_YES : R2_VOTE_NO;
    pthread_mutex_unlock(&v->lock);
    return is;
}

/* ---- plans */

static bool able(struct r2_vote *v)
{
    bool is;

    pthread_mutex_lock(&v->lock);
    is = runs(v);
    pthread_mutex_unlock(&v->lock);
    return is;
}

int r2_vote_accept(struct r2_vote *v, const void *data, size_t len, void **object)
{
    struct r2_plan *plan = malloc(sizeof(*plan));
    int rc = plan ? r2_plan_read(plan, data, len, v->nodes) : -ENOMEM;

    if (rc == 0 && plan->schedule != R2_PLAN_STOCK && !able(v))
        rc = -EAGAIN;
    if (rc)
        free(plan);
    else
        *object = plan;
    return rc;
}

static void describe(const struct r2_vote *v, char *name, size_t room)
{
    const struct r2_plan *plan = &v->plan;
    struct r2_plan equal;

    r2_plan_equal(&equal, v->nodes);
    equal.from_bytes = plan->from_bytes;
    snprintf(name, room, "%s%s",
             plan->schedule == R2_PLAN_STOCK ? "" : r2_plan_name(plan->schedule),
             plan->schedule == R2_PLAN_DIRECT && !r2_plan_same(plan, &equal) ? ", weighted" : "");
}

void r2_vote_follow(struct r2_vote *v, const void *object, uint64_t epoch, uint64_t at)
{
    enum r2_plan_schedule before = v->plan.schedule;
    char name[40], line[112];

    v->plan = *(const struct r2_plan *)object;
    describe(v, name, sizeof(name));
    if (v->plan.schedule == R2_PLAN_STOCK && before == R2_PLAN_STOCK)
        return;
    if (v->plan.schedule == R2_PLAN_DIRECT)
        snprintf(line, sizeof(line), "plan %llu from operation %llu on: %s; this node owns %.1f %%",
                 (unsigned long long)epoch, (unsigned long long)at, name,
                 v->plan.weights[v->node] * 100.0 / R2_SCHEDULE_UNIT);
    else
        snprintf(line, sizeof(line), "plan %llu from operation %llu on: %s",
                 (unsigned long long)epoch, (unsigned long long)at,
                 *name ? name : "NCCL's own choice");
    r2_watch_journal(line);
    r2_comm_row_plan(v->comm, name, v->rank ? line : NULL); /* rank 0 says why */
}

/* ---- the application's thread */

static enum outcome outcome(struct r2_vote *v)
{
    struct timespec until = {.tv_sec = (time_t)(v->until_ns / R2_NS_PER_S),
                             .tv_nsec = (long)(v->until_ns % R2_NS_PER_S)};
    enum outcome is;
    int rc = 0;

    pthread_mutex_lock(&v->lock);
    while (v->outcome == OPEN && rc == 0)
        rc = pthread_cond_timedwait(&v->wake, &v->lock, &until);
    is = v->outcome;
    pthread_mutex_unlock(&v->lock);
    return is;
}

static bool is_stock(enum outcome outcome)
{
    return outcome == STOCK || outcome == REFUSED;
}

/* Hands it over: with CUDA it goes on by itself. */
static int give(struct r2_vote *v, const struct r2_direct_call *call)
{
    uint64_t number;
    int rc = r2_direct_allreduce(v->direct, call, &number);

    return rc || v->copies ? rc : r2_direct_wait(v->direct, number);
}

static int as_result(struct r2_vote *v, int rc)
{
    if (rc == 0)
        return R2_NCCL_OK;
    if (atomic_load(&v->comm->state) == R2_SEG_COMM_REVOKED || rc == -EMSGSIZE)
        return R2_NCCL_USAGE; /* as NCCL says */
    if (r2_comms_elsewhere(v->comm) || rc == -ECONNRESET)
        return R2_NCCL_REMOTE;
    return rc == -ECANCELED ? R2_NCCL_INTERNAL : R2_NCCL_SYSTEM;
}

static int between(struct r2_vote *v, const uint64_t *word, const void *in, void *out,
                   uint64_t count)
{
    const struct r2_plan *plan = &v->plan;
    struct r2_direct_call call = {
        .in = in,
        .out = out,
        .count = count,
        .whole = word[R2_WORD_COUNT],
        .type = (int)word[R2_WORD_TYPE],
        .op = (int)word[R2_WORD_OP],
        .schedule = plan->schedule == R2_PLAN_R2CCL ? R2_SCHEDULE_R2CCL : R2_SCHEDULE_DIRECT,
        .weights = plan->schedule == R2_PLAN_DIRECT ? plan->weights : NULL,
        .slow = (int)plan->slow,
        .tail = plan->tail,
        .chunks = R2_PLAN_CHUNKS,
        .stream = (void *)word[R2_WORD_STREAM],
    };

    return as_result(v, give(v, &call));
}

/* What does not divide by the node's ranks: NCCL's, on the communicator itself. */
static int rest(struct r2_vote *v, const uint64_t *w, uint64_t from, size_t bytes)
{
    int (*fn)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) =
        r2_comms_real(v->comm)->fn[R2_API_ncclAllReduce];
    int result;

    if (from == w[R2_WORD_COUNT])
        return R2_NCCL_OK;
    r2_call_nest();
    result =
        fn(w[R2_WORD_SEND] + from * bytes, w[R2_WORD_RECV] + from * bytes, w[R2_WORD_COUNT] - from,
           w[R2_WORD_TYPE], w[R2_WORD_OP], w[R2_WORD_COMM], w[R2_WORD_STREAM]);
    r2_call_unnest();
    return result;
}

/* Each rank of a node has a slice of the node's sum, and takes it to those of other nodes. */
static int run_sliced(struct r2_vote *v, const uint64_t *word)
{
    size_t bytes = r2_nccl_type_size((int)word[R2_WORD_TYPE]);
    uint64_t slice = word[R2_WORD_COUNT] / (uint64_t)v->per_node;
    char *out = (char *)word[R2_WORD_RECV], *mine = out + (uint64_t)v->place * slice * bytes;
    void *stream = (void *)word[R2_WORD_STREAM];
    int type = (int)word[R2_WORD_TYPE];
    int result = r2_node_reduce_scatter(v->within, (const void *)word[R2_WORD_SEND], mine, slice,
                                        type, (int)word[R2_WORD_OP], stream);

    if (result == R2_NCCL_OK)
        result = between(v, word, mine, mine, slice);
    if (result == R2_NCCL_OK)
        result = r2_node_all_gather(v->within, mine, out, slice, type, stream);
    return result == R2_NCCL_OK ? rest(v, word, slice * (uint64_t)v->per_node, bytes) : result;
}

static int run(struct r2_vote *v, const uint64_t *word)
{
    int result = v->within ? run_sliced(v, word)
                           : between(v, word, (const void *)word[R2_WORD_SEND],
                                     (void *)word[R2_WORD_RECV], word[R2_WORD_COUNT]);

    if (result == R2_NCCL_OK)
        __atomic_fetch_add(&r2_comm_row(v->comm)->planned, 1, __ATOMIC_RELAXED);
    return result;
}

/* Means of means of whole numbers are not their mean. */
static bool divides(const struct r2_vote *v, int type, int reduction)
{
    return reduction != R2_NCCL_AVG || v->per_node == 1 || type >= R2_NCCL_FLOAT16;
}

bool r2_vote_refused(struct r2_vote *v)
{
    int state = atomic_load(&v->comm->state);

    return state == R2_SEG_COMM_SUSPENDED || state == R2_SEG_COMM_REVOKED;
}

static bool in_plan(const struct r2_vote *v, uint64_t bytes)
{
    return v->plan.schedule != R2_PLAN_STOCK && bytes >= v->plan.from_bytes;
}

/* Why NCCL has a call that is large enough; NULL: it has not. */
static const char *uncovered(const struct r2_vote *v, const uint64_t *word, enum r2_vote_call how)
{
    int type = (int)word[R2_WORD_TYPE], reduction = (int)word[R2_WORD_OP];

    if (how == R2_VOTE_GROUPED)
        return "calls within ncclGroupStart and ncclGroupEnd";
    if (how == R2_VOTE_CONFIGURED)
        return "calls of ncclAllReduceConfig";
    if (reduction > R2_NCCL_AVG)
        return "reductions that the application made (PreMulSum)";
    if (!r2_reduce_covers(type, reduction))
        return "an element type that R2CCL does not know";
    if (!divides(v, type, reduction))
        return "means of whole numbers on nodes with several ranks";
    return r2_device_capturing((void *)word[R2_WORD_STREAM]) ? "calls captured into a CUDA graph"
                                                             : NULL;
}

/* Once for a communicator. */
static void say_left_out(struct r2_vote *v, const char *what)
{
    char line[160];

    if (v->left_out || r2_vote_state(v) == R2_VOTE_NO)
        return;
    v->left_out = what;
    snprintf(line, sizeof(line), "communicator %016llx: NCCL keeps what plans do not cover: %s",
             (unsigned long long)r2_comms_id(v->comm), what);
    r2_watch_journal(line);
    if (v->always)
        R2_WARN("%s", line);
    else
        R2_INFO("%s", line);
}

uint64_t r2_vote_bytes(const uint64_t *word)
{
    size_t size = r2_nccl_type_size((int)word[R2_WORD_TYPE]);

    return word[R2_WORD_COUNT] * (size ? size : 1);
}

bool r2_vote_takes(struct r2_vote *v, const uint64_t *word, enum r2_vote_call how)
{
    const char *why;

    if (!in_plan(v, r2_vote_bytes(word)) || r2_vote_refused(v))
        return false;
    why = uncovered(v, word, how);
    if (why)
        say_left_out(v, why);
    return !why && (!v->always || !is_stock(outcome(v)));
}

int r2_vote_run(struct r2_vote *v, const uint64_t *word)
{
    switch (outcome(v)) {
    case DIRECT:
        return run(v, word);
    case OPEN:
        r2_comms_broken(v->comm, "no answer whether AllReduce is direct");
        return R2_NCCL_REMOTE;
    default: /* aborted; without a plan nobody comes here */
        return r2_comms_elsewhere(v->comm) ? R2_NCCL_REMOTE : R2_NCCL_INTERNAL;
    }
}

/* ---- life */

struct r2_vote *r2_vote_new(struct r2_comm *comm, int rank, int nranks, int device, bool always)
{
    struct r2_vote *v = calloc(1, sizeof(*v));

    if (!v)
        return NULL;
    v->comm = comm;
    v->rank = rank;
    v->nranks = nranks;
    v->device = device;
    v->always = always;
    r2_plan_stock(&v->plan, 0);
    if (always) {
        v->plan.schedule = R2_PLAN_DIRECT;
        v->plan.from_bytes = R2_VOTE_FROM;
    }
    /* A rank that is missing is said to be after one of these, by a silent root after two. */
    v->until_ns = r2_now_ns() + 3 * r2_settings_get()->agree_timeout_ns;
    r2_lock_init(&v->lock);
    r2_cond_init(&v->wake);
    return v;
}

void r2_vote_bind(struct r2_vote *v, struct r2_agree *agree)
{
    v->agree = agree;
}

void r2_vote_abort(struct r2_vote *v)
{
    pthread_mutex_lock(&v->lock);
    if (v->outcome != STOCK)
        decide(v, ABORTED);
    if (v->direct)
        r2_direct_abort(v->direct);
    /* What runs opens its gate when it has ended. */
    if (v->direct && r2_direct_state(v->direct, NULL) == R2_DIRECT_FAILED)
        open_gates(v);
    pthread_mutex_unlock(&v->lock);
}

void r2_vote_failed(struct r2_vote *v)
{
    pthread_mutex_lock(&v->lock);
    if (v->outcome == OPEN)
        decide(v, ABORTED);
    if (v->direct)
        r2_direct_abort(v->direct);
    pthread_mutex_unlock(&v->lock);
}

void r2_vote_abort_node(struct r2_vote *v)
{
    struct r2_node *within;

    pthread_mutex_lock(&v->lock);
    within = v->within;
    if (within)
        r2_node_hold(within);
    pthread_mutex_unlock(&v->lock);
    if (!within)
        return;
    r2_node_abort(within);
    r2_node_drop(within);
}

void r2_vote_finish(struct r2_vote *v)
{
    bool direct;

    pthread_mutex_lock(&v->lock);
    direct = v->outcome == DIRECT;
    pthread_mutex_unlock(&v->lock);
    if (direct)
        r2_direct_finish(v->direct);
}

void r2_vote_close(struct r2_vote *v)
{
    struct r2_direct *direct;
    struct r2_copies *copies;
    struct r2_node *within;

    pthread_mutex_lock(&v->lock);
    v->closed = true;
    direct = v->direct;
    within = v->within;
    v->direct = NULL;
    v->within = NULL;
    v->making = false;
    pthread_mutex_unlock(&v->lock);
    r2_direct_free(direct);
    pthread_mutex_lock(
        &v->lock); /* take_stock may be at them; r2_direct_free was their last user */
    copies = v->copies;
    v->copies = NULL;
    pthread_mutex_unlock(&v->lock);
    if (copies)
        r2_copies_open_all(copies);
    r2_copies_free(copies);
    r2_node_free(within);
}

void r2_vote_free(struct r2_vote *v)
{
    if (!v)
        return;
    pthread_mutex_destroy(&v->lock);
    pthread_cond_destroy(&v->wake);
    free(v);
}
