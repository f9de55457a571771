/* A remote process with two NICs whose paths are lost while a request waits: whether it still
 * exists is asked (S: attempts, R: questions), and the test answers. Over a scripted transport
 * (rung 2). The time without a path is 20 s. */
#ifndef R2_TESTS_LIVENESS_BED_H
#define R2_TESTS_LIVENESS_BED_H

#include <errno.h>

#include "check.h"
#include "enginelib/remote.h"

#define MSG (64 * 1024u)

static uint8_t data[MSG];
static struct remote r;
static struct r2_req *req;
static uint32_t lost[2];      /* by NIC: its path's generation that was up */
static struct r2_ep *over[2]; /* by NIC: what was ended last, and may not be shut yet */
static bool speaks;           /* its process has answered, where its host does not refuse */

/* Paths between NICs 0..paths-1 are there, and a request waits. */
static void begin(bool out, int paths)
{
    req = NULL;
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, paths));
    if (out)
        CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    else
        CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    lost[0] = lost[1] = 0;
    over[0] = over[1] = NULL;
}

static void lose_one(int nic)
{
    struct r2_ep *e = fake_find(r.id, nic, nic, 0);

    CHECK(e);
    lost[nic] = e->params.gen;
    fake_fail(e, ECONNRESET, false);
}

/* They were there, and all are lost. */
__attribute__((unused)) static void lose(bool out, int paths)
{
    begin(out, paths);
    for (int i = 0; i < paths; i++)
        lose_one(i);
}

/* The attempt (S) or question (R) that is out between these NICs, or NULL. */
static struct r2_ep *trial_of(int nic, int rnic)
{
    struct r2_ep *e;

    pthread_mutex_lock(&fake_all_lock);
    for (e = fake_all; e; e = e->next) {
        if (memcmp(e->params.remote_process, r.id, 16) == 0 && e->params.initiator &&
            e->params.probe == !r.out && e->params.local_nic == nic &&
            e->params.remote_nic == rnic && (!r.out || e->params.gen > lost[nic]) &&
            e != over[nic] && !atomic_load(&e->is_shut))
            break;
    }
    pthread_mutex_unlock(&fake_all_lock);
    return e;
}

static struct r2_ep *trial(int nic)
{
    return trial_of(nic, nic);
}

__attribute__((unused)) static struct r2_ep *await_trial(int nic)
{
    struct r2_ep *e = NULL;

    for (int i = 0; i < REMOTE_WAIT_MS && !(e = trial(nic)); i++)
        fake_pass_ms(1);
    CHECK(e);
    return e;
}

/* It ends. */
static void end_trial(struct r2_ep *e, int err)
{
    over[e->params.local_nic] = e;
    fake_fail(e, err, err == ECONNREFUSED);
}

/* The process answers: the path between NICs of that number is there again. */
__attribute__((unused)) static struct r2_ep *back(int nic)
{
    struct r2_ep *e = remote_path(&r, nic, r.out ? await_trial(nic)->params.gen - 1 : r.gen);

    CHECK(e);
    return e;
}

/* For `ms`, or until the request ends: whatever is out between NICs i ends with err[i]; 0: does not
 * end. Returns how often; `rc` as remote_test. */
static int answer(const int err[2], int ms, int *rc)
{
    int times = 0;

    *rc = 0;
    for (uint64_t end = r2_now_ns() + (uint64_t)ms * R2_NS_PER_MS; !*rc && r2_now_ns() < end;) {
        for (int i = 0; i < 2; i++) {
            struct r2_ep *e = err[i] ? trial(i) : NULL;

            if (!e)
                continue;
            times++;
            atomic_store(&e->there, speaks && err[i] != ECONNREFUSED);
            end_trial(e, err[i]);
        }
        *rc = remote_test(req, 2, NULL);
    }
    return times;
}

/* The same between NICs of `nics` (bits). */
__attribute__((unused)) static int refuse(unsigned nics, int err, int ms, int *rc)
{
    return answer((int[2]){nics & 1 ? err : 0, nics & 2 ? err : 0}, ms, rc);
}

#endif
