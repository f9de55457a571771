/* A completion of a control message that never comes, where the job sends nothing that would show
 * it (verbs_bed.h says what this rung cannot prove): heartbeats follow it, and whoever waits for it
 * is not left waiting. */
#include "verbs_bed.h"

#define SIZE (64 * 1024)
#define CTRL_TX 1 /* enum r2_wr_kind: the end of a control send, and an arrival */
#define CTRL_RX 2

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct r2_mr *out_mr, *in_mr;

static void lose(int kind)
{
    char text[32];

    for (int dev = 0; dev < 2; dev++) { /* whichever carries it */
        snprintf(text, sizeof(text), "!lose fv%d %d", dev, kind);
        bed_script(text);
    }
}

/* One message, of which a completion of that kind gets lost after the receive is known to the
 * sender, and then silence. */
static void one_message(size_t size, int kind)
{
    struct r2_req *recv_req = NULL, *send_req = NULL;

    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251);
    memset(in, 0xdb, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, size, 0, in_mr, &recv_req), 0);
    bed_ms(50); /* it is cleared to send */
    lose(kind);
    CHECK_EQ(r2_engine_isend(bed.tx, out, size, 0, out_mr, &send_req), 0);
    CHECK(recv_req && send_req);
    CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send_req, BED_WAIT_MS), 1);
    lose(0);
    CHECK_MEM(in, out, size);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    bed_close(&bed);
}

/* The receiver waits for its acknowledgement to have arrived. */
static void test_acknowledgement_sent(void)
{
    one_message(SIZE, CTRL_TX);
}

/* The sender waits for the acknowledgement. */
static void test_acknowledgement_arrived(void)
{
    one_message(SIZE, CTRL_RX);
}

/* The receiver waits for the message. */
static void test_small_message_arrived(void)
{
    one_message(8, CTRL_RX);
}

/* More small messages than a queue has slots, of which only some are signalled; a completion of
 * those is lost in between. */
static void test_small_messages(void)
{
    struct r2_req *recv_req, *send_req;

    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    for (uint32_t i = 0; i < 200; i++) {
        memcpy(out, &i, sizeof(i));
        if (i == 60 || i == 120)
            lose(CTRL_TX);
        CHECK_EQ(r2_engine_irecv(bed.rx, in, 8, 0, in_mr, &recv_req), 0);
        CHECK_EQ(r2_engine_isend(bed.tx, out, 8, 0, out_mr, &send_req), 0);
        CHECK_EQ(bed_test(recv_req, BED_WAIT_MS), 1);
        CHECK_EQ(bed_test(send_req, BED_WAIT_MS), 1);
        CHECK_MEM(in, out, 8);
    }
    lose(0);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    bed_close(&bed);
}

static const struct check_test tests[] = {
    {"acknowledgement_sent", test_acknowledgement_sent},
    {"acknowledgement_arrived", test_acknowledgement_arrived},
    {"small_message_arrived", test_small_message_arrived},
    {"small_messages", test_small_messages},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
