#define _GNU_SOURCE
#define R2_ENGINELIB
#include "remote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/nic/nics.h"
#include "settings/values.h"
#include "util/random.h"

/* Where the handle has what a remote process would have written (handles.c). */
enum { AT_PROCESS = 8, AT_SECRET = 24, AT_LISTEN = 40, AT_COOKIE = 48 };

static struct r2_ctx *ctx;

/* Remote processes, and what they have said last of their NICs. */
static struct known {
    uint8_t id[16];
    int number, nics;
    uint32_t info;
    struct r2_info_nic said[R2_MAX_NICS];
} known[200];

static struct known *known_of(const uint8_t id[16])
{
    struct known *k = known;

    while (memcmp(k->id, id, 16) != 0)
        k++;
    return k;
}

const char remote_outlives[] =
    "R2CCL_HEARTBEAT=25ms heartbeat_idle=25ms R2CCL_NO_PATH_TIMEOUT=20s R2CCL_DAMP=0";
bool remote_wired;
unsigned remote_plain;

static struct r2_settings tuned;

/* What users cannot set. */
static bool tune(const char *name, const char *text)
{
    if (strcmp(name, "heartbeat_idle") == 0)
        return r2_value_duration(text, "ms", &tuned.heartbeat_idle_ns) == 0;
    if (strcmp(name, "heartbeat_misses") == 0)
        return r2_value_int(text, &tuned.heartbeat_misses) == 0;
    return strcmp(name, "damp_suppress") == 0 && r2_value_int(text, &tuned.damp_suppress) == 0;
}

/* Sets what users can set, or else the rest. False: one of the rest is none. */
static bool set_all(const char *env, bool of_users)
{
    char copy[512], *name, *rest = copy;
    bool good = true;

    snprintf(copy, sizeof(copy), "%s", env ? env : "");
    while ((name = strsep(&rest, " "))) {
        char *value = name;

        strsep(&value, "=");
        if (strncmp(name, "R2", 2) != 0)
            good &= of_users || !*name || tune(name, value);
        else if (of_users)
            setenv(name, value, 1);
    }
    return good;
}

void remote_engine(int nics, const char *env)
{
    char list[256] = "";
    bool good = false;

    for (int i = 0; i < nics; i++)
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s127.0.%d.1", i ? "," : "",
                 i + 1);
    setenv("R2CCL_NICS", list, 1);
    setenv("R2CCL_IO_THREADS", "1", 1);
    setenv("R2CCL_SPIN", "0", 1);
    setenv("R2CCL_SHM", "0", 1);
    set_all(env, true);
    r2_engine_transport = &fake_ops;
    if (r2_engine_init(&ctx, 1, NULL) == 0) {
        for (int i = 0; i < r2_local.n && remote_wired; i++)
            r2_local.nics[i].loopback = false;
        tuned = *r2_eng.set;
        r2_eng.set = &tuned;
        good = set_all(env, false);
    }
    if (!good || !ctx || r2_engine_start() || r2_local.n != nics) {
        fprintf(stderr, "the engine does not start with NICs %s\n", list);
        abort();
    }
}

struct r2_ctx *remote_ctx(void)
{
    return ctx;
}

void remote_new(struct remote *r, bool out, int nics)
{
    uint8_t secret[16];

    static int numbers;

    memset(r, 0, sizeof(*r));
    r->number = numbers++ % 200;
    r->out = out;
    r->nics = nics;
    if (r2_random_bytes(r->id, 16) || r2_random_bytes(secret, 16) ||
        r2_engine_listen(ctx, 0, r->handle, &r->listen))
        abort();
    known[r->number] = (struct known){.number = r->number, .nics = nics};
    memcpy(known[r->number].id, r->id, 16);
    for (int i = 0; i < nics; i++)
        known[r->number].said[i].word = R2_NIC_USABLE;
    memcpy(&r->listen_id, r->handle + AT_LISTEN, 8);
    r->conn_id = out ? 0 : 77;
    if (!out)
        return;
    memcpy(r->handle + AT_PROCESS, r->id, 16);
    memcpy(r->handle + AT_SECRET, secret, 16);
}

struct r2_wire_addr remote_addr(const struct remote *r, int nic)
{
    struct r2_wire_addr a;

