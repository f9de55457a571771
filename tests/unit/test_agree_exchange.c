/* All ranks offer something and get what all others offered. Rung 3: processes over loopback. */
#define _GNU_SOURCE
#include "agree_power.h"
#include "agree_ranks.h"

#include <errno.h>
#include <signal.h>

#define ROUNDS 5

static atomic_int rounds; /* exchanged here */
static atomic_int invitations;

/* Offers of different lengths, empty ones among them. */
static size_t fill(uint8_t *data, int rank, uint32_t round)
{
    size_t len = (size_t)rank * 37 * round % (R2_AGREE_OFFER + 1);

    memset(data, rank + (int)round, len);
    return len;
}

static void on_exchanged(void *user, uint32_t round, const void *const *offers, const size_t *len)
{
    (void)user;
    CHECK_EQ(round, atomic_load(&rounds) + 1);
    for (int r = 0; r < processes; r++) {
        uint8_t want[R2_AGREE_OFFER];

        CHECK_EQ(len[r], fill(want, r, round));
        CHECK_MEM(offers[r], want, len[r]);
    }
    atomic_fetch_add(&rounds, 1);
}

static void on_invited(void *user)
{
    (void)user;
    atomic_fetch_add(&invitations, 1);
}

PROCESSES(all_get_all_offers, 4)
{
    uint8_t id[R2_AGREE_ID], data[R2_AGREE_OFFER];
    struct r2_agree *a;
    uint64_t epoch;

    ops.exchanged = on_exchanged;
    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(r2_agree_offer(a, 1, data, 0), -EAGAIN);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    CHECK_EQ(r2_agree_offer(a, 2, data, 0), -EINVAL);
    CHECK_EQ(r2_agree_offer(a, 1, data, R2_AGREE_OFFER + 1), -E2BIG);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        if ((int)round % processes == me) /* the others wait for it */
            AWAIT(atomic_load(&sh->stuck) == (int)round * processes - 1);
        CHECK_EQ(r2_agree_offer(a, round, data, fill(data, me, round)), 0);
        atomic_fetch_add(&sh->stuck, 1);
        AWAIT(atomic_load(&rounds) == (int)round);
    }
    CHECK_EQ(r2_agree_offer(a, ROUNDS, data, 0), -EINVAL);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes);
    r2_agree_destroy(a);
}

/* The leader alone knows that there is to be an exchange. */
PROCESSES(the_leader_invites, 3)
{
    uint8_t id[R2_AGREE_ID], data[R2_AGREE_OFFER];
    struct r2_agree *a;
    uint64_t epoch;

    ops.exchanged = on_exchanged;
    ops.invited = on_invited;
    get_id(id);
    a = member(id, me, processes);
    CHECK_EQ(operate(a, 0, &epoch), 0);
    AWAIT(state_of(a) == R2_AGREE_READY);
    CHECK_EQ(r2_agree_invite(a), me ? -EPERM : 0);
    AWAIT(atomic_load(&invitations) >= 1);
    if (me == 1)
        AWAIT(atomic_load(&invitations) >= 2); /* who does not offer is asked again */
    CHECK_EQ(r2_agree_offer(a, 1, data, fill(data, me, 1)), 0);
    AWAIT(atomic_load(&rounds) == 1);
    atomic_fetch_add(&sh->step, 1);
    AWAIT(atomic_load(&sh->step) >= processes);
    r2_agree_destroy(a);
}

static atomic_int gone; /* the rank that was said to be gone, and one */

static void on_failed(void *user, int rank, uint32_t error)
{
    (void)user;
    CHECK_EQ(error, 6); /* ncclRemoteError */
    CHECK_EQ(atomic_exchange(&gone, rank + 1), 0);
}

/* They have met, and hear of the end of others. */
static struct r2_agree *meet_and_hear(void)
{
    ops.exchanged = on_exchanged;
    ops.failed = on_failed;
    return meet();
}

static void offers(struct r2_agree *a)
{
    uint8_t data[R2_AGREE_OFFER];

    CHECK_EQ(r2_agree_offer(a, 1, data, fill(data, me, 1)), 0);
}

static void leave(struct r2_agree *a, int all)
{
    atomic_fetch_add(&sh->switched, 1);
    AWAIT(atomic_load(&sh->switched) >= all);
    r2_agree_destroy(a);
}

/* `sh->stuck` dies before it has offered anything; the others hear of it in time. */
static void one_dies(void)
{
    struct r2_agree_view view;
    struct r2_agree *a = meet_and_hear();
    int dead = atomic_load(&sh->stuck);

    if (me == dead)
        raise(SIGKILL);
    offers(a);
    AWAIT(atomic_load(&gone));
    CHECK_EQ(atomic_load(&gone), dead + 1);
    AWAIT(r2_agree_lookup(a, true, &view) == -EREMOTEIO);
    CHECK_EQ(atomic_load(&rounds), 0);
    leave(a, processes - 1);
}

PROCESSES(a_rank_dies_before_it_offers, 4)
{
    atomic_store(&sh->stuck, processes - 1);
    one_dies();
}

/* One that is stopped for several seconds is awaited, and so is one that nothing reaches. */
PROCESSES(a_stopped_rank_is_awaited, 3)
{
    struct r2_agree *a = meet_and_hear();

    if (me == 1)
        raise(SIGSTOP);
    offers(a);
    if (me == 0) {
        STAYS_MS(4000, atomic_load(&gone) == 0);
        AWAIT((kill(sh->pids[1], SIGCONT), atomic_load(&rounds) == 1)); /* it may stop late */
    }
    AWAIT(atomic_load(&rounds) == 1);
    CHECK_EQ(atomic_load(&gone), 0);
    leave(a, processes);
}

PROCESSES(a_rank_without_power_is_awaited, 3)
{
    struct r2_agree *a = meet_and_hear();

    if (me == 2) {
        lose_power();
        AWAIT(atomic_load(&sh->switched) >= processes - 1);
        return;
    }
    offers(a);
    STAYS_MS(4000, atomic_load(&gone) == 0);
    leave(a, processes - 1);
}

/* A process that ends while nobody awaits its offer is not said to be gone: a rank, then the
 * leader. */
PROCESSES(nobody_is_gone_where_the_leader_has_invited, 3)
{
    struct r2_agree *a;

    ops.invited = on_invited;
    a = meet_and_hear();
    if (me == 0)
        CHECK_EQ(r2_agree_invite(a), 0);
    AWAIT(atomic_load(&invitations));
    atomic_fetch_add(&sh->ready, 1);
    AWAIT(atomic_load(&sh->ready) >= 2 * processes);
    if (me == 1)
        return;
    offers(a);
    STAYS_MS(me ? 6000 : 3000, atomic_load(&gone) == 0);
    if (me)
        r2_agree_destroy(a);
}

TEST(the_leader_dies_before_it_offers)
{
    run_processes(3, one_dies);
}
