/* A completion of a control message that never comes, where the job sends nothing that would show
 * it (rung 3; verbs_bed.h says what it cannot prove): heartbeats follow it, and whoever waits for
 * it is not left waiting. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (64 * 1024)
#define CTRL_TX 1 /* enum r2_wr_kind: the end of a control send, and an arrival */
#define CTRL_RX 2
#define BULK_TX 3 /* the end of a chunk, and its arrival */
#define BULK_RX 4
#define STALLED "requests neither completed nor failed"
#define COUNT 7 /* the end of a count behind the last one */

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

/* A NIC that has flapped, here or in the test before, would be left out for long. It may flap once
 * more meanwhile. */
static void both_again(void)
{
    bool both = false;

    for (int turn = 0; turn < 20 && !both; turn++) {
        for (int nic = 0; nic < 2; nic++)
            r2_nicstate_forgive(nic, r2_now_ns());
        both = WITHIN_MS(2000, bed_paths(bed.tx) >= 2);
    }
    CHECK(both);
}

static void open_both(void)
{
    bed_open(&bed, 0);
    both_again();
}

/* One message, of which a completion of that kind gets lost after the receive is known to the
 * sender, and then silence. */
static void one_message(size_t size, int kind)
{
    struct r2_req *recv_req = NULL, *send_req = NULL;

    open_both();
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251);
    memset(in, 0xdb, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, size, 0, in_mr, &recv_req), 0);
    bed_until_cleared(bed.tx);
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
TEST(acknowledgement_sent)
{
    one_message(SIZE, CTRL_TX);
}

/* The sender waits for the acknowledgement. */
TEST(acknowledgement_arrived)
{
    one_message(SIZE, CTRL_RX);
}

/* The receiver waits for the message. */
TEST(small_message_arrived)
{
    one_message(8, CTRL_RX);
}

/* More small messages than a queue has slots, of which only some are signalled; a completion of
 * those is lost in between. */
TEST(small_messages)
{
    struct r2_req *recv_req, *send_req;

    open_both();
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

/* Each NIC's first count since its path was opened is a lost one; a later count still says that the
 * end of the only chunk behind it never came. */
TEST(count_and_chunk)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    uint64_t from;

    open_both();
    lose(COUNT);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 0);
    bed_ms(2000); /* of test chunks and of this one */
    from = bed_journal();
    lose(BULK_TX);
    bed_message(&bed, &memory, 1);
    lose(0);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL), 1);
    bed_message(&bed, &memory, 2);
    bed_finish(&bed, &memory);
}

static void lose_all(int kind)
{
    char text[32];

    for (int dev = 0; dev < 2; dev++) {
        snprintf(text, sizeof(text), "!lose fv%d %d 1000", dev, kind);
        bed_script(text);
    }
}

/* A receive is posted when a message before it has come and is counted. The journal's head. */
static uint64_t receive_after_one(struct bed_memory *memory, struct r2_req **recv)
{
    uint64_t from;

    open_both();
    bed_register(&bed, memory);
    bed_message(&bed, memory, 0);
    bed_ms(700);
    from = bed_journal();
    memset(in, 0xdb, SIZE);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, memory->in_mr, recv), 0);
    bed_until_cleared(bed.tx);
    return from;
}

/* A message whose chunk and the first count behind it leave no trace at one end, and then silence:
 * a later count ends the path, and the message comes over again. */
static void count_of_that_chunk(int kind, int then)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    struct r2_req *send = NULL, *recv = NULL;
    uint64_t from = receive_after_one(&memory, &recv);

    if (then) { /* of chunks one is lost, and later counts */
        lose(kind);
    } else {
        lose_all(kind);
    }
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, memory.out_mr, &send), 0);
    bed_ms(200);
    if (then)
        lose_all(then);
    bed_ms(750); /* the first count has gone */
    lose(0);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, "a completion never came"), 1);
    bed_finish(&bed, &memory);
}

TEST(count_of_that_chunk_sent)
{
    count_of_that_chunk(BULK_TX, COUNT);
}

TEST(count_of_that_chunk_arrived)
{
    count_of_that_chunk(BULK_RX, 0);
}

/* Both ends of the path between the first NICs have proven it. */
static bool carries(void)
{
    struct r2_peer *p = bed.tx->peer;
    const struct r2_path *path;
    bool yes;

    r2_peer_lock(p);
    path = r2_path_find(p, 0, 0, R2_VIA_VERBS);
    yes = path && r2_path_may(path) >= R2_MAY_STAND_BY;
    r2_peer_unlock(p);
    return yes;
}

/* The number of the control queue pair of that end of it; 0: none. */
static uint32_t control_of(bool initiator)
{
    uint32_t number = 0;
    struct r2_list *n;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (!ep->params.local_nic && !ep->params.remote_nic && ep->params.initiator == initiator &&
            atomic_load(&ep->open) && !atomic_load(&ep->failed) && !atomic_load(&ep->dead))
            number = ep->ctrl.qp->qp_num;
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    return number;
}

/* Nothing of one path's control queue pair arrives any more, while its heartbeats and chunks do:
 * its retries end the path (`mute`), or that it never gives up does (`freeze`); what it carried
 * goes over the other one, and it is made anew. */
static void control_alone(const char *how, bool initiator, const char *cause)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    uint64_t from, until;
    char text[32];
    int turn = 0;

    open_both();
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, turn++);
    from = bed_journal();
    AWAIT(carries() && control_of(initiator));
    snprintf(text, sizeof(text), "%s %u", how, control_of(initiator));
    bed_script(text);
    until = r2_now_ns() + BED_WAIT_MS * R2_NS_PER_MS;
    while (!bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL) && r2_now_ns() < until) {
        memory.size = turn % 2 ? 8 : SIZE;
        bed_message(&bed, &memory, turn++);
    }
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, cause), 1);
    CHECK_EQ(bed_told(from, R2_EV_NIC_DOWN, NULL, NULL, NULL), 0);
    both_again();
    memory.size = SIZE;
    bed_message(&bed, &memory, turn);
    bed_finish(&bed, &memory);
}

TEST(control_of_the_sender)
{
    control_alone("mute", true, NULL);
}

TEST(control_of_the_receiver)
{
    control_alone("mute", false, NULL);
}

TEST(frozen_control_of_the_sender)
{
    control_alone("freeze", true, STALLED);
}

TEST(frozen_control_of_the_receiver)
{
    control_alone("freeze", false, STALLED);
}

/* More completions in a row are lost than counts are sent. */
TEST(chunk_and_its_counts)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    struct r2_req *send = NULL, *recv = NULL;
    uint64_t from = receive_after_one(&memory, &recv);

    lose(BULK_TX);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, memory.out_mr, &send), 0);
    bed_ms(200);
    lose_all(COUNT);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, STALLED), 1);
    lose(0);
    bed_finish(&bed, &memory);
}

/* The NIC takes a chunk's bytes, and not the word that they are there: nothing of it is done, and
 * it goes again by another path. */
TEST(half_posted)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    uint64_t from;

    open_both();
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 0);
    from = bed_journal();
    bed_script("!refuse fv0 chain 1");
    bed_script("!refuse fv1 chain 1");
    for (int turn = 1; turn < 20; turn++)
        bed_message(&bed, &memory, turn);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, "connection error"), 1); /* at once */
    bed_script("!refuse fv0 chain 0");
    bed_script("!refuse fv1 chain 0");
    both_again();
    bed_message(&bed, &memory, 20);
    bed_finish(&bed, &memory);
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_TIMEOUT", "14", 1); /* 0.54 s with all retries */
    return check_main(argc, argv);
}

#endif