    fake_ops.address(nic, &a);
    a.offers = remote_plain >> nic & 1 ? 0 : fake_offers;
    a.ip[3] = (uint8_t)(10 + r->number);
    return a;
}

static void put_nic(struct r2_info_nic *n, const struct r2_info_nic *said)
{
    n->word = said->word;
    n->less = said->less;
    n->forgiven = said->forgiven;
}

void remote_info(const struct remote *r, struct remote_info *info)
{
    const struct known *k = known_of(r->id);

    memset(info, 0, sizeof(*info));
    info->m.pid = 4242;
    info->m.nics = (uint32_t)r->nics;
    info->m.number = k->info;
    snprintf(info->m.host, sizeof(info->m.host), "remote%d", r->number);
    for (int i = 0; i < r->nics; i++) {
        struct r2_info_nic *n = &info->nics[i];

        snprintf(n->name, sizeof(n->name), "rnic%d", i);
        n->addr = remote_addr(r, i);
        put_nic(n, &k->said[i]);
    }
}

int remote_say_info(struct r2_ep *ep, const struct remote_info *info)
{
    return fake_ctrl(ep, R2_F_INFO, info, sizeof(info->m) + info->m.nics * sizeof(info->nics[0]));
}

static void say_info(struct remote *r, struct r2_ep *ep)
{
    struct remote_info info;

    remote_info(r, &info);
    remote_say_info(ep, &info);
}

/* The remote process is the receiver: test chunks arrive, and it says so. */
static bool prove_out(struct r2_ep *ep)
{
    struct r2_msg_test m;
    uint32_t want;
    struct r2_bulk b;

    if (remote_hear(ep, R2_F_TEST, &m, sizeof(m)) < 0 || m.gen != ep->params.gen)
        return false;
    want = m.bytes;
    m.bytes = 0;
    while (m.bytes < want && fake_next(ep, &b)) {
        if (b.conn != R2_CONN_TEST || !fake_chunk_sent(ep, &b))
            return false;
        m.bytes += b.len;
    }
    return m.bytes == want && fake_ctrl(ep, R2_F_TEST_ACK, &m, sizeof(m)) == 0;
}

/* It is the sender. */
static bool prove_in(struct r2_ep *ep)
{
    struct r2_msg_test m = {.gen = ep->params.gen, .bytes = 64};
    struct r2_bulk b = {.conn = R2_CONN_TEST, .len = 64, .total = 64};

    return fake_ctrl(ep, R2_F_TEST, &m, sizeof(m)) == 0 && fake_claim(ep, &b) == 0 &&
           fake_done(ep, &b) && remote_hear(ep, R2_F_TEST_ACK, &m, sizeof(m)) >= 0 && m.bytes == 64;
}

bool remote_prove(struct remote *r, struct r2_ep *ep)
{
    return r->out ? prove_out(ep) : prove_in(ep);
}

struct r2_ep *remote_unproven(struct remote *r, int nic, uint32_t above)
{
    struct r2_ep *ep;

    if (r->out) {
        ep = fake_find(r->id, nic, nic, above);
    } else {
        r->gen = (r->gen > above ? r->gen : above) + 1;
        ep = fake_accept(r->id, nic, nic, r->gen);
    }
    if (!ep || !fake_up(ep))
        return NULL;
    say_info(r, ep);
    return ep;
}

struct r2_ep *remote_via(const struct remote *r, int nic, int via, int ms)
{
    struct r2_ep *ep = fake_newest(r->id, nic, via);

    for (int t = 0; t < ms && !ep; t++) {
        fake_pass_ms(1);
        ep = fake_newest(r->id, nic, via);
    }
    return ep;
}

struct r2_ep *remote_path(struct remote *r, int nic, uint32_t above)
{
    struct r2_ep *ep = remote_unproven(r, nic, above);

    return ep && remote_prove(r, ep) ? ep : NULL;
}

static bool open_out(struct remote *r, struct r2_ep *ep)
{
    struct r2_msg_open_ack ack = {0};
    struct r2_msg_open m;

    if (remote_hear(ep, R2_F_OPEN, &m, sizeof(m)) < 0 || m.listen != r->listen_id)
        return false;
    r->conn_id = ack.conn = m.conn;
    fake_ctrl(ep, R2_F_OPEN_ACK, &ack, sizeof(ack));
    return r2_engine_connect(ctx, 0, r->handle, &r->conn) == 0 && r->conn;
}

