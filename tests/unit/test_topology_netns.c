/* NICs and link events in a network namespace that each test makes for itself. Rung 4. Skipped
 * where the system does not allow one. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "await.h"
#include "check.h"
#include "topology/linkwatch.h"
#include "topology/nettables.h"
#include "topology/nics.h"

/* Runs `ip` with the arguments in `line`: true if it succeeded. */
static bool try_ip(const char *line)
{
    char copy[256];
    char *argv[32] = {"ip"};
    int argc = 1;
    int status;
    pid_t pid;

    snprintf(copy, sizeof(copy), "%s", line);
    for (char *word = strtok(copy, " "); word && argc < 31; word = strtok(NULL, " ")) {
        argv[argc++] = word;
    }
    pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);

        dup2(null, STDERR_FILENO);
        execvp("ip", argv);
        _exit(127);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void ip(const char *line)
{
    CHECK_MSG(try_ip(line), "ip %s", line);
}

/* A fresh namespace with a pair a0 - b0, both up, a0 with addresses. */
static void make_world(void)
{
    if (unshare(CLONE_NEWNET) != 0) {
        CHECK_SKIP("no network namespaces: %s", strerror(errno));
    }
    if (!try_ip("link set lo up")) {
        CHECK_SKIP("the ip tool does not run here");
    }
    if (!try_ip("link add name a0 type veth peer name b0")) {
        CHECK_SKIP("no veth here");
    }
    ip("addr add 10.1.0.1/24 dev a0");
    ip("addr add fd01::1/64 dev a0 nodad");
    ip("link set a0 up");
    ip("link set b0 up");
}

static int find(const char *nics, struct r2_nic *out, char *err, size_t errlen)
{
    struct r2_settings s = {0};

    snprintf(s.nics, sizeof(s.nics), "%s", nics);
    return r2_nics_find(&s, out, R2_MAX_NICS, err, errlen);
}

TEST(find)
{
    struct r2_nic nics[R2_MAX_NICS];
    char err[1024];
    uint64_t guid;

    make_world();
    CHECK_EQ(find("", nics, err, sizeof(err)), 1);
    CHECK_STR(nics[0].name, "a0");
    CHECK_EQ(nics[0].ifindex, if_nametoindex("a0"));
    CHECK(nics[0].link_up && !nics[0].loopback);
    CHECK_STR(nics[0].pci_path, "");
    CHECK_EQ(nics[0].mtu, 1500);
    CHECK_EQ(nics[0].prefixlen, 24);
    CHECK_EQ(nics[0].family, AF_INET);
    CHECK_EQ(nics[0].socklen, sizeof(struct sockaddr_in));
    CHECK_GT(nics[0].speed_mbps, 0);
    guid = nics[0].guid;
    CHECK_EQ(find("a0,127.0.1.1,127.0.2.1,fd01::1", nics, err, sizeof(err)), 4);
    CHECK_STR(nics[0].name, "10.1.0.1");
    CHECK_STR(nics[1].name, "127.0.1.1");
    CHECK_STR(nics[3].name, "fd01::1");
    CHECK_EQ(find("a0", nics, err, sizeof(err)), 1);
    CHECK_EQ(nics[0].guid, guid);
    CHECK_EQ(find("eth0", nics, err, sizeof(err)), -ENODEV);
    CHECK_MSG(strstr(err, "a0 (10.1.0.1, fd01::1"), "%s", err);
    /* Its link-local address, which comes with the carrier: the kernel reports that up to a second
     * after another one's. */
    AWAIT(find("b0", nics, err, sizeof(err)) == 1);
    CHECK_EQ(((struct sockaddr_in6 *)&nics[0].addr)->sin6_scope_id, if_nametoindex("b0"));
}

