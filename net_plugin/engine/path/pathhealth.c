/* Health of paths: what their states mean for traffic, segment and journal; test chunks. Everything
 * here runs under the peer's lock.
 *
 * A path that comes back carries nothing of the job before test chunks on each bulk lane and words
 * on its control lane have gone both ways: the connecting side says how many bytes it wants to see
 * (TEST), sends them as chunks of connection 0, and goes on when the other side has them all
 * (TEST_ACK). One-sided transports have a place of their own for them, and say that one has arrived
 * when they have found there what it is made of. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/locate.h"
#include "engine/path/path.h"
#include "util/ratelimit.h"

#define TEST_CHUNK (64 * 1024)
#define TEST_CHUNKS 4 /* at least, and as many on each lane */
#define TEST_MOST (2 * TEST_CHUNK * R2_LANES_MAX)
#define HEADS 128 /* bytes of a packet that are none of the chunk, at most */
#define TEST_NS (1 * R2_NS_PER_S)
#define TEST_ONE_SIDED_NS (2 * R2_NS_PER_S) /* a queue pair sends again after 0.27 s as a rule */
#define DAMP_REUSE 1000                     /* one failure: nobody is left alone for that */
#define DAMP_HALVINGS 10                 /* in the longest time: nothing is left of any penalty */
#define DRAIN_MIN_NS (50 * R2_NS_PER_MS) /* the word about it travels on another path */

static uint8_t test_bytes[TEST_CHUNK]; /* read only */

void r2_damp_rules_get(struct r2_damp_rules *out)
{
    out->suppress = (uint32_t)r2_eng.set->damp_suppress;
    out->reuse = DAMP_REUSE;
    if (out->suppress && out->reuse > out->suppress / 2)
        out->reuse = out->suppress / 2; /* else it would be used again at once */
    out->half_life_ns = 1 + r2_eng.set->damp_ns / DAMP_HALVINGS;
    out->max_suppress_ns = r2_eng.set->damp_ns;
}

/* ---- states */

static enum r2_seg_path_state shown_as(const struct r2_path *path)
{
    static const enum r2_seg_path_state as[R2_HEALTH_STATES] = {
        [R2_HEALTH_HEALTHY] = R2_SEG_PATH_UP,      [R2_HEALTH_SUSPECT] = R2_SEG_PATH_SUSPECT,
        [R2_HEALTH_FAILED] = R2_SEG_PATH_DOWN,     [R2_HEALTH_PROBING] = R2_SEG_PATH_PROBING,
        [R2_HEALTH_RAMPING] = R2_SEG_PATH_RAMPING, [R2_HEALTH_DRAINED] = R2_SEG_PATH_DRAINED,
        [R2_HEALTH_DAMPED] = R2_SEG_PATH_DAMPED,
    };

    if (path->health.state != R2_HEALTH_UNREACHED)
        return as[path->health.state];
    if (path->state == R2_PATH_PROVEN)
        return R2_SEG_PATH_UP;
    if (r2_path_is_up(path) || path->state == R2_PATH_CONNECTING)
        return R2_SEG_PATH_CONNECTING;
    if (!r2_past_carried(path->past))
        return R2_SEG_PATH_NEVER_REACHED;
    /* It is wanted, and cannot be had. */
    return path->past == R2_PAST_MISSED && path->role != R2_ROLE_SPARE ? R2_SEG_PATH_CONNECTING
                                                                       : R2_SEG_PATH_CLOSED;
}

void r2_path_show(struct r2_path *path, const char *cause)
{
    r2_control_path_state(r2_eng.ctl, path->shown.row, shown_as(path), path->gen, cause);
}

void r2_path_set_role(struct r2_path *path, enum r2_path_role role)
{
    bool spare = role == R2_ROLE_SPARE, was_spare = path->role == R2_ROLE_SPARE;

    path->role = role;
    if (spare == was_spare)
        return;
    r2_control_path_spare(r2_eng.ctl, path->shown.row, spare);
    /* Else it is shown as it was, and so is its cause. */
    if (path->state == R2_PATH_WAIT && path->past == R2_PAST_MISSED &&
        path->health.state == R2_HEALTH_UNREACHED)
        r2_path_show(path, spare ? "a better pair of NICs serves" : "wanted again");
    path->peer->todo |= R2_TODO_WEIGH;
}

