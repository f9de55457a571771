/* When a queue pair that neither completes nor fails is held to have failed (stalls.c), by itself:
 * an endpoint without a device, whose clock and whose peer's word are the test's. What it looks
 * like from above: test_verbs_lost, test_verbs_lanes. */
#include "check.h"

#ifdef R2_HAVE_VERBS

#include <errno.h>
#include <stdlib.h>

#include "engine/internal.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"

#define STEP (100 * R2_NS_PER_MS)
#define PATIENCE (4 * R2_NS_PER_S) /* more than it takes with the timeout of main() */
#define LONG (600 * R2_NS_PER_S)

static struct r2_hca hca = {.name = "none"};
static struct r2_ep *ep;
static uint64_t now;

static void open_end(bool initiator)
{
    ep = calloc(1, sizeof(*ep));
    CHECK(ep);
    r2_eng.n_nics = 1; /* which it is said of */
    ep->params.initiator = initiator;
    ep->n_bulk = 2;
    ep->hca = &hca;
    ep->memory = calloc(1, r2_v_memory_len(ep));
    CHECK(ep->memory);
    now = R2_NS_PER_S;
}

static void close_end(void)
{
    free(ep->memory);
    free(ep);
}

static uint32_t word(int which)
{
    return ((const uint32_t *)(const void *)r2_v_beat(ep, 0))[which];
}

/* What the peer's heartbeat writes here. */
static void peer_says(uint32_t asks, uint32_t answers)
{
    uint32_t *at = (uint32_t *)(void *)r2_v_beat(ep, 1);

    at[0] = asks;
    at[1] = answers;
}

/* Looks until the endpoint ends or the time is over. */
static int look_for(uint64_t time, uint64_t step)
{
    int rc = 0;

    for (uint64_t end = now + time; now < end && rc == 0; now += step) {
        rc = r2_stalls_look(ep, now);
        r2_stalls_word(ep);
    }
    return rc;
}

static void chunk_posted(int q)
{
    ep->bulk[q].tx_posted++;
}

static void chunk_ended(int q)
{
    ep->bulk[q].tx_done++;
    ep->bulk[q].ended++;
}

/* It stands still, or is of a build that knows no questions. */
static void test_unanswered(void)
{
    open_end(true);
    chunk_posted(1);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 1);
    peer_says(0, word(0));
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0); /* a device may take its time from now on */
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    CHECK_EQ(strcmp(ep->cause, "requests neither completed nor failed"), 0);
    close_end();
}

/* An answer to an earlier question says nothing about now. */
static void test_old_answer(void)
{
    open_end(true);
    chunk_posted(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    CHECK_EQ(word(0), 1);
    peer_says(0, 1);
    chunk_ended(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    chunk_posted(0);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 2);
    peer_says(0, 2);
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* Something completes now and then, if only a count. */
static void test_slow(void)
{
    open_end(true);
    for (int i = 0; i < 3; i++)
        chunk_posted(0);
    for (int i = 0; i < 30; i++) {
        CHECK_EQ(look_for(2 * R2_NS_PER_S, STEP), 0);
        peer_says(0, word(0));
        ep->bulk[0].ended++;
    }
    CHECK_EQ(look_for(PATIENCE, STEP), 0); /* asked, and answered by the next word */
    peer_says(0, word(0));
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

static void test_idle(void)
{
    open_end(true);
    chunk_posted(0);
    chunk_ended(0);
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 0);
    close_end();
}

/* We were stopped ourselves: what passed meanwhile is no waiting. */
static void test_observer_stopped(void)
{
    open_end(true);
    chunk_posted(0);
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(2 * STEP, STEP), 0);
    now += LONG;
    CHECK_EQ(look_for(STEP, STEP), 0);
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* Control frames whose ends nobody asked for complete with others only. */
static void test_control(void)
{
    open_end(false);
    ep->ctrl.tx_posted = 3;
    CHECK_EQ(look_for(LONG, STEP), 0);
    CHECK_EQ(word(0), 0);
    ep->ctrl_signals = 1u << 3;
    ep->ctrl.tx_posted = 4;
    CHECK_EQ(look_for(R2_NS_PER_S, STEP), 0);
    peer_says(0, word(0));
    CHECK_EQ(look_for(PATIENCE, STEP), -ETIMEDOUT);
    close_end();
}

/* An answer is given only after all that had come was taken. */
static void test_answering(void)
{
    open_end(false);
    peer_says(7, 0);
    r2_stalls_empty(ep); /* before it was read */
    r2_stalls_word(ep);
    CHECK_EQ(word(1), 0);
    r2_stalls_word(ep); /* read, and nothing polled since */
    CHECK_EQ(word(1), 0);
    peer_says(8, 0);
    r2_stalls_empty(ep);
    r2_stalls_word(ep);
    CHECK_EQ(word(1), 7);
    close_end();
}

static const struct check_test tests[] = {
    {"unanswered", test_unanswered},
    {"old_answer", test_old_answer},
    {"slow", test_slow},
    {"idle", test_idle},
    {"observer_stopped", test_observer_stopped},
    {"control", test_control},
    {"answering", test_answering},
    {0},
};

int main(int argc, char **argv)
{
    setenv("NCCL_IB_TIMEOUT", "14", 1); /* 0.54 s with all retries, four times that with patience */
    return check_main(argc, argv, tests);
}

#else

int main(void)
{
    return CHECK_SKIPPED;
}

#endif
