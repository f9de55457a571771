/* Connections of the agreement (rung 2): what is known of the other end, stage by stage, between
 * two ends in one thread over loopback. What processes make of it: agree_net. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include "agree/net.h"
#include "await.h"
#include "check.h"

static struct end {
    struct r2_agree_net net;
    bool knows; /* any token */
    enum r2_agree_stage at_frame;
    int frames, closed, refused;
} ends[32], *a, *b; /* each is used once, since a process's network never ends */

static bool on_frame(void *user, const struct r2_agree_conn *c, const struct r2_agree_frame *f,
                     const uint8_t *payload)
{
    struct end *end = user;

    (void)f, (void)payload;
    end->frames++;
    end->at_frame = c->stage;
    return end->knows;
}

static bool knows(void *user, const struct r2_agree_frame *f)
{
    (void)f;
    return ((struct end *)user)->knows;
}

static void on_refused(void *user, const struct r2_agree_addr *addr)
{
    (void)addr;
    ((struct end *)user)->refused++;
}

static void on_close(void *user, const uint8_t process[16])
{
    (void)process;
    ((struct end *)user)->closed++;
}

static struct end *begin(char name, bool known)
{
    static int used;
    struct end *end = &ends[used++];
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(sa);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&sa, len) == 0 && listen(fd, 8) == 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&sa, &len), 0);
    end->knows = known;
    end->net.self.addr = (struct r2_agree_addr){4, ntohs(sa.sin_port), {127, 0, 0, 1}};
    memset(end->net.self.process, name, sizeof(end->net.self.process));
    end->net.on_frame = on_frame;
    end->net.knows = knows;
    end->net.on_refused = on_refused;
    end->net.on_close = on_close;
    end->net.user = end;
    CHECK_EQ(r2_agree_net_init(&end->net, fd), 0);
    return end;
}

static void send_one(struct end *from, const struct end *to)
{
    struct r2_agree_frame f = {.kind = R2_FRAME_CALL};

    CHECK_EQ(
        r2_agree_net_send(&from->net, to->net.self.process, &to->net.self.addr, &f, NULL, 0, NULL),
        0);
}

/* A calls B; whether each knows any token. */
static void meet(bool a_knows, bool b_knows)
{
    a = begin('A', a_knows);
    b = begin('B', b_knows);
    send_one(a, b);
}

/* The end's connection: it never has two. */
static struct r2_agree_conn *conn(struct end *end)
{
    struct r2_list *it = r2_list_first(&end->net.conns);

    CHECK(!it || it->next == &end->net.conns);
    return it ? R2_CONTAINER_OF(it, struct r2_agree_conn, node) : NULL;
}

static bool is_at(struct end *end, enum r2_agree_stage stage)
{
    r2_agree_net_turn(&end->net, 0);
    return conn(end) && conn(end)->stage == stage;
}

static bool has_none(struct end *end)
{
    r2_agree_net_turn(&end->net, 0);
    return !conn(end);
}

TEST(from_stage_to_stage)
{
    meet(true, true);
    CHECK_EQ(conn(a)->stage, R2_CONN_CONNECTING);
    AWAIT(is_at(a, R2_CONN_OPEN)); /* nobody has accepted it */
    CHECK_EQ(a->net.strangers, 0); /* it knows whom it called */
    AWAIT(is_at(b, R2_CONN_TRUSTED));
    CHECK(b->frames == 1 && b->at_frame == R2_CONN_NAMED);
    CHECK_EQ(b->net.strangers, 0);
    AWAIT(is_at(a, R2_CONN_NAMED));
    send_one(b, a); /* the way that there is, by the name that it has shown */
    AWAIT(is_at(a, R2_CONN_TRUSTED));
    CHECK(conn(a)->outgoing && !conn(b)->outgoing);
    shutdown(conn(a)->fd, SHUT_RDWR);
    AWAIT(has_none(b));
    AWAIT(has_none(a));
    CHECK(a->closed == 1 && b->closed == 1 && a->refused == 0);
}

/* Who was called may be late with a token that is not known any more. */
TEST(a_friend_stays)
{
    meet(false, true);
    AWAIT(is_at(a, R2_CONN_OPEN));
    AWAIT(is_at(b, R2_CONN_TRUSTED));
    send_one(b, a);
    WHILE_MS (5000, a->frames == 0)
        r2_agree_net_turn(&a->net, 0);
    CHECK_EQ(a->frames, 1);
    CHECK(is_at(a, R2_CONN_NAMED));
    b->knows = false;
    send_one(a, b);
    WHILE_MS (5000, b->frames == 1)
        r2_agree_net_turn(&b->net, 0);
    CHECK_EQ(b->frames, 2);
    CHECK(is_at(b, R2_CONN_TRUSTED)); /* it has shown one before */
}

TEST(a_stranger_goes)
{
    meet(false, false);
    AWAIT(is_at(a, R2_CONN_OPEN));
    AWAIT(is_at(b, R2_CONN_OPEN));
    CHECK_EQ(b->net.strangers, 1);
    AWAIT(has_none(b));
    CHECK(b->frames == 1 && b->at_frame == R2_CONN_NAMED);
    CHECK(b->closed == 0 && b->net.strangers == 0); /* anybody may say any name */
    AWAIT(has_none(a));
}

TEST(refused)
{
    a = begin('A', true);
    b = begin('B', true);
    close(b->net.listener);
    send_one(a, b);
    CHECK_EQ(conn(a)->stage, R2_CONN_CONNECTING);
    AWAIT(has_none(a));
    CHECK(a->refused == 1 && a->closed == 0 && a->net.strangers == 0);
}

/* A caller of `b` that says hello `hellos` times before the frame. */
static void call(int hellos)
{
    struct r2_agree_frame hello = {.kind = R2_FRAME_HELLO, .len = R2_AGREE_HELLO_BYTES};
    struct r2_agree_frame f = {.kind = R2_FRAME_CALL};
    struct sockaddr_in sa = {.sin_family = AF_INET,
                             .sin_port = htons(b->net.self.addr.port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint8_t text[R2_AGREE_HEADER + R2_AGREE_HELLO_BYTES];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0);
    for (int i = 0; i < hellos; i++) {
        r2_agree_frame_encode(text, &hello);
        r2_agree_hello_encode(text + R2_AGREE_HEADER, &a->net.self);
        CHECK_EQ(send(fd, text, sizeof(text), 0), sizeof(text));
    }
    r2_agree_frame_encode(text, &f);
    CHECK_EQ(send(fd, text, R2_AGREE_HEADER, 0), R2_AGREE_HEADER);
    AWAIT(is_at(b, hellos == 1 ? R2_CONN_TRUSTED : R2_CONN_OPEN));
    if (hellos == 1)
        shutdown(fd, SHUT_RDWR);
    AWAIT(has_none(b));
    CHECK(b->frames == (hellos == 1) && b->net.strangers == 0);
    close(fd);
}

/* Whatever is out of turn ends the connection. */
TEST(one_hello)
{
    a = begin('A', true);
    for (int hellos = 0; hellos < 3; hellos++) {
        b = begin('B', true);
        call(hellos);
    }
}
