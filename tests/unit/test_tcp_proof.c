/* The handshake's proof, over real sockets on loopback (rung 3): who does not know the accepting
 * process's secret is nobody's path, neither as the connecting side nor as the accepting one. The
 * other end is a plain socket of the test. What it cannot prove: that the tag is hard to guess. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "await.h"
#include "check.h"
#include "dial.h"
#include "engine/loop/loop.h"
#include "transport/tcp/tcp.h"
#include "util/random.h"
#include "util/siphash.h"

/* Where the handle has what a remote process would have written (handles.c). */
enum { AT_ADDRS = 6, AT_PROCESS = 8, AT_SECRET = 24, AT_NIC = 56, AT_ADDR = 57 };

/* What a tag can be instead of the right one. */
enum tag { RIGHT, ONE_BIT, OTHER_SECRET, OTHER_NONCE, OTHER_LABEL, OTHER_HELLO, ZERO, TAGS };

static struct r2_ctx *ctx;
static struct r2_listen *listening;
static uint8_t handle[R2_HANDLE_BYTES];

static void begin(void)
{
    CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
    CHECK_EQ(r2_engine_listen(ctx, 0, handle, &listening), 0);
}

static void end(void)
{
    CHECK_EQ(r2_engine_close_listen(listening), 0);
    CHECK_EQ(r2_engine_finalize(ctx), 0);
}

/* `who` as in r2_hello_tag. */
static void make_tag(enum tag kind, const uint8_t secret[16], char who,
                     const struct r2_tcp_hello *hello, const uint8_t nonce[16], uint8_t tag[16])
{
    struct r2_tcp_hello h = *hello;
    uint8_t key[16], once[16];

    memcpy(key, secret, 16);
    memcpy(once, nonce, 16);
    key[15] ^= kind == OTHER_SECRET;
    once[3] ^= kind == OTHER_NONCE ? 0x40 : 0;
    h.gen ^= kind == OTHER_HELLO;
    if (kind == OTHER_LABEL)
        who = who == 'S' ? 'R' : 'S';
    r2_hello_tag(key, who, &h, once, tag);
    tag[15] ^= kind == ONE_BIT;
    if (kind == ZERO)
        memset(tag, 0, 16);
}

static int patient(int fd)
{
    const struct timeval patience = {.tv_sec = 20};

    CHECK_GE(fd, 0);
    CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    return fd;
}

/* True: `len` bytes came. False: the other end left without a word. */
static bool hear(int fd, void *out, size_t len)
{
    ssize_t n = recv(fd, out, len, MSG_WAITALL);

    CHECK_MSG(n == (ssize_t)len || n == 0 || (n < 0 && errno == ECONNRESET), "%zd of %zu bytes: %s",
              n, len, n < 0 ? strerror(errno) : "too few");
    return n == (ssize_t)len;
}

static bool say(int fd, const void *data, size_t len)
{
    return send(fd, data, len, MSG_NOSIGNAL) == (ssize_t)len;
}

/* The peer of that id, or NULL: its reference is the caller's. */
static struct r2_peer *find(const uint8_t id[16], bool out)
{
    struct r2_peer *found = NULL;
    struct r2_list *n;

    pthread_mutex_lock(&r2_eng.lock);
    R2_LIST_FOR_EACH (n, &r2_eng.peers) {
        struct r2_peer *p = R2_CONTAINER_OF(n, struct r2_peer, node);

        if (p->out == out && memcmp(p->id, id, 16) == 0)
            found = p;
    }
    if (found)
        r2_peer_get(found);
    pthread_mutex_unlock(&r2_eng.lock);
    return found;
}

static bool known(const uint8_t id[16], bool out)
{
    struct r2_peer *p = find(id, out);

    if (p)
        r2_peer_put(p);
    return p;
}

/* Paths up to a peer that the engine connects to; 0 without such a peer. */
static int paths_up(const uint8_t id[16])
{
    struct r2_peer *p = find(id, true);
    int n = 0;

    if (!p)
        return 0;
    r2_peer_lock(p);
    n = p->n_up;
    r2_peer_unlock(p);
    r2_peer_put(p);
    return n;
}

/* How the engine's last endpoint to a process ended, as the engine was told. */
static struct r2_transport_events hooked;
static const struct r2_transport_events *real;
static uint8_t watched[16];
static uint8_t watched_via;
static struct r2_ep_health told;
static int told_err; /* 0: not yet */
static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;

static void failed(void *owner, struct r2_ep *ep, int err, const struct r2_ep_health *health)
{
    const struct r2_ep_params *params = r2_eng.ops->params(ep);

    pthread_mutex_lock(&told_lock);
    if (memcmp(params->remote_process, watched, 16) == 0 && params->transport == watched_via &&
        !told_err) {
        told = *health;
        told_err = err;
    }
    pthread_mutex_unlock(&told_lock);
    real->failed(owner, ep, err, health);
}

