/* Test chunks. Everything here runs under the peer's lock.
 *
 * A path that comes back carries nothing of the job before two tests. Test chunks go over each bulk
 * lane, and words both ways over its control lane. The connecting side says how many bytes it wants
 * to see (TEST), and sends them as chunks of connection 0. It goes on when the other side has them
 * all (TEST_ACK). One-sided transports have a place of their own for test chunks. They say that one
 * has arrived when they have found its contents there. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/path/path.h"

#define TEST_CHUNK (64 * 1024)
#define TEST_CHUNKS 4 /* at least, and as many on each lane */
#define TEST_MOST (2 * TEST_CHUNK * R2_LANES_MAX)
#define HEADS 128 /* bytes of a packet that are none of the chunk, at most */
#define TEST_NS (1 * R2_NS_PER_S)
#define TEST_ONE_SIDED_NS (2 * R2_NS_PER_S) /* a queue pair sends again after 0.27 s as a rule */
#define LOSSY_PART 20 /* of segments, sent again: packets of any size get lost */

static uint8_t test_bytes[TEST_CHUNK]; /* read only */

void r2_path_proven(struct r2_path *path, const char *cause)
{
    path->state = r2_path_next(path->state, R2_PATH_EV_ARRIVED);
    path->attempt.fails = 0;
    path->past = r2_past_next(path->past, R2_PAST_EV_PROVEN);
    if (!r2_path_wireless(path))
        r2_nic_reach(path->lnic, R2_NICREACH_EV_MEET);
    if (path->peer->out && !path->peer->doubt_since) /* the other side learns what comes of it */
        path->peer->doubt_since = path->peer->no_path_since;
    path->peer->no_path_since = 0;
    r2_path_event(path, R2_HEALTH_EV_PROVEN, cause);
    r2_peer_census(path->peer);
    r2_path_tell_up(path);
    path->peer->todo |= R2_TODO_WEIGH;
    r2_peer_wake(path->peer); /* what waited for a path goes on */
}

static uint32_t chunk_len(const struct r2_path *path)
{
    return r2_path_one_sided(path) ? R2_TEST_LEN : TEST_CHUNK;
}

/* Fills one packet of the NIC. Where the kernel hands large pieces on uncut, as between virtual
 * machines, only such a one finds out that the way takes smaller packets. */
static uint32_t packet_len(const struct r2_path *path)
{
    int mtu = r2_local.nics[path->lnic].mtu, len = mtu - HEADS;

    return len < HEADS ? HEADS : len > TEST_CHUNK ? TEST_CHUNK : (uint32_t)len;
}

/* Bytes in all. A lane may be dead while the others work: its port may hash to another link, or a
 * firewall may know it. */
static uint32_t plan_test(struct r2_path *path)
{
    unsigned lanes = r2_eng.ops->planned(path->ep);

    lanes = lanes < 1 ? 1 : lanes > R2_LANES_MAX ? R2_LANES_MAX : lanes;
    memset(path->test.took, 0, sizeof(path->test.took));
    if (r2_path_one_sided(path)) {
        path->test.quota = R2_TEST_EACH;
        return chunk_len(path) * lanes * path->test.quota;
    }
    path->test.quota = (uint8_t)(1 + (TEST_CHUNKS + lanes - 1) / lanes);
    return lanes * (packet_len(path) + TEST_CHUNK * (path->test.quota - 1u));
}

void r2_path_test(struct r2_path *path)
{
    struct r2_msg_test m = {.gen = path->gen};
    bool fresh = path->health.state == R2_HEALTH_UNREACHED && !r2_path_one_sided(path) &&
                 r2_nic_trusted(path->lnic);

    path->test.out = path->test.want = 0; /* test.done: see up_accepted */
    path->test.at = path->peer->out ? r2_peer_now(path->peer) : 0;
    if (!path->peer->out)
        return;
    if (!fresh)
        m.bytes = path->test.want = plan_test(path);
    if (r2_out_frame(path, R2_F_TEST, &m, sizeof(m), NULL, 0))
        return; /* no memory: it is down again */
    if (fresh)
        r2_path_proven(path, "");
    else
        path->outbox.kick_wanted += R2_LANES_MAX;
}

