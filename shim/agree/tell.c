/* When NCCL has failed at one rank, the others wait for it for ever. Those that have a connection
 * to what died get an error from their transport. Those that only share memory with it, or with a
 * rank that has stopped since, get none. So the first that knows says it to the leader, who says it
 * to all, this rank included. If that one is not connected, or nothing comes back from it soon, all
 * are told directly, and who hears it so tells the leader. Nothing comes back if its process is
 * stopped, or if its host has lost its power, of which the kernel here knows nothing yet.
 *
 * A word is about a communicator that cannot complete anything any more, so that it may come twice,
 * late, or after an abort; it is never taken back. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "agree/internal.h"
#include "nccl_abi/nccl_net_abi.h"
#include "util/clock.h"
#include "util/lock.h"

/* Of a thread that reports an error: the leader's patience, the last step and R2_NET_LONG_NS. */
#define R2_TELL_WAIT_NS (200 * R2_NS_PER_MS)
#define R2_TELL_LEADER_NS (30 * R2_NS_PER_MS) /* then the others are told without it */
#define R2_TELL_STEP_NS R2_NS_PER_MS          /* rank by rank, so that not all do so at once */
#define R2_TELL_STEPS 16
#define R2_TELL_AGAIN_NS (500 * R2_NS_PER_MS) /* all are told again; grows by as much */
#define R2_TELL_ROUNDS 3
#define R2_TELL_LOOK_NS R2_NS_PER_MS /* whether the word is with the kernel */

/* --- any thread --------------------------------------------------------------------------- */

int r2_agree_tell(struct r2_agree *a, uint32_t error)
{
    uint64_t deadline = r2_now_ns() + R2_TELL_WAIT_NS;
    struct timespec ts = {.tv_sec = (time_t)(deadline / R2_NS_PER_S),
                          .tv_nsec = (long)(deadline % R2_NS_PER_S)};
    int rc = 0;

    if (error == 0 || atomic_load(&r2_agree_inert)) {
        return -ENOTCONN;
    }
    pthread_mutex_lock(&a->lock);
    a->error = a->error ? a->error : error;
    a->tellers++; /* before the kick: the thread looks again while there are any */
    pthread_mutex_unlock(&a->lock);
    r2_agree_service_kick(a);
    pthread_mutex_lock(&a->lock);
    while (!a->error_said && rc == 0) {
        rc = a->state == R2_AGREE_READY || a->state == R2_AGREE_FAILED ? 0 : ENOTCONN;
        rc = rc == 0 ? pthread_cond_timedwait(&a->wake, &a->lock, &ts) : rc;
    }
    a->tellers--;
    rc = a->error_said ? 0 : -ENOTCONN;
    pthread_mutex_unlock(&a->lock);
    return rc;
}

/* --- service thread ----------------------------------------------------------------------- */

static void r2_tell_rank(struct r2_agree *a, uint32_t rank)
{
    uint8_t text[R2_AGREE_FAILURE_BYTES];

    r2_agree_failure_encode(text, &a->failure);
    r2_agree_member_send(a, rank, R2_FRAME_FAILED, text, sizeof(text), NULL, 0);
}

/* Frames may be lost with their connection, and before a rank knows the others it takes none:
 * repeated a few times. */
static void r2_tell_all(struct r2_agree *a, uint64_t now)
{
    for (int r = 0; r < a->nranks; r++) {
        if (r != a->rank) {
            r2_tell_rank(a, (uint32_t)r);
        }
    }
    a->failure_rounds++;
    a->tell_ns = now + R2_TELL_AGAIN_NS * (uint64_t)a->failure_rounds;
}

static void r2_tell_said(struct r2_agree *a)
{
    pthread_mutex_lock(&a->lock);
    a->error_said = true;
    pthread_cond_broadcast(&a->wake);
    pthread_mutex_unlock(&a->lock);
}

static void r2_tell_again(struct r2_agree *a, uint64_t now)
{
    if (a->failure_rounds < R2_TELL_ROUNDS) {
        r2_tell_all(a, now);
    } else {
        a->tell_ns = UINT64_MAX;
    }
}

/* The word of this rank. Not relied on is a leader that ends with this process, or that it has no
 * connection to: that one died, or the ranks met at another process. */
static void r2_tell_first(struct r2_agree *a, uint64_t now)
{
    enum r2_agree_way way = r2_agree_member_way(a, R2_AGREE_LEADER); /* of what was sent before */

    if (a->rank == R2_AGREE_LEADER || way != R2_WAY_SENT) {
        r2_tell_all(a, now);
        return;
    }
    r2_tell_rank(a, R2_AGREE_LEADER);
    a->tell_ns = now + R2_TELL_LEADER_NS + (uint64_t)(a->rank % R2_TELL_STEPS) * R2_TELL_STEP_NS;
}

