/* engine/locate/announce among simulated processes (rung 1): how often is it said that a NIC is
 * broken, and does everybody hear it? */
#include "check.h"

#include "engine/locate/announce.h"

#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)
#define MOST 400

static struct r2_tells all[MOST];
static uint64_t finds[MOST]; /* when it has its verdict */
static bool knows[MOST];

static struct r2_msg_verdict verdict(int number)
{
    struct r2_msg_verdict m = {.kind = 1};

    m.nic.family = 4;
    m.nic.ip[3] = (uint8_t)number;
    return m;
}

/* n processes that all talk to each other find it within 20 ms and look every 20 ms; a message
 * takes up to 2 ms. Returns how many messages there were. */
static long storm(int n)
{
    struct r2_msg_verdict m = verdict(7), out;
    long said = 0;

    memset(all, 0, sizeof(all));
    memset(knows, 0, sizeof(knows));
    for (int i = 0; i < n; i++)
        finds[i] = 10 * SEC + check_below(20 * MS);
    for (uint64_t now = 10 * SEC; now < 11 * SEC; now += MS) {
        for (int i = 0; i < n; i++) {
            if (now / MS == finds[i] / MS)
                r2_tells_add(&all[i], &m, n - 1, check_random(), now);
        }
        for (int i = 0; i < n; i++) {
            if ((now / MS + (uint64_t)i) % 20 || !r2_tells_due(&all[i], &out, now))
                continue;
            said += n - 1;
            CHECK_EQ(out.nic.ip[3], 7);
            for (int k = 0; k < n; k++) {
                knows[k] |= k != i;
                if (k != i)
                    r2_tells_heard(&all[k], &m.nic, n - 1, now + check_below(2 * MS));
            }
        }
    }
    return said;
}

TEST(many_say_it_seldom)
{
    for (int n = 20; n <= MOST; n += 20) {
        long said = storm(n);

        CHECK_GE(said, n - 1);
        CHECK_LE(said, 20L * n); /* not n x n */
        for (int i = 0; i < n; i++)
            CHECK(knows[i] || said == n - 1);
    }
}

TEST(few_all_say_it)
{
    CHECK_EQ(storm(3), 3 * 2);
    CHECK_EQ(storm(R2_TELL_FEW + 1), (R2_TELL_FEW + 1) * R2_TELL_FEW);
}

TEST(each_nic_once)
{
    struct r2_tells t = {0};
    struct r2_msg_verdict a = verdict(1), b = verdict(2), out;

    r2_tells_add(&t, &a, 100, 0, SEC);
    r2_tells_add(&t, &a, 100, 0, SEC);
    r2_tells_add(&t, &b, 100, 300 * MS, SEC);
    CHECK(r2_tells_due(&t, &out, SEC));
    CHECK_EQ(out.nic.ip[3], 1);
    CHECK(!r2_tells_due(&t, &out, SEC));
    r2_tells_heard(&t, &a.nic, 100, SEC); /* of another NIC: no reason to be silent */
    CHECK(r2_tells_due(&t, &out, SEC + 300 * MS));
    CHECK_EQ(out.nic.ip[3], 2);
    r2_tells_add(&t, &a, 100, 0, SEC + 900 * MS); /* heard just now */
    CHECK(!r2_tells_due(&t, &out, 2 * SEC));
    r2_tells_add(&t, &a, 100, 0, 3 * SEC); /* ... and long ago: it is broken again */
    CHECK(r2_tells_due(&t, &out, 3 * SEC));
    for (int i = 0; i < 3 * R2_TELLS; i++) {
        struct r2_msg_verdict m = verdict(10 + i);

        r2_tells_add(&t, &m, 100, 0, 4 * SEC); /* bounded */
    }
    for (int i = 0; i < R2_TELLS; i++)
        CHECK(r2_tells_due(&t, &out, 5 * SEC));
    CHECK(!r2_tells_due(&t, &out, 5 * SEC));
}
