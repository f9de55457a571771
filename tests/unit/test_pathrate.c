/* engine/pathrate on simulated links (rung 1): does it find the rate, keep the pipe full and the
 * queue short? */
#include "pathrate_link.h"

/* What the window may be: twice what the pipe holds with a chunk on the wire, and its floors. */
static uint64_t window_bound(void)
{
    uint64_t slack = k.rate / 250;
    uint64_t chunk = r2_pathrate_chunk_len(&k.pr, k.max_chunk);
    uint64_t pipe = (uint64_t)((unsigned __int128)k.rate * (k.delay + k.ack_jitter) / SEC);
    uint64_t lanes = 1 + k.rate / GB < k.lanes ? 1 + k.rate / GB : k.lanes;

    slack = slack < later(MIB, 2 * chunk) ? slack : later(MIB, 2 * chunk);
    return later(later(2 * (pipe + chunk), pipe + chunk * lanes), chunk + slack) * 13 / 10 + chunk;
}

TEST(bulk_grid)
{
    static const uint64_t rates[] = {125 * MB, 1250 * MB, 5 * GB, 12500 * MB, 25 * GB};
    static const uint64_t delays[] = {10 * US, 60 * US, 1 * MS};
    static const unsigned lanes[] = {1, 2, 4};

    for (unsigned i = 0; i < 5 * 3 * 3 * 2; i++) {
        uint64_t used;

        link_init(rates[i % 5], delays[i / 5 % 3], lanes[i / 15 % 3], i / 45 ? 4 * MIB : MIB);
        k.ack_jitter = 20 * US;
        run_for(300 * MS); /* start-up and the first clean round trip are over */
        CHECK_MSG(!k.pr.startup, "still starting up at rate %" PRIu64, k.rate);
        k.peak = 0;
        used = use_of_run(300 * MS);
        expect_rate(k.rate, 4, 12);
        CHECK_MSG(used >= 97, "%" PRIu64 " %% of %" PRIu64 " used (delay %" PRIu64 " lanes %u)",
                  used, k.rate, k.delay, k.lanes);
        CHECK_MSG(k.peak <= window_bound(),
                  "%" PRIu64 " in flight, bound %" PRIu64 " (link %" PRIu64 " delay %" PRIu64
                  " lanes %u min rtt %" PRIu64 "/%u)",
                  k.peak, window_bound(), k.rate, k.delay, k.lanes, k.pr.min_rtt_ns,
                  k.pr.min_rtt_len);
    }
}

/* A start-up must not swallow megabytes on a slow link. */
TEST(startup_slow)
{
    link_init(125 * MB, 50 * US, 4, 4 * MIB);
    run_for(200 * MS);
    CHECK_LE(k.peak, 8 * (125 * MB / 1000) + 4 * 128 * 1024);
    CHECK_LE(k.worst_rtt, 12 * MS);
}

/* A fast link and a long round trip: the window doubles with each. */
TEST(startup_long)
{
    uint64_t t0;

    link_init(25 * GB, 2 * MS, 1, MIB);
    t0 = k.now;
    while (r2_pathrate_rate(&k.pr) < 20 * GB) {
        CHECK_LT(k.now - t0, 30 * MS);
        run_for(100 * US);
    }
}

/* What the start-up has queued goes out before the first window of the steady state. */
TEST(startup_drains)
{
    link_init(2500 * MB, 60 * US, 2, MIB);
    while (k.pr.startup) {
        run_for(10 * US);
    }
    CHECK_GT(r2_pathrate_inflight(&k.pr), 2 * MIB);
    CHECK_EQ(r2_pathrate_window(&k.pr, MIB, 2, false), 0);
    run_for(10 * MS);
    CHECK_GE(r2_pathrate_window(&k.pr, MIB, 2, false), 2 * MIB);
}

/* No lane alone can fill the link: the window must not starve them (a smaller window would measure
 * a smaller rate, which would make it smaller still). */
TEST(lane_bound)
{
    uint64_t used;

    link_init(20 * GB, 30 * US, 4, MIB);
    k.lane_rate = 5500 * MB;
    run_for(SEC);
    used = use_of_run(SEC);
    CHECK_GE(used, 98);
    link_init(20 * GB, 30 * US, 4, MIB);
    k.lane_rate = 2 * GB;
    run_for(SEC);
    used = use_of_run(SEC);
    CHECK_GE(used, 39); /* 4 x 2 of 20 GB/s */
}