static int start_hooked(const struct r2_transport_events *events, const uint8_t process[16])
{
    real = events;
    hooked = *events;
    hooked.failed = failed;
    return r2_transport_mux.start(&hooked, process);
}

/* From now on, of the endpoints to that process by that transport. */
static void watch(const uint8_t id[16], enum r2_transport_id via)
{
    pthread_mutex_lock(&told_lock);
    memcpy(watched, id, 16);
    watched_via = (uint8_t)via;
    told_err = 0;
    pthread_mutex_unlock(&told_lock);
}

static struct r2_ep_health await_end(int *err)
{
    struct r2_ep_health h = {0};

    *err = 0;
    WHILE_MS (20000, !*err) {
        pthread_mutex_lock(&told_lock);
        *err = told_err;
        h = told;
        pthread_mutex_unlock(&told_lock);
    }
    CHECK(*err);
    return h;
}

/* ---- the engine accepts */

/* Connects as process `from`. True: it was welcomed. */
static bool welcomed(const uint8_t from[16], enum r2_hello_kind kind, enum tag tag)
{
    struct r2_tcp_hello h = {.magic = R2_TCP_MAGIC,
                             .version = R2_WIRE_VERSION,
                             .kind = (uint8_t)kind,
                             .nic = 1,
                             .gen = 1};
    struct r2_tcp_welcome w = {0};
    struct r2_tcp_challenge c;
    struct r2_tcp_proof proof;
    int fd = dial();
    uint8_t want[16];
    bool ok;

    memcpy(h.from, from, 16);
    memcpy(h.to, r2_eng.process, 16);
    CHECK_EQ(r2_random_bytes(h.nonce, 16), 0);
    CHECK(say(fd, &h, sizeof(h)));
    CHECK(hear(fd, &c, sizeof(c)));
    CHECK_EQ(c.status, 0);
    r2_hello_tag(r2_eng.secret, 'R', &h, c.nonce, want);
    CHECK_MEM(c.tag, want, 16); /* it proves itself first */
    make_tag(tag, r2_eng.secret, 'S', &h, c.nonce, proof.tag);
    CHECK(say(fd, &proof, sizeof(proof)));
    ok = hear(fd, &w, sizeof(w));
    close(fd);
    CHECK(!ok || (w.magic == R2_TCP_MAGIC && w.status == 0));
    return ok;
}

static void accepts(enum r2_hello_kind kind)
{
    uint8_t from[16];

    begin();
    for (int tag = RIGHT + 1; tag < TAGS; tag++) {
        CHECK_EQ(r2_random_bytes(from, 16), 0);
        CHECK_MSG(!welcomed(from, kind, (enum tag)tag), "welcomed with wrong tag %d", tag);
        CHECK(!known(from, false));
    }
    CHECK_EQ(r2_random_bytes(from, 16), 0);
    CHECK(welcomed(from, kind, RIGHT));
    if (kind == R2_HELLO_LANE)
        CHECK(known(from, false));
    end();
}

TEST(wrong_connector)
{
    accepts(R2_HELLO_LANE);
}

/* Says the HELLO of one lane, proves itself, and keeps the socket. What the WELCOME says. */
static uint32_t lane(const uint8_t from[16], unsigned index, unsigned nic, uint32_t gen, int *fd)
{
    struct r2_tcp_hello h = {.magic = R2_TCP_MAGIC,
                             .version = R2_WIRE_VERSION,
                             .kind = R2_HELLO_LANE,
                             .lane = (uint8_t)index,
                             .lanes = 2,
                             .nic = (uint8_t)nic,
                             .gen = gen};
    struct r2_tcp_challenge c;
    struct r2_tcp_proof proof;
    struct r2_tcp_welcome w;

    *fd = dial();
    memcpy(h.from, from, 16);
    memcpy(h.to, r2_eng.process, 16);
    CHECK(say(*fd, &h, sizeof(h)));
    CHECK(hear(*fd, &c, sizeof(c)));
    r2_hello_tag(r2_eng.secret, 'S', &h, c.nonce, proof.tag);
    CHECK(say(*fd, &proof, sizeof(proof)));
    CHECK(hear(*fd, &w, sizeof(w)));
    CHECK_EQ(w.magic, R2_TCP_MAGIC);
    return w.status;
}

/* Whoever has a handle knows the secret: one that does joins the lanes of its own endpoints only.
 */
