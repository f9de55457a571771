/* Events of a device whose two ports are two NICs, over the stand-in for libibverbs (rung 3;
 * verbs_bed.h says what it cannot prove): one port's are not the other's, and an address may change
 * while queue pairs are being made with it. */
#include "verbs_bed.h"

#ifdef R2_HAVE_VERBS

#include "transport/verbs/verbs.h"

#define SIZE (256 * 1024)

static uint8_t out[SIZE], in[SIZE];
static struct bed bed;
static struct bed_memory memory = {.out = out, .in = in, .size = SIZE};
static const char *const nics[] = {"127.0.1.1", "127.0.2.1"};

static void message(int turn)
{
    bed_message(&bed, &memory, turn);
}

static void begin(void)
{
    bed_open(&bed, 2);
    bed_register(&bed, &memory);
    message(0);
}

static void finish(void)
{
    bed_finish(&bed, &memory);
}

/* The generation of the NIC's path to itself if that carries chunks, else 0. */
static uint32_t carries(int nic)
{
    struct r2_peer *p = bed.tx->peer;
    uint32_t gen = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *path = p->paths[i];

        if (path->transport == R2_VIA_VERBS && path->lnic == nic && path->rnic == nic &&
            r2_path_may(path) >= R2_MAY_STAND_BY)
            gen = path->gen;
    }
    r2_peer_unlock(p);
    return gen;
}

static void until_carries(int nic, bool does)
{
    r2_nicstate_forgive(nic, r2_now_ns()); /* of the tests before */
    CHECK_MSG(WITHIN_MS(BED_WAIT_MS, (carries(nic) != 0) == does), "NIC %d should%s carry", nic,
              does ? "" : " not");
}

static void both_carry(void)
{
    until_carries(0, true);
    until_carries(1, true);
}

/* Whatever happens to one port, or to one that is nobody's, ends nothing of the other's. */
TEST(port_of_another)
{
    static const int types[] = {IBV_EVENT_PORT_ERR,    IBV_EVENT_LID_CHANGE,
                                IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
                                IBV_EVENT_GID_CHANGE,  IBV_EVENT_CLIENT_REREGISTER};
    uint32_t gens[2];
    uint64_t from;
    char text[32];

    begin();
    both_carry();
    for (int port = 1; port >= 0; port--) {
        int other = 1 - port;

        gens[other] = carries(other);
        from = bed_journal();
        snprintf(text, sizeof(text), "!port fv0 %d down", port + 1);
        bed_script(text);
        until_carries(port, false);
        message(port);
        for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
            snprintf(text, sizeof(text), "!event fv0 %d %d", types[i], port + 1);
            bed_script(text);
        }
        AWAIT(!bed_script("unread fv0"));
        message(port + 10);
        CHECK_EQ(carries(other), gens[other]);
        CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, nics[other], nics[other], NULL), 0);
        CHECK_EQ(bed_told(from, R2_EV_NIC_DOWN, nics[other], NULL, NULL), 0);
        CHECK_EQ(r2_nic_word(other), R2_NIC_USABLE);
        snprintf(text, sizeof(text), "!port fv0 %d up", port + 1);
        bed_script(text);
        both_carry();
        CHECK_EQ(carries(other), gens[other]);
    }
    for (int nic = 0; nic < 2; nic++)
        gens[nic] = carries(nic);
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        for (int port = 0; port <= 9; port += 3) { /* none of them is there */
            snprintf(text, sizeof(text), "!event fv0 %d %d", types[i], port);
            bed_script(text);
        }
    }
    AWAIT(!bed_script("unread fv0"));
    message(2);
    for (int nic = 0; nic < 2; nic++)
        CHECK_EQ(carries(nic), gens[nic]);
    finish();
}

/* The device failed before the endpoint has a socket: it gets none. */
TEST(fails_before_it_begins)
{
    struct r2_ep_params params = {.transport = R2_VIA_VERBS};
    struct r2_ep *ep;

    begin();
    params.remote_addr = *r2_pair_addr(bed.tx->peer, 0, 0);
    ep = r2_vep_new(&params);
    CHECK(ep);
    r2_veps_fail(ep->hca, ENODEV);
    CHECK_EQ(r2_meet_dial(ep), -ESHUTDOWN);
    CHECK_EQ(atomic_load(&ep->refs), 1);
    r2_vep_put(ep);
    both_carry();
    finish();
}