/* Every change of state is told, and that a ramp begins again: what makes a path come up or go down
 * tells it itself (path-up, path-down). */
static enum r2_seg_event told_as(enum r2_health_state before, enum r2_health_state state)
{
    static const enum r2_seg_event as[R2_HEALTH_STATES] = {
        [R2_HEALTH_SUSPECT] = R2_EV_PATH_SUSPECT,
        [R2_HEALTH_PROBING] = R2_EV_PATH_PROBING,
        [R2_HEALTH_DRAINED] = R2_EV_PATH_DRAINED,
        [R2_HEALTH_DAMPED] = R2_EV_PATH_DAMPED,
    };

    if (state == before)
        return state == R2_HEALTH_RAMPING ? R2_EV_PATH_RAMPING : R2_EV_NONE;
    if (state == R2_HEALTH_UNREACHED)
        return R2_EV_PATH_CLOSED;
    if (state == R2_HEALTH_HEALTHY && before != R2_HEALTH_UNREACHED)
        return R2_EV_PATH_HEALTHY;
    return as[state];
}

/* A process that leaves closes hundreds of paths, and the journal is for what happened before. */
static bool too_many_closed(uint64_t now, unsigned *untold)
{
    static struct r2_ratelimit closed; /* under its own lock: peers have different ones */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    bool pass;

    pthread_mutex_lock(&lock);
    pass = r2_ratelimit_pass(&closed, false, now, untold);
    pthread_mutex_unlock(&lock);
    return !pass;
}

static void tell_state(const struct r2_path *path, enum r2_seg_event event, const char *cause)
{
    unsigned untold = 0;
    char text[128];

    if (event == R2_EV_NONE ||
        (event == R2_EV_PATH_CLOSED && too_many_closed(r2_peer_now(path->peer), &untold)))
        return;
    snprintf(text, sizeof(text), "%s (and %u paths before, not shown)", cause, untold);
    r2_path_journal(path, event, 0, 0, untold ? text : cause);
}

bool r2_path_event(struct r2_path *path, enum r2_health_event event, const char *cause)
{
    enum r2_health_state before = path->health.state;

    if (!r2_health_step(&path->health, event, r2_peer_now(path->peer)))
        return false;
    tell_state(path, told_as(before, path->health.state), cause);
    r2_path_show(path, cause);
    r2_peer_census(path->peer);
    path->peer->todo |= R2_TODO_WEIGH;
    return true;
}

/* Both NICs are of this node: its kernel hands the bytes over, and no wire is asked. Loopback has
 * no wire anyway. */
bool r2_path_wireless(const struct r2_path *path)
{
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    return !r2_local.nics[path->lnic].loopback && r->known && r2_nic_own(&r->addr) >= 0;
}

/* A ramp goes on in silence (health.def), so its state alone does not say that it answers. */
static bool answers(const struct r2_path *path)
{
    return path->state == R2_PATH_PROVEN && path->health.state != R2_HEALTH_SUSPECT &&
           path->hb.unanswered < R2_SUSPECT_BEATS;
}

/* It is wanted, and cannot be had. */
static bool is_lost(const struct r2_path *path)
{
    enum r2_health_state state = path->health.state;

    return r2_past_carried(path->past) &&
           (state == R2_HEALTH_SUSPECT || state == R2_HEALTH_RAMPING || state == R2_HEALTH_FAILED ||
            state == R2_HEALTH_PROBING || state == R2_HEALTH_DAMPED);
}

static bool rnic_usable(const struct r2_path *path)
{
    return path->rnic < path->peer->n_rnics && path->peer->rnics[path->rnic].word == R2_NIC_USABLE;
}

static enum r2_census census_of(const struct r2_path *path, bool others)
{
    const struct r2_peer *p = path->peer;

    if (r2_path_wireless(path))
        return R2_CENSUS_NONE;
    if (answers(path))
        return R2_CENSUS_OK;
    if (!others || p->life != R2_PEER_ALIVE || r2_list_empty(&p->conn_list) || !rnic_usable(path))
        return R2_CENSUS_NONE; /* nobody is blamed, or the other side is already */
    return is_lost(path) ? R2_CENSUS_LOST : R2_CENSUS_NONE;
}

static bool some_answer(const struct r2_peer *p)
{
    return R2_ANY_PATH(path, p, census_of(path, false) == R2_CENSUS_OK);
}

