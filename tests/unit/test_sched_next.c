/* engine/core/sched_next (rung 1): which path takes the next chunk. Rules on random views, and
 * transfers over simulated paths. What it cannot prove: that measured rates are right, and who is
 * allowed to carry (engine_weights, engine_shares). */
#include "check.h"

#include <string.h>

#include "engine/core/sched_next.h"
#include "engine/core/weights.h"
#include "util/random.h"

#define CHUNK (64u * 1024)
#define MOST 8
#define ROUNDS 20000

static struct r2_prng prng;

static uint64_t up_to(uint64_t most)
{
    return r2_prng_next(&prng) % (most + 1);
}

/* Rates over four powers of ten, some unknown; equal ones are frequent. */
static struct r2_sched_path some_path(void)
{
    static const uint64_t rates[] = {0,         1000000,    10000000,    10000000,
                                     100000000, 1000000000, 12500000000, 12500000000};

    return (struct r2_sched_path){.rate = rates[up_to(7)],
                                  .inflight = up_to(1) ? up_to(16) * CHUNK : 0,
                                  .distance = (unsigned)up_to(3)};
}

/* Who takes the chunk for which `self` asks: -1: self. */
static int next_of(const struct r2_sched_path *self, const struct r2_sched_path others[], int n,
                   uint64_t waiting)
{
    struct r2_sched_path paths[1 + MOST] = {*self};

    for (int i = 0; i < n; i++)
        paths[1 + i] = others[i];
    for (int i = 0; i <= n; i++) {
        paths[i].chunk = CHUNK;
        paths[i].takes = true;
    }
    return r2_sched_next(paths, 1 + n, &(struct r2_sched_bytes){.waiting = waiting}) - 1;
}

TEST(order)
{
    for (int round = 0; round < ROUNDS; round++) {
        struct r2_sched_path paths[MOST];
        uint16_t order[MOST];
        unsigned named = 0;
        int n = (int)up_to(MOST);

        for (int i = 0; i < n; i++)
            paths[i] = some_path();
        r2_sched_order(paths, n, order);
        for (int i = 0; i < n; i++)
            named |= 1u << order[i];
        CHECK(named == (1u << n) - 1); /* each of them once: none is left idle */
        for (int i = 1; i < n; i++) {
            const struct r2_sched_path *a = &paths[order[i - 1]], *b = &paths[order[i]];

            CHECK(b->rate || !a->rate);
            if (!a->rate && b->rate)
                continue;
            CHECK(r2_sched_done(a, 0) <= r2_sched_done(b, 0));
            if (r2_sched_done(a, 0) == r2_sched_done(b, 0))
                CHECK(a->distance <= b->distance);
        }
    }
}

/* Who declines names a path that is done at least twice as soon; so the soonest never declines. */
TEST(the_soonest_never_declines)
{
    int declined = 0;

    for (int round = 0; round < ROUNDS; round++) {
        struct r2_sched_path paths[MOST];
        int n = 1 + (int)up_to(MOST - 1), next;
        uint64_t waiting = 1 + up_to(64 * CHUNK);
        uint64_t len = waiting < CHUNK ? waiting : CHUNK;
        uint64_t mine, least = UINT64_MAX;

        for (int i = 0; i < n; i++)
            paths[i] = some_path();
        next = next_of(&paths[0], paths + 1, n - 1, waiting);
        mine = r2_sched_done(&paths[0], len);
        for (int i = 1; i < n; i++) {
            uint64_t theirs = r2_sched_done(&paths[i], len);

            least = theirs && theirs < least ? theirs : least;
        }
        CHECK(next >= -1 && next < n - 1);
        if (!mine || mine <= least)
            CHECK(next == -1);
        if (next < 0)
            continue;
        declined++;
        CHECK(r2_sched_done(&paths[1 + next], len) == least && least <= mine / 2);
    }
    CHECK(declined > ROUNDS / 100);
}

