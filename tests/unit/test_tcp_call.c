/* Calls of an accepting process that no path leads to (R2_HELLO_CALL), over real sockets on
 * loopback (rung 3): who is believed, and when. The caller is a plain socket of the test. What it
 * cannot prove: that paths come back by it; the lab does. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>

#include "dial.h"
#include "tcp_bed.h"
#include "transport/tcp/tcp.h"
#include "util/siphash.h"

#define PORT 4711

static struct r2_transport_events hooked;
static const struct r2_transport_events *real;
static atomic_int calls;
static struct r2_wire_addr said;
static int said_nic;
static atomic_bool silent; /* every path, as it is found out just before a call */

static void called(const uint8_t process[16], int nic, const struct r2_wire_addr *addr)
{
    said = *addr;
    said_nic = nic;
    if (atomic_load(&silent)) {
        r2_peer_lock(tx->peer);
        tx->peer->suspect_since =
            r2_now_ns(); /* until the next look at heartbeats, which do come */
        pthread_mutex_unlock(&tx->peer->lock);
    }
    real->called(process, nic, addr);
    atomic_fetch_add(&calls, 1);
}

static int start_hooked(const struct r2_transport_events *events, const uint8_t process[16])
{
    real = events;
    hooked = *events;
    hooked.called = called;
    return r2_transport_mux.start(&hooked, process);
}

static bool passed_on; /* the proof is of a caller at another address */

static void prove(int fd, const uint8_t secret[16], const struct r2_tcp_hello *h,
                  const uint8_t nonce[16], uint8_t tag[16])
{
    struct sockaddr_storage sa;
    socklen_t len = sizeof(sa);
    struct r2_wire_addr here;

    CHECK_EQ(getsockname(fd, (struct sockaddr *)&sa, &len), 0);
    CHECK_EQ(r2_wire_from_sockaddr(&here, &sa), 0);
    here.ip[3] ^= passed_on ? 8 : 0;
    r2_hello_call_tag(secret, h, nonce, &here, tag);
}

