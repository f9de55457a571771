/* Whoever finds an endpoint's lock taken leaves what it wants with the holder and goes
 * (transport/verbs/ep.c): every holder has to look before it leaves for good, or a frame waits for
 * the next heartbeat. Two threads meet at the lock as often as time allows; heartbeats, which would
 * hide what was forgotten, are minutes apart (rung 3; verbs_bed.h says what it cannot prove). */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include <pthread.h>

#include "transport/verbs/verbs.h"

#define MEET_MS 2000   /* of meetings */
#define FORGOTTEN 1000 /* ms for a thread that holds the lock or is about to, and has no core */

static struct bed bed;
static struct r2_ep *ep;
static void (*holds)(void); /* takes the lock for something else */
static pthread_barrier_t gate;
static atomic_bool over;

static void take_endpoint(void)
{
    struct r2_peer *p;

    ep = NULL;
    atomic_store(&over, false);
    bed_open(&bed, 2);
    p = bed.tx->peer;
    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths && !ep; i++) {
        if (p->paths[i]->transport == R2_VIA_VERBS && p->paths[i]->ep) {
            ep = p->paths[i]->ep;
            r2_vep_get(ep);
        }
    }
    r2_peer_unlock(p);
    CHECK(ep);
}

static void *holder(void *arg)
{
    (void)arg;
    for (;;) {
        pthread_barrier_wait(&gate);
        if (atomic_load(&over))
            return NULL;
        for (int i = 0; i < 16; i++)
            holds();
        pthread_barrier_wait(&gate);
    }
}

static bool looked_at(void)
{
    return WITHIN_MS(FORGOTTEN, atomic_load(&ep->want) == 0);
}

static void meet(void (*what)(void))
{
    uint64_t until;
    pthread_t thread;
    unsigned rounds = 0;

    holds = what;
    take_endpoint();
    pthread_barrier_init(&gate, NULL, 2);
    CHECK_EQ(pthread_create(&thread, NULL, holder, NULL), 0);
    for (until = r2_now_ns() + MEET_MS * R2_NS_PER_MS; r2_now_ns() < until; rounds++) {
        pthread_barrier_wait(&gate);
        for (int i = 0; i < 16; i++)
            r2_vep_run(ep, R2_WANT_CTRL);
        pthread_barrier_wait(&gate);
        CHECK_MSG(looked_at(), "round %u: nobody looks for what was wanted (0x%x)", rounds,
                  atomic_load(&ep->want));
    }
    atomic_store(&over, true);
    pthread_barrier_wait(&gate);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&gate);
    CHECK_GT(rounds, 10);
    r2_vep_put(ep);
    bed_close(&bed);
}

static void health(void)
{
    struct r2_ep_health h;

    r2_transport_verbs.health(ep, &h);
}

static void task(void)
{
    r2_vep_kick(ep, 0);
}

static void reached(void)
{
    r2_transport_verbs.reached(ep);
}

/* Asks whether messages are being read that there are none of. */
static void detach(void)
{
    CHECK_EQ(r2_transport_verbs.detach(ep, UINT64_MAX, 0, 0, false), 0);
}

TEST(health)
{
    meet(health);
}

TEST(task)
{
    meet(task);
}

TEST(reached)
{
    meet(reached);
}

TEST(detach)
{
    meet(detach);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_HEARTBEAT", "60s", 1);
    return check_main(argc, argv);
}

#endif