TEST(lane_of_another)
{
    uint8_t first[16], second[16];
    int fd[7];

    begin();
    CHECK_EQ(r2_random_bytes(first, 16), 0);
    memcpy(second, first, 16);
    second[15] ^= 1;
    CHECK_EQ(lane(first, 0, 1, 5, &fd[0]), 0);
    CHECK_EQ(lane(second, 1, 1, 5, &fd[1]), ESTALE);
    CHECK_EQ(lane(first, 1, 0, 5, &fd[2]), ESTALE);
    CHECK_EQ(lane(first, 1, 1, 4, &fd[3]), ESTALE);
    CHECK_EQ(lane(first, 3, 1, 5, &fd[4]), ESTALE); /* it said that there are two */
    CHECK_EQ(lane(first, 1, 1, 5, &fd[5]), 0);
    CHECK_EQ(lane(first, 1, 1, 5, &fd[6]), ESTALE); /* there is one */
    for (int i = 0; i < 7; i++)
        close(fd[i]);
    end();
}

/* ---- the engine connects */

struct other {
    uint8_t id[16], secret[16];
    uint8_t handle[R2_HANDLE_BYTES];
    int listener;
    struct r2_conn *conn;
};

/* A process that listens at a socket of the test: the engine has its handle and begins to connect.
 * `offers` as in r2_wire_addr. */
static void other_new(struct other *o, uint8_t offers)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000301)};
    struct sockaddr_storage at;
    struct r2_wire_addr addr;
    socklen_t len = sizeof(at);

    memset(o, 0, sizeof(*o));
    CHECK_EQ(r2_random_bytes(o->id, 16), 0);
    CHECK_EQ(r2_random_bytes(o->secret, 16), 0);
    o->listener = patient(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_EQ(bind(o->listener, (struct sockaddr *)&sa, sizeof(sa)), 0);
    CHECK_EQ(listen(o->listener, 16), 0);
    CHECK_EQ(getsockname(o->listener, (struct sockaddr *)&at, &len), 0);
    CHECK_EQ(r2_wire_from_sockaddr(&addr, &at), 0);
    addr.offers = offers;
    memcpy(o->handle, handle, sizeof(handle));
    memcpy(o->handle + AT_PROCESS, o->id, 16);
    memcpy(o->handle + AT_SECRET, o->secret, 16);
    o->handle[AT_ADDRS] = 1;
    o->handle[AT_NIC] = 0;
    memcpy(o->handle + AT_ADDR, &addr, sizeof(addr));
    CHECK_EQ(r2_engine_connect(ctx, 0, o->handle, &o->conn), 0);
}

/* The next attempt of that kind; others are sent away. */
static int next_attempt(const struct other *o, enum r2_hello_kind kind, struct r2_tcp_hello *h)
{
    for (int i = 0; i < 50; i++) {
        int fd = patient(accept4(o->listener, NULL, NULL, SOCK_CLOEXEC));

        if (hear(fd, h, sizeof(*h)) && h->kind == kind) {
            CHECK_EQ(h->magic, R2_TCP_MAGIC);
            CHECK_MEM(h->to, o->id, 16);
            CHECK_MEM(h->from, r2_eng.process, 16);
            return fd;
        }
        close(fd);
    }
    CHECK_MSG(false, "no attempt of kind %d", kind);
    return -1;
}

/* Answers one attempt. The socket when the engine has proved itself then, -1 when it left. */
static int proves_to(const struct other *o, enum r2_hello_kind kind, enum tag tag,
                     struct r2_tcp_hello *hello, uint8_t nonce[16])
{
    struct r2_tcp_challenge c = {.magic = R2_TCP_MAGIC};
    struct r2_tcp_proof proof;
    struct r2_tcp_hello h;
    int fd = next_attempt(o, kind, &h);
    uint8_t want[16];

    CHECK_EQ(r2_random_bytes(c.nonce, 16), 0);
    *hello = h;
    memcpy(nonce, c.nonce, 16);
    make_tag(tag, o->secret, 'R', &h, c.nonce, c.tag);
    CHECK(say(fd, &c, sizeof(c)));
    if (!hear(fd, &proof, sizeof(proof))) {
        close(fd);
        return -1;
    }
    r2_hello_tag(o->secret, 'S', &h, c.nonce, want);
    CHECK_MEM(proof.tag, want, 16);
    return fd;
}

static int proves(const struct other *o, enum r2_hello_kind kind, enum tag tag)
{
    struct r2_tcp_hello hello;
    uint8_t nonce[16];

    return proves_to(o, kind, tag, &hello, nonce);
}

