/* Slow NICs, over real sockets on loopback between two processes (rung 3). Either end knows that
 * they are what is waited for, the receiver by what the sender marks. The thread that polls does
 * there what I/O threads would be woken for. With one process at both ends the sender alone would
 * do. The NICs are slow by a fault; what that saves on real ones is for tests/bench/cost.py to
 * say. */
#define _GNU_SOURCE
#include <limits.h>

#include "io/fault.h"
#include "io/pause.h"
#include "naps.h"
#include "two_bed.h"

#define LEN (1u << 20)
#define AHEAD 8
#define MESSAGES 100
#define CHUNKS (int)(MESSAGES * (LEN / (64 * 1024)))
#define ROUNDS 4
#define NOMINAL_NS ((uint64_t)MESSAGES * LEN * R2_NS_PER_S / (2 * RATE))
#define THREADS 3
#define LOOK_NS (2 * R2_NS_PER_MS) /* of a thread that is stood in for */
#define RATE 100000000             /* bytes/s of each NIC */

static uint8_t data[AHEAD][LEN];

static struct r2_req *post(bool sender, int i)
{
    struct r2_req *req = NULL;
    uint8_t *at = data[i % AHEAD];

    CHECK_EQ(sender ? r2_engine_isend(tx, at, LEN, 0, NULL, &req)
                    : r2_engine_irecv(rx, at, LEN, 0, NULL, &req),
             0);
    CHECK(req);
    return req;
}

/* Polls as NCCL does. Looks that found NICs limit, per mille. */
static unsigned carry(bool sender)
{
    uint64_t looks = 0, limited = 0, until = r2_now_ns() + 40 * R2_NS_PER_S;
    struct r2_req *reqs[AHEAD];

    for (int i = 0; i < AHEAD; i++)
        reqs[i] = post(sender, i);
    for (int i = 0; i < MESSAGES; i++) {
        for (int done = 0; !done; looks++) {
            CHECK_EQ(r2_engine_test(reqs[i % AHEAD], &done, NULL), 0);
            limited += r2_pause_limited(r2_now_ns());
            CHECK_MSG(r2_now_ns() < until, "message %d of %d", i, MESSAGES);
        }
        if (i + AHEAD < MESSAGES)
            reqs[i % AHEAD] = post(sender, i + AHEAD);
    }
    return (unsigned)(limited * 1000 / looks);
}

/* A machine that takes the caller's core away makes the I/O threads wake, so one round must do. The
 * sender's wake for the fault's timer. */
static void run_one(bool sender)
{
    struct r2_fault fault = {.kind = R2_SEG_FAULT_SLOW, .tx = true, .rate = RATE};
    unsigned limited = 0;
    long fewest = LONG_MAX;

    two_meet(sender);
    for (int nic = 0; sender && nic < 2; nic++)
        r2_fault_set(nic, &fault);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t from = r2_now_ns(), took;
        long slept = naps();
        unsigned one = carry(sender);

        took = r2_now_ns() - from;
        took = took < NOMINAL_NS ? took : NOMINAL_NS;
        slept = naps() - slept - THREADS * (long)(took / LOOK_NS);
        fewest = slept < fewest ? slept : fewest;
        limited = one > limited ? one : limited;
    }
    CHECK_MSG(limited >= 50, "%s: in %u of 1000 looks slow NICs were what was waited for",
              sender ? "sender" : "receiver", limited);
    CHECK_MSG(sender || fewest < CHUNKS / 4,
              "I/O threads woke %ld times for %d chunks, without looks", fewest, CHUNKS);
    atomic_fetch_add(&sh->over, 1);
    AWAIT(atomic_load(&sh->over) == 2);
    two_part(sender);
}

TEST(both_ends_know)
{
    two_processes(run_one);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_IO_THREADS", "3", 1);
    setenv("R2CCL_LANES", "8", 1); /* the fault holds back a chunk of each: more than a window */
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv);
}