/* From full speed to a tenth within one round: how long until no more is in flight than the new
 * rate asks for. The maximum alone would take 200 ms. */
TEST(sudden_drop)
{
    static const uint64_t rates[] = {25 * MB, 125 * MB, 1250 * MB};

    for (unsigned i = 0; i < 3; i++) {
        uint64_t t0, chunk, queued;

        link_init(rates[i], 60 * US, 1, MIB);
        run_for(SEC);
        chunk = r2_pathrate_chunk_len(&k.pr, MIB);
        queued = later(8 * chunk, 2 * r2_pathrate_window(&k.pr, chunk, 1, false) + chunk);
        k.rate = rates[i] / 10;
        t0 = k.now;
        while (r2_pathrate_rate(&k.pr) > rates[i] / 5) {
            CHECK_MSG(k.now - t0 < queued * SEC / k.rate + 5 * MS,
                      "after %" PRIu64 " us still %" PRIu64, (k.now - t0) / US,
                      r2_pathrate_rate(&k.pr));
            run_for(MS);
        }
        printf("# %" PRIu64 " MB/s to a tenth: known after %" PRIu64 " us\n", rates[i] / MB,
               (k.now - t0) / US);
        run_for(100 * MS);
        k.peak = 0;
        run_for(100 * MS);
        CHECK_LE(k.peak, window_bound());
        k.rate = rates[i];
        run_for(300 * MS);
        expect_rate(rates[i], 5, 12);
    }
}

/* One thread is kept waiting once: all that is in flight is late, and the rate is what it was. */
TEST(one_stall)
{
    link_init(25 * MB, 8 * MS, 1, MIB);
    run_for(SEC);
    CHECK_GE(k.count, 4);
    for (unsigned i = 0; i < k.count; i++)
        k.list[i].t_acked = later(k.list[i].t_acked, k.now + 200 * MS);
    k.link_free += 200 * MS;
    run_for(201 * MS);
    expect_rate(25 * MB, 15, 25);
}

/* The silence itself lowers what is believed, before any acknowledgement says so. */
TEST(silence_lowers)
{
    link_init(125 * MB, 60 * US, 1, MIB);
    run_for(SEC);
    CHECK_GE(r2_pathrate_inflight(&k.pr), R2_CHUNK_SLOW);
    CHECK_EQ(r2_pathrate_rate_now(&k.pr, k.now), r2_pathrate_rate(&k.pr));
    CHECK_LE(r2_pathrate_rate_now(&k.pr, k.now + 100 * MS), window_bound() * 10);
    k.to_send = 0;
    run_for(100 * MS); /* idle is not silent */
    CHECK_EQ(r2_pathrate_rate_now(&k.pr, k.now + SEC), r2_pathrate_rate(&k.pr));
}

/* Messages with pauses over a shaper that lets 160 KiB through at once after each. */
TEST(bursts_do_not_count)
{
    link_init(25 * MB, 100 * US, 1, 512 * 1024);
    k.burst = 160 * 1024;
    for (unsigned i = 0; i < 40; i++) {
        k.to_send = MIB;
        for (unsigned ms = 0; ms < 60; ms++) {
            run_for(MS);
            CHECK(i < 20 || r2_pathrate_rate(&k.pr) <= 50 * MB);
        }
    }
    CHECK(!k.pr.startup);
    CHECK_LE(r2_pathrate_rate(&k.pr), 40 * MB);
    CHECK_GE(r2_pathrate_rate(&k.pr), 20 * MB);
    CHECK_LE(r2_pathrate_chunk_len(&k.pr, MIB), 64 * 1024);
    k.to_send = UINT64_MAX;
    run_for(200 * MS);
    CHECK_GE(use_of_run(SEC), 97);
}

/* A sender that never has more than two small messages under way, which never ends the start-up.
 * The first of them go out of what a shaper has saved up. */
