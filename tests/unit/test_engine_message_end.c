/* The engine as sender, over a scripted transport (rung 2): how the end of a message is cut. Chunks
 * may be longer here than a path's first ones are. */
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u

static uint8_t data[256 * KB];
static struct remote r;

/* What is left of a message goes with its last chunk, up to half a chunk more. */
TEST(no_small_rest)
{
    static const uint32_t cut[][2] = {
        {64 * KB, 0}, {80 * KB, 0}, {64 * KB, 64 * KB - 128}, {64 * KB, 80 * KB}};

    for (int i = 0; i < 4; i++) {
        uint32_t size = cut[i][0] + cut[i][1];
        struct r2_req *req = NULL;
        struct r2_bulk c[8];
        struct r2_ep *ep;
        int n = 0;

        remote_new(&r, true, 1); /* anew: what was measured would make chunks longer */
        CHECK(remote_open(&r, 1));
        ep = fake_find(r.id, 0, 0, 0);
        CHECK_EQ(r2_engine_isend(r.conn, data, size, 0, NULL, &req), 0);
        CHECK_EQ(remote_cts(ep, &r, 0, size), 0);
        while (n < 8 && fake_next(ep, &c[n]))
            n++;
        CHECK_EQ(n, cut[i][1] ? 2 : 1);
        for (int k = 0; k < n; k++) {
            CHECK_EQ(c[k].len, cut[i][k]);
            CHECK(fake_chunk_sent(ep, &c[k]));
            CHECK_EQ(remote_ack_range(ep, &r, c[k].seq, c[k].offset, c[k].len), 0);
        }
        CHECK_EQ(remote_test(req, 0, NULL), 1);
        remote_end(&r);
    }
}

int main(int argc, char **argv)
{
    remote_engine(1, NULL);
    return check_main(argc, argv);
}