TEST(alone_or_unknown)
{
    struct r2_sched_path slow = {.rate = 1000}, fast = {.rate = 1000000000}, new = {.rate = 0};
    struct r2_sched_path busy[2];

    CHECK(next_of(&slow, NULL, 0, CHUNK) == -1);
    CHECK(next_of(&slow, &new, 1, CHUNK) == -1); /* nobody knows that it is faster */
    CHECK(next_of(&new, &fast, 1, CHUNK) == -1);
    CHECK(next_of(&slow, &fast, 1, CHUNK) == 0);
    CHECK(next_of(&fast, &slow, 1, CHUNK) == -1);
    /* So much waits that the slow one is of use: 10 times a fast one's bytes. */
    slow.rate = fast.rate / 10;
    CHECK(next_of(&slow, &fast, 1, 11 * CHUNK) == -1);
    CHECK(next_of(&slow, &fast, 1, 9 * CHUNK) == 0);
    /* What the faster ones have to send first counts: 12 chunks and 8, at twice 10 times its rate.
     */
    busy[0] = busy[1] = fast;
    CHECK(next_of(&slow, busy, 2, 12 * CHUNK) == 0);
    busy[1].inflight = 8 * CHUNK;
    CHECK(next_of(&slow, busy, 2, 12 * CHUNK) == -1);
    CHECK(r2_sched_done(&(struct r2_sched_path){.rate = 1}, UINT64_MAX) == UINT64_MAX);
}

/* ---- a message over simulated paths: two chunks in flight on each */

struct link {
    struct r2_sched_path path;
    struct r2_share share;
    uint64_t until[2]; /* ns: when what is in flight is acknowledged; 0: nothing */
    uint64_t taken;
    uint64_t limit; /* of what is in flight; views only */
};

static struct r2_share_set shares;

static int free_slot(const struct link *l)
{
    return !l->until[0] ? 0 : !l->until[1] ? 1 : -1;
}

static uint64_t take(struct link *l, uint64_t now, uint64_t waiting)
{
    uint64_t len = waiting < CHUNK ? waiting : CHUNK, last = now;
    int at = free_slot(l);

    if (l->until[!at] > last)
        last = l->until[!at];
    l->until[at] = last + len * 1000000000 / l->path.rate + 1;
    l->path.inflight += len;
    l->taken += len;
    r2_share_sent(&shares, &l->share, len);
    return len;
}

/* One path with room takes a chunk, if `sched` is not set whichever comes first. */
static uint64_t one_chunk(struct link *links, int n, uint64_t now, uint64_t waiting, bool sched)
{
    struct r2_sched_path seen[MOST];
    uint16_t order[MOST];

    for (int i = 0; i < n; i++)
        seen[i] = links[i].path;
    r2_sched_order(seen, n, order);
    for (int i = 0; i < n; i++) {
        struct link *l = &links[order[i]];
        struct r2_sched_path others[MOST];
        int m = 0;

        if (free_slot(l) < 0 || !r2_share_may(&shares, &l->share))
            continue;
        for (int k = 0; k < n; k++) {
            if (&links[k] != l && r2_share_may(&shares, &links[k].share))
                others[m++] = links[k].path;
        }
        if (!sched || next_of(&l->path, others, m, waiting) < 0)
            return take(l, now, waiting);
    }
    return 0;
}

/* The next acknowledgement. */
static uint64_t advance(struct link *links, int n, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    struct link *l = NULL;
    int slot = 0;

    for (int i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            if (links[i].until[k] && links[i].until[k] < next) {
                next = links[i].until[k];
                l = &links[i];
                slot = k;
            }
        }
    }
    CHECK_MSG(l, "bytes wait, nothing is in flight and all paths decline at %llu",
              (unsigned long long)now);
    l->until[slot] = 0;
    l->path.inflight = l->until[!slot] ? CHUNK : 0;
    return next;
}

/* Returns when the last byte was acknowledged. */
static uint64_t transfer(struct link *links, int n, uint64_t bytes, bool sched)
{
    uint64_t now = 1, waiting = bytes, sum = 0, last = 0;

    while (waiting) {
        uint64_t len = one_chunk(links, n, now, waiting, sched);

        CHECK(len <= waiting);
        waiting -= len;
        if (!len)
            now = advance(links, n, now);
    }
    for (int i = 0; i < n; i++) {
        sum += links[i].taken;
        for (int k = 0; k < 2; k++)
            last = links[i].until[k] > last ? links[i].until[k] : last;
    }
    CHECK(sum == bytes);
    return last > now ? last : now;
}

static void begin(struct link *links, int n, const uint64_t rates[], const uint32_t weights[])
{
    memset(links, 0, (size_t)n * sizeof(*links));
    memset(&shares, 0, sizeof(shares));
    r2_share_begin(&shares);
    for (int i = 0; i < n; i++) {
        links[i].path.rate = rates[i];
        links[i].share.weight = weights ? weights[i] : R2_WEIGHT_FULL;
        r2_share_add(&shares, &links[i].share);
    }
    r2_share_end(&shares, false);
}

