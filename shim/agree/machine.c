#include "agree/machine.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

void r2_agree_machine_init(struct r2_agree_machine *m, int rank, int nranks, uint64_t *promises)
{
    memset(m, 0, sizeof(*m));
    m->rank = rank;
    m->nranks = nranks;
    m->promises = rank == R2_AGREE_LEADER ? promises : NULL;
}

static struct r2_agree_msg r2_agree_say(const struct r2_agree_machine *m, enum r2_agree_type type,
                                        uint64_t epoch)
{
    return (struct r2_agree_msg){
        .type = type, .epoch = epoch, .decided = m->decided, .committed = m->committed};
}

static void r2_agree_send(const struct r2_agree_machine *m, enum r2_agree_to to,
                          enum r2_agree_type type, uint64_t epoch, struct r2_agree_out *out)
{
    out->to = to;
    out->msg = r2_agree_say(m, type, epoch);
}

/* All epochs up to `decided` are decided and the last one committed is `committed`. */
static void r2_agree_learn(struct r2_agree_machine *m, uint64_t decided, uint64_t committed,
                           struct r2_agree_out *out)
{
    struct r2_agree_slot promise = m->promise;

    if (decided <= m->decided || committed > decided) {
        return;
    }
    if (committed != m->committed && committed != promise.epoch) {
        m->failed = true; /* committed without this rank's promise: F1 does not hold, stop here */
        return;
    }
    m->decided = decided;
    if (!promise.epoch || promise.epoch > decided) {
        return;
    }
    m->promise = (struct r2_agree_slot){0};
    if (committed != promise.epoch) {
        out->aborted = promise.epoch;
        return;
    }
    /* There is room: no promise was made without. */
    m->pending[m->npending++] = promise;
    m->committed = promise.epoch;
    m->committed_at = promise.at;
    out->committed = promise.epoch;
}

/* The leader's decision. Everything below the proposal was decided before it was made. */
static void r2_agree_conclude(struct r2_agree_machine *m, bool commit, struct r2_agree_out *out)
{
    uint64_t epoch = m->proposal.epoch;

    m->proposal = (struct r2_agree_slot){0};
    r2_agree_learn(m, epoch, commit ? epoch : m->committed, out);
    out->concluded = epoch;
    out->concluded_well = commit;
    r2_agree_send(m, R2_AGREE_EVERYBODY, R2_AGREE_DECISION, epoch, out);
}

static void r2_agree_count_promise(struct r2_agree_machine *m, int from, struct r2_agree_out *out)
{
    uint64_t bit = UINT64_C(1) << (from % 64);

    if (m->promises[from / 64] & bit) {
        return;
    }
    m->promises[from / 64] |= bit;
    if (++m->npromises == m->nranks) {
        r2_agree_conclude(m, true, out);
    }
}

int r2_agree_machine_propose(struct r2_agree_machine *m, uint64_t at, uint64_t next,
                             struct r2_agree_out *out)
{
    uint64_t epoch = m->decided + 1;

    *out = (struct r2_agree_out){0};
    if (m->rank != R2_AGREE_LEADER || !m->promises || at <= next || at <= m->committed_at) {
        return -EINVAL;
    }
    if (m->failed || m->closed) {
        return -EIO;
    }
    if (m->proposal.epoch || m->npending > 0) {
        return -EBUSY;
    }
    m->proposal = (struct r2_agree_slot){epoch, at};
    m->promise = m->proposal;
    m->floor = epoch;
    m->npromises = 0;
    memset(m->promises, 0, ((size_t)m->nranks + 63) / 64 * sizeof(*m->promises));
    r2_agree_send(m, R2_AGREE_EVERYBODY, R2_AGREE_PROPOSE, epoch, out);
    out->msg.at = at;
    out->promised = epoch;
    r2_agree_count_promise(m, m->rank, out); /* decides at once if there is nobody else */
    return 0;
}

void r2_agree_machine_abandon(struct r2_agree_machine *m, struct r2_agree_out *out)
{
    *out = (struct r2_agree_out){0};
    if (m->proposal.epoch) {
        r2_agree_conclude(m, false, out);
    }
}

bool r2_agree_machine_repeat(const struct r2_agree_machine *m, struct r2_agree_msg *msg)
{
    if (!m->proposal.epoch) {
        return false;
    }
    *msg = r2_agree_say(m, R2_AGREE_PROPOSE, m->proposal.epoch);
    msg->at = m->proposal.at;
    return true;
}

bool r2_agree_machine_has_promise(const struct r2_agree_machine *m, int rank)
{
    return m->promises && (m->promises[rank / 64] >> (rank % 64) & 1);
}

bool r2_agree_machine_would_promise(const struct r2_agree_machine *m, int from,
                                    const struct r2_agree_msg *msg, uint64_t next)
{
    /* What the message tells about earlier epochs may close an open promise and take its place
     * among the pending: room for two is needed. */
    int room = R2_AGREE_PENDING - m->npending - (m->promise.epoch ? 1 : 0);
    uint64_t last =
        m->promise.epoch && msg->committed == m->promise.epoch ? m->promise.at : m->committed_at;

    return msg->type == R2_AGREE_PROPOSE && from == R2_AGREE_LEADER && m->rank != R2_AGREE_LEADER &&
           msg->epoch > m->floor && msg->decided + 1 == msg->epoch && msg->decided >= m->decided &&
           msg->committed <= msg->decided && next < msg->at && msg->at > last && room > 0 &&
           !m->failed && !m->closed;
}

