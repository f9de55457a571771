/* One engine over the stand-in for libibverbs (tests/fakeverbs) that is connected to itself: both
 * ends of every path, and both ends' devices, are in this process, so that a test decides what
 * happens when. Rung 3; it cannot prove what real devices do.
 *
 * Two NICs (127.0.1.1 and 127.0.2.1, devices fv0 and fv1). One test thread; every wait is bounded.
 */
#ifndef R2_TESTS_VERBS_BED_H
#define R2_TESTS_VERBS_BED_H

#include <dlfcn.h>

#include "await.h"
#include "check.h"
#include "engine/loop/loop.h"
#include "engine/message/message.h"
#include "journal_look.h"

/* A frozen queue pair takes longest: its peer may be idle, and answers with its second heartbeat.
 */
#define BED_WAIT_MS 40000

struct bed {
    struct r2_ctx *ctx;
    struct r2_conn *tx, *rx;
};

__attribute__((unused)) static const char *bed_nics = "127.0.1.1,127.0.2.1";
static int (*bed_script)(const char *text); /* tests/fakeverbs/script.c */

__attribute__((unused)) static void bed_ms(int ms)
{
    pause_us((unsigned long)ms * 1000);
}

/* The stand-in beside this program's build folder; skips the test where it could not be built. */
__attribute__((unused)) static void bed_library(void)
{
    const char *path = check_built("fakeverbs/libibverbs.so.1");
    void *lib;

    if (access(path, R_OK) != 0)
        CHECK_SKIP("no %s: <infiniband/verbs.h> is missing (Debian: libibverbs-dev)", path);
    setenv("R2CCL_IBVERBS_LIB", path, 1);
    lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_MSG(lib, "%s", dlerror());
    *(void **)(void *)&bed_script = dlsym(lib, "fv_script");
    CHECK(bed_script);
}

/* An attribute with which all queue pairs were connected; below 0: tests/fakeverbs/fake.h. */
__attribute__((unused)) static int bed_attr(const char *name)
{
    int (*attr)(const char *);
    void *lib = dlopen(getenv("R2CCL_IBVERBS_LIB"), RTLD_NOW | RTLD_NOLOAD);

    CHECK(lib);
    *(void **)(void *)&attr = dlsym(lib, "fv_attr");
    CHECK(attr);
    return attr(name);
}

/* Paths over queue pairs that may carry chunks now, towards ourselves. */
__attribute__((unused)) static int bed_paths(struct r2_conn *tx)
{
    struct r2_peer *p = tx->peer;
    int n = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++)
        n += p->paths[i]->transport == R2_VIA_VERBS && r2_path_may(p->paths[i]) >= R2_MAY_STAND_BY;
    r2_peer_unlock(p);
    return n;
}

__attribute__((unused)) static void bed_until_paths(struct r2_conn *tx, int paths)
{
    AWAIT(bed_paths(tx) >= paths);
}

/* A connection from this process to itself, over `paths` paths. */
__attribute__((unused)) static void bed_open(struct bed *b, int paths)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;

    memset(b, 0, sizeof(*b));
    setenv("R2CCL_NICS", bed_nics, 1); /* read once */
    setenv("R2CCL_CHUNK", "64K", 1);
    setenv("R2CCL_LOG", "warn", 0);
    if (!bed_script)
        bed_library();
    CHECK_EQ(r2_engine_init(&b->ctx, 1, NULL), 0);
    CHECK_EQ(r2_engine_listen(b->ctx, 0, handle, &l), 0);
    WHILE_MS (BED_WAIT_MS, !(b->tx && b->rx)) {
        if (!b->tx)
            CHECK_EQ(r2_engine_connect(b->ctx, 0, handle, &b->tx), 0);
        if (!b->rx)
            CHECK_EQ(r2_engine_accept(l, &b->rx), 0);
    }
    CHECK(b->tx && b->rx);
    CHECK_EQ(r2_engine_close_listen(l), 0);
    bed_until_paths(b->tx, paths);
}

__attribute__((unused)) static void bed_close(struct bed *b)
{
    r2_engine_close(b->tx);
    r2_engine_close(b->rx);
    r2_engine_finalize(b->ctx);
}

/* 1 done, 0 not within `ms`, -errno. */
__attribute__((unused)) static int bed_test(struct r2_req *req, int ms)
{
    int done = 0, rc = r2_engine_test(req, &done, NULL);

    WHILE_MS (ms, rc == 0 && !done)
        rc = r2_engine_test(req, &done, NULL);
    return rc ? rc : done;
}

__attribute__((unused)) static uint64_t bed_counted(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

__attribute__((unused)) static uint64_t bed_journal(void)
{
    return journal_head(r2_control_segment(r2_eng.ctl));
}

/* How often the journal has that event since entry `from` (bed_journal), between these NICs, for
 * that cause; NULL: any. */
__attribute__((unused)) static int bed_told(uint64_t from, enum r2_seg_event event, const char *nic,
                                            const char *remote, const char *cause)
{
    const struct r2_segment *seg = r2_control_segment(r2_eng.ctl);
    int n = 0;

    for (uint64_t i = from; i < bed_journal(); i++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, i);

        n += e && e->event == event && (!nic || strcmp(e->nic, nic) == 0) &&
             (!remote || strcmp(e->remote_nic, remote) == 0) &&
             (!cause || strcmp(e->cause, cause) == 0);
    }
    return n;
}

/* Waits until the script's answer is at least `state`. */
__attribute__((unused)) static void bed_until_script(int state)
{
    AWAIT(bed_script("") >= state);
}

/* The connection's next message is cleared to send. */
__attribute__((unused)) static void bed_until_cleared(struct r2_conn *tx)
{
    bool cleared = false;

    WHILE_MS (BED_WAIT_MS, !cleared) {
        r2_peer_lock(tx->peer);
        cleared = r2_send_cts(tx, tx->next_seq);
        r2_peer_unlock(tx->peer);
    }
    CHECK(cleared);
}

/* Buffers that both ends have registered, and a message between them, other bytes with each turn.
 */
struct bed_memory {
    uint8_t *out, *in;
    size_t size;
    struct r2_mr *out_mr, *in_mr;
};

__attribute__((unused)) static void bed_register(struct bed *bed, struct bed_memory *m)
{
    CHECK_EQ(r2_engine_reg(bed->tx, m->out, m->size, 1, &m->out_mr), 0);
    CHECK_EQ(r2_engine_reg(bed->rx, m->in, m->size, 1, &m->in_mr), 0);
}

__attribute__((unused)) static void bed_finish(struct bed *bed, struct bed_memory *m)
{
    CHECK_EQ(r2_engine_dereg(bed->rx, m->in_mr), 0);
    CHECK_EQ(r2_engine_dereg(bed->tx, m->out_mr), 0);
    bed_close(bed);
}

__attribute__((unused)) static void bed_message(struct bed *bed, struct bed_memory *m, int turn)
{
    struct r2_req *send = NULL, *recv = NULL;

    for (size_t i = 0; i < m->size; i++)
        m->out[i] = (uint8_t)(i * 7 + i / 251 + (size_t)turn * 31);
    memset(m->in, 0xdb, m->size);
    CHECK_EQ(r2_engine_irecv(bed->rx, m->in, m->size, 0, m->in_mr, &recv), 0);
    CHECK_EQ(r2_engine_isend(bed->tx, m->out, m->size, 0, m->out_mr, &send), 0);
    CHECK_EQ(bed_test(recv, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(send, BED_WAIT_MS), 1);
    CHECK_MEM(m->in, m->out, m->size);
}

#endif