/* Bytes are conserved, nothing waits for ever, and slow paths cost no time: the transfer ends as
 * soon as when all paths take whatever they can, or sooner. */
TEST(transfers)
{
    static const uint64_t rates[] = {10000000, 50000000, 100000000, 1000000000, 1250000000};
    uint64_t sooner = 0;

    for (int round = 0; round < 2000; round++) {
        struct link links[MOST];
        uint64_t of[MOST], bytes = 1 + up_to(100 * CHUNK), with, without;
        int n = 1 + (int)up_to(MOST - 1);

        for (int i = 0; i < n; i++)
            of[i] = rates[up_to(4)];
        begin(links, n, of, NULL);
        without = transfer(links, n, bytes, false);
        begin(links, n, of, NULL);
        with = transfer(links, n, bytes, true);
        CHECK_MSG(with <= without + without / 10, "round %d: %llu ns, %llu ns if nobody declines",
                  round, (unsigned long long)with, (unsigned long long)without);
        sooner += with < without - without / 10;
    }
    CHECK(sooner > 200);
}

/* ---- views: as long as bytes wait and a path could carry, some path gets the next chunk */

static bool could_carry(const struct link *l)
{
    return l->path.inflight < l->limit && r2_share_may(&shares, &l->share);
}

/* All others that could carry as well. */
static int others_of(const struct link *links, int n, const struct link *l,
                     struct r2_sched_path others[])
{
    int m = 0;

    for (int i = 0; i < n; i++) {
        if (&links[i] != l && could_carry(&links[i]))
            others[m++] = links[i].path;
    }
    return m;
}

/* The header's word: the faster ones together would have sent all that waits before this path had
 * sent a chunk. One of them is done with a chunk in half its time. */
static bool may_decline(const struct r2_sched_path *self, const struct r2_sched_path others[],
                        int m, uint64_t waiting)
{
    uint64_t len = waiting < CHUNK ? waiting : CHUNK, mine = r2_sched_done(self, len);
    double bytes = (double)waiting, rates = 0;
    bool soon = false;

    for (int i = 0; i < m; i++) {
        uint64_t theirs = r2_sched_done(&others[i], len);

        if (!theirs || theirs >= mine)
            continue;
        bytes += (double)others[i].inflight;
        rates += (double)others[i].rate;
        soon |= theirs <= mine / 2;
    }
    return soon && bytes / rates * 1e9 < (double)mine + 1; /* ns are whole there */
}

/* Asks everybody who could carry; who gets the next chunk, or NULL. */
static struct link *gets_it(struct link *links, int n, uint64_t waiting, int *declined)
{
    struct r2_sched_path seen[MOST], others[MOST];
    struct link *taker = NULL;
    uint16_t order[MOST];
    bool any = false;

    for (int i = 0; i < n; i++)
        seen[i] = links[i].path;
    r2_sched_order(seen, n, order);
    for (int i = 0; i < n; i++) {
        struct link *l = &links[order[i]];
        int m = others_of(links, n, l, others);

        if (!could_carry(l))
            continue;
        any = true;
        if (next_of(&l->path, others, m, waiting) < 0) {
            taker = taker ? taker : l;
            continue;
        }
        ++*declined;
        CHECK_MSG(may_decline(&l->path, others, m, waiting),
                  "path %d of %d declines, of use for %llu bytes", order[i], n,
                  (unsigned long long)waiting);
    }
    CHECK_MSG(taker || !any, "all of %d paths decline, and %llu bytes wait", n,
              (unsigned long long)waiting);
    return taker;
}

/* Some path has a chunk acknowledged, which one is chance. */
static void acknowledge(struct link *links, int n)
{
    for (int i = 0, from = (int)up_to(MOST); i < n; i++) {
        struct r2_sched_path *path = &links[(from + i) % n].path;

        if (!path->inflight)
            continue;
        path->inflight -= path->inflight < CHUNK ? path->inflight : CHUNK;
        return;
    }
    CHECK_MSG(false, "%d paths with nothing in flight, and none could carry", n);
}

