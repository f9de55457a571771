/* The engine as receiver of chunks that come twice or damaged, over a scripted transport (rung 2):
 * copies beside their originals, what is sent again over them, checksums that do not fit. What it
 * cannot prove: that sockets do as the script does (test_tcp_damage.c). */
#include "control/impl.h"
#include "recv_bed.h"
#include "util/crc32c.h"

static int claim_copy(struct r2_ep *ep, uint64_t off, struct r2_bulk *c)
{
    *c = remote_chunk(&r, 0, off, CHUNK, MSG);
    c->flags |= R2_BULK_COPY;
    return fake_claim(ep, c);
}

/* The same chunk over two paths: whichever is whole first is placed, the other one is drained. The
 * reader of the original has let go of the buffer before the copy is placed. */
TEST(copies)
{
    struct r2_bulk c, copy;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    CHECK_EQ(claim_copy(b, 0, &copy), 0);  /* the original has not come yet */
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* ... comes now, while the copy is placed */
    CHECK(remote_place(b, &copy, source));
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* ... or later */

    CHECK_EQ(claim_chunk(a, 0, CHUNK, &c), 0); /* the original is being read, slowly */
    memset(sink + CHUNK, 0x55, CHUNK / 2);
    atomic_store(&a->reading, true);
    CHECK_EQ(claim_copy(b, CHUNK, &copy), 1); /* inside a read: the copy goes */
    atomic_store(&a->reading, false);
    CHECK_EQ(a->n_rx, 1);
    CHECK_EQ(claim_copy(b, CHUNK, &copy), 0); /* between two reads: it takes the place */
    CHECK_EQ(a->n_rx, 0);
    CHECK(remote_place(b, &copy, source));
    CHECK(!fake_done(a, &c)); /* the rest of the original is drained */
    CHECK_EQ(claim_copy(b, CHUNK, &copy), 1);

    CHECK_EQ(claim_chunk(a, 0, 2 * CHUNK, &c), 0);
    CHECK(remote_place(a, &c, source));
    CHECK_EQ(claim_copy(b, 2 * CHUNK, &copy), 1); /* too late */
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    chunk(b, 0, 3 * CHUNK);
    fake_pull(a);
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    CHECK_EQ(claim_copy(b, 0, &copy), 1); /* of a message that is over */
    CHECK(remote_up(&r, 0));
    remote_end(&r);
}

/* A slow NIC dies; one of its two neighbouring chunks has come as a copy, the other one has not.
 * The sender repeats both in one piece: its path is well, and stays. Pieces of a copy are no reason
 * to end a path either, before it is placed and afterwards. */
TEST(replay_over_a_copy)
{
    struct r2_bulk copy, c, part;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    CHECK_EQ(claim_copy(b, 0, &copy), 0);
    part = remote_chunk(&r, 0, CHUNK / 2, CHUNK / 2, MSG);
    CHECK_EQ(fake_claim(b, &part), 1); /* the copy is being placed */
    CHECK(remote_place(b, &copy, source));
    CHECK_EQ(fake_claim(b, &part), 1);
    c = remote_chunk(&r, 0, 0, 2 * CHUNK, MSG);
    CHECK_EQ(fake_claim(b, &c), 0); /* half of it has come */
    chunk(b, 0, 2 * CHUNK);
    chunk(b, 0, 3 * CHUNK);
    fake_pull(b);
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* a lane still writes */
    CHECK(remote_place(b, &c, source));
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    CHECK(remote_up(&r, 1));
    remote_end(&r);
}

/* The replay of a chunk that has come in part is read over what is in place; then a copy of all of
 * it is whole first. The copy goes, and the reader of the replay stays with it: its path is well.
 */
TEST(copy_behind_a_replay)
{
    struct r2_bulk c, copy;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    chunk(b, 0, 0);
    c = remote_chunk(&r, 0, 0, 2 * CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), 0); /* half of it has come */
    copy = c;
    copy.flags |= R2_BULK_COPY;
    CHECK_EQ(fake_claim(b, &copy), 1);
    CHECK(remote_up(&r, 0));
    CHECK_EQ(a->n_rx, 1);
    CHECK(remote_place(a, &c, source));
    chunk(b, 0, 2 * CHUNK);
    chunk(b, 0, 3 * CHUNK);
    fake_pull(a);
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    CHECK(remote_up(&r, 0));
    remote_end(&r);
}

/* A copy that is not whole has no claim; the lane that gives it up must not give back that of the
 * original, which another lane of the same endpoint writes into its place. */
TEST(dropped_copy_leaves_the_original)
{
    struct r2_bulk c, copy, again;
    struct r2_req *req;
    uint64_t bad = r2_eng.n->crc_errors;

    begin(2);
    req = irecv(sink, MSG);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 0);
    copy = remote_chunk(&r, 0, 0, CHUNK, MSG);
    copy.flags |= R2_BULK_COPY;
    r2_up_chunk_dropped(a->params.owner, a, &copy, true);
    CHECK_EQ(r2_eng.n->crc_errors - bad, 1);
    CHECK_LT(claim_chunk(b, 0, 0, &again), 0); /* still written to */
    CHECK(remote_place(a, &c, source));
    CHECK_EQ(claim_chunk(b, 0, 0, &again), 1);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* A chunk that fails its checksum was not received: it is counted, and comes over another path. */
TEST(bad_crc_is_not_placed)
{
    uint64_t bad = r2_eng.n->crc_errors;
    struct r2_bulk c;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    for (uint64_t off = 0; off < MSG - CHUNK; off += CHUNK)
        chunk(a, 0, off);
    CHECK_EQ(claim_chunk(a, 0, MSG - CHUNK, &c), 0);
    CHECK(fake_dropped(a, &c, true));
    CHECK_EQ(r2_eng.n->crc_errors - bad, 1);
    fake_fail(a, EBADMSG, false); /* as the transport does then */
    CHECK_GE(remote_hear(b, R2_F_FENCED, NULL, 0), 0);
    fake_pull(b);
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    chunk(b, 0, MSG - CHUNK);
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

/* A small message that fails its checksum is not used, and ends its path. */
TEST(bad_crc_of_a_small_message)
{
    struct {
        struct r2_msg_eager m;
        uint8_t data[1000];
    } __attribute__((packed)) f = {.m = {.size = 1000, .flags = R2_BULK_CRC}};
    uint64_t bad = r2_eng.n->crc_errors;
    struct r2_req *req;

    begin(2);
    f.m.conn = r.conn_id;
    f.m.crc = r2_crc32c(0, source, sizeof(f.data));
    memcpy(f.data, source, sizeof(f.data));
    f.data[500] ^= 4;
    req = irecv(sink, MSG);
    CHECK_EQ(fake_ctrl(a, R2_F_EAGER, &f, sizeof(f)), -EBADMSG);
    CHECK_EQ(r2_eng.n->crc_errors - bad, 1);
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    f.data[500] ^= 4;
    CHECK_EQ(fake_ctrl(b, R2_F_EAGER, &f, sizeof(f)), 0);
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, sizeof(f.data));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, NULL);
    return check_main(argc, argv);
}
