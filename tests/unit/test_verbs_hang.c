/* RDMA devices whose commands hang from the beginning, at a peer that can be reached by sockets
 * (rung 3; verbs_bed.h says what it cannot prove). Each pair of NICs may take seconds to fail for
 * the first time, one after the other; sockets stand in long before R2CCL_NO_PATH_TIMEOUT, and
 * queue pairs carry the job when the devices answer. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (256 * 1024)

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};

static void message(int turn)
{
    bed_message(&bed, &memory, turn);
}

/* Sockets that carry as much as they are given, and do not only stand by. */
static int sockets(void)
{
    struct r2_peer *p = bed.tx->peer;
    int n = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++)
        n += p->paths[i]->transport == R2_VIA_TCP && r2_path_may(p->paths[i]) >= R2_MAY_STAND_BY;
    r2_peer_unlock(p);
    return n;
}

static int endpoints(void)
{
    struct r2_list *n;
    int count = 0;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps)
        count++;
    pthread_mutex_unlock(&r2_verbs.lock);
    return count;
}

TEST(from_the_beginning)
{
    struct r2_ctx *first;
    int before;

    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    bed_library();
    CHECK_EQ(r2_engine_init(&first, 1, NULL), 0); /* the devices are open now */
    bed_script("!hang fv0 2");                    /* what is asked about ports as well */
    bed_script("!hang fv1 2");
    bed_open(&bed, 0);
    CHECK_EQ(bed_paths(bed.tx), 0);
    CHECK_GT(sockets(), 0);
    bed_register(&bed, &memory);
    message(1);
    bed_ms(1500);
    before = endpoints();
    bed_ms(3500);                  /* what the devices never answer is held against nobody */
    CHECK_LE(endpoints(), before); /* no more of them wait behind the first */
    CHECK_GT(sockets(), 0);
    message(2);
    bed_script("!unhang");
    for (int nic = 0; nic < 2; nic++)
        r2_nicstate_forgive(nic, r2_now_ns());
    bed_until_paths(bed.tx, 2);
    AWAIT(!sockets());
    message(3);
    bed_finish(&bed, &memory);
    r2_engine_finalize(first);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NO_PATH_TIMEOUT", "4s", 1);
    return check_main(argc, argv);
}

#endif
