/* Verdicts of other processes of the node, over a scripted transport (rung 2): what a process makes
 * of a row that another one wrote while it waited. The other one is a real process with the same
 * node segment; it does what the test tells it. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"
#include "control/nodeseg.h"
#include "engine/locate/round.h"
#include "enginelib/remote.h"

#define NICS 3
#define LATE_MS 290 /* after a round's probes began: nothing else is tried before they end */

static struct remote x, y;
static char host[64];
static uint8_t data[65536];

/* ---- the other process: claims a NIC, then writes a row about it and gives it back */

static struct {
    int ask, answer;
} other;

static void serve(int in, int out)
{
    struct r2_nodeseg *seg;
    struct r2_node_row row;

    if (r2_nodeseg_open(&seg, host))
        _exit(1);
    while (read(in, &row, sizeof(row)) == (ssize_t)sizeof(row)) {
        bool gives_up = row.state == R2_NODE_UNKNOWN && row.pid;
        int rc;

        atomic_store(&added_ns, row.mono_ns); /* its clock is the engine's */
        rc = gives_up    ? 0
             : row.state ? r2_nodeseg_write(seg, &row)
                         : r2_nodeseg_claim(seg, &row.nic);

        if (row.state || gives_up)
            r2_nodeseg_release(seg, &row.nic);
        if (write(out, &rc, sizeof(rc)) != (ssize_t)sizeof(rc))
            break;
    }
    _exit(0);
}

static void start_other(void)
{
    int to[2], from[2];

    CHECK_EQ(pipe(to), 0);
    CHECK_EQ(pipe(from), 0);
    if (fork() == 0) {
        close(to[1]); /* its death, or ours, ends the other */
        close(from[0]);
        serve(to[0], from[1]);
    }
    other.ask = to[1];
    other.answer = from[0];
}

static void tell(struct r2_node_row *row)
{
    int rc = -EAGAIN;

    for (int i = 0; i < 200 && rc == -EAGAIN; i++) {
        row->mono_ns = atomic_load(&added_ns);
        CHECK_EQ(write(other.ask, row, sizeof(*row)), sizeof(*row));
        CHECK_EQ(read(other.answer, &rc, sizeof(rc)), sizeof(rc));
        if (rc == -EAGAIN)
            fake_pass_ms(1);
    }
    CHECK_EQ(rc, 0);
}

/* It claims the NIC, or gives it back without a word, as if it had died. */
static void other_claims(int nic, bool claims)
{
    struct r2_node_row row = {.pid = !claims};

    fake_ops.address(nic, &row.nic);
    row.nic.port = 0;
    row.nic.offers = 0;
    tell(&row);
}

/* "The NIC is broken", or works as far as the other process knows. */
static void other_finds(int nic, enum r2_finding_kind kind)
{
    struct r2_node_row row = {.state = R2_NODE_FAILED, .kind = kind, .process = {1, 2, 3}};

    fake_ops.address(nic, &row.nic);
    row.nic.port = 0;
    row.nic.offers = 0;
    snprintf(row.name, sizeof(row.name), "nic%d", nic);
    snprintf(row.why, sizeof(row.why), "because");
    tell(&row);
}

/* ---- the engine under test */

static void begin(void)
{
    struct r2_req *req;

    remote_new(&x, true, NICS);
    CHECK(remote_open(&x, NICS));
    remote_new(&y, false, NICS);
    CHECK(remote_open(&y, NICS));
    CHECK_EQ(r2_engine_isend(x.conn, data, sizeof(data), 0, NULL, &req), 0);
    CHECK_EQ(r2_engine_irecv(y.conn, data, sizeof(data), 0, NULL, &req), 0);
    other_claims(0, true);
}

static void end(void)
{
    remote_end(&x);
    remote_end(&y);
    for (int t = 0; t < 5000 && !r2_nic_usable(0); t++) /* nobody is left whom it could ask */
        fake_pass_ms(1);
    CHECK(r2_nic_usable(0));
    fake_pass_ms(50);
}

static void fail(struct remote *r)
{
    struct r2_ep *ep = fake_find(r->id, 0, 0, 0);

    CHECK(ep);
    fake_fail(ep, ETIMEDOUT, false);
}

static bool probed(struct remote *r)
{
    for (int t = 0; t < 2000; t++) {
        if (fake_probe_at(r->id, 0, 0))
            return true;
        fake_pass_ms(1);
    }
    return false;
}

/* The verdict that the path's row shows, once there is one. */
static const char *verdict_on(struct remote *r)
{
    static char text[R2_FINDING_WHY];

    for (int t = 0; t < REMOTE_WAIT_MS; t++) {
        struct r2_path *path;

        r2_peer_lock(r->conn->peer);
        path = r2_path_find(r->conn->peer, 0, 0, R2_VIA_TCP);
        snprintf(text, sizeof(text), "%s", path->shown.verdict);
        pthread_mutex_unlock(&r->conn->peer->lock);
        if (text[0])
            break;
        fake_pass_ms(1);
    }
    return text;
}