/* An endpoint of NIC 0 to NIC 0 that has sent its card and waits for the peer's, with a reference.
 * NULL: it is made already, on a machine that did not let us look in time. */
static struct r2_ep *being_made(void)
{
    struct r2_ep *found = NULL;

    for (int us = 0; us < BED_WAIT_MS * 1000 && !found && !carries(0); us += 100) {
        struct r2_list *n;

        pthread_mutex_lock(&r2_verbs.lock);
        R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
            struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

            if (found || !ep->params.initiator || ep->params.local_nic || ep->params.remote_nic ||
                pthread_mutex_trylock(&ep->lock))
                continue;
            if (ep->stage == R2_V_CARD && !atomic_load(&ep->dead)) {
                found = ep;
                r2_vep_get(ep);
            }
            pthread_mutex_unlock(&ep->lock);
        }
        pthread_mutex_unlock(&r2_verbs.lock);
        await_nap();
    }
    return found;
}

/* Port 1 goes and comes back, and its path is being made again, slowly. */
static struct r2_ep *again(void)
{
    struct r2_ep *found = NULL;

    for (int tries = 0; tries < 20 && !found; tries++) {
        bed_script("!port fv0 1 down");
        until_carries(0, false);
        bed_script("!chaos cmd_us=30000");
        bed_script("!port fv0 1 up");
        r2_nicstate_forgive(0, r2_now_ns());
        found = being_made();
    }
    CHECK(found);
    return found;
}

/* Paths between these NICs that ended since; both ends of each are here. */
static int ended(uint64_t from, int a, int b)
{
    return bed_told(from, R2_EV_PATH_DOWN, nics[a], nics[b], NULL);
}

/* Commands for ports that take the number of one and then `what`. */
static void of_port(const char *verb, int port, const char *what)
{
    char text[64];

    snprintf(text, sizeof(text), "!%s fv0 %d %s", verb, port + 1, what);
    bed_script(text);
}

/* The NIC's path is another one than that. */
static void until_anew(int nic, uint32_t gen)
{
    r2_nicstate_forgive(nic, r2_now_ns());
    CHECK_MSG(WITHIN_MS(BED_WAIT_MS, carries(nic) && carries(nic) != gen),
              "no new path of NIC %d carries", nic);
}

static int lid_of(int nic)
{
    struct r2_vnic *v = &r2_verbs.nics[nic];
    int lid;

    pthread_mutex_lock(&v->lock);
    lid = v->lid;
    pthread_mutex_unlock(&v->lock);
    return lid;
}

/* A port gets another LID, or another partition key where its queue pairs take theirs from: its
 * paths end, the other port's do not, and new ones are made with what is there now. */
TEST(other_lid_or_partition)
{
    int key;

    begin();
    both_carry();
    key = bed_attr("pkey") ^ 2; /* none that it had in a test before */
    for (int lid = 0; lid < 2; lid++) {
        for (int port = 0; port < 2; port++) {
            uint64_t from = bed_journal();
            uint32_t gens[2] = {carries(0), carries(1)};
            char text[32];

            if (lid)
                snprintf(text, sizeof(text), "%d", lid_of(port) ^ 8);
            else
                snprintf(text, sizeof(text), "0 %d", key);
            of_port(lid ? "lid" : "pkey", port, text);
            until_anew(port, gens[port]);
            CHECK_GT(ended(from, port, port), 0);
            CHECK_EQ(ended(from, 1 - port, 1 - port), 0);
            CHECK_EQ(carries(1 - port), gens[1 - port]);
            message(port);
        }
    }
    AWAIT(bed_attr("pkey") == key); /* ends of what was tried between the two partitions */
    finish();
}

/* Events that have brought nothing new end nothing: the subnet manager has started anew, and all is
 * as it was; a key that no queue pair of ours uses is another one. */