/* A path that is lost says something about its NIC only while the peer answers on another. */
void r2_peer_census(struct r2_peer *p)
{
    bool others = some_answer(p);

    R2_FOR_EACH_PATH (path, p) {
        enum r2_census now = census_of(path, others);

        if (now == path->counted)
            continue;
        atomic_fetch_sub(&r2_eng.nic_state[path->lnic].census[path->counted], 1);
        atomic_fetch_add(&r2_eng.nic_state[path->lnic].census[now], 1);
        path->counted = now;
    }
}

static bool has_open(const struct r2_peer *p)
{
    R2_FOR_EACH_CONN (c, p) {
        if (c->state == R2_CONN_OPENING || (c->state == R2_CONN_OPEN && !r2_conn_is_left(c)))
            return true;
    }
    return false;
}

static bool waits_for(const struct r2_peer *p, int nic)
{
    bool others = some_answer(p);

    return R2_ANY_PATH(path, p,
                       path->lnic == nic && is_lost(path) && !answers(path) &&
                           (rnic_usable(path) || !others));
}

bool r2_nic_asked_in_vain(int nic)
{
    bool found = false;

    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        found |= p->life == R2_PEER_ALIVE && has_open(p) && waits_for(p, nic);
        r2_peer_unlock(p);
    }
    return found;
}

void r2_path_tell_up(struct r2_path *path)
{
    uint64_t away = path->down.at ? r2_peer_now(path->peer) - path->down.at : 0;

    if (path->intro != R2_INTRO_HEARD || path->state != R2_PATH_PROVEN)
        return;
    path->intro = R2_INTRO_TOLD;
    r2_path_journal(path, R2_EV_PATH_UP, 0, away, path->down.at ? "back" : "connected");
    path->down.at = 0;
}

static void proven(struct r2_path *path, const char *cause)
{
    path->state = r2_path_next(path->state, R2_PATH_EV_ARRIVED);
    path->attempt.fails = 0;
    path->past = r2_past_next(path->past, R2_PAST_EV_PROVEN);
    if (!r2_path_wireless(path))
        r2_nic_reach(path->lnic, R2_NICREACH_EV_MEET);
    if (path->peer->out && !path->peer->doubt_since) /* the other side learns what comes of it */
        path->peer->doubt_since = path->peer->no_path_since;
    path->peer->no_path_since = 0;
    r2_path_event(path, R2_HEALTH_EV_PROVEN, cause);
    r2_peer_census(path->peer);
    r2_path_tell_up(path);
    path->peer->todo |= R2_TODO_WEIGH;
    r2_peer_wake(path->peer); /* what waited for a path goes on */
}

/* ---- draining */

static bool drained_here(const struct r2_path *path)
{
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    return r2_nic_word(path->lnic) == R2_NIC_DRAINED || (r->known && r->word == R2_NIC_DRAINED);
}

void r2_path_follow(struct r2_path *path)
{
    bool drained = drained_here(path);

    if (drained && r2_path_event(path, R2_HEALTH_EV_DRAIN, "its NIC is drained")) {
        path->drain_at = r2_peer_now(path->peer);
        if (path->state == R2_PATH_CONNECTING)
            r2_path_fail(path, path->gen, 0, "drained");
        path->peer->todo |= R2_TODO_KICK;
    } else if (!drained && r2_path_event(path, R2_HEALTH_EV_UNDRAIN, "its NIC is given back")) {
        path->attempt.next_at = 0;
        path->attempt.fails = 0;
        if (path->state == R2_PATH_PROVEN) { /* it was not empty yet */
            path->intro = path->intro ? R2_INTRO_HEARD : R2_INTRO_NONE;
            proven(path, "its NIC is given back before it was empty");
        }
    }
}

/* Nothing of a message is on the path, and every frame has left. */
static bool is_empty(const struct r2_path *path)
{
    if (path->outbox.off < path->outbox.len || r2_pathrate_inflight(&path->rate))
        return false;
    R2_FOR_EACH_CONN (c, path->peer) {
        for (uint64_t s = c->oldest; s < c->next_seq && c->peer->out; s++) {
            struct r2_req *r = r2_conn_req(c, s);

            if (r && r->attached && r2_send_on_path(&r->led.send, path->index))
                return false;
        }
    }
    return true;
}

/* ---- test chunks */

static bool one_sided(const struct r2_path *path)
{
    return path->transport != R2_VIA_TCP;
}

