/* The engine as receiver when memory for acknowledgements runs out (rung 2, as test_engine_recv.c):
 * what has arrived is said as soon as there is memory again, without any event of a path, and
 * nothing is called fenced before. acks.c is compiled in here with an allocator that fails on
 * demand. */
#include "check.h"

#include <stdatomic.h>
#include <stdlib.h>

static atomic_bool alloc_fails;
static atomic_ulong alloc_failed;

static void *test_realloc(void *p, size_t size)
{
    if (atomic_load(&alloc_fails)) {
        atomic_fetch_add(&alloc_failed, 1);
        return NULL;
    }
    return realloc(p, size);
}

#define realloc test_realloc
#include "../../net_plugin/engine/message/acks.c"
#undef realloc

#include "recv_bed.h"

struct heard {
    struct r2_msg_ack m;
    struct r2_ack_range range[8];
} __attribute__((packed));

static struct r2_req *req;

/* A receive is posted, and from now on there is no memory. */
static void begin_short(int paths)
{
    begin(paths);
    req = irecv(sink, MSG);
    atomic_store(&alloc_failed, 0);
    atomic_store(&alloc_fails, true);
}

/* The range of one chunk is said by itself once there is memory. */
TEST(one_chunk)
{
    struct heard ack;

    begin_short(1);
    chunk(a, 0, CHUNK);
    CHECK_GT(atomic_load(&alloc_failed), 0);
    fake_pass_ms(100);
    atomic_store(&alloc_fails, false);
    do {
        memset(&ack, 0, sizeof(ack));
        CHECK_GE(remote_hear(a, R2_F_ACK, &ack, sizeof(ack)), 0);
    } while (ack.m.ranges == 0);
    CHECK_EQ(ack.range[0].offset, CHUNK);
    CHECK_EQ(ack.range[0].len, CHUNK);
    remote_end(&r);
}

/* The sender would send again what is in place: FENCED waits until all of that was said. */
TEST(fenced_waits)
{
    struct heard ack = {0};
    int at_ack = -1, at_fenced;

    begin_short(2);
    chunk(a, 0, CHUNK);
    remote_forget(b);
    CHECK_EQ(remote_down(b, a), 0);
    CHECK_EQ(remote_hear_ms(b, R2_F_FENCED, NULL, 0, 200), -1);
    CHECK_EQ(remote_down(b, a), 0); /* asked again */
    CHECK_EQ(remote_hear_ms(b, R2_F_FENCED, NULL, 0, 200), -1);
    remote_forget(b);
    atomic_store(&alloc_fails, false);
    at_fenced = remote_hear(b, R2_F_FENCED, NULL, 0);
    CHECK_GE(at_fenced, 0);
    do {
        memset(&ack, 0, sizeof(ack));
        at_ack = remote_hear_ms(b, R2_F_ACK, &ack, sizeof(ack), 0);
        CHECK_GE(at_ack, 0);
    } while (ack.m.ranges == 0);
    CHECK_LT(at_ack, at_fenced);
    CHECK_EQ(ack.range[0].offset, CHUNK);
    CHECK_EQ(ack.range[0].len, CHUNK);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, NULL);
    return check_main(argc, argv);
}
