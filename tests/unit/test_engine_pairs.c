/* Which pairs of NICs get a path on nodes with many NICs, over a scripted transport (rung 2): the
 * sockets have room when all queue pairs have failed, and every NIC is met by some path. What it
 * cannot prove: that real attempts fail as fast as the script's. */
#include <sys/wait.h>

#include "check.h"
#include "enginelib/remote.h"

static struct remote r;
static int nics; /* of this process */

static void all_fail(int err)
{
    struct r2_ep *eps[512];
    int n = 0;

    pthread_mutex_lock(&fake_all_lock);
    for (struct r2_ep *ep = fake_all; ep && n < 512; ep = ep->next)
        eps[n++] = ep; /* the list keeps its references until remote_end */
    pthread_mutex_unlock(&fake_all_lock);
    while (n)
        fake_fail(eps[--n], err, false);
}

static struct r2_ep *wait_for(int lnic, int rnic, int via, int ms)
{
    for (int t = 0; t < ms; t++) {
        struct r2_ep *found = NULL;

        pthread_mutex_lock(&fake_all_lock);
        for (struct r2_ep *e = fake_all; e && !found; e = e->next) {
            if (!e->params.probe && e->params.transport == via &&
                (lnic < 0 || e->params.local_nic == lnic) && e->params.remote_nic == rnic &&
                !atomic_load(&e->is_shut))
                found = e;
        }
        pthread_mutex_unlock(&fake_all_lock);
        if (found)
            return found;
        fake_pass_ms(1);
    }
    return NULL;
}

static void only_with(bool these_nics)
{
    if (!these_nics)
        CHECK_SKIP("not with %d NICs", nics);
}

static void finish(void)
{
    atomic_store(&fake_unreachable, 0);
    remote_end(&r);
}

/* Queue pairs worked, and none does any more. */
TEST(sockets_after_queue_pairs)
{
    only_with(nics == 8);
    remote_new(&r, true, nics);
    CHECK(remote_open(&r, nics));
    atomic_store(&fake_unreachable, 1u << R2_VIA_VERBS);
    all_fail(EIO);
    for (int l = 0; l < nics; l++)
        CHECK(wait_for(l, l, R2_VIA_TCP, 10000));
    CHECK(fake_up(wait_for(0, 0, R2_VIA_TCP, 1)));
    finish();
}

/* Queue pairs never worked, and the handle names a few NICs only. */
TEST(sockets_from_the_start)
{
    only_with(nics == 8);
    remote_new(&r, true, nics);
    atomic_store(&fake_unreachable, 1u << R2_VIA_VERBS);
    CHECK(remote_open(&r, 1));
    fake_pass_ms(500);
    all_fail(ECONNRESET);
    for (int l = 0; l < nics; l++)
        CHECK(wait_for(l, l, R2_VIA_TCP, 10000));
    finish();
}

/* One NIC is left on each side, whatever their numbers. */
TEST(the_last_pair)
{
    only_with(nics == 8);
    remote_new(&r, true, nics);
    CHECK(remote_open(&r, 2));
    atomic_store(&fake_unreachable, 1u << R2_VIA_VERBS);
    all_fail(EIO);
    CHECK(wait_for(0, nics - 1, R2_VIA_TCP, 10000));
    CHECK(wait_for(nics - 1, 1, R2_VIA_TCP, 10000));
    finish();
}

/* The side that accepts takes every pair that the other side may choose. */
TEST(all_are_accepted)
{
    uint32_t gen = 1000;

    only_with(nics == 8);
    remote_new(&r, false, nics);
    CHECK(remote_open(&r, 1));
    for (int via = 0; via < R2_VIA_COUNT; via++) {
        fake_offers = via == R2_VIA_VERBS ? R2_OFFER_ROCE : 0;
        for (int i = 0; i < nics * nics; i++)
            CHECK(fake_accept(r.id, i / nics, i % nics, ++gen));
    }
    fake_offers = R2_OFFER_ROCE;
    finish();
}

/* More pairs than have room: each local NIC has its own rail, each of the peer's some path, by
 * both transports, and no transport takes the other's room. */
TEST(more_than_have_room)
{
    int count[R2_VIA_COUNT] = {0};
    struct r2_peer *p;
    bool met = false;

    only_with(nics > 8);
    remote_new(&r, true, R2_MAX_NICS);
    atomic_store(&fake_unreachable, 1u << R2_VIA_VERBS);
    CHECK(remote_open(&r, 1));
    p = r.conn->peer;
    fake_pass_ms(500);
    fake_policy(r.id, -EHOSTUNREACH);
    all_fail(ECONNRESET);
    for (int t = 0; t < 10000 && !met; t++) {
        fake_pass_ms(1);
        met = true;
        r2_peer_lock(p);
        for (int via = 0; via < R2_VIA_COUNT; via++) {
            for (int i = 0; i < R2_MAX_NICS; i++) {
                bool some = false;

                for (int l = 0; l < nics; l++)
                    some |= r2_path_find(p, l, i, via) != NULL;
                met &= some && (i >= nics || r2_path_find(p, i, i, via));
            }
        }
        r2_peer_unlock(p);
    }
    CHECK(met);
    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++)
        count[p->paths[i]->transport]++;
    r2_peer_unlock(p);
    CHECK_LE(count[R2_VIA_TCP], R2_PATHS_VIA);
    CHECK_LE(count[R2_VIA_VERBS], R2_PATHS_VIA);
    fake_policy(r.id, 0);
    CHECK(wait_for(-1, R2_MAX_NICS - 1, R2_VIA_TCP, 10000));
    finish();
}

/* A process has one engine, and that one number of NICs. */
int main(int argc, char **argv)
{
    static const int counts[] = {8, 9, 13, 16};
    int worst = 0;

    for (int i = 0; i < 4; i++) {
        pid_t pid = fork();
        int status = 0;

        if (pid == 0) {
            nics = counts[i];
            fake_offers = R2_OFFER_ROCE;
            remote_engine(nics, NULL);
            exit(check_main(argc, argv));
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid)
            return 1;
        if (WIFSIGNALED(status))
            fprintf(stderr, "with %d NICs: signal %d\n", counts[i], WTERMSIG(status));
        if (!WIFEXITED(status) || (WEXITSTATUS(status) && !worst))
            worst = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    }
    return worst;
}
