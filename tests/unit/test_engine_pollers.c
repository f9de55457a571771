/* When it is looked who shares the machine, and what those that poll do where few threads are in
 * use. The sockets are real, on loopback (rung 3). How many are in use is test_pollers' matter. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "added_time.h"
#include "await.h"
#include "dial.h"
#include "holder.h"
#include "io/io.h"
#include "tcp_bed.h"

#define CORES 16 /* as the test has it: six threads */
#define NEIGHBOURS 7
#define CALLS 200

static pid_t neighbours[NEIGHBOURS]; /* they come before the engine */
static atomic_bool together = true;  /* they run on the process's cores, else on none */
static atomic_int at_start = -1;     /* threads in use when sockets are opened for the first time */
static atomic_int helps;
static atomic_bool looked;          /* between accepting a socket and the next */
static _Thread_local bool accepted; /* this thread is there */

/* In front of libc's. The thread's own cores are the real ones, too, since threads are put there.
 */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    bool here = !pid || pid == getpid();

    if (accepted)
        atomic_store(&looked, true);
    memset(set, 0, size);
    if (!pid && syscall(SYS_sched_getaffinity, 0, size, set) < 0)
        return -1;
    for (int i = 0; i < NEIGHBOURS; i++)
        here |= neighbours[i] == pid && atomic_load(&together);
    for (int i = 0; i < CORES && here; i++)
        CPU_SET(i, set);
    return 0;
}

/* In front of libc's. */
int accept4(int fd, struct sockaddr *at, socklen_t *len, int flags)
{
    int (*real)(int, struct sockaddr *, socklen_t *, int) =
        (int (*)(int, struct sockaddr *, socklen_t *, int))dlsym(RTLD_NEXT, "accept4");
    int got = real(fd, at, len, flags);

    accepted = got >= 0;
    return got;
}

static int start(const struct r2_transport_events *events, const uint8_t process[16])
{
    atomic_store(&at_start, r2_io_used());
    return r2_transport_mux.start(events, process);
}

static bool help(struct r2_ep *ep)
{
    atomic_fetch_add(&helps, 1);
    return r2_transport_mux.help(ep);
}

static void begin(void)
{
    for (int i = 0; i < NEIGHBOURS && !r2_eng.inited; i++)
        neighbours[i] = holder_start(holder_segment, NULL);
    bed_listen();
    CHECK_GE(r2_io_count(), 4);
}

/* What is opened first goes to threads that are in use. A look when the engine starts would be too
 * soon: it would stand in the way of that one, with the ranks that were there before it only. */
TEST(look_at_what_is_opened_first)
{
    begin();
    CHECK_EQ(atomic_load(&at_start), r2_io_count());
    bed_connect();
    CHECK_EQ(r2_io_used(), 1);
    end();
}

/* The engine looks by itself, too: every 2 s at last. */
static void come_to_use(int n)
{
    AWAIT(r2_io_used() == n);
}

/* Nor does a socket that is accepted wait for the engine's next look. */
TEST(look_at_what_is_accepted)
{
    begin();
    atomic_store(&together, false);
    come_to_use(r2_io_count());
    atomic_store(&looked, false);
    atomic_store(&together, true);
    WHILE_MS (20000, !atomic_load(&looked)) {
        int stranger = dial();

        add_time(50 * R2_NS_PER_MS); /* a look is good for a while, so the first may bring none */
        close(stranger);
    }
    CHECK(atomic_load(&looked));
    come_to_use(1); /* when it has ended */
    bed_connect();
    end();
}

/* Where one thread is in use, those that poll stand in for it; they do not forget the others, whose
 * sockets are older. */
TEST(help_where_more_were_in_use)
{
    struct r2_req *req;
    uint8_t byte;
    int done = 0, most = 0;

    begin();
    atomic_store(&together, false);
    come_to_use(r2_io_count());
    bed_connect();
    atomic_store(&together, true);
    come_to_use(1);
    CHECK_EQ(r2_engine_irecv(rx, &byte, 1, 0, NULL, &req), 0);
    for (int round = 0; round < 50 && most < CALLS / 2; round++) {
        int before = atomic_load(&helps);

        for (int i = 0; i < CALLS; i++) {
            AWAIT(!r2_io_all_awake());
            add_time(5 * R2_NS_PER_US); /* else it is too soon */
            CHECK_EQ(r2_engine_test(req, &done, NULL), 0);
        }
        if (atomic_load(&helps) - before > most)
            most = atomic_load(&helps) - before;
    }
    CHECK_GE(most, CALLS / 2);
    CHECK(!done);
    end();
}

int main(int argc, char **argv)
{
    static struct r2_transport_ops ops;
    int rc;

    ops = r2_transport_mux;
    ops.start = start;
    ops.help = help;
    r2_engine_transport = &ops;
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SPIN", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    setenv("LOCAL_WORLD_SIZE", "1", 1); /* whoever started the test */
    rc = check_main(argc, argv);
    for (int i = 0; i < NEIGHBOURS && neighbours[i]; i++)
        holder_end(neighbours[i]);
    return rc;
}