/* Whether this rank may end. Either a word came from another one, which tells them all. Or
 * everybody who can be reached has been told, as far as the kernel, which goes on with it. Who has
 * heard may be gone by the time that the last one is known not to answer. Where no connection to
 * anybody is there or in the making, their hosts have refused it or ended theirs: all others are
 * gone, and nobody is left to be told. */
static bool r2_tell_gone(struct r2_agree *a)
{
    bool wait = false, nobody = true;

    if (a->failure_heard || a->failure_rounds == 0) {
        return a->failure_heard;
    }
    for (int r = 0; r < a->nranks; r++) {
        enum r2_agree_way way = r2_agree_member_way(a, (uint32_t)r);

        wait = wait || way == R2_WAY_WAIT;
        nobody = nobody && (r == a->rank || way == R2_WAY_NONE);
        a->failure_sent |= r != a->rank && (way == R2_WAY_SENT || way == R2_WAY_SELF);
    }
    return nobody || (a->failure_sent && !wait);
}

void r2_agree_tell_turn(struct r2_agree *a, uint64_t now)
{
    bool said, here, awaited;
    uint32_t error;

    pthread_mutex_lock(&a->lock);
    error = a->error;
    said = a->error_said;
    awaited = a->tellers > 0;
    pthread_mutex_unlock(&a->lock);
    if (!a->roster.seats) {
        return;
    }
    here = error && a->failure.error == 0;
    if (here) {
        a->failure = (struct r2_agree_failure){(uint32_t)a->rank, error};
        r2_tell_first(a, now);
    }
    if (!here && now >= a->tell_ns) {
        r2_tell_again(a, now);
    }
    if (error && !said && r2_tell_gone(a)) {
        r2_tell_said(a);
    } else if (error && !said && awaited && now + R2_TELL_LOOK_NS < a->deadline_ns) {
        a->deadline_ns = now + R2_TELL_LOOK_NS;
    }
    a->deadline_ns = a->tell_ns < a->deadline_ns ? a->tell_ns : a->deadline_ns;
}

/* What this rank waits for does not come any more, or to no use. */
static void r2_tell_here(struct r2_agree *a)
{
    if (a->ops && a->ops->failed) {
        a->ops->failed(a->user, (int)a->failure.rank, a->failure.error);
    }
    pthread_mutex_lock(&a->lock);
    a->told = true;
    r2_agree_member_fence(a);
    pthread_cond_broadcast(&a->wake);
    pthread_mutex_unlock(&a->lock);
}

/* Those whom the leader does not tell find out by themselves that it is the leader. */
void r2_agree_tell_gone(struct r2_agree *a, uint32_t rank, uint64_t now)
{
    if (a->failure.error) {
        return;
    }
    a->failure = (struct r2_agree_failure){rank, R2_NCCL_REMOTE_ERROR};
    r2_tell_here(a);
    if (a->rank == R2_AGREE_LEADER) {
        r2_tell_all(a, now);
        a->deadline_ns = a->tell_ns < a->deadline_ns ? a->tell_ns : a->deadline_ns;
    }
}

/* From a rank of the roster. What the leader knows it tells to all; another rank's word comes where
 * the leader did not answer that one. */
void r2_agree_tell_frame(struct r2_agree *a, const struct r2_agree_frame *f, const uint8_t *payload,
                         uint64_t now)
{
    bool leader = a->rank == R2_AGREE_LEADER, first = a->failure.error == 0;
    struct r2_agree_failure failure;

    if (r2_agree_failure_decode(payload, f->len, &failure) != 0 ||
        failure.rank >= (uint32_t)a->nranks) {
        return;
    }
    a->failure_heard = true;
    if (first) {
        a->failure = failure;
        if (failure.rank != (uint32_t)a->rank) {
            r2_tell_here(a);
        }
    }
    if (!leader) {
        a->tell_ns = UINT64_MAX; /* others see to it */
        if (first && f->from != R2_AGREE_LEADER) {
            r2_tell_rank(a, R2_AGREE_LEADER); /* whom that one may not reach */
        }
    } else if (first) {
        r2_tell_all(a, now);
        a->deadline_ns = a->tell_ns < a->deadline_ns ? a->tell_ns : a->deadline_ns;
    } else {
        r2_tell_rank(a, f->from); /* it did not hear */
    }
}
