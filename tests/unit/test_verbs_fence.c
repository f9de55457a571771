/* What the fence is for: a write that is on its way when its path fails, and lands long after. The
 * stand-in catches one, and lets it land when the message is done, if it is done before (rung 3;
 * verbs_bed.h says what it cannot prove). */
#include "verbs_bed.h"

#define SIZE (256 * 1024)
#define WRONG_MS 400 /* what an engine without a fence has to show itself in */

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct r2_mr *out_mr, *in_mr;
static struct r2_req *send_req, *recv_req;

static void begin(void)
{
    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251);
    memset(in, 0xdb, SIZE);
}

/* A message whose first large write is caught as `how` says, and whose path then fails. */
static void fail_with(const char *how)
{
    bed_script(how);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, in_mr, &recv_req), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, out_mr, &send_req), 0);
    CHECK(send_req && recv_req);
    bed_until_script(1);
    bed_script("break");
}

/* The application has its buffer back and uses it; then the write arrives. */
static void reuse_and_land(void)
{
    CHECK_MEM(in, out, SIZE);
    memset(in, 0x5a, SIZE);
    bed_script("release");
    bed_ms(100);
    for (size_t i = 0; i < SIZE; i++)
        CHECK_MSG(in[i] == 0x5a,
                  "a write of the old generation landed at %zu after the message "
                  "was done",
                  i);
}

static void finish(void)
{
    CHECK_EQ(bed_test(send_req, BED_WAIT_MS), 1);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    bed_close(&bed);
}

/* Acknowledged, but not in memory until the queue pair has been drained: the message is not done
 * before. */
TEST(acknowledged_but_late)
{
    int done;

    begin();
    fail_with("late 32768");
    done = bed_test(recv_req, WRONG_MS);
    if (done)
        reuse_and_land();
    CHECK_EQ(done, 0);
    bed_script("release");
    bed_until_script(2);
    CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), 1);
    reuse_and_land();
    finish();
}

/* Still in the network when the message is done over another path: the queue pair is in ERR (it
 * cannot be destroyed yet) and lets nothing in. */
TEST(late_in_the_network)
{
    begin();
    bed_script("undying");
    fail_with("network 32768");
    CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), 1);
    reuse_and_land();
    CHECK_EQ(bed_script(""), 1); /* it was caught, and never let in */
    finish();
}

/* Where a queue without receives never flushes one that comes in ERR (soft-RoCE), no path waits for
 * that, which would take the drain's second. */
TEST(queues_without_receives)
{
    uint64_t begun;

    begin();
    bed_script("!chaos dry=1");
    fail_with("network 32768");
    begun = r2_now_ns();
    CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), 1);
    CHECK_LT(r2_now_ns() - begun, 800 * R2_NS_PER_MS);
    CHECK_MEM(in, out, SIZE);
    bed_script("release");
    bed_script("!chaos dry=0");
    finish();
}

/* The device neither drains nor destroys: nothing is sent again, and the job ends with an error. */
TEST(unconfirmed_is_not_assumed)
{
    int done;

    begin();
    bed_script("!refuse fv0 destroy 1000000");
    bed_script("!refuse fv1 destroy 1000000");
    bed_script("!refuse fv0 err 1000000");
    bed_script("!refuse fv1 err 1000000");
    fail_with("late 32768");
    done = bed_test(recv_req, 2000); /* the drain's second, and the time to be wrong in */
    if (done == 1)
        reuse_and_land();
    CHECK_LE(done, 0);
    if (!done)
        CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), -ETIMEDOUT);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), -ETIMEDOUT); /* nor is it said here */
    _exit(0); /* this process's devices are of no use any more */
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NO_PATH_TIMEOUT", "3s", 1);
    return check_main(argc, argv);
}