static bool open_in(struct remote *r, struct r2_ep *ep)
{
    struct r2_msg_open m = {
        .conn = r->conn_id, .listen = r->listen_id, .p2p_chunk = r2_p2pchunk_word(), .eager = 8192};
    struct r2_msg_open_ack ack;

    fake_ctrl(ep, R2_F_OPEN, &m, sizeof(m));
    if (remote_hear(ep, R2_F_OPEN_ACK, &ack, sizeof(ack)) < 0 || ack.status)
        return false;
    return r2_engine_accept(r->listen, &r->conn) == 0 && r->conn;
}

bool remote_open(struct remote *r, int paths)
{
    struct r2_ep *first = NULL;
    bool ok;

    if (r->out && r2_engine_connect(ctx, 0, r->handle, &r->conn))
        return false;
    for (int i = 0; i < paths; i++) {
        struct r2_ep *ep = remote_path(r, i, 0);

        if (!ep)
            return false;
        if (!first)
            first = ep;
    }
    ok = r->out ? open_out(r, first) : open_in(r, first);
    for (int i = 0; i < paths && ok; i++)
        remote_forget(fake_find(r->id, i, i, 0));
    return ok;
}

bool remote_more(struct remote *r, struct r2_ep *ep)
{
    if (!r->out) {
        r->conn_id++;
        return open_in(r, ep);
    }
    return r2_engine_connect(ctx, 0, r->handle, &r->conn) == 0 && open_out(r, ep);
}

void remote_end(struct remote *r)
{
    struct r2_msg_close_ack ack = {.conn = r->conn_id, .from_sender = r->out};

    r2_engine_close(r->conn);
    r2_engine_close_listen(r->listen);
    for (int i = 0; i < r->nics; i++) {
        struct r2_ep *ep = remote_up(r, i) ? fake_find(r->id, i, i, 0) : NULL;

        if (ep)
            fake_ctrl(ep, R2_F_CLOSE_ACK, &ack, sizeof(ack));
    }
    fake_forget(r->id);
}

/* ---- hearing */

int remote_hear_ms(struct r2_ep *ep, uint8_t type, void *body, size_t cap, int ms)
{
    for (int t = 0; t <= ms; t++) {
        fake_pull(ep);
        for (int i = 0; i < ep->n_frames; i++) {
            struct fake_frame *f = &ep->frames[i];

            if (f->taken || f->type != type)
                continue;
            f->taken = true;
            if (body)
                memcpy(body, f->body, f->len < cap ? f->len : cap);
            return i;
        }
        if (t < ms)
            fake_pass_ms(1);
    }
    return -1;
}

int remote_hear(struct r2_ep *ep, uint8_t type, void *body, size_t cap)
{
    return remote_hear_ms(ep, type, body, cap, REMOTE_WAIT_MS);
}

void remote_forget(struct r2_ep *ep)
{
    fake_pull(ep);
    for (int i = 0; i < ep->n_frames; i++)
        ep->frames[i].taken = true;
}

/* ---- saying */

int remote_cts(struct r2_ep *ep, struct remote *r, uint64_t seq, uint64_t size)
{
    struct r2_msg_cts m = {.conn = r->conn_id, .seq = seq, .size = size};

    return fake_ctrl(ep, R2_F_CTS, &m, sizeof(m));
}

int remote_ack(struct r2_ep *ep, struct remote *r, uint64_t cumulative)
{
    struct r2_msg_ack m = {.conn = r->conn_id, .cumulative = cumulative};

    return fake_ctrl(ep, R2_F_ACK, &m, sizeof(m));
}

int remote_ack_range(struct r2_ep *ep, struct remote *r, uint64_t seq, uint64_t off, uint64_t len)
{
    struct {
        struct r2_msg_ack m;
        struct r2_ack_range range;
    } __attribute__((packed))
    a = {.m = {.conn = r->conn_id, .ranges = 1}, .range = {.seq = seq, .offset = off, .len = len}};

    return fake_ctrl(ep, R2_F_ACK, &a, sizeof(a));
}

