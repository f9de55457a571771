/* A communicator ends while an operation waits for a peer: nobody goes on without the sum. Ranks
 * are processes over loopback NICs (rung 3). Every time-out that direct.c would set is over at
 * once. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>

static int over_at_once(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    (void)cond, (void)mutex, (void)until;
    return ETIMEDOUT;
}

#define pthread_cond_timedwait over_at_once
#include "../../shim/direct/direct.c"
#undef pthread_cond_timedwait

#include "direct_bed.h"

enum { COUNT = 100003, FINISHED = 1 };

static float in[COUNT];

/* Rank 1 is late; it is killed if `dies`. */
static bool dies;

static void one_ends(int rank)
{
    struct r2_direct *d = bed_join(rank);
    struct r2_direct_call call = {.in = in, .out = in, .count = COUNT, .type = FLOAT32, .op = SUM};
    uint64_t number, begun;

    (void)over_at_once;
    CHECK_EQ(bed_allreduce(d, in, in, COUNT, NULL), 0);
    bed_fill(in, rank, COUNT, 0);
    bed_together(0);
    begun = r2_now_ns();
    if (rank == 1)
        STAYS_MS(200, atomic_load(&sh->step[FINISHED]) == 0);
    if (rank == 1 && dies)
        raise(SIGKILL);
    CHECK_EQ(r2_direct_allreduce(d, &call, &number), 0);
    r2_direct_finish(d);
    atomic_fetch_add(&sh->step[FINISHED], 1);
    CHECK_LT(r2_now_ns() - begun, 20 * R2_NS_PER_S);
    CHECK_EQ(r2_direct_wait(d, number), dies ? -ECONNRESET : 0);
    if (!dies)
        bed_check(in, COUNT, 0);
    r2_direct_free(d);
}

TEST(a_late_peer_is_waited_for)
{
    bed_run(3, -1, one_ends);
}

TEST(a_dead_peer_is_not)
{
    dies = true;
    bed_run(3, 1, one_ends);
}