TEST(nothing_new)
{
    static const int types[] = {IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
                                IBV_EVENT_GID_CHANGE, IBV_EVENT_CLIENT_REREGISTER};
    uint64_t from;
    char text[32], same[32];

    begin();
    both_carry();
    snprintf(same, sizeof(same), "0 %d", bed_attr("pkey"));
    from = bed_journal();
    for (int port = 0; port < 2; port++) {
        for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
            snprintf(text, sizeof(text), "!event fv0 %d %d", types[i], port + 1);
            bed_script(text);
        }
        of_port("pkey", port, "1 0x8002");
        of_port("pkey", port, same);
    }
    AWAIT(!bed_script("unread fv0"));
    message(1);
    for (int nic = 0; nic < 2; nic++)
        CHECK_EQ(ended(from, nic, nic), 0);
    finish();
}

static bool active(int nic)
{
    struct r2_vnic *v = &r2_verbs.nics[nic];
    bool is;

    pthread_mutex_lock(&v->lock);
    is = v->active;
    pthread_mutex_unlock(&v->lock);
    return is;
}

/* A port's event is believed at once, however long the device takes to say more about it (it may be
 * dead): nothing new is begun there, and the other port is as it was. */
TEST(told_before_the_device_answers)
{
    char text[32];

    begin();
    both_carry();
    for (int port = 0; port < 2; port++) {
        uint64_t from = bed_journal();

        bed_script("!hang fv0 2");
        snprintf(text, sizeof(text), "!port fv0 %d down", port + 1);
        bed_script(text);
        AWAIT(!active(port));
        CHECK(active(1 - port));
        until_carries(port, false);
        CHECK_EQ(ended(from, 1 - port, 1 - port), 0);
        bed_script("!hang fv0 0");
        snprintf(text, sizeof(text), "!port fv0 %d up", port + 1);
        bed_script(text);
        both_carry();
        message(port);
    }
    finish();
}

/* The look that another event has asked for sees the change first, before the word of it: the paths
 * end all the same, those of the other port do not. */
TEST(change_is_seen_early)
{
    static const int types[] = {IBV_EVENT_PORT_ACTIVE, IBV_EVENT_SM_CHANGE};
    int key, other;

    begin();
    both_carry();
    key = bed_attr("pkey");
    other = key ^ 4;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        uint32_t gens[2] = {carries(0), carries(1)};
        char text[32];

        bed_script("!hang fv0 2");
        snprintf(text, sizeof(text), "!event fv0 %d 1", types[i]);
        bed_script(text);
        AWAIT(bed_script("hung fv0")); /* asked */
        snprintf(text, sizeof(text), "0 %d", i ? key : other);
        of_port("pkey", 0, text);
        bed_script("!hang fv0 0");
        until_anew(0, gens[0]);
        CHECK_EQ(carries(1), gens[1]);
        message((int)i);
    }
    AWAIT(bed_attr("pkey") == key);
    finish();
}

/* What is told of one queue ends its path, and no other. */
TEST(events_of_queues)
{
    static const int ends[] = {IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
                               IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_CQ_ERR};
    static const int means_nothing[] = {IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED,
                                        IBV_EVENT_PATH_MIG, IBV_EVENT_QP_LAST_WQE_REACHED};
    uint64_t from;
    char text[32];

    begin();
    both_carry();
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        uint32_t gens[2] = {carries(0), carries(1)};
        int hit;

        from = bed_journal();
        snprintf(text, sizeof(text), "!queue fv0 %d %d", ends[i], (int)i * 2);
        bed_script(text);
        AWAIT(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL));
        message((int)i);
        /* There may be one across, that stands by. */
        hit = (ended(from, 0, 0) > 0) + (ended(from, 1, 1) > 0) +
              (ended(from, 0, 1) + ended(from, 1, 0) > 0);
        CHECK_MSG(hit == 1, "event %d ended %d paths", ends[i], hit);
        both_carry();
        for (int nic = 0; nic < 2; nic++)
            CHECK_EQ(carries(nic) != gens[nic], ended(from, nic, nic) > 0);
    }
    from = bed_journal();
    for (size_t i = 0; i < sizeof(means_nothing) / sizeof(means_nothing[0]); i++) {
        snprintf(text, sizeof(text), "!queue fv0 %d %d", means_nothing[i], (int)i);
        bed_script(text);
    }
    AWAIT(!bed_script("unread fv0"));
    message(9);
    CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL), 0);
    finish();
}