static void r2_agree_on_propose(struct r2_agree_machine *m, int from,
                                const struct r2_agree_msg *msg, uint64_t next, bool promise,
                                struct r2_agree_out *out)
{
    if (from != R2_AGREE_LEADER || m->rank == R2_AGREE_LEADER || msg->epoch <= m->decided ||
        msg->decided + 1 != msg->epoch) {
        return;
    }
    if (promise && !m->failed) {
        m->promise = (struct r2_agree_slot){msg->epoch, msg->at};
        m->floor = msg->epoch;
        out->promised = msg->epoch;
    } else if (m->floor < msg->epoch) {
        m->floor = msg->epoch; /* F3: whatever the reason was, it is "never" from here on */
    }
    r2_agree_send(m, R2_AGREE_SENDER,
                  m->promise.epoch == msg->epoch ? R2_AGREE_PROMISE : R2_AGREE_REFUSE, msg->epoch,
                  out);
    out->msg.next = next;
}

/* "What became of epoch?" A rank that has not promised it says never, and with that it is aborted:
 * who asks need not wait for a leader that is gone. */
static void r2_agree_on_ask(struct r2_agree_machine *m, uint64_t epoch, uint64_t next,
                            struct r2_agree_out *out)
{
    if (epoch <= m->decided || m->rank == R2_AGREE_LEADER) {
        /* A leader that has not decided yet says so: it lives, and nobody else need be asked. */
        r2_agree_send(m, R2_AGREE_SENDER, R2_AGREE_DECISION, epoch, out);
    } else if (m->promise.epoch != epoch) {
        if (m->floor < epoch) {
            m->floor = epoch;
        }
        r2_agree_send(m, R2_AGREE_SENDER, R2_AGREE_REFUSE, epoch, out);
        out->msg.next = next;
    }
}

static void r2_agree_on_refuse(struct r2_agree_machine *m, uint64_t epoch, struct r2_agree_out *out)
{
    if (m->proposal.epoch && m->proposal.epoch == epoch) {
        r2_agree_conclude(m, false, out);
    } else if (m->promise.epoch && m->promise.epoch == epoch && m->rank != R2_AGREE_LEADER) {
        /* F3 and F1: never committed. All before it is known since the promise (F4). */
        r2_agree_learn(m, epoch, m->committed, out);
    }
}

void r2_agree_machine_receive(struct r2_agree_machine *m, int from, const struct r2_agree_msg *msg,
                              uint64_t next, bool willing, struct r2_agree_out *out)
{
    bool promise = willing && r2_agree_machine_would_promise(m, from, msg, next);

    *out = (struct r2_agree_out){0};
    if (from < 0 || from >= m->nranks || from == m->rank || !msg->epoch) {
        return;
    }
    if (m->rank != R2_AGREE_LEADER) { /* which knows it all: the decisions are its own */
        r2_agree_learn(m, msg->decided, msg->committed, out);
    }
    switch (msg->type) {
    case R2_AGREE_PROPOSE:
        r2_agree_on_propose(m, from, msg, next, promise, out);
        break;
    case R2_AGREE_PROMISE:
        if (m->proposal.epoch && m->proposal.epoch == msg->epoch) {
            r2_agree_count_promise(m, from, out);
        }
        break;
    case R2_AGREE_REFUSE:
        r2_agree_on_refuse(m, msg->epoch, out);
        break;
    case R2_AGREE_ASK:
        r2_agree_on_ask(m, msg->epoch, next, out);
        break;
    default: /* DECISION said all that it has to say by what was learnt */
        break;
    }
}

enum r2_agree_at r2_agree_machine_at(struct r2_agree_machine *m, uint64_t index)
{
    if (m->failed) {
        return R2_AGREE_FAIL;
    }
    while (m->npending > 0 && m->pending[0].at <= index) {
        m->force = m->pending[0];
        m->npending--;
        memmove(m->pending, m->pending + 1, (size_t)m->npending * sizeof(*m->pending));
    }
    return m->promise.epoch && m->promise.at <= index ? R2_AGREE_WAIT : R2_AGREE_GO;
}

uint64_t r2_agree_machine_fence(const struct r2_agree_machine *m)
{
    if (m->failed) {
        return 0;
    }
    if (m->npending > 0) {
        return m->pending[0].at; /* a promise is for a later index */
    }
    return m->promise.epoch ? m->promise.at : UINT64_MAX;
}

bool r2_agree_machine_ask(const struct r2_agree_machine *m, struct r2_agree_msg *msg)
{
    if (!m->promise.epoch) {
        return false;
    }
    *msg = r2_agree_say(m, R2_AGREE_ASK, m->promise.epoch);
    return true;
}

void r2_agree_machine_fail(struct r2_agree_machine *m)
{
    m->failed = true;
}

void r2_agree_machine_close(struct r2_agree_machine *m, struct r2_agree_out *out)
{
    m->closed = true;
    r2_agree_machine_abandon(m, out);
}
