/* engine/pathrate and lateness that is not the link's: threads that are kept waiting, and what a
 * path with little to send makes of it. */
#include "pathrate_link.h"

/* Stops of 200 ms, a minute apart, while there is little to send: none of them is a slow link. */
static void test_stalls_are_no_slow_link(void)
{
    link_init(1250 * MB, 60 * US, 1, MIB);
    run_for(SEC);
    for (unsigned i = 0; i < 6; i++) {
        uint64_t stop = k.now + 200 * MS;

        k.to_send = 3 * 8192; /* more than one is late, each time */
        k.message = 8192;
        pull();
        for (unsigned j = 0; j < k.count; j++)
            k.list[j].t_acked = stop;
        run_until(stop);
        for (unsigned ms = 0; ms < 1000; ms++) {
            k.to_send = 8192;
            run_for(MS);
        }
        expect_rate(1250 * MB, 5, 10);
        k.now += 60 * SEC;
    }
}

/* Messages of `len` with pauses for `ns`; threads are kept waiting for up to `stall` ns each time.
 */
static void sparse(uint32_t len, uint64_t ns, uint64_t stall)
{
    for (uint64_t until = k.now + ns; k.now < until;) {
        k.to_send = len;
        pull();
        do {
            uint64_t stop = k.now + (stall ? check_below(stall) : 0);

            for (unsigned i = 0; i < k.count; i++)
                k.list[i].t_acked = later(k.list[i].t_acked, stop);
            run_until(stop + MS);
        } while (k.count > 0);
    }
}

/* Threads that are kept waiting for seconds lower the rate of a path with little to send. It is in
 * use again soon after that, at the rate that the link had by then. */
static void test_late_threads_are_no_slow_link(void)
{
    static const uint64_t rates[] = {1250 * MB, 5 * GB, 12500 * MB};

    for (unsigned i = 0; i < 3 * 2; i++) {
        uint32_t len = i < 3 ? 128 * 1024 : 400 * 1024;

        link_init(rates[i % 3], 60 * US, 4, 512 * 1024);
        run_for(SEC);
        for (unsigned turn = 0; turn < 2; turn++) {
            uint64_t stall = i < 3 && turn == 0 ? 4 * MS : 30 * MS;

            for (unsigned n = 0; n < 600 && r2_pathrate_rate(&k.pr) > k.rate / 5; n++)
                sparse(len, 100 * MS, stall);
            CHECK_LT(r2_pathrate_rate(&k.pr), k.rate / 4);
            sparse(len, SEC / 2, 0);
            expect_rate(k.rate, 30, 30);
            k.rate /= 10;
            k.to_send = UINT64_MAX;
            run_for(SEC);
            expect_rate(k.rate, 5, 10);
            k.to_send = 0;
            run_for(100 * MS);
        }
    }
}

/* `n` chunks of `len`, one after the other. */
static void one_by_one(unsigned n, uint64_t len, uint64_t took)
{
    struct r2_rate_stamp stamp;

    for (unsigned i = 0; i < n; i++) {
        r2_pathrate_on_send(&k.pr, len, k.now, &stamp);
        r2_pathrate_app_limited(&k.pr);
        r2_pathrate_on_ack(&k.pr, len, &stamp, k.now, k.now + took);
        k.now += took + MS;
    }
}

/* The rate before comes back with chunks that are in time, while none is late between them. */
static void test_comes_back(void)
{
    static const struct {
        uint64_t rate, slow;      /* slow: chunks take so long, and lower it */
        uint64_t len, took, late; /* late: that much later before the last of them */
        bool back;
    } cases[] = {
        {1250 * MB, 6 * MS, 65536, 120 * US, 0, true},
        {1250 * MB, 6 * MS, 65536, 120 * US, 20 * MS, false},
        {1250 * MB, 6 * MS, 1024, 200 * US, 0, false}, /* what is due at the lower rate */
        {125 * MB, 9 * MS, 8192, 1050 * US, 0, false},
        {1250 * MB, 6 * MS, 65536, 20 * US, 0, false}, /* less than on the wire: savings */
        {1250 * MB, 6 * MS, 65536, 700 * US, 0, false},
    };

    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        link_init(cases[i].rate, 60 * US, 1, 512 * 1024);
        run_for(SEC);
        k.to_send = 0;
        run_for(100 * MS);
        one_by_one(3, 65536, cases[i].slow / 2);
        expect_rate(k.rate, 5, 10);
        one_by_one(3, 65536, cases[i].slow);
        CHECK_LE(r2_pathrate_rate(&k.pr), 20 * MB);
        one_by_one(7, cases[i].len, cases[i].took);
        CHECK_LE(r2_pathrate_rate(&k.pr), 20 * MB);
        one_by_one(cases[i].late > 0, cases[i].len, cases[i].late);
        one_by_one(1, cases[i].len, cases[i].took);
        CHECK_EQ(r2_pathrate_rate(&k.pr) > k.rate / 2, cases[i].back);
    }
}

static const struct check_test tests[] = {
    {"stalls_are_no_slow_link", test_stalls_are_no_slow_link},
    {"late_threads_are_no_slow_link", test_late_threads_are_no_slow_link},
    {"comes_back", test_comes_back},
    {NULL, NULL},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