static void connects(enum r2_hello_kind kind, uint8_t offers)
{
    const struct r2_tcp_welcome w = {.magic = R2_TCP_MAGIC,
                                     .status = kind == R2_HELLO_LANE ? 0 : EPROTONOSUPPORT};
    struct other o;
    int fd;

    begin();
    for (int tag = RIGHT + 1; tag < TAGS; tag++) {
        other_new(&o, offers);
        CHECK_MSG(proves(&o, kind, (enum tag)tag) < 0, "proves itself after wrong tag %d", tag);
        CHECK_EQ(paths_up(o.id), 0);
        close(o.listener);
    }
    other_new(&o, offers);
    fd = proves(&o, kind, RIGHT);
    CHECK_GE(fd, 0);
    CHECK_EQ(paths_up(o.id), 0); /* not before it is welcomed */
    CHECK(say(fd, &w, sizeof(w)));
    WHILE_MS (20000, kind == R2_HELLO_LANE && !paths_up(o.id))
        ;
    CHECK_EQ(paths_up(o.id), kind == R2_HELLO_LANE);
    close(fd);
    close(o.listener);
    end();
}

TEST(wrong_acceptor)
{
    connects(R2_HELLO_LANE, 0);
}

/* "You are gone to me" ends connections: it is believed from who proves it, in answer to this very
 * attempt; its number alone is nothing, and neither is what was said to another attempt. */
TEST(given_up_by_whom)
{
    for (int tag = RIGHT; tag <= TAGS; tag++) { /* TAGS: it leaves without one */
        const struct r2_tcp_welcome w = {.magic = R2_TCP_MAGIC, .status = R2_WELCOME_GONE};
        struct r2_tcp_proof proof;
        struct r2_ep_health health;
        struct r2_tcp_hello h;
        uint8_t nonce[16];
        struct other o;
        int fd, err;

        begin();
        other_new(&o, 0);
        watch(o.id, R2_VIA_TCP);
        fd = proves_to(&o, R2_HELLO_LANE, RIGHT, &h, nonce);
        CHECK_GE(fd, 0);
        CHECK(say(fd, &w, sizeof(w)));
        make_tag(tag == TAGS ? RIGHT : (enum tag)tag, o.secret, 'G', &h, nonce, proof.tag);
        if (tag < TAGS)
            CHECK(say(fd, &proof, sizeof(proof)));
        else
            close(fd);
        health = await_end(&err);
        CHECK_MSG(health.given_up == (tag == RIGHT), "tag %d: %d, error %d", tag, health.given_up,
                  err);
        CHECK(health.there);
        if (tag < TAGS)
            close(fd);
        close(o.listener);
        end();
    }
}

/* Who takes the connection and answers with what is not of this protocol is another process. That
 * answer may be shorter than any of ours. Who says nothing is not known to be. */
static void answers_otherwise(enum r2_hello_kind kind, uint8_t offers)
{
    static const char *const words[] = {"H", "SSH-2.0-x\r\n", "2RCX", ""};

    for (int i = 0; i < 2 * 4; i++) {
        const char *word = words[i / 2];
        struct r2_ep_health health;
        struct r2_tcp_hello h;
        struct other o;
        int fd, err;

        if (i % 2 == 0 && !*word)
            continue; /* nothing is said, and nobody leaves */
        begin();
        other_new(&o, offers);
        fd = next_attempt(&o, kind, &h);
        watch(o.id, kind == R2_HELLO_LANE ? R2_VIA_TCP : R2_VIA_VERBS);
        if (*word)
            CHECK(say(fd, word, strlen(word)));
        if (i % 2)
            close(fd);
        health = await_end(&err);
        CHECK_EQ(health.other_process, *word != 0);
        CHECK_EQ(err, *word ? ESRCH : ECONNRESET);
        CHECK(!health.there);
        if (i % 2 == 0)
            close(fd);
        close(o.listener);
        end();
    }
}

TEST(another_protocol)
{
    answers_otherwise(R2_HELLO_LANE, 0);
}

/* ---- the same for queue pairs, whose devices are the stand-in's (tests/fakeverbs) */

static void need_devices(void)
{
    struct r2_wire_addr addr;

    begin();
    CHECK_EQ(r2_eng.ops->address(0, &addr), 0);
    end();
    if (!(addr.offers & R2_OFFER_ROCE))
        CHECK_SKIP("no stand-in for libibverbs: <infiniband/verbs.h> is missing (Debian: "
                   "libibverbs-dev)");
}

TEST(wrong_connector_of_pairs)
{
    need_devices();
    accepts(R2_HELLO_VERBS);
}

TEST(wrong_acceptor_of_pairs)
{
    need_devices();
    connects(R2_HELLO_VERBS, R2_OFFER_ROCE);
}

TEST(another_protocol_of_pairs)
{
    need_devices();
    answers_otherwise(R2_HELLO_VERBS, R2_OFFER_ROCE);
}

int main(int argc, char **argv)
{
    const char *library = check_built("fakeverbs/libibverbs.so.1");
    static struct r2_transport_ops ops;

    ops = r2_transport_mux;
    ops.start = start_hooked;
    r2_engine_transport = &ops;

    if (access(library, R_OK) == 0)
        setenv("R2CCL_IBVERBS_LIB", library, 1);
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv);
}
