/* The engine as receiver of messages of MSG bytes in chunks of CHUNK, over a scripted transport
 * whose script is the test; both ends' NICs are 0 and 1. One test thread. */
#ifndef R2_TESTS_RECV_BED_H
#define R2_TESTS_RECV_BED_H

#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (64 * KB)
#define CHUNK (16 * KB)

static uint8_t source[4 * MSG], sink[4 * MSG];
static struct remote r;
static struct r2_ep *a, *b; /* paths of NIC 0 and NIC 1 */

__attribute__((unused)) static void begin(int paths)
{
    for (size_t i = 0; i < sizeof(source); i++)
        source[i] = (uint8_t)check_random();
    memset(sink, 0, sizeof(sink));
    remote_new(&r, false, 2);
    CHECK(remote_open(&r, paths));
    a = fake_find(r.id, 0, 0, 0);
    b = paths > 1 ? fake_find(r.id, 1, 1, 0) : NULL;
    CHECK(a && (b || paths < 2));
}

__attribute__((unused)) static struct r2_req *irecv(uint8_t *to, size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_irecv(r.conn, to, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

/* One chunk of message `seq`, whose bytes are source + seq * MSG. */
__attribute__((unused)) static int claim_chunk(struct r2_ep *ep, uint64_t seq, uint64_t off,
                                               struct r2_bulk *c)
{
    *c = remote_chunk(&r, seq, off, CHUNK, MSG);
    return fake_claim(ep, c);
}

__attribute__((unused)) static void chunk(struct r2_ep *ep, uint64_t seq, uint64_t off)
{
    struct r2_bulk c;

    CHECK_EQ(claim_chunk(ep, seq, off, &c), 0);
    CHECK(remote_place(ep, &c, source + seq * MSG));
}

#endif