static uint32_t chunk_len(const struct r2_path *path)
{
    return one_sided(path) ? R2_TEST_LEN : TEST_CHUNK;
}

/* Fills one packet of the NIC. Where the kernel hands large pieces on uncut, as between virtual
 * machines, only such a one finds out that the way takes smaller packets. */
static uint32_t packet_len(const struct r2_path *path)
{
    int mtu = r2_local.nics[path->lnic].mtu, len = mtu - HEADS;

    return len < HEADS ? HEADS : len > TEST_CHUNK ? TEST_CHUNK : (uint32_t)len;
}

/* Bytes in all. A lane may be dead while the others work: its port may hash to another link, or a
 * firewall may know it. */
static uint32_t plan_test(struct r2_path *path)
{
    unsigned lanes = r2_eng.ops->planned(path->ep);

    lanes = lanes < 1 ? 1 : lanes > R2_LANES_MAX ? R2_LANES_MAX : lanes;
    memset(path->test.took, 0, sizeof(path->test.took));
    if (one_sided(path)) {
        path->test.quota = R2_TEST_EACH;
        return chunk_len(path) * lanes * path->test.quota;
    }
    path->test.quota = (uint8_t)(1 + (TEST_CHUNKS + lanes - 1) / lanes);
    return lanes * (packet_len(path) + TEST_CHUNK * (path->test.quota - 1u));
}

void r2_path_test(struct r2_path *path)
{
    struct r2_msg_test m = {.gen = path->gen};
    bool fresh =
        path->health.state == R2_HEALTH_UNREACHED && !one_sided(path) && r2_nic_trusted(path->lnic);

    path->test.out = path->test.want = 0; /* test.done: see up_accepted */
    path->test.at = path->peer->out ? r2_peer_now(path->peer) : 0;
    if (!path->peer->out)
        return;
    if (!fresh)
        m.bytes = path->test.want = plan_test(path);
    if (r2_out_frame(path, R2_F_TEST, &m, sizeof(m), NULL, 0))
        return; /* no memory: it is down again */
    if (fresh)
        proven(path, "");
    else
        path->outbox.kick_wanted += R2_LANES_MAX;
}

bool r2_path_test_next(struct r2_path *path, struct r2_bulk *bulk)
{
    unsigned lane = bulk->lane % R2_LANES_MAX;

    if (path->test.out >= path->test.want || path->test.took[lane] >= path->test.quota)
        return false;
    memset(bulk, 0, sizeof(*bulk));
    bulk->lane = (uint16_t)lane;
    bulk->conn = R2_CONN_TEST;
    bulk->len = !path->test.took[lane]++ && !one_sided(path) ? packet_len(path) : chunk_len(path);
    bulk->seq = path->test.out / chunk_len(path);
    bulk->total = bulk->len;
    bulk->data = test_bytes;
    path->test.out += bulk->len;
    return true;
}

#define SMALL_PACKET 1280 /* IPv6 asks that much of every link */
#define LOST_TESTS 2
#define LOSSY_PART 20 /* of segments, sent again: packets of any size get lost */

/* S: a test was not answered in time. After a few the next attempts use small packets, or full ones
 * again: which of them pass is what a user has to know. */
void r2_path_test_lost(struct r2_path *path)
{
    if (one_sided(path) || ++path->test.lost < LOST_TESTS)
        return;
    path->test.lost = 0;
    path->attempt.packet = path->attempt.packet ? 0 : SMALL_PACKET;
}

static void tell_small(const struct r2_path *path)
{
    static atomic_uint told; /* bits of NICs */
    char text[128];

    if (atomic_fetch_or(&told, 1u << path->lnic) >> path->lnic & 1)
        return;
    r2_path_journal(path, R2_EV_WARNING, 0, 0, "large packets vanish on it: it uses small ones");
    R2_TELL("path %s: packets of %d bytes, this NIC's MTU, are lost on the way, and packets of %d "
            "arrive. It uses small packets and is slower. Check the MTU of NICs, bridges and "
            "switches on both sides",
            r2_path_text(path, text, sizeof(text)), r2_local.nics[path->lnic].mtu, SMALL_PACKET);
}

void r2_path_judge_packets(struct r2_path *path, const struct r2_ep_health *h)
{
    if (!path->attempt.packet || path->state != R2_PATH_PROVEN)
        return;
    if (h->retransmits * LOSSY_PART > h->segments)
        path->attempt.packet = 0;
    else
        tell_small(path);
}