/* Calls, as process `from` that knows `secret`. True: it was welcomed. */
static bool call(const uint8_t from[16], const uint8_t secret[16], unsigned nic, uint32_t port)
{
    struct r2_tcp_hello h = {.magic = R2_TCP_MAGIC,
                             .version = R2_WIRE_VERSION,
                             .kind = R2_HELLO_CALL,
                             .nic = (uint8_t)nic,
                             .gen = port};
    struct r2_tcp_challenge c;
    struct r2_tcp_proof proof;
    struct r2_tcp_welcome w;
    int fd = dial();
    ssize_t n;

    memcpy(h.from, from, 16);
    memcpy(h.to, r2_eng.process, 16);
    CHECK_EQ(send(fd, &h, sizeof(h), MSG_NOSIGNAL), (ssize_t)sizeof(h));
    CHECK_EQ(recv(fd, &c, sizeof(c), MSG_WAITALL), (ssize_t)sizeof(c));
    CHECK_EQ(c.status, 0);
    prove(fd, secret, &h, c.nonce, proof.tag);
    CHECK_EQ(send(fd, &proof, sizeof(proof), MSG_NOSIGNAL), (ssize_t)sizeof(proof));
    n = recv(fd, &w, sizeof(w), MSG_WAITALL);
    CHECK(n == (ssize_t)sizeof(w) || n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
    return n == (ssize_t)sizeof(w) && w.status == 0;
}

static void where(struct r2_wire_addr *out)
{
    r2_peer_lock(tx->peer);
    *out = tx->peer->rnics[1].addr;
    pthread_mutex_unlock(&tx->peer->lock);
}

/* Only who has the secret of a process that this one has a connection to. */
TEST(who_is_believed)
{
    uint8_t other[16], wrong[16];

    bed_listen();
    bed_connect();
    memcpy(other, r2_eng.process, 16);
    memcpy(wrong, r2_eng.secret, 16);
    other[3] ^= 1;
    wrong[15] ^= 1;
    CHECK(!call(r2_eng.process, wrong, 1, PORT));
    CHECK(!call(other, r2_eng.secret, 1, PORT));
    CHECK(!call(r2_eng.process, r2_eng.secret, R2_WIRE_MAX_NICS, PORT));
    CHECK(!call(r2_eng.process, r2_eng.secret, 1, 0));
    CHECK(!call(r2_eng.process, r2_eng.secret, 1, 65536));
    passed_on = true;
    CHECK(!call(r2_eng.process, r2_eng.secret, 1, PORT));
    passed_on = false;
    CHECK_EQ(atomic_load(&calls), 0);
    CHECK(call(r2_eng.process, r2_eng.secret, 1, PORT));
    CHECK_EQ(atomic_load(&calls), 1);
    CHECK_EQ(said_nic, 1);
    CHECK_EQ(said.port, PORT);
    CHECK_EQ(said.family, 4);
    end();
}

static bool some_up(struct r2_peer *p)
{
    bool yes;

    r2_peer_lock(p);
    yes = p->n_up > 0;
    pthread_mutex_unlock(&p->lock);
    return yes;
}

/* While a path answers the peer's word comes over it, in order; a call changes nothing. */
TEST(only_without_a_path)
{
    struct r2_wire_addr before, after;
    int was = atomic_load(&calls);

    bed_listen();
    bed_connect();
    where(&before);
    CHECK(before.family);
    CHECK(call(r2_eng.process, r2_eng.secret, 1, PORT));
    CHECK_EQ(atomic_load(&calls), was + 1);
    where(&after);
    CHECK_EQ(memcmp(&before, &after, sizeof(before)), 0);
    r2_peer_lock(tx->peer); /* none left */
    for (int i = 0; i < tx->peer->n_paths; i++)
        r2_path_fail(tx->peer->paths[i], tx->peer->paths[i]->gen, ETIMEDOUT, "test");
    r2_peer_moved(tx->peer, 1, &said);
    after = tx->peer->rnics[1].addr; /* later the other end calls, and says where it is */
    pthread_mutex_unlock(&tx->peer->lock);
    CHECK_EQ(after.port, PORT);
    CHECK_EQ(after.offers, before.offers);
    r2_peer_lock(tx->peer); /* and back, so that it ends in order */
    r2_peer_moved(tx->peer, 1, &before);
    pthread_mutex_unlock(&tx->peer->lock);
    end();
}

/* The paths are dead but up still, as none of them answers and silence alone fails none: the caller
 * is believed, and what leads to where it was is given up; the others are left as they are. */
TEST(every_path_silent)
{
    struct r2_wire_addr before, after;

    bed_listen();
    bed_connect();
    where(&before);
    atomic_store(&silent, true);
    for (int i = 0; i < 50; i++) { /* the look may come between */
        CHECK(call(r2_eng.process, r2_eng.secret, 1, PORT));
        where(&after);
        if (after.port == PORT)
            break;
    }
    atomic_store(&silent, false);
    CHECK_EQ(after.port, PORT);
    CHECK_EQ(after.offers, before.offers);
    AWAIT(some_up(tx->peer)); /* one may be made anew just now */
    r2_peer_lock(tx->peer);
    for (int i = 0; i < tx->peer->n_paths; i++) {
        if (tx->peer->paths[i]->rnic == 1) /* nothing listens there */
            CHECK(!r2_path_is_up(tx->peer->paths[i]));
    }
    r2_peer_moved(tx->peer, 1, &before); /* and back, so that it ends in order */
    pthread_mutex_unlock(&tx->peer->lock);
    end();
}

int main(int argc, char **argv)
{
    static struct r2_transport_ops ops;

    ops = r2_transport_mux;
    ops.start = start_hooked;
    r2_engine_transport = &ops;
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv);
}
