/* The vote of one rank, without the others: what it offers, and what becomes of what it has made
 * when its communicator ends meanwhile. What it uses is made up. Rung 1. */
#define r2_agree_offer fake_offer
#define r2_direct_new fake_new
#define r2_direct_free fake_free
#define r2_direct_card fake_card
#define r2_direct_finish fake_finish
#define r2_direct_abort fake_abort
#define r2_direct_state fake_state
#define r2_real_plugin_symbol fake_symbol
#define r2_device_cuda fake_cuda
#define r2_comms_id fake_id
#define r2_comm_row_plan fake_row_plan
#define r2_leader_none fake_none
#define r2_direct_meet fake_meet
#define r2_direct_connect fake_connect
#define r2_watch_journal fake_journal
#define r2_watch_wake fake_wake
#define r2_launch_local_ranks fake_local_ranks
#define r2_copies_new fake_copies_new
#define r2_copies_free fake_copies_free
#define r2_copies_open_all fake_open_all
#define r2_copies_let_all fake_let_all
#include "../../shim/comms/vote.c"

#include "check.h"

#define NODES 3
#define HERE 8                     /* ranks of the node, each with a communicator of its own */
#define RATE UINT64_C(12500000000) /* of each: a larger window */

static const int rank_node[NODES] = {0, 1, 2};
static struct r2_links_card card = {.nics = 1};
static struct r2_comm comm;
static int dummy;

static struct {
    int offers, made, freed, nones;
    bool yes;
    char why[WHY];
    struct r2_vote *vote;
    void (*meanwhile)(struct r2_vote *v); /* while it makes what it needs */
    bool cuda, stock_meanwhile;           /* while gates are opened, ranks agree on NCCL's own */
    int copies_freed, opened;
    bool plan_meanwhile; /* while the connections are closed, rank 0 proposes a plan */
    enum r2_direct_state state;
} seen;

int fake_offer(struct r2_agree *a, uint32_t round, const void *data, size_t len)
{
    struct ballot b;

    (void)a;
    CHECK(len >= sizeof(b));
    CHECK_EQ(round, (uint32_t)seen.offers + 1);
    memcpy(&b, data, sizeof(b));
    seen.offers++;
    seen.yes = b.yes;
    snprintf(seen.why, sizeof(seen.why), "%s", b.why);
    return 0;
}

int fake_new(struct r2_direct **out, const struct r2_direct_config *config)
{
    CHECK_EQ(config->p, NODES);
    CHECK_EQ(config->nic_rate, RATE);
    CHECK_EQ(config->per_node, 1);
    seen.made++;
    if (seen.meanwhile)
        seen.meanwhile(seen.vote);
    *out = (struct r2_direct *)&dummy;
    return 0;
}

void fake_free(struct r2_direct *d)
{
    struct r2_plan plan;
    void *object;

    seen.freed += d != NULL;
    r2_plan_equal(&plan, NODES);
    if (seen.plan_meanwhile)
        CHECK_EQ(r2_vote_accept(seen.vote, &plan, r2_plan_bytes(NODES), &object), -EAGAIN);
}

const struct r2_links_card *fake_card(const struct r2_direct *d)
{
    CHECK(d != NULL);
    return &card;
}

void fake_finish(struct r2_direct *d)
{
    (void)d;
}

void fake_abort(struct r2_direct *d)
{
    (void)d;
}

enum r2_direct_state fake_state(struct r2_direct *d, int *error)
{
    CHECK(d != NULL);
    if (error)
        *error = -ECANCELED;
    return seen.state;
}

int fake_meet(struct r2_direct *d, int rank, const void *offer, size_t len)
{
    (void)d, (void)rank, (void)offer, (void)len;
    return 0;
}

void fake_connect(struct r2_direct *d)
{
    (void)d;
}

void fake_journal(const char *text)
{
    (void)text;
}

void fake_wake(void) {}

static uint64_t fake_speed(void)
{
    return HERE * RATE;
}

int fake_local_ranks(r2_env_fn env)
{
    (void)env;
    return HERE;
}

void *fake_symbol(const char *name)
{
    return strcmp(name, "r2ccl_local_speed") ? (void *)&dummy : (void *)fake_speed;
}

bool fake_cuda(void)
{
    return seen.cuda;
}

int fake_copies_new(struct r2_copies **out, int device, size_t len)
{
    struct r2_sizes_window w = r2_sizes_window(NODES, RATE, 1);

    (void)device;
    CHECK_EQ(len, r2_sizes_bytes(&w));
    *out = (struct r2_copies *)&dummy;
    return 0;
}

void fake_copies_free(struct r2_copies *c)
{
    seen.copies_freed += c != NULL;
}

void fake_open_all(struct r2_copies *c)
{
    struct ballot no = {.why = "it cannot"};
    const void *offers[NODES] = {&no, &no, &no};
    size_t len[NODES] = {sizeof(no), sizeof(no), sizeof(no)};

    CHECK(c != NULL);
    if (seen.stock_meanwhile)
        r2_vote_exchanged(seen.vote, FIRST_ROUND, offers, len);
    CHECK_EQ(seen.copies_freed, 0); /* they are in use here */
    seen.opened++;
}

void fake_let_all(struct r2_copies *c)
{
    CHECK(c != NULL);
}

uint64_t fake_id(const struct r2_comm *c)
{
    (void)c;
    return 7;
}

void fake_row_plan(struct r2_comm *c, const char *plan, const char *cause)
{
    (void)c, (void)plan, (void)cause;
}