int remote_eager(struct r2_ep *ep, struct remote *r, uint64_t seq, const void *data, uint32_t size)
{
    struct {
        struct r2_msg_eager m;
        uint8_t data[8192];
    } a = {.m = {.conn = r->conn_id, .seq = seq, .size = size}};

    memcpy(a.data, data, size);
    return fake_ctrl(ep, R2_F_EAGER, &a, sizeof(a.m) + size);
}

int remote_close(struct r2_ep *ep, struct remote *r, uint64_t cumulative)
{
    struct r2_msg_close m = {
        .conn = r->conn_id, .cumulative = cumulative, .from_sender = r->out ? 0 : 1};

    return fake_ctrl(ep, R2_F_CLOSE, &m, sizeof(m));
}

int remote_nic(struct r2_ep *ep, int nic, bool usable, uint32_t number)
{
    return remote_word(ep, nic, usable ? R2_NIC_USABLE : R2_NIC_DOWN, 1000, number);
}

int remote_word_of(struct r2_ep *ep, int nic, const struct r2_info_nic *said, uint32_t number)
{
    struct known *k = known_of(ep->params.remote_process);
    struct remote r = {.number = k->number, .nics = k->nics};
    struct remote_info info;

    memcpy(r.id, k->id, 16);
    if (number >= k->info) {
        put_nic(&k->said[nic], said);
        k->info = number;
    }
    remote_info(&r, &info);
    info.m.number = number;
    info.m.nics = (uint32_t)(nic < r.nics ? r.nics : nic + 1);
    put_nic(&info.nics[nic], said);
    return remote_say_info(ep, &info);
}

int remote_word(struct r2_ep *ep, int nic, enum r2_nic_word word, unsigned weight, uint32_t number)
{
    struct r2_info_nic said = {.word = (uint8_t)word, .less = (uint16_t)(1000 - weight)};

    return remote_word_of(ep, nic, &said, number);
}

static struct {
    struct r2_task task;
    void (*f)(int nic);
    int nic;
    atomic_bool done; /* written last, by the I/O thread */
} command;

static void run_command(struct r2_task *t)
{
    (void)t;
    command.f(command.nic);
    atomic_store(&command.done, true);
}

bool remote_command(void (*f)(int nic), int nic)
{
    r2_task_init(&command.task, r2_io_at(0), run_command);
    command.f = f;
    command.nic = nic;
    atomic_store(&command.done, false);
    r2_task_kick(&command.task);
    for (int i = 0; i < 20000 && !atomic_load(&command.done); i++)
        fake_pass_ms(1);
    return atomic_load(&command.done);
}

void remote_drain(int nic)
{
    r2_nicstate_drain(nic, r2_now_ns());
}

void remote_nic_back(int nic)
{
    r2_nicstate_place(nic, R2_PLACE_EV_LINK_DOWN, "a test", r2_now_ns());
    r2_nicstate_place(nic, R2_PLACE_EV_LINK_UP, "a test", r2_now_ns());
}

void remote_undrain(int nic)
{
    r2_nicstate_undrain(nic, r2_now_ns());
}

/* The sender of bulk is the engine (out) or the remote process. */
static struct r2_msg_path about(const struct r2_ep *dead, bool engine_sends)
{
    struct r2_msg_path m = {
        .transport = dead->params.transport, .gen = dead->params.gen, .reason = ETIMEDOUT};

    m.sender_nic = engine_sends ? dead->params.local_nic : dead->params.remote_nic;
    m.receiver_nic = engine_sends ? dead->params.remote_nic : dead->params.local_nic;
    return m;
}

int remote_down(struct r2_ep *ep, const struct r2_ep *dead)
{
    struct r2_msg_path m = about(dead, false);

    return fake_ctrl(ep, R2_F_DOWN, &m, sizeof(m));
}

int remote_fenced(struct r2_ep *ep, const struct r2_ep *dead)
{
    struct r2_msg_path m = about(dead, true);

    return fake_ctrl(ep, R2_F_FENCED, &m, sizeof(m));
}

struct r2_bulk remote_chunk(const struct remote *r, uint64_t seq, uint64_t off, uint32_t len,
                            uint64_t total)
{
    return (struct r2_bulk){
        .conn = r->conn_id, .seq = seq, .offset = off, .len = len, .total = total};
}