TEST(a_burst_in_the_startup)
{
    const uint64_t outstanding = UINT64_C(256) * 1024;

    link_init(250 * MB, 60 * US, 1, 512 * 1024);
    k.burst = 256 * 1024;
    k.message = 128 * 1024;
    for (unsigned i = 0; i < 2000; i++) {
        uint64_t flying = r2_pathrate_inflight(&k.pr);

        k.to_send = flying < outstanding ? outstanding - flying : 0;
        run_for(MS / 10);
    }
    CHECK(k.pr.startup);
    expect_rate(250 * MB, 10, 100);
}

/* 40 s of bulk: the queue that we make ourselves must not feed the minimum, and the minimum the
 * queue. */
TEST(no_creep)
{
    uint64_t used;

    link_init(1250 * MB, 60 * US, 1, 4 * MIB);
    run_for(SEC);
    k.peak = 0;
    used = use_of_run(40 * SEC);
    CHECK_GE(used, 98);
    CHECK_LE(k.peak, window_bound());
}

/* Threads wake late and acknowledgements wait behind the peer's data, milliseconds each: a slow NIC
 * is kept full all the same. */
TEST(late_acks)
{
    for (unsigned ms = 2; ms <= 5; ms++) {
        uint64_t used;

        link_init(125 * MB, 60 * US, 1, MIB);
        k.ack_jitter = ms * MS;
        run_for(SEC);
        used = use_of_run(2 * SEC);
        CHECK_MSG(used >= 97, "%" PRIu64 " %% used, up to %u ms late", used, ms);
    }
}

/* The route got longer: within about 10 s the minimum follows. */
TEST(rtt_rise)
{
    link_init(1250 * MB, 60 * US, 1, MIB);
    run_for(SEC);
    k.delay = 5 * MS;
    run_for(12 * SEC);
    CHECK_GE(k.pr.min_rtt_ns, 5 * MS);
    CHECK_GE(use_of_run(SEC), 95);
}

/* Bursts with pauses: the pauses are not the path's fault. */
TEST(app_limited)
{
    uint64_t lowest = UINT64_MAX;

    link_init(12500 * MB, 40 * US, 4, MIB);
    run_for(300 * MS);
    expect_rate(12500 * MB, 5, 12);
    for (unsigned i = 0; i < 500; i++) {
        k.to_send = i % 2 ? 8 : 300 * 1000; /* far less than the pipe holds */
        run_for(10 * MS);
        CHECK_EQ(k.count, 0);
        lowest = r2_pathrate_rate(&k.pr) < lowest ? r2_pathrate_rate(&k.pr) : lowest;
    }
    CHECK_GE(lowest, 11 * GB);
    /* The path became slower meanwhile: bulk finds out. */
    k.rate = 1250 * MB;
    k.to_send = UINT64_MAX;
    run_for(900 * MS);
    expect_rate(1250 * MB, 5, 12);
}

/* App-limited samples raise an estimate that is too low. */
TEST(app_limited_raises)
{
    struct r2_pathrate pr;
    struct r2_rate_stamp stamp;
    uint64_t t = 5 * SEC;

    r2_pathrate_init(&pr);
    for (uint64_t len = MIB; len <= 4 * MIB; len += MIB, t += SEC) {
        r2_pathrate_app_limited(&pr);
        r2_pathrate_on_send(&pr, len, t, &stamp);
        r2_pathrate_on_ack(&pr, len, &stamp, t, t + MS);
        CHECK_EQ(r2_pathrate_rate(&pr), len * 1000);
    }
    CHECK(pr.startup); /* never had enough to send: no verdict yet */
}

/* A few messages under way at any time, in a window that has room for all of them: the link falls
 * to a third, less than would be noticed at once. */
TEST(wide_estimate_ends)
{
    const uint64_t outstanding = UINT64_C(640) * 1024;

    link_init(354 * MB, 60 * US, 4, 512 * 1024);
    for (unsigned i = 0; i < 6000; i++) {
        uint64_t flying = r2_pathrate_inflight(&k.pr);

        k.rate = i < 400 ? 354 * MB : 118 * MB;
        k.to_send = flying < outstanding ? outstanding - flying : 0;
        run_for(MS / 4);
        if (i == 399) {
            expect_rate(354 * MB, 10, 10);
            CHECK_EQ(k.peak, outstanding);
        }
    }
    expect_rate(118 * MB, 10, 10);
    k.peak = 0;
    k.to_send = UINT64_MAX;
    run_for(50 * MS);
    CHECK_LE(k.peak, window_bound());
}