static int some_view(struct link *links)
{
    static const uint32_t some_weights[] = {0, 250, R2_WEIGHT_FULL, R2_WEIGHT_FULL};
    uint64_t rates[MOST] = {0};
    uint32_t weights[MOST];
    int n = 1 + (int)up_to(MOST - 1);

    for (int i = 0; i < n; i++)
        weights[i] = some_weights[up_to(3)];
    begin(links, n, rates, weights);
    for (int i = 0; i < n; i++) {
        links[i].path = some_path();
        links[i].limit = (1 + up_to(16)) * CHUNK;
        r2_share_sent(&shares, &links[i].share, up_to(64) * CHUNK);
    }
    return n;
}

TEST(no_path_is_idle)
{
    int declined = 0;

    for (int round = 0; round < ROUNDS / 10; round++) {
        struct link links[MOST];
        uint64_t waiting = 1 + up_to(100 * CHUNK);
        int n = some_view(links);

        while (waiting) {
            struct link *l = gets_it(links, n, waiting, &declined);
            uint64_t len = waiting < CHUNK ? waiting : CHUNK;

            if (!l) {
                acknowledge(links, n);
                continue;
            }
            l->path.inflight += len;
            r2_share_sent(&shares, &l->share, len);
            waiting -= len;
        }
    }
    CHECK_GE(declined, ROUNDS / 4);
}

TEST(weights_are_kept)
{
    const uint64_t rates[] = {100000000, 100000000, 100000000};
    const uint32_t weights[] = {1000, 250, 0};
    struct link links[3];

    begin(links, 3, rates, weights);
    transfer(links, 3, 5000 * (uint64_t)CHUNK, true);
    CHECK_GE(links[1].taken / CHUNK, 980);
    CHECK_LE(links[1].taken / CHUNK, 1020);
    CHECK(links[2].taken == 0);
}

/* What waits at the peer's NIC counts, as far as others use that NIC. */
TEST(ahead)
{
    struct r2_sched_path path = {.nic_inflight = 4, .inflight = 2, .nic_paths = 3};

    CHECK_EQ(r2_sched_ahead(&path), 8);
    path.nic_paths = 1;
    CHECK_EQ(r2_sched_ahead(&path), 4);
    path.nic_paths = 0; /* none answers at the moment */
    CHECK_EQ(r2_sched_ahead(&path), 4);
}

/* Bytes for any NIC: random views of NICs, some with nothing to do and no room. */
static int some_nics(struct r2_sched_path paths[])
{
    int n = 1 + (int)up_to(MOST - 1);

    for (int i = 0; i < n; i++) {
        paths[i] = some_path();
        paths[i].chunk = CHUNK << up_to(3);
        paths[i].srtt = up_to(1) ? up_to(UINT64_C(1) << up_to(24)) : 0;
        paths[i].nic_rate = up_to(3) ? paths[i].rate + up_to(UINT64_C(1) << up_to(34)) : 0;
        paths[i].nic_paths = (unsigned)up_to(4);
        paths[i].nic_inflight = paths[i].inflight + up_to(16) * CHUNK;
        paths[i].takes = paths[i].inflight || up_to(1);
        paths[i].left = up_to(1);
    }
    paths[0].takes = true;
    return n;
}

/* With rates unknown nobody is faster: the NIC with the least ahead gets the chunk, even if it has
 * no room now. One that never takes any gets none. */
TEST(least_ahead)
{
    int left = 0;

    for (int round = 0; round < ROUNDS; round++) {
        struct r2_sched_path paths[MOST];
        int n = some_nics(paths), next;

        for (int i = 0; i < n; i++) {
            paths[i].rate = 0;
            paths[i].left = false;
        }
        next = r2_sched_next(paths, n, &(struct r2_sched_bytes){.waiting = CHUNK, .any_nic = true});
        CHECK(paths[next].takes);
        for (int i = 0; i < n; i++)
            CHECK(!paths[i].takes || r2_sched_ahead(&paths[next]) <= r2_sched_ahead(&paths[i]));
        left += next != 0;
        CHECK(r2_sched_next(paths, n, &(struct r2_sched_bytes){.waiting = CHUNK}) == 0);
    }
    CHECK_GE(left, ROUNDS / 4);
}

/* A path on trial leaves nothing to faster ones. */
TEST(trial)
{
    struct r2_sched_path paths[2] = {{.rate = 1000, .chunk = CHUNK, .takes = true},
                                     {.rate = 1000000000, .chunk = CHUNK, .takes = true}};
    struct r2_sched_bytes bytes = {.waiting = CHUNK};

    CHECK(r2_sched_next(paths, 2, &bytes) == 1);
    paths[1].takes = false; /* nobody would ask it again */
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    paths[1].takes = true;
    bytes.trial = true;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    bytes.any_nic = true;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    paths[0].nic_inflight = CHUNK; /* busy is something else */
    CHECK(r2_sched_next(paths, 2, &bytes) == 1);
}