TEST(find_down)
{
    struct r2_nic nics[R2_MAX_NICS];
    char err[1024];

    make_world();
    ip("link set b0 down"); /* a0 loses its carrier */
    CHECK_EQ(find("", nics, err, sizeof(err)), 1);
    CHECK(!nics[0].link_up);
    CHECK_STR(nics[0].name, "a0");
    ip("link set a0 down");
    CHECK_EQ(find("a0", nics, err, sizeof(err)), 1);
    CHECK(!nics[0].link_up);
}

/* The speed of loopback addresses as sockets: what was found can be bound to. */
TEST(find_can_bind)
{
    struct r2_nic nics[R2_MAX_NICS];
    char err[1024];
    int n;

    make_world();
    n = find("10.1.0.1,127.0.1.1,::1,fd01::1", nics, err, sizeof(err));
    CHECK_EQ(n, 4);
    for (int i = 0; i < n; i++) {
        int fd = socket(nics[i].family, SOCK_STREAM | SOCK_CLOEXEC, 0);

        CHECK_GE(fd, 0);
        CHECK_MSG(bind(fd, (struct sockaddr *)&nics[i].addr, nics[i].socklen) == 0, "%s: %s",
                  nics[i].name, strerror(errno));
        close(fd);
    }
}

/* ---- events ---- */

struct seen {
    int ifindex;
    int count[R2_ADDR_REMOVED + 1];
    enum r2_link_event last; /* of the link */
    char addr[R2_NIC_NAME];
};

static void on_event(void *arg, int ifindex, enum r2_link_event event, const struct sockaddr *addr)
{
    struct seen *seen = arg;

    if (ifindex != seen->ifindex) {
        return;
    }
    CHECK_EQ(addr != NULL, event == R2_ADDR_ADDED || event == R2_ADDR_REMOVED);
    seen->count[event]++;
    if (addr) {
        r2_addr_text(addr, seen->addr, sizeof(seen->addr));
    } else {
        seen->last = event;
    }
}

/* With a dump of now, as the engine does (where another thread asks for it). */
static void resync(struct r2_linkwatch *w, struct seen *seen)
{
    struct r2_net_tables tables;
    uint64_t moment;

    for (int tries = 0; r2_linkwatch_stale(w); tries++) {
        CHECK(tries < 100);
        CHECK_GE(r2_linkwatch_read(w, on_event, seen), 0);
        CHECK(r2_linkwatch_drained(w));
        moment = r2_linkwatch_moment(w);
        CHECK_EQ(r2_net_tables_read(&tables), 0);
        CHECK_GE(r2_linkwatch_read(w, on_event, seen), 0);
        CHECK_GE(r2_linkwatch_resync(w, &tables, moment, on_event, seen), 0);
        r2_net_tables_free(&tables);
    }
}

/* Reads until `event` was seen `count` times, 5 s at most. */
static void await(struct r2_linkwatch *w, struct seen *seen, enum r2_link_event event, int count)
{
    for (int tries = 0; seen->count[event] < count; tries++) {
        struct pollfd p = {.fd = r2_linkwatch_fd(w), .events = POLLIN};

        CHECK_MSG(tries < 50, "event %d was not seen %d times", (int)event, count);
        poll(&p, 1, 100);
        CHECK_GE(r2_linkwatch_read(w, on_event, seen), 0);
        if (r2_linkwatch_stale(w))
            resync(w, seen);
    }
}