bool r2_path_test_next(struct r2_path *path, struct r2_bulk *bulk)
{
    unsigned lane = bulk->lane % R2_LANES_MAX;

    if (path->test.out >= path->test.want || path->test.took[lane] >= path->test.quota)
        return false;
    memset(bulk, 0, sizeof(*bulk));
    bulk->lane = (uint16_t)lane;
    bulk->conn = R2_CONN_TEST;
    bulk->len =
        !path->test.took[lane]++ && !r2_path_one_sided(path) ? packet_len(path) : chunk_len(path);
    bulk->seq = path->test.out / chunk_len(path);
    bulk->total = bulk->len;
    bulk->data = test_bytes;
    path->test.out += bulk->len;
    return true;
}

static void tell_small(const struct r2_path *path)
{
    static atomic_uint told; /* bits of NICs */
    char text[128];

    if (atomic_fetch_or(&told, 1u << path->lnic) >> path->lnic & 1)
        return;
    r2_path_journal(path, R2_EV_WARNING, 0, 0, "large packets vanish on it: it uses small ones");
    R2_TELL("path %s: packets of %d bytes, this NIC's MTU, are lost on the way, and packets of %d "
            "arrive. It uses small packets and is slower. Check the MTU of NICs, bridges and "
            "switches on both sides",
            r2_path_text(path, text, sizeof(text)), r2_local.nics[path->lnic].mtu,
            path->attempt.packet);
}

void r2_path_judge_packets(struct r2_path *path, const struct r2_ep_health *h)
{
    if (!path->attempt.packet || path->state != R2_PATH_PROVEN)
        return;
    if (h->retransmits * LOSSY_PART > h->segments)
        path->attempt.packet = 0;
    else
        tell_small(path);
}

/* S: the other side has seen it all. */
int r2_path_on_test_ack(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_test m;

    memcpy(&m, body, sizeof(m));
    if (!path->peer->out)
        return -EPROTO;
    if (path->state == R2_PATH_TESTING && m.gen == path->gen && m.bytes >= path->test.want) {
        path->test.lost = 0;
        r2_path_proven(path, path->attempt.packet ? "test chunks have arrived in small packets"
                                                  : "test chunks have arrived");
    }
    return 0;
}

/* R: answers once all is there. */
static void answer_test(struct r2_path *path)
{
    struct r2_msg_test m = {.gen = path->gen, .bytes = path->test.done};

    if (path->test.at && path->test.done >= path->test.want) {
        path->test.at = 0;
        if (r2_out_frame(path, R2_F_TEST_ACK, &m, sizeof(m), NULL, 0))
            return; /* no memory: it is down again */
        r2_path_proven(path, path->test.want ? "test chunks have arrived" : "");
    }
}

int r2_path_on_test(struct r2_path *path, const uint8_t *body)
{
    struct r2_msg_test m;

    memcpy(&m, body, sizeof(m));
    if (path->peer->out || m.bytes > TEST_MOST)
        return -EPROTO;
    path->test.want = m.bytes;
    path->test.at = r2_peer_now(path->peer);
    answer_test(path);
    return 0;
}

int r2_path_test_claim(struct r2_path *path, struct r2_bulk *bulk)
{
    if (path->peer->out || bulk->len > chunk_len(path))
        return -EPROTO;
    if (r2_path_one_sided(path)) /* it is in its place */
        return 0;
    bulk->data = malloc(bulk->len);
    return bulk->data ? 0 : 1;
}

void r2_path_test_done(struct r2_path *path, const struct r2_bulk *bulk, bool whole)
{
    free(bulk->data);
    if (!whole)
        return;
    path->test.done += bulk->len;
    answer_test(path);
}

void r2_path_test_tick(struct r2_path *path, uint64_t now)
{
    if (path->state != R2_PATH_TESTING || !path->peer->out)
        return;
    if (now - path->test.at > (r2_path_one_sided(path) ? TEST_ONE_SIDED_NS : TEST_NS))
        r2_path_fail(path, path->gen, ETIMEDOUT, "test chunks did not arrive");
    else if (path->test.out < path->test.want)
        path->outbox.kick_wanted += R2_LANES_MAX;
}
