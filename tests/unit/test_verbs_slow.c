/* Chunks and counts of the only path to a peer (rung 3; verbs_bed.h says what it cannot prove):
 * what is slow is waited for, and a receive is not lost for long. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (64 * 1024)
#define STALLED "requests neither completed nor failed"

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;

/* The queue pair for chunks at that end of the open path; 0: none. */
static uint32_t bulk_of(bool initiator)
{
    uint32_t number = 0;
    struct r2_list *n;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (ep->params.initiator == initiator && atomic_load(&ep->open) &&
            !atomic_load(&ep->failed) && !atomic_load(&ep->dead))
            number = ep->bulk[0].qp->qp_num;
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    return number;
}

/* It has one by now. */
static uint32_t until_bulk(bool initiator)
{
    AWAIT(bulk_of(initiator));
    return bulk_of(initiator);
}

static void until_told(uint64_t from, enum r2_seg_event event)
{
    AWAIT(bed_told(from, event, NULL, NULL, NULL));
}

/* On the only path a chunk takes longer than a device may take for a packet, yet it moves: it is
 * waited for. One that does not move ends the path all the same. */
TEST(slow_or_frozen_and_alone)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    struct r2_req *send = NULL, *recv = NULL;
    char text[64];
    uint64_t from;

    bed_open(&bed, 1);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 0);
    from = bed_journal();
    snprintf(text, sizeof(text), "slow %u %d", until_bulk(true), SIZE * 10 / 35); /* 3.5 s */
    bed_script(text);
    bed_message(&bed, &memory, 1);
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL), 0);
    snprintf(text, sizeof(text), "freeze %u", until_bulk(true));
    bed_script(text);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, memory.in_mr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, memory.out_mr, &send), 0);
    until_told(from, R2_EV_PATH_DOWN);
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, STALLED), 1);
    r2_nicstate_forgive(0, r2_now_ns());
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(in, out, SIZE);
    bed_finish(&bed, &memory);
}

/* The arrival of a count behind a message gets lost: nothing is missing, and its receive is posted
 * again with the next arrival. */
TEST(count_arrived)
{
    struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
    uint32_t qp;
    uint64_t from;
    char text[32];

    bed_open(&bed, 1);
    bed_register(&bed, &memory);
    bed_message(&bed, &memory, 0);
    from = bed_journal();
    qp = until_bulk(false);
    snprintf(text, sizeof(text), "receives %u", qp);
    bed_script("!lose fv0 4"); /* R2_WR_BULK_RX */
    AWAIT(bed_script(text) == R2_BULK_RX - 1);
    bed_message(&bed, &memory, 1);
    AWAIT(bed_script(text) == R2_BULK_RX);
    bed_message(&bed, &memory, 2);
    CHECK_EQ(bulk_of(false), qp);
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL), 0);
    bed_finish(&bed, &memory);
}

int main(int argc, char **argv)
{
    bed_nics = "127.0.1.1";
    setenv("NCCL_IB_TIMEOUT", "14", 1); /* 0.54 s with all retries, four times that with patience */
    return check_main(argc, argv);
}

#endif