/* S: the other side has seen it all. */
int r2_path_on_test_ack(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_test m;

    memcpy(&m, body, sizeof(m));
    if (!path->peer->out)
        return -EPROTO;
    if (path->state == R2_PATH_TESTING && m.gen == path->gen && m.bytes >= path->test.want) {
        path->test.lost = 0;
        proven(path, path->attempt.packet ? "test chunks have arrived in small packets"
                                          : "test chunks have arrived");
    }
    return 0;
}

/* R: answers once all is there. */
static void answer_test(struct r2_path *path)
{
    struct r2_msg_test m = {.gen = path->gen, .bytes = path->test.done};

    if (path->test.at && path->test.done >= path->test.want) {
        path->test.at = 0;
        if (r2_out_frame(path, R2_F_TEST_ACK, &m, sizeof(m), NULL, 0))
            return; /* no memory: it is down again */
        proven(path, path->test.want ? "test chunks have arrived" : "");
    }
}

int r2_path_on_test(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_test m;

    memcpy(&m, body, sizeof(m));
    if (path->peer->out || m.bytes > TEST_MOST)
        return -EPROTO;
    path->test.want = m.bytes;
    path->test.at = r2_peer_now(path->peer);
    answer_test(path);
    return 0;
}

int r2_path_test_claim(struct r2_path *path, struct r2_bulk *bulk)
{
    if (path->peer->out || bulk->len > chunk_len(path))
        return -EPROTO;
    if (one_sided(path)) /* it is in its place */
        return 0;
    bulk->data = malloc(bulk->len);
    return bulk->data ? 0 : 1;
}

void r2_path_test_done(struct r2_path *path, const struct r2_bulk *bulk, bool whole)
{
    free(bulk->data);
    if (!whole)
        return;
    path->test.done += bulk->len;
    answer_test(path);
}

/* ---- time */

void r2_path_forgive(struct r2_path *path)
{
    r2_damp_clear(&path->damp);
    path->attempt.fails = 0;
    if (r2_path_event(path, R2_HEALTH_EV_REUSE, "past failures are forgotten"))
        path->attempt.next_at = 0;
}

int r2_peer_left(const struct r2_peer *p, int transport)
{
    int n = 0;

    for (int i = 0; i < p->n_paths; i++)
        n += transport == R2_VIA_TCP ? r2_path_is_up(p->paths[i]) : r2_path_suffices(p->paths[i]);
    return n;
}

static bool needed(const struct r2_path *path)
{
    return !r2_peer_left(path->peer, path->transport); /* nothing else is left */
}

static void tick_damped(struct r2_path *path, uint64_t now)
{
    struct r2_damp_rules rules;

    r2_damp_rules_get(&rules);
    if (!r2_damp_tick(&path->damp, &rules, now) && !needed(path))
        return;
    r2_damp_release(&path->damp);
    path->attempt.next_at = now;
    path->attempt.fails = 0;
    r2_path_event(path, R2_HEALTH_EV_REUSE,
                  needed(path) ? "no other path is left" : "the penalty has faded");
}

void r2_path_tick(struct r2_path *path, uint64_t now)
{
    switch (path->health.state) {
    case R2_HEALTH_RAMPING:
        /* Silence proves nothing: who does not answer is not back. */
        if (now - path->health.since_ns >= r2_eng.set->ramp_ns && !path->hb.unanswered)
            r2_path_event(path, R2_HEALTH_EV_RAMPED, "at full weight");
        break;
    case R2_HEALTH_DAMPED:
        tick_damped(path, now);
        break;
    case R2_HEALTH_DRAINED:
        if (r2_path_is_up(path) && path->peer->out && now - path->drain_at > DRAIN_MIN_NS &&
            is_empty(path))
            r2_path_fail(path, path->gen, 0, "drained");
        break;
    default:
        break;
    }
    if (path->state == R2_PATH_TESTING && path->peer->out) {
        if (now - path->test.at > (one_sided(path) ? TEST_ONE_SIDED_NS : TEST_NS))
            r2_path_fail(path, path->gen, ETIMEDOUT, "test chunks did not arrive");
        else if (path->test.out < path->test.want)
            path->outbox.kick_wanted += R2_LANES_MAX;
    }
}