bool remote_place(struct r2_ep *ep, const struct r2_bulk *b, const uint8_t *message)
{
    memcpy(b->data, message + b->offset, b->len);
    return fake_done(ep, b);
}

/* ---- looking */

static struct r2_peer *find_peer(const struct remote *r)
{
    struct r2_peer *found = NULL;
    struct r2_list *n;

    pthread_mutex_lock(&r2_eng.lock);
    R2_LIST_FOR_EACH (n, &r2_eng.peers) {
        struct r2_peer *p = R2_CONTAINER_OF(n, struct r2_peer, node);

        if (p->out == r->out && memcmp(p->id, r->id, 16) == 0)
            found = p;
    }
    if (found)
        r2_peer_get(found);
    pthread_mutex_unlock(&r2_eng.lock);
    return found;
}

bool remote_up(const struct remote *r, int nic)
{
    int state = remote_state(r, nic);

    return state >= R2_PATH_TESTING && state <= R2_PATH_PROVEN;
}

int remote_state(const struct remote *r, int nic)
{
    struct r2_peer *p = find_peer(r);
    struct r2_path *path;
    int state;

    if (!p)
        return -1;
    r2_peer_lock(p);
    path = r2_path_find(p, nic, nic, R2_VIA_VERBS);
    if (!path)
        path = r2_path_find(p, nic, nic, R2_VIA_TCP);
    state = path ? (int)path->state : -1;
    pthread_mutex_unlock(&p->lock);
    r2_peer_put(p);
    return state;
}

bool remote_there(const struct remote *r)
{
    struct r2_peer *p = r2_peer_find(r->id, r->out);

    if (p)
        r2_peer_put(p);
    return p;
}

bool remote_wait_state(const struct remote *r, int nic, int state)
{
    for (int i = 0; i < REMOTE_WAIT_MS; i++) {
        if (remote_state(r, nic) == state)
            return true;
        fake_pass_ms(1);
    }
    return false;
}

bool remote_suspect(const struct remote *r)
{
    struct r2_peer *p = find_peer(r);
    bool yes = false;

    if (!p)
        return false;
    r2_peer_lock(p);
    yes = p->suspect_since;
    pthread_mutex_unlock(&p->lock);
    r2_peer_put(p);
    return yes;
}

uint64_t remote_waits(const struct remote *r, enum r2_seg_waits_for *what)
{
    struct r2_peer *p = find_peer(r);
    const struct r2_seg_peer *row;
    uint64_t since;

    if (!p)
        return 0;
    r2_peer_lock(p);
    row = &r2_control_segment(r2_eng.ctl)->peers[p->row];
    since = row->waits_mono_ns;
    *what = (enum r2_seg_waits_for)row->waits_for;
    pthread_mutex_unlock(&p->lock);
    r2_peer_put(p);
    return since;
}

int remote_test(struct r2_req *req, int ms, size_t *size)
{
    for (int i = 0; i <= ms; i++) {
        int done = 0, rc = r2_engine_test(req, &done, size);

        if (rc || done)
            return rc ? rc : 1;
        if (i < ms)
            fake_pass_ms(1);
    }
    return 0;
}

bool remote_wait_flag(atomic_bool *flag)
{
    for (int i = 0; i < REMOTE_WAIT_MS; i++) {
        if (atomic_load(flag))
            return true;
        fake_pass_ms(1);
    }
    return false;
}

void remote_shows(struct r2_path *path, uint64_t best, uint64_t shown)
{
    r2_grey_restart(&path->watch);
    path->watch.best_rate = path->watch.peak = best;
    path->watch.shown[0] = shown;
    path->watch.fade_ns = shown ? R2_NS_PER_S : 0;
}

void remote_rate(struct r2_ep *ep, uint64_t ns_per_chunk)
{
    struct r2_path *path = ep->params.owner;
    uint64_t now = r2_now_ns();

    r2_peer_lock(path->peer);
    for (int i = 0; i < 64; i++, now += ns_per_chunk) {
        struct r2_rate_stamp stamp;

        r2_pathrate_on_send(&path->rate, 32 << 10, now, &stamp);
        r2_pathrate_on_ack(&path->rate, 32 << 10, &stamp, now, now + ns_per_chunk);
    }
    r2_peer_unlock(path->peer);
}