TEST(events)
{
    struct seen seen;
    struct r2_linkwatch *w;

    make_world();
    memset(&seen, 0, sizeof(seen));
    seen.ifindex = (int)if_nametoindex("a0");
    CHECK_EQ(r2_linkwatch_open(&w), 0);
    CHECK_EQ(r2_link_query(seen.ifindex), R2_LINK_UP);

    ip("link set a0 down");
    await(w, &seen, R2_LINK_DOWN, 1);
    CHECK_EQ(r2_link_query(seen.ifindex), R2_LINK_DOWN);
    ip("link set a0 up");
    await(w, &seen, R2_LINK_UP, 1);

    ip("link set b0 down"); /* the cable: administratively up, no carrier */
    CHECK_EQ(r2_link_query(seen.ifindex), R2_LINK_DOWN);
    await(w, &seen, R2_LINK_DOWN, 2);
    ip("link set b0 up");
    await(w, &seen, R2_LINK_UP, 2);

    ip("addr add 10.2.0.1/24 dev a0");
    await(w, &seen, R2_ADDR_ADDED, seen.count[R2_ADDR_ADDED] + 1);
    CHECK_STR(seen.addr, "10.2.0.1");
    ip("addr del 10.2.0.1/24 dev a0");
    await(w, &seen, R2_ADDR_REMOVED, seen.count[R2_ADDR_REMOVED] + 1);
    CHECK_STR(seen.addr, "10.2.0.1");

    ip("link del a0");
    await(w, &seen, R2_LINK_REMOVED, 1);
    CHECK_EQ(r2_link_query(seen.ifindex), R2_LINK_REMOVED);
    r2_linkwatch_close(w);
}

/* What does not change a link's state is not told. */
TEST(events_only_changes)
{
    struct seen seen;
    struct r2_linkwatch *w;

    make_world();
    memset(&seen, 0, sizeof(seen));
    seen.ifindex = (int)if_nametoindex("a0");
    CHECK_EQ(r2_linkwatch_open(&w), 0);
    CHECK_EQ(r2_linkwatch_read(w, on_event, &seen), 0);
    ip("link set a0 mtu 1400");
    ip("link set a0 alias something");
    ip("link set a0 txqueuelen 17");
    ip("addr add 10.3.0.1/24 dev a0");
    await(w, &seen, R2_ADDR_ADDED, 1);
    CHECK_EQ(seen.count[R2_LINK_UP] + seen.count[R2_LINK_DOWN], 0);
    r2_linkwatch_close(w);
}

/* The kernel drops events when the queue is full; the state is right all the same. */
TEST(events_overflow)
{
    struct seen seen;
    struct r2_linkwatch *w;
    int small = 1;

    make_world();
    memset(&seen, 0, sizeof(seen));
    seen.ifindex = (int)if_nametoindex("a0");
    CHECK_EQ(r2_linkwatch_open(&w), 0);
    CHECK_EQ(setsockopt(r2_linkwatch_fd(w), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)), 0);
    for (int i = 0; i < 20; i++) {
        ip("link set b0 mtu 1400");
        ip("link set b0 mtu 1401");
    }
    ip("link set a0 down");
    ip("addr add 10.4.0.1/24 dev a0");
    /* The events themselves are lost: prove that a dump stood in for them. */
    await(w, &seen, R2_LINK_DOWN, 1);
    await(w, &seen, R2_ADDR_ADDED, 1);
    CHECK_STR(seen.addr, "10.4.0.1");
    CHECK_EQ(seen.last, R2_LINK_DOWN);
    CHECK_EQ(seen.count[R2_LINK_UP], 0);
    ip("link set a0 up");
    await(w, &seen, R2_LINK_UP, 1);
    for (int i = 0; i < 40; i++) {
        ip("link set b0 mtu 1402");
        ip("link set b0 mtu 1403");
    }
    ip("link del a0");
    await(w, &seen, R2_LINK_REMOVED, 1);
    CHECK_GE(seen.count[R2_ADDR_REMOVED], 1);
    r2_linkwatch_close(w);
}

