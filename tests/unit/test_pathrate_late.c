/* Which late chunks say that a path has become slow, over a simulated one (rung 1). Others:
 * test_pathrate. */
#include "pathrate_link.h"

/* Messages that come alone, in four parts each, and two of them in a row wait for a thread: the
 * link is what it was. */
TEST(parts_are_late_together)
{
    link_init(5 * GB, 60 * US, 4, 512 * 1024);
    run_for(SEC);
    k.to_send = 0;
    run_for(20 * MS);
    k.message = 64 * 1024;
    for (unsigned i = 0; i < 40; i++) {
        k.to_send = 256 * 1024;
        pull();
        for (unsigned j = 0; j < k.count && (i == 20 || i == 21); j++)
            k.list[j].t_acked = k.now + 12 * MS;
        run_for(13 * MS);
        CHECK_EQ(k.count, 0);
    }
    expect_rate(5 * GB, 10, 10);
}

/* The same when the second message is sent while parts of the first are under way. The
 * acknowledgements of both come in turn, as over several lanes. */
TEST(parts_of_two_messages)
{
    struct r2_rate_stamp stamps[8];
    uint64_t t0;

    link_init(5 * GB, 60 * US, 4, 512 * 1024);
    run_for(SEC);
    k.to_send = 0;
    run_for(20 * MS);
    t0 = k.now;
    for (unsigned i = 0; i < 4; i++)
        r2_pathrate_on_send(&k.pr, 65536, t0, &stamps[i]);
    r2_pathrate_on_ack(&k.pr, 65536, &stamps[0], t0, t0 + 6 * MS);
    for (unsigned i = 4; i < 8; i++)
        r2_pathrate_on_send(&k.pr, 65536, t0 + 6 * MS, &stamps[i]);
    for (unsigned i = 1; i < 4; i++) {
        r2_pathrate_on_ack(&k.pr, 65536, &stamps[i + 3], t0 + 6 * MS, t0 + 12 * MS + i);
        r2_pathrate_on_ack(&k.pr, 65536, &stamps[i], t0, t0 + 12 * MS + i);
    }
    r2_pathrate_on_ack(&k.pr, 65536, &stamps[7], t0 + 6 * MS, t0 + 12 * MS + 4);
    expect_rate(5 * GB, 10, 10);
}

/* Every chunk is brought by a copy over another path, long after it should have been there: nothing
 * is delivered by this one, and all the same it is known to be slow. */
TEST(overtaken)
{
    link_init(1250 * MB, 60 * US, 1, MIB);
    run_for(SEC);
    k.to_send = 0;
    run_for(20 * MS);
    for (unsigned i = 0; i < 4; i++) {
        struct r2_rate_stamp stamp;
        uint64_t t = k.now + i * 6 * MS;

        r2_pathrate_on_send(&k.pr, 262144, t, &stamp);
        r2_pathrate_on_lost(&k.pr, 262144);
        r2_pathrate_overtaken(&k.pr, 262144, &stamp, t, t + 6 * MS);
    }
    CHECK_LT(r2_pathrate_rate(&k.pr), 100 * MB);
}