/* Right after the verdict on the last pair. */
static bool goes_out(int nic)
{
    for (int t = 0; t < REMOTE_WAIT_MS && r2_nic_usable(nic); t++)
        fake_pass_ms(1);
    return !r2_nic_usable(nic);
}

static uint64_t count(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

/* Two pairs fall silent together, another process has found out why. */
TEST(adopted)
{
    uint64_t rounds = count(&r2_eng.n->locate_rounds);

    begin();
    fail(&x);
    fail(&y);
    CHECK(probed(&x));
    other_finds(0, R2_FOUND_LOCAL);
    CHECK(starts(verdict_on(&x), "local NIC, as pid"));
    CHECK(starts(verdict_on(&y), "local NIC, as pid"));
    CHECK(goes_out(0));
    CHECK_EQ(count(&r2_eng.n->locate_rounds), rounds);
    end();
}

/* One of them does when there is no time left to ask it: the verdict is the same. */
TEST(a_pair_too_late)
{
    begin();
    fail(&x);
    CHECK(probed(&x));
    fake_pass_ms(LATE_MS);
    fail(&y);
    other_finds(0, R2_FOUND_LOCAL);
    CHECK(starts(verdict_on(&x), "local NIC, as pid"));
    CHECK_MSG(starts(verdict_on(&y), "local NIC, as pid"), "it is \"%s\"", verdict_on(&y));
    CHECK(goes_out(0));
    end();
}

/* The other process dies without a word. What had no time to answer before is asked again then. */
TEST(a_late_pair_is_asked_again)
{
    begin();
    fail(&x);
    CHECK(probed(&x));
    fake_pass_ms(LATE_MS);
    fail(&y);
    for (int t = 0; t < 2000 && (fake_probe_at(x.id, 0, 0) || fake_probe_at(y.id, 0, 0)); t++)
        fake_pass_ms(1);
    CHECK(!fake_probe_at(x.id, 0, 0) && !fake_probe_at(y.id, 0, 0));
    other_claims(0, false);
    CHECK(probed(&y));
    fake_fail(fake_probe_at(y.id, 0, 0), EALREADY, false);
    CHECK_MSG(starts(verdict_on(&y), "transient"), "it is \"%s\"", verdict_on(&y));
    CHECK(!fake_probe_at(x.id, 0, 0)); /* it was silent: that stands */
    end();
}

/* What our own probe says stands over what another process wrote. */
TEST(an_answer_counts_more)
{
    begin();
    fail(&x);
    fail(&y);
    CHECK(probed(&x) && probed(&y));
    fake_fail(fake_probe_at(y.id, 0, 0), EALREADY, false);
    other_finds(0, R2_FOUND_LOCAL);
    CHECK(starts(verdict_on(&y), "transient"));
    CHECK(!starts(verdict_on(&x), "local NIC"));
    CHECK(r2_nic_usable(0));
    end();
}

/* No answer counts as silence only of what had the time to answer. */
TEST(silence_takes_time)
{
    struct r2_wire_addr addr;

    begin();
    addr = remote_addr(&x, 1);
    for (int i = 0; i < 2; i++) {
        struct r2_round r = {.kind = R2_ROUND_ASSIST, .lnic = 1};
        uint64_t now = r2_now_ns();
        struct r2_target *t = r2_target_add(&r, 1, &addr, 1, x.id, "nic1@x", true);

        r.next_try =
            now + R2_TRY_NS; /* the round's next turn is far: a late one is asked at once */
        r2_targets_tick(&r, now);
        CHECK_EQ(t->tries, 1);
        r2_targets_close(&r, now + (i ? R2_TRY_NS : R2_TRY_NS / 2));
        CHECK(t->closed);
        CHECK_EQ(t->outcome, i ? R2_SEEN_SILENT : R2_SEEN_NOTHING);
    }
    other_finds(0, R2_FOUND_TRANSIENT); /* gives the NIC back */
    end();
}

static void unlink_node(void)
{
    const char *name = r2_locate_seg ? r2_nodeseg_name(r2_locate_seg) : NULL;

    if (name)
        shm_unlink(name);
}

int main(int argc, char **argv)
{
    char env[256];

    snprintf(host, sizeof(host), "test-adopt-%d", (int)getpid());
    snprintf(env, sizeof(env),
             "R2CCL_NO_PATH_TIMEOUT=20s R2CCL_HEARTBEAT=10s heartbeat_idle=10s R2CCL_DAMP=0 "
             "R2CCL_LOG=none R2CCL_SHM=1 R2CCL_NODE_NAME=%s",
             host);
    start_other();
    remote_engine(NICS, env);
    if (!r2_locate_seg) {
        printf("skip: no POSIX shared memory here\n");
        return CHECK_SKIPPED;
    }
    atexit(unlink_node);
    return check_main(argc, argv);
}