/* Tables that were read before an event say nothing against it; of other interfaces they count. */
TEST(events_newer_than_tables)
{
    struct r2_net_tables before;
    struct seen c0, d0;
    struct r2_linkwatch *w;
    bool resynced = false;
    uint64_t moment;
    int small = 1;

    make_world();
    ip("link add name c0 type veth peer name d0"); /* down: nothing happens to them by itself */
    memset(&c0, 0, sizeof(c0));
    memset(&d0, 0, sizeof(d0));
    c0.ifindex = (int)if_nametoindex("c0");
    d0.ifindex = (int)if_nametoindex("d0");
    CHECK_EQ(r2_linkwatch_open(&w), 0);
    CHECK_EQ(r2_linkwatch_read(w, on_event, &c0), 0);
    CHECK(r2_linkwatch_drained(w));
    moment = r2_linkwatch_moment(w);
    CHECK_EQ(r2_net_tables_read(&before), 0);
    CHECK(!r2_linkwatch_since(w, c0.ifindex, moment));
    ip("addr add 10.5.0.1/24 dev c0");
    await(w, &c0, R2_ADDR_ADDED, 1);
    CHECK(r2_linkwatch_since(w, c0.ifindex, moment));
    CHECK(!r2_linkwatch_since(w, d0.ifindex, moment));

    /* Newer tables have it too: they are in step, though something was read since `moment`. (Other
     * interfaces may be changing still.) */
    WHILE_MS (20000, !resynced || r2_linkwatch_stale(w)) {
        struct r2_net_tables after;

        resynced = true;
        CHECK_EQ(r2_net_tables_read(&after), 0);
        CHECK_GE(r2_linkwatch_read(w, on_event, &c0), 0);
        CHECK_GE(r2_linkwatch_resync(w, &after, moment, on_event, &c0), 0);
        r2_net_tables_free(&after);
    }

    /* The tables do not have the address; and as if the other one had been up then. */
    r2_net_tables_link(&before, d0.ifindex)->flags |= IFF_UP | 0x10000;
    CHECK_GE(r2_linkwatch_resync(w, &before, moment, on_event, &d0), 1);
    CHECK_EQ(d0.count[R2_LINK_UP], 1);
    CHECK_GE(r2_linkwatch_resync(w, &before, moment, on_event, &c0), 0);
    CHECK_EQ(c0.count[R2_ADDR_REMOVED], 0);
    CHECK(r2_linkwatch_stale(w)); /* of that interface they tell nothing */
    r2_net_tables_free(&before);

    CHECK_EQ(setsockopt(r2_linkwatch_fd(w), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)), 0);
    moment = r2_linkwatch_moment(w);
    for (int i = 0; i < 20; i++)
        ip(i % 2 ? "link set d0 mtu 1400" : "link set d0 mtu 1401");
    CHECK_GE(r2_linkwatch_read(w, on_event, &c0), 0);
    CHECK(r2_linkwatch_since(w, c0.ifindex, moment)); /* what was lost may be about any of them */
    CHECK(r2_linkwatch_lost_since(w, moment));
    CHECK_EQ(r2_net_tables_read(&before), 0);
    CHECK_EQ(r2_linkwatch_resync(w, &before, moment, on_event, &c0), 0);
    CHECK(r2_linkwatch_stale(w)); /* as old as the loss */
    r2_net_tables_free(&before);
    moment = r2_linkwatch_moment(w);
    CHECK(!r2_linkwatch_since(w, c0.ifindex, moment));
    CHECK(!r2_linkwatch_lost_since(w, moment));
    r2_linkwatch_close(w);
}

/* A NIC that moves into a container's namespace is gone here. */
TEST(events_moved_away)
{
    struct seen seen;
    struct r2_linkwatch *w;
    char line[64];
    pid_t child;
    int ready[2];
    char byte;

    make_world();
    memset(&seen, 0, sizeof(seen));
    seen.ifindex = (int)if_nametoindex("a0");
    CHECK_EQ(r2_linkwatch_open(&w), 0);
    CHECK_EQ(pipe(ready), 0);
    child = fork();
    if (child == 0) {
        byte = unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
        _exit(write(ready[1], &byte, 1) == 1 && pause());
    }
    CHECK(read(ready[0], &byte, 1) == 1 && byte == 'y');
    snprintf(line, sizeof(line), "link set a0 netns %d", (int)child);
    ip(line);
    await(w, &seen, R2_LINK_REMOVED, 1);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    r2_linkwatch_close(w);
}

TEST(query_nothing)
{
    CHECK_EQ(r2_link_query(0), R2_LINK_REMOVED);
    CHECK_EQ(r2_link_query(1 << 30), R2_LINK_REMOVED);
}
