/* A sandbox denies what the kernel knows of sockets, TCP_INFO or SIOCOUTQ, with real sockets on
 * loopback (rung 3): sound NICs stay as they are, a silent one is found by what is not heard. The
 * denials are those of this program's own wrappers, as a seccomp filter would answer. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "added_time.h"
#include "await.h"
#include "journal_look.h"
#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define MSG (256u * 1024)

static uint8_t out[MSG], in[MSG];
static bool no_info, no_queue;
static atomic_int asked;

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
    if (no_info && level == IPPROTO_TCP && name == TCP_INFO) {
        atomic_fetch_add(&asked, 1);
        errno = EPERM;
        return -1;
    }
    return (int)syscall(SYS_getsockopt, fd, level, name, value, len);
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list rest;
    void *arg;

    va_start(rest, request);
    arg = va_arg(rest, void *);
    va_end(rest);
    if (no_queue && request == SIOCOUTQ) {
        atomic_fetch_add(&asked, 1);
        errno = ENOSYS;
        return -1;
    }
    return (int)syscall(SYS_ioctl, fd, request, arg);
}

static bool move(int ms)
{
    static struct r2_req *sending, *receiving;

    if (!receiving && !sending)
        bed_post(out, in, MSG, &sending, &receiving);
    if (!bed_done(&sending, &receiving, ms))
        return false;
    CHECK_MEM(in, out, MSG);
    return true;
}

/* The first path that is lost, or NULL. */
static const struct r2_seg_journal_entry *lost_path(void)
{
    struct r2_segment *seg = r2_control_segment(r2_eng.ctl);

    for (uint64_t n = 0; n < journal_head(seg); n++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, n);

        if (e && e->event == R2_EV_PATH_DOWN)
            return e;
    }
    return NULL;
}

/* Its NIC, "" for none. */
static const char *lost(void)
{
    const struct r2_seg_journal_entry *e = lost_path();

    return e ? e->nic : "";
}

static int warnings(void)
{
    struct r2_segment *seg = r2_control_segment(r2_eng.ctl);
    int found = 0;

    for (uint64_t n = 0; n < journal_head(seg); n++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, n);

        found += e && e->event == R2_EV_WARNING && strstr(e->cause, "silence is found late");
    }
    return found;
}

/* Socket `index` of the first NIC's path that was accepted, 0 for control and then bulk; or NULL.
 */
static struct r2_lane *accepted(int index)
{
    struct r2_lane *found = NULL;
    struct r2_list *n;

    pthread_mutex_lock(&r2_tcp.lock);
    R2_LIST_FOR_EACH (n, &r2_tcp.accepted) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (ep->params.local_nic == 0 && ep->params.remote_nic == 0)
            found = r2_ep_lane(ep, index);
    }
    pthread_mutex_unlock(&r2_tcp.lock);
    return found;
}

/* It hears nothing any more. */
static bool deafen(int index)
{
    struct sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog drop = {.len = 1, .filter = &none};
    struct r2_lane *lane = accepted(index);

    return lane && setsockopt(lane->io.fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof(drop)) == 0;
}

static void sound_and_silent(void)
{
    bed_listen();
    bed_connect();
    WHILE_MS (1500, true)
        CHECK(move(5000));
    WHILE_MS (15000, !atomic_load(&asked)) /* SIOCOUTQ only while bytes are out */
        CHECK(move(5000));
    STAYS_MS(2500, !lost()[0]); /* idle ones are asked, too */
    CHECK_GE(atomic_load(&asked), 1);
    CHECK_EQ(warnings(), 1);
    CHECK(r2_control_segment(r2_eng.ctl)->gauges.missing & R2_SEG_MISSING_TCP_INFO);
    if (!deafen(0))
        CHECK_SKIP("no socket filters here: %s", strerror(errno));
    WHILE_MS (15000, !lost()[0])
        CHECK(move(10000));
    CHECK_STR(lost(), "127.0.1.1");
    for (int i = 0; i < 5; i++)
        CHECK(move(5000));
    CHECK_EQ(warnings(), 1);
    end();
}

/* The control socket goes on, and what the bulk socket was given is acknowledged by nobody. The
 * kernel gives up by itself, but as a rule after a quarter of an hour. */
static void bulk_alone(void)
{
    const struct r2_seg_journal_entry *e;

    bed_listen();
    bed_connect();
    WHILE_MS (500, true)
        CHECK(move(5000));
    if (!deafen(1))
        CHECK_SKIP("no socket filters here: %s", strerror(errno));
    WHILE_MS (15000, !lost()[0])
        move(100);
    e = lost_path();
    CHECK(e && strcmp(e->nic, "127.0.1.1") == 0);
    CHECK_MSG(strcmp(e->cause, "bulk bytes unacknowledged") == 0, "cause: %s", e->cause);
    for (int i = 0; i < 5; i++)
        CHECK(move(5000));
    end();
}

/* An idle path may be asked more often than it says something: it is not silent for that. */
static void seldom_heard(void)
{
    struct r2_ep_health health;
    struct r2_lane *lane;

    setenv("R2CCL_HEARTBEAT", "3s", 1); /* idle ones: 30 s */
    bed_listen();
    bed_connect();
    CHECK(move(5000));
    lane = accepted(0);
    CHECK(lane);
    for (int ms = 0; ms < 8000; ms += 50) {
        r2_transport_tcp.health(lane->ep, &health);
        CHECK(health.answered);
        add_time(50 * R2_NS_PER_MS);
        await_nap();
    }
    CHECK_GE(atomic_load(&asked), 1);
    end();
}

/* What is denied once is not asked again: a process for each. */
static void in_a_process(void (*body)(void))
{
    pid_t pid = fork();
    int status = 1;

    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        body();
        exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
}

TEST(no_tcp_info)
{
    no_info = true;
    in_a_process(sound_and_silent);
    in_a_process(bulk_alone);
    in_a_process(seldom_heard);
    no_info = false;
}

TEST(no_siocoutq)
{
    no_queue = true;
    in_a_process(sound_and_silent);
    in_a_process(bulk_alone);
    no_queue = false;
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LANES", "1", 1);
    setenv("R2CCL_IO_THREADS", "2", 1);
    return check_main(argc, argv);
}