static atomic_bool enough;

static void *tells(void *arg)
{
    unsigned seed = 1;

    (void)arg;
    while (!atomic_load(&enough)) {
        char text[32];

        snprintf(text, sizeof(text), "!queue fv0 %d %d",
                 rand_r(&seed) % 3 ? IBV_EVENT_QP_FATAL : IBV_EVENT_CQ_ERR, rand_r(&seed) % 12);
        bed_script(text);
        bed_ms(2);
    }
    return NULL;
}

/* Events of queues that are being made and destroyed: whose they are is known all the same, without
 * a look at what another thread is changing (TSan). */
TEST(events_while_queues_go)
{
    uint64_t from, until;
    pthread_t thread;

    begin();
    both_carry();
    from = bed_journal();
    bed_script("!chaos cmd_us=500");
    CHECK_EQ(pthread_create(&thread, NULL, tells, NULL), 0);
    until = r2_now_ns() + 2 * R2_NS_PER_S;
    for (int turn = 0; r2_now_ns() < until; turn++) {
        for (int nic = 0; nic < 2; nic++)
            r2_nicstate_forgive(nic, r2_now_ns());
        message(turn); /* over sockets, if it must be */
    }
    atomic_store(&enough, true);
    pthread_join(thread, NULL);
    bed_script("!chaos cmd_us=0");
    CHECK_GE(bed_told(from, R2_EV_PATH_DOWN, NULL, NULL, NULL), 4);
    both_carry();
    message(1);
    finish();
}

/* The address moves to another entry of the table: whatever is being made takes it from there. */
TEST(gid_moves_meanwhile)
{
    uint64_t from;
    int index;

    begin();
    for (int turn = 0; turn < 6; turn++) {
        struct r2_ep *ep = again();

        from = bed_journal();
        bed_script(turn % 2 ? "!gid fv0 1 3 0.0.0.0" : "!gid fv0 1 1 0.0.0.0");
        bed_script(turn % 2 ? "!gid fv0 1 1 127.0.1.1" : "!gid fv0 1 3 127.0.1.1");
        bed_script("!chaos cmd_us=0");
        both_carry();
        pthread_mutex_lock(&r2_verbs.nics[0].lock);
        index = r2_verbs.nics[0].gid_index;
        pthread_mutex_unlock(&r2_verbs.nics[0].lock);
        CHECK_EQ(index, turn % 2 ? 1 : 3);
        CHECK_EQ(bed_told(from, R2_EV_PATH_DOWN, nics[1], nics[1], NULL), 0);
        message(turn);
        r2_vep_put(ep);
    }
    finish();
}

/* The address is another one: what is being made with the old one ends at once, not by its time
 * limit, and is made with the new one. */
TEST(gid_changes_meanwhile)
{
    begin();
    for (int turn = 0; turn < 4; turn++) {
        struct r2_ep *ep = again();
        uint64_t begun = r2_now_ns();

        bed_script("!gid fv0 1 1 127.0.99.1"); /* leads nowhere */
        AWAIT(atomic_load(&ep->failed));
        CHECK_LT(r2_now_ns() - begun, R2_NS_PER_S);
        r2_vep_put(ep);
        message(turn); /* over the other port */
        bed_script("!chaos cmd_us=0");
        bed_script("!gid fv0 1 1 127.0.1.1");
        both_carry();
        message(turn + 10);
    }
    finish();
}

int main(int argc, char **argv)
{
    setenv("R2_FAKEVERBS", "fv0=127.0.1.1+127.0.2.1", 1);
    setenv("R2CCL_HEARTBEAT", "2s", 1); /* nor by one of these */
    return check_main(argc, argv);
}

#endif
