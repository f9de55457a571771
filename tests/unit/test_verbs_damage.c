/* Bytes that change on their way, and nobody says so: what verify mode is for (invariant "a wrong
 * result is worse than an abort"). The stand-in changes one (rung 3; verbs_bed.h says what it
 * cannot prove). What a send carried is looked at before it is placed, and comes again over a new
 * path; what a write carried is in place when it is looked at, where its reader may have seen it,
 * so its connection ends. */
#include "verbs_bed.h"

#define SIZE (256 * 1024)
#define SMALL 2000

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct r2_mr *out_mr, *in_mr;

static void begin(void)
{
    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251);
    memset(in, 0, SIZE);
}

static void finish(void)
{
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    bed_close(&bed);
}

static void post(size_t size, struct r2_req **send, struct r2_req **recv)
{
    *send = *recv = NULL;
    CHECK_EQ(r2_engine_irecv(bed.rx, in, size, 0, in_mr, recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, size, 0, out_mr, send), 0);
    CHECK(*send && *recv);
}

static void message(size_t size)
{
    struct r2_req *send, *recv;

    post(size, &send, &recv);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, size);
    memset(in, 0, size);
}

/* So often, and each time with the NICs. */
static void blamed(uint64_t from, const char *cause, int times)
{
    static const char *const nics[] = {"127.0.1.1", "127.0.2.1"};
    int n = 0;

    CHECK_EQ(bed_told(from, R2_EV_CRC_ERROR, NULL, NULL, cause), times);
    for (int i = 0; i < 4; i++)
        n += bed_told(from, R2_EV_CRC_ERROR, nics[i % 2], nics[i / 2], cause);
    CHECK_EQ(n, times);
}

/* A chunk: the message is not done, both sides are told within a second, another connection over
 * the same NICs goes on. */
TEST(chunk)
{
    const char *why = "a chunk arrived damaged (CRC32C)";
    uint64_t bad, from, begun;
    struct r2_req *send, *recv;
    struct bed other;
    size_t wrong = 0;
    int rc;

    bed_open(&other, 2);
    begin();
    message(SIZE);
    bad = bed_counted(&r2_eng.n->crc_errors);
    from = bed_journal();
    bed_script("damage write 32768");
    post(SIZE, &send, &recv);
    bed_until_script(2);
    begun = r2_now_ns();
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), -EBADMSG);
    rc = bed_test(send, BED_WAIT_MS);
    CHECK_MSG(rc < 0, "the sender was told %d", rc);
    CHECK_LT(r2_now_ns() - begun, R2_NS_PER_S);
    CHECK_EQ(bed_counted(&r2_eng.n->crc_errors) - bad, 1);
    blamed(from, "chunk", 1);
    AWAIT(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, why));
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, why), 1);
    finish();
    for (size_t i = 1; i < SIZE - 1; i++)
        wrong += in[i] == (out[i] ^ 0x10) && out[i - 1] && in[i - 1] == out[i - 1] &&
                 in[i + 1] == out[i + 1];
    CHECK_EQ(wrong, 1); /* or nothing was damaged */
    bed = other;
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    bed_until_paths(bed.tx, 2); /* its path was made anew */
    message(SIZE);
    finish();
}

/* A small message: not placed, and here again over another generation or path. */
TEST(small_message)
{
    uint64_t bad, failed, from;

    begin();
    message(SMALL);
    bad = bed_counted(&r2_eng.n->crc_errors);
    failed = bed_counted(&r2_eng.n->path_failures);
    from = bed_journal();
    for (int i = 1; i <= 3; i++) {
        bed_script("damage send 1500");
        message(SMALL);
        CHECK_EQ(bed_script(""), 2);
        CHECK_EQ(bed_counted(&r2_eng.n->crc_errors) - bad, (uint64_t)i);
        bed_until_paths(bed.tx, 2);
    }
    blamed(from, "small message", 3);
    CHECK_GE(bed_counted(&r2_eng.n->path_failures) - failed, 3);
    message(SMALL);
    finish();
}

static bool all_proven(void)
{
    struct r2_peer *p = bed.tx->peer;
    bool proven;

    r2_peer_lock(p);
    proven =
        !R2_ANY_PATH(path, p, path->transport == R2_VIA_VERBS && path->state != R2_PATH_PROVEN);
    r2_peer_unlock(p);
    return proven;
}

/* What says which chunk was written, here its offset: nothing is believed of it. The chunk comes
 * again. */
TEST(head_of_a_chunk)
{
    uint64_t bad, failed;

    begin();
    message(SIZE);
    bad = bed_counted(&r2_eng.n->crc_errors);
    failed = bed_counted(&r2_eng.n->path_failures);
    for (int i = 1; i <= 3; i++) {
        AWAIT(all_proven()); /* else it may be the head of a test chunk */
        bed_script("damage head 16 25");
        message(SIZE);
        CHECK_EQ(bed_script(""), 2);
        /* A copy of the chunk may have come over the other path before. */
        AWAIT(bed_counted(&r2_eng.n->path_failures) - failed >= (uint64_t)i);
    }
    CHECK_EQ(bed_counted(&r2_eng.n->crc_errors), bad);
    message(SIZE);
    finish();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_VERIFY", "1", 1);
    setenv("R2CCL_DAMP", "0", 1); /* all come back at once */
    return check_main(argc, argv);
}
