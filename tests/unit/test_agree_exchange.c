/* All ranks offer something and get what all others offered. Rung 3: processes over loopback. */
#define _GNU_SOURCE
#include "agree_ranks.h"

#include <errno.h>

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

static void one(void)
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

static void on_invited(void *user)
{
    (void)user;
    atomic_fetch_add(&invitations, 1);
}

/* The leader alone knows that there is to be an exchange. */
static void one_invited(void)
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

TEST(all_get_all_offers)
{
    run_processes(4, one);
}

TEST(two_ranks)
{
    run_processes(2, one);
}

TEST(the_leader_invites)
{
    run_processes(3, one_invited);
}