void fake_none(struct r2_comm *c, const char *why)
{
    (void)c, (void)why;
    seen.nones++;
}

/* ---- the tests */

static struct r2_vote *start(bool always)
{
    memset(&seen, 0, sizeof(seen));
    seen.vote = r2_vote_new(&comm, 0, NODES, 0, always);
    CHECK(seen.vote);
    return seen.vote;
}

TEST(a_plan_begins_it)
{
    struct r2_vote *v = start(false);

    CHECK(r2_vote_ready(v, rank_node, NODES));
    CHECK_EQ(seen.made, 0); /* until a plan needs it */
    r2_vote_invited(v);
    r2_vote_invited(v); /* invitations are repeated */
    CHECK_EQ(seen.made, 1);
    CHECK_EQ(seen.offers, 1);
    CHECK(seen.yes);
    r2_vote_close(v);
    CHECK_EQ(seen.freed, 1);
    r2_vote_free(v);
}

/* It was told that a rank is missing, and has taken NCCL's own choice; then that rank comes. The
 * others must hear that this one will not take part. */
TEST(who_has_given_up_says_no)
{
    struct r2_vote *v = start(true);

    r2_vote_off(v, "rank 2 is missing");
    CHECK_EQ(seen.nones, 1);
    r2_vote_ready(v, rank_node, NODES);
    CHECK_EQ(seen.offers, 1);
    CHECK(!seen.yes);
    CHECK_STR(seen.why, "rank 2 is missing");
    CHECK_EQ(seen.made, 0);
    r2_vote_close(v);
    r2_vote_free(v);
}

TEST(a_communicator_that_ends_meanwhile)
{
    void (*const ends[])(struct r2_vote *) = {r2_vote_close, r2_vote_abort};

    for (unsigned i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        struct r2_vote *v = start(true);

        seen.meanwhile = ends[i];
        r2_vote_ready(v, rank_node, NODES);
        CHECK_EQ(seen.made, 1);
        CHECK_EQ(seen.freed, 1); /* nobody else would */
        CHECK_EQ(seen.offers, 0);
        seen.meanwhile = NULL;
        r2_vote_close(v);
        CHECK_EQ(seen.freed, 1);
        r2_vote_free(v);
    }
}

/* The service thread learns that a rank has said no, while the application's ends the communicator
 * and opens its gates. */
TEST(the_answer_comes_as_it_ends)
{
    struct r2_vote *v = start(true);

    seen.cuda = seen.stock_meanwhile = true;
    r2_vote_ready(v, rank_node, NODES);
    CHECK(seen.yes);
    r2_vote_close(v);
    CHECK_EQ(seen.copies_freed, 1);
    CHECK_EQ(seen.freed, 1);
    r2_vote_free(v);
}

/* All ranks have said yes, twice. */
static struct r2_vote *agreed(void)
{
    struct r2_vote *v = start(true);
    struct ballot yes = {.yes = 1};
    const void *offers[NODES] = {&yes, &yes, &yes};
    size_t len[NODES] = {sizeof(yes), sizeof(yes), sizeof(yes)};

    seen.cuda = true;
    r2_vote_ready(v, rank_node, NODES);
    r2_vote_exchanged(v, FIRST_ROUND, offers, len);
    seen.state = R2_DIRECT_READY;
    on_changed(v);
    CHECK_EQ(seen.offers, 2);
    CHECK(seen.yes);
    r2_vote_exchanged(v, SECOND_ROUND, offers, len);
    CHECK_EQ(r2_vote_state(v), R2_VOTE_YES);
    return v;
}

TEST(a_plan_that_comes_as_it_ends)
{
    struct r2_vote *v = agreed();

    seen.plan_meanwhile = true;
    r2_vote_close(v);
    CHECK_EQ(seen.freed, 1);
    r2_vote_free(v);
}

/* Streams of the application wait: their buffers hold no sums. */
TEST(another_rank_has_failed)
{
    struct r2_vote *v = agreed();

    r2_vote_failed(v);
    seen.state = R2_DIRECT_FAILED;
    on_changed(v);
    CHECK_EQ(seen.opened, 0);
    CHECK_EQ(r2_vote_state(v), R2_VOTE_NO); /* no more plans */
    r2_vote_abort(v);
    CHECK_EQ(seen.opened, 1);
    r2_vote_close(v);
    r2_vote_free(v);
}

/* A peer that is dead says nothing, so the second round never ends. */
TEST(who_says_no_does_not_wait)
{
    struct r2_vote *v = start(true);
    struct ballot yes = {.yes = 1};
    const void *offers[NODES] = {&yes, &yes, &yes};
    size_t len[NODES] = {sizeof(yes), sizeof(yes), sizeof(yes)};

    r2_vote_ready(v, rank_node, NODES);
    r2_vote_exchanged(v, FIRST_ROUND, offers, len);
    CHECK_EQ(r2_vote_state(v), R2_VOTE_OPEN);
    seen.state = R2_DIRECT_FAILED;
    on_changed(v);
    CHECK_EQ(seen.offers, 2);
    CHECK(!seen.yes);
    CHECK_EQ(r2_vote_state(v), R2_VOTE_NO);
    CHECK(is_stock(outcome(v)));
    CHECK_EQ(seen.nones, 0);
    yes.yes = 0; /* the others answer after all: it is said once */
    r2_vote_exchanged(v, SECOND_ROUND, offers, len);
    CHECK_EQ(seen.nones, 1);
    CHECK_EQ(seen.freed, 1);
    r2_vote_close(v);
    r2_vote_free(v);
}