TEST(small_messages)
{
    link_init(25 * GB, 20 * US, 1, MIB);
    for (unsigned i = 0; i < 1000; i++) {
        k.to_send = 8;
        run_for(50 * US);
    }
    CHECK_EQ(k.pr.min_rtt_ns, 20 * US);
    CHECK_GE(r2_pathrate_window(&k.pr, R2_CHUNK_MIN, 1, false), R2_CHUNK_MIN);
    CHECK_EQ(r2_pathrate_chunk_len(&k.pr, MIB), R2_CHUNK_MIN);
    k.pr.known_slow = true;
    CHECK_EQ(r2_pathrate_chunk_len(&k.pr, MIB), R2_CHUNK_SLOW);
    k.pr.known_slow = false;
    /* Bulk after that is not held back. */
    k.to_send = UINT64_MAX;
    run_for(100 * MS);
    CHECK_GE(use_of_run(200 * MS), 97);
}

/* Messages shorter than a chunk, without a pause: the path never runs empty by itself. */
TEST(small_messages_without_pause)
{
    static const uint64_t delays[] = {40 * US, 100 * US, 250 * US, MS};

    for (unsigned i = 0; i < 4; i++) {
        uint64_t used;

        link_init(12500 * MB, delays[i], 4, 512 * 1024);
        k.message = 128 * 1024;
        run_for(300 * MS);
        used = use_of_run(SEC);
        CHECK_MSG(used >= 97, "%" PRIu64 " %% used, delay %" PRIu64, used, k.delay);
        used = use_of_run(12 * SEC); /* and when the round trip is to be had anew */
        CHECK_MSG(used >= 97, "%" PRIu64 " %% used, delay %" PRIu64, used, k.delay);
    }
}

/* Stops of 200 ms, a minute apart, while there is little to send: none of them is a slow link. */
TEST(stalls_are_no_slow_link)
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

/* The peer is stopped for 15 s just when the minimum is too old: that is no round trip. */
TEST(stop_is_no_round_trip)
{
    link_init(1250 * MB, 60 * US, 1, MIB);
    run_for(SEC);
    k.to_send = 0;
    run_for(20 * SEC);
    k.to_send = 8192;
    pull();
    CHECK_EQ(k.count, 1);
    k.list[0].t_acked += 15 * SEC;
    run_for(16 * SEC);
    k.to_send = UINT64_MAX;
    run_for(10 * MS);
    CHECK_LT(k.pr.min_rtt_ns, MS);
    expect_rate(1250 * MB, 5, 10);
    CHECK_LE(r2_pathrate_inflight(&k.pr), window_bound());
}

TEST(chunk_len)
{
    struct r2_pathrate pr;
    struct r2_rate_stamp stamp;
    uint64_t t = 5 * SEC;

    r2_pathrate_init(&pr);
    CHECK_EQ(r2_pathrate_chunk_len(&pr, MIB), 65536);
    CHECK_EQ(r2_pathrate_chunk_len(&pr, 10000), 8192);
    CHECK_EQ(r2_pathrate_chunk_len(&pr, 100), 4096);
    r2_pathrate_on_send(&pr, 500000, t, &stamp);
    r2_pathrate_on_ack(&pr, 500000, &stamp, t, t + MS);
    CHECK_EQ(r2_pathrate_rate(&pr), 500 * MB);
    CHECK_EQ(r2_pathrate_chunk_len(&pr, MIB), 30 * 4096);
    CHECK_EQ(r2_pathrate_chunk_len(&pr, 100000), 24 * 4096);
}

