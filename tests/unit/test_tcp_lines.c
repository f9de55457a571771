/* Who polls lines of a buffer finds each of them placed by the copy that puts a line's flag last
 * (util/copy.c, test_util_copy). That holds whichever way the message came. The sockets are real,
 * on loopback (rung 3). The copy is this program's own, which notes what it places, and recvmsg()
 * notes what the kernel does. It cannot prove the order of the real copy. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "tcp_bed.h"
#include "util/copy.h"

#define MSG (1024u * 1024)
#define SMALL 512u

static uint8_t out[MSG], in[MSG];
static atomic_size_t by_copy, by_kernel; /* bytes of `in` */

static bool is_in(const void *at)
{
    return (const uint8_t *)at >= in && (const uint8_t *)at < in + MSG;
}

void r2_copy_lines(void *dst, const void *src, size_t len, size_t msg_offset)
{
    (void)msg_offset;
    memcpy(dst, src, len);
    if (is_in(dst))
        atomic_fetch_add(&by_copy, len);
}

/* Bulk lanes alone call it (rx.c): a chunk's rest, then the next head. */
ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
    ssize_t n = syscall(SYS_recvmsg, fd, msg, flags);
    size_t first = msg->msg_iov[0].iov_len;

    if (n > 0 && is_in(msg->msg_iov[0].iov_base))
        atomic_fetch_add(&by_kernel, (size_t)n < first ? (size_t)n : first);
    return n;
}

static void wait_for(struct r2_req *req)
{
    int done = 0;

    WHILE_MS (20000, !done)
        CHECK_EQ(r2_engine_test(req, &done, NULL), 0);
    CHECK(done);
}

/* `late`: the receive is posted when the send is done. */
static void move(uint32_t len, bool lines, bool late)
{
    struct r2_req *sending = NULL, *receiving = NULL;

    for (uint32_t i = 0; i < len; i += 8)
        memcpy(out + i, &(uint64_t){check_random()}, 8);
    memset(in, 0, len);
    atomic_store(&by_copy, 0);
    atomic_store(&by_kernel, 0);
    for (int turn = 0; turn < 2; turn++) {
        if (turn == late)
            CHECK_EQ(
                (lines ? r2_engine_irecv_lines : r2_engine_irecv)(rx, in, len, 0, NULL, &receiving),
                0);
        else
            CHECK_EQ(r2_engine_isend(tx, out, len, 0, NULL, &sending), 0);
        if (late && sending) {
            wait_for(sending);
            sending = NULL;
        }
    }
    CHECK(receiving);
    wait_for(receiving);
    if (sending)
        wait_for(sending);
    CHECK_MEM(in, out, len);
}

TEST(chunks)
{
    bed_listen();
    bed_connect();
    for (int i = 0; i < 3; i++) {
        move(MSG, true, false);
        CHECK_EQ(atomic_load(&by_kernel), 0);
        CHECK_EQ(atomic_load(&by_copy), MSG);
    }
    move(MSG, false, false); /* nobody looks before the receive is done: no copy */
    CHECK_EQ(atomic_load(&by_kernel), MSG);
    CHECK_EQ(atomic_load(&by_copy), 0);
    end();
}

TEST(small)
{
    bed_listen();
    bed_connect();
    for (int late = 0; late < 2; late++) {
        move(SMALL, true, late);
        CHECK_EQ(atomic_load(&by_copy), SMALL);
    }
    end();
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_DISABLE", "1", 1); /* also where a stand-in for libibverbs is set */
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_GREY", "0", 1); /* no copies of chunks, which are copied in lines as well */
    return check_main(argc, argv);
}
