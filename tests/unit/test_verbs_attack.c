/* Two things that go wrong at once, over the stand-in for libibverbs (rung 3; verbs_bed.h says what
 * it cannot prove). Devices go while what the first one lost travels again. A registration fails
 * while the memory's messages are under way. A write is still in the network when its memory is
 * deregistered. The commands of devices hang from the beginning. */
#include <pthread.h>

#include "verbs_bed.h"

#define SIZE (256 * 1024)

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct r2_mr *out_mr, *in_mr;

static void fill(int turn)
{
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251 + (size_t)turn * 31);
    memset(in, 0xdb, SIZE);
}

static void begin(void)
{
    bed_open(&bed, 2);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    fill(0);
}

static void finish(void)
{
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    bed_close(&bed);
}

static void post(struct r2_req **send, struct r2_req **recv)
{
    *send = *recv = NULL;
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, in_mr, recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, out_mr, send), 0);
    CHECK(*send && *recv);
}

static void done(struct r2_req *send, struct r2_req *recv)
{
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
}

/* The application uses its memory again; then everything that was caught arrives. */
static void nothing_lands(void)
{
    memset(in, 0x5a, SIZE);
    bed_script("release");
    bed_ms(100);
    for (size_t i = 0; i < SIZE; i++)
        CHECK_MSG(in[i] == 0x5a, "written at %zu after the memory was given back", i);
}

static void command(const char *verb, int dev, const char *rest)
{
    char text[64];

    snprintf(text, sizeof(text), "!%s fv%d %s", verb, dev, rest);
    bed_script(text);
}

/* A device goes with chunks of a message under way, and so does the other while it carries them
 * again: what is missing then comes by sockets, and neither device's writes land any more. Both
 * come back and are used. */
TEST(removal_during_replay)
{
    struct r2_req *send, *recv;
    uint64_t replayed, chunks;
    int first, second;

    begin();
    replayed = bed_counted(&r2_eng.n->replayed_bytes);
    chunks = bed_counted(&r2_eng.n->replayed_chunks);
    bed_script("network 32768");
    post(&send, &recv);
    bed_until_script(1);
    first = bed_script("where") - 10;
    bed_ms(200); /* the other device's chunks are through: what it writes next is a replay */
    bed_script("network 32768");
    command("remove", first, "");
    bed_until_script(1);
    second = bed_script("where") - 10;
    CHECK(first != second && first + second == 1);
    command("remove", second, "");
    done(send, recv);
    replayed = bed_counted(&r2_eng.n->replayed_bytes) - replayed;
    chunks = bed_counted(&r2_eng.n->replayed_chunks) - chunks;
    CHECK_GE(replayed, 2 * 32768);
    CHECK_GE(chunks, 2);
    CHECK_LE(replayed, chunks * 64 * 1024); /* none is larger (bed_open) */
    nothing_lands();
    command("restore", first, "");
    command("restore", second, "");
    for (int nic = 0; nic < 2; nic++)
        r2_nicstate_forgive(nic, r2_now_ns());
    bed_until_paths(bed.tx, 2);
    fill(1);
    post(&send, &recv);
    done(send, recv);
    finish();
}

static void one_port(int dev, const char *state)
{
    command("port", dev, state);
}

/* fv1 is still at it when the message begins, and fails then; fv0 carries the message and loses its
 * port in the middle. fv1 is no path for this memory, so sockets carry the rest. */
static void failing_registration(bool of_sender)
{
    struct r2_req *send, *recv;
    uint32_t keys[R2_WIRE_MAX_NICS] = {0};
    struct r2_mr **late = of_sender ? &out_mr : &in_mr;
    uint64_t from;

    bed_open(&bed, 2);
    fill(2);
    CHECK_EQ(r2_engine_reg(of_sender ? bed.rx : bed.tx, of_sender ? in : out, SIZE, 1,
                           of_sender ? &in_mr : &out_mr),
             0);
    bed_script("!hang fv1 1");
    bed_script("!refuse fv1 reg 1");
    CHECK_EQ(r2_engine_reg(of_sender ? bed.tx : bed.rx, of_sender ? out : in, SIZE, 1, late), 0);
    r2_eng.ops->remote_keys((*late)->keys, keys);
    CHECK(keys[0] && !keys[1]);
    from = bed_journal();
    bed_script("network 32768");
    post(&send, &recv);
    bed_until_script(1);
    CHECK_EQ(bed_script("where"), 10);
    bed_script("!hang fv1 0");
    AWAIT(!bed_script("hung fv1"));
    one_port(0, "1 down");
    done(send, recv);
    /* Nobody tried there and ended a path that others use. */
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, "127.0.2.1", "127.0.2.1", NULL), 0);
    nothing_lands();
    r2_eng.ops->remote_keys((*late)->keys, keys);
    CHECK_EQ(keys[1], 0);
    one_port(0, "1 up");
    r2_nicstate_forgive(0, r2_now_ns());
    bed_until_paths(bed.tx, 2);
    fill(3);
    post(&send, &recv);
    done(send, recv);
    finish();
}

TEST(failing_registration_of_receiver)
{
    failing_registration(false);
}

TEST(failing_registration_of_sender)
{
    failing_registration(true);
}

/* A write is in the network, for as long as you like: deregMr comes back in bounded time all the
 * same. The write finds neither a queue pair nor a key, even if others have the range registered.
 * Their messages go on. */
TEST(write_across_dereg)
{
    struct r2_req *send, *recv;
    struct r2_mr *same;
    uint64_t begun;

    r2_revoke_wait_ns = 200 * R2_NS_PER_MS;
    begin();
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &same), 0);
    bed_script("network 32768");
    post(&send, &recv);
    bed_until_script(1);
    begun = r2_now_ns();
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_LT(r2_now_ns() - begun, 3 * R2_NS_PER_S);
    CHECK_EQ(bed_test(recv, 0), -ECANCELED);
    nothing_lands();
    CHECK_EQ(bed_script(""), 1);
    CHECK_LT(bed_test(send, BED_WAIT_MS), 0);
    in_mr = same;
    finish();
}

/* ... and the same for the sender's memory. When deregMr has returned, its NICs do not send what
 * they have been asked to send and have not sent yet. Others keep the range registered. */
TEST(read_across_dereg)
{
    struct r2_req *send = NULL, *recv = NULL;
    struct r2_mr *same;
    uint64_t begun;

    begin();
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &same), 0);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, in_mr, &recv), 0);
    bed_until_cleared(bed.tx);
    one_port(0, "1 blackhole");
    one_port(1, "1 blackhole");
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, out_mr, &send), 0);
    CHECK(recv && send);
    bed_ms(10);
    begun = r2_now_ns();
    CHECK_EQ(r2_engine_dereg(bed.tx, out_mr), 0);
    CHECK_LT(r2_now_ns() - begun, 3 * R2_NS_PER_S);
    CHECK_EQ(bed_test(send, 0), -ECANCELED);
    memset(out, 0xdb, SIZE); /* as it is at the receiver's */
    memset(out + 1000, 0x11, 24);
    one_port(0, "1 up");
    one_port(1, "1 up");
    CHECK_LT(bed_test(recv, BED_WAIT_MS), 0);
    bed_ms(200); /* for what is still on its way */
    for (size_t i = 1000; i < 1024; i++)
        CHECK_MSG(in[i] == 0xdb, "byte %zu was read after deregMr had returned", i);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed.tx, same), 0);
    bed_close(&bed);
}