TEST(bookkeeping)
{
    struct r2_pathrate pr;
    struct r2_rate_stamp a;
    struct r2_rate_stamp b;

    r2_pathrate_init(&pr);
    pr.known_slow = true;
    CHECK_EQ(r2_pathrate_rate(&pr), 0);
    CHECK_EQ(pr.min_rtt_ns, 0);
    CHECK_EQ(r2_pathrate_window(&pr, 65536, 4, false), 8 * 65536);
    CHECK_EQ(r2_pathrate_window(&pr, 65536, 0, false), 2 * 65536);
    r2_pathrate_on_send(&pr, 1000, SEC, &a);
    r2_pathrate_on_send(&pr, 500, SEC + 10, &b);
    CHECK(a.clean && !b.clean);
    CHECK_EQ(r2_pathrate_inflight(&pr), 1500);
    r2_pathrate_on_ack(&pr, 600, &a, SEC, SEC + MS); /* in two parts */
    r2_pathrate_on_ack(&pr, 400, &a, SEC, SEC + MS);
    CHECK_EQ(r2_pathrate_inflight(&pr), 500);
    r2_pathrate_on_lost(&pr, 500);
    CHECK_EQ(r2_pathrate_inflight(&pr), 0);
    r2_pathrate_on_lost(&pr, 500); /* never below zero */
    CHECK_EQ(r2_pathrate_inflight(&pr), 0);
    CHECK_GT(r2_pathrate_rate(&pr), 0);
    r2_pathrate_reset(&pr);
    CHECK_EQ(r2_pathrate_rate(&pr), 0);
    CHECK_EQ(pr.min_rtt_ns, 0);
    CHECK(pr.known_slow);
    CHECK(pr.startup);
}

/* Nonsense in: no crash, no overflow, a window of at least one chunk, or none
 * while the path is to run empty. */
TEST(hostile_times)
{
    struct r2_pathrate pr;
    struct r2_rate_stamp stamps[16] = {{0}};
    uint64_t sent[16] = {0};

    r2_pathrate_init(&pr);
    for (unsigned long n = 0; n < check_rounds(20000); n++) {
        unsigned i = (unsigned)check_below(16);
        uint64_t t = check_below(4) ? check_below(SEC) : check_random();
        uint64_t len = check_below(2) ? check_below(1 << 20) : check_random() >> check_below(64);
        uint32_t chunk = r2_pathrate_chunk_len(&pr, 4 * MIB);

        CHECK(chunk >= 4096 && chunk <= 4 * MIB && chunk % 4096 == 0);
        CHECK(r2_pathrate_window(&pr, chunk, 1 + i, true) >= chunk ||
              (pr.probing_rtt && r2_pathrate_inflight(&pr)));
        CHECK(r2_pathrate_window(&pr, chunk, 1 + i, true) <=
              r2_pathrate_window(&pr, chunk, 1 + i, false));
        switch (check_below(4)) {
        case 0:
            r2_pathrate_on_send(&pr, len, t, &stamps[i]);
            sent[i] = t;
            break;
        case 1:
            r2_pathrate_on_ack(&pr, len, &stamps[i], sent[i], t);
            break;
        case 2:
            r2_pathrate_app_limited(&pr);
            break;
        default:
            r2_pathrate_on_lost(&pr, len);
        }
        if (check_below(100) == 0) {
            r2_pathrate_reset(&pr);
            memset(stamps, 0, sizeof(stamps));
        }
    }
}

/* The latest round trips, or the present silence. While nothing is in flight nobody is silent. */
TEST(how_long_chunks_take)
{
    struct r2_pathrate pr;
    struct r2_rate_stamp stamp;
    uint64_t ms = 1000000;

    r2_pathrate_init(&pr);
    CHECK_EQ(r2_pathrate_srtt_now(&pr, 5 * ms), 0);
    r2_pathrate_on_send(&pr, 65536, 10 * ms, &stamp);
    CHECK_EQ(r2_pathrate_srtt_now(&pr, 17 * ms), 7 * ms);
    r2_pathrate_on_ack(&pr, 65536, &stamp, 10 * ms, 18 * ms);
    CHECK_EQ(r2_pathrate_srtt_now(&pr, 90 * ms), 8 * ms);
    r2_pathrate_on_send(&pr, 65536, 100 * ms, &stamp);
    CHECK_EQ(r2_pathrate_srtt_now(&pr, 103 * ms), 8 * ms);
    CHECK_EQ(r2_pathrate_srtt_now(&pr, 120 * ms), 20 * ms);
}