/* One NIC, busy with other peers, has little left for this path, whose own rate is low for that.
 * The NIC as a whole is done with a chunk as soon as the other one: the path is not slow. If its
 * chunks take long, or all paths of the NIC are as slow, it is. */
TEST(slow_or_shared)
{
    struct r2_sched_path paths[2] = {{.rate = CHUNK * 1000,
                                      .inflight = 3 * CHUNK,
                                      .srtt = 4000000,
                                      .nic_inflight = 3 * CHUNK,
                                      .nic_rate = CHUNK * 1000,
                                      .chunk = CHUNK,
                                      .takes = true},
                                     {.rate = CHUNK * 100,
                                      .srtt = 3000000,
                                      .nic_inflight = 2 * CHUNK,
                                      .nic_rate = CHUNK * 1000,
                                      .chunk = CHUNK,
                                      .takes = true}};
    struct r2_sched_bytes bytes = {.waiting = CHUNK, .any_nic = true};

    CHECK(r2_sched_next(paths, 2, &bytes) == 1);
    bytes.any_nic = false; /* each NIC's own choice: there the path's rate counts */
    CHECK(r2_sched_next((struct r2_sched_path[]){paths[1], paths[0]}, 2, &bytes) == 1);
    bytes.any_nic = true;
    CHECK(r2_sched_next((struct r2_sched_path[]){paths[1], paths[0]}, 2, &bytes) == 0);
    paths[1].srtt = 20000000;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    paths[1].srtt = 3000000;
    paths[1].nic_rate = CHUNK * 100;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
}

/* The path with the least ahead is slow. The chunk goes to the next, not to who asks. */
TEST(not_to_who_asks)
{
    struct r2_sched_path paths[3] = {
        {.rate = CHUNK * 1000, .nic_inflight = 3 * CHUNK, .chunk = CHUNK, .takes = true},
        {.rate = CHUNK * 10, .chunk = CHUNK, .takes = true},
        {.rate = CHUNK * 1000, .nic_inflight = 2 * CHUNK, .chunk = CHUNK, .takes = true}};
    struct r2_sched_bytes bytes = {.waiting = CHUNK, .any_nic = true};

    CHECK(r2_sched_next(paths, 3, &bytes) == 2);
}

/* A NIC that is left to others takes no chunk while these have bytes there. If all are left, the
 * one with least ahead takes it. */
TEST(left_to_others)
{
    struct r2_sched_path paths[2] = {
        {.nic_inflight = CHUNK, .chunk = CHUNK, .takes = true, .left = true},
        {.nic_inflight = 8 * CHUNK, .inflight = CHUNK, .chunk = CHUNK, .takes = true}};
    struct r2_sched_bytes bytes = {.waiting = CHUNK, .any_nic = true};

    CHECK(r2_sched_next(paths, 2, &bytes) == 1);
    paths[0].inflight = CHUNK; /* all that it has in flight is its own */
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    paths[0].inflight = 0;
    paths[1].takes = false;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
    paths[1].takes = paths[1].left = true;
    CHECK(r2_sched_next(paths, 2, &bytes) == 0);
}

/* Whoever is asked because a chunk was left to it takes it, or leaves it to one that takes it: no
 * chunk goes round for ever. */
TEST(no_chunk_goes_round)
{
    int asked[3] = {0};

    for (int round = 0; round < ROUNDS; round++) {
        struct r2_sched_path paths[MOST];
        int n = some_nics(paths), times = 0, next;
        struct r2_sched_bytes bytes = {
            .waiting = 1 + up_to(64 * CHUNK) / (1 + up_to(31)), .any_nic = true, .trial = up_to(1)};

        for (next = -1; next && times <= 2; times++) {
            struct r2_sched_path first;

            next = r2_sched_next(paths, n, &bytes);
            first = paths[0];
            paths[0] = paths[next];
            paths[next] = first;
            bytes.trial = false;
        }
        CHECK_MSG(!next, "round %d: %d paths leave a chunk to each other", round, n);
        asked[times - 1]++;
    }
    CHECK_GE(asked[1], ROUNDS / 10);
}

int main(int argc, char **argv)
{
    r2_prng_seed(&prng, 20);
    return check_main(argc, argv);
}
