/* R2CCL_MODE=migrate: the nearest NIC that is up takes the place of a home NIC that is lost, over a
 * scripted transport (rung 2). It cannot prove that real NICs are where their paths say. */
#include "check.h"
#include "near_bed.h"

TEST(the_nearest_stands_in)
{
    static const int in_turn[NICS] = {0, 2, 3, 1};

    begin();
    r2_peer_lock(r.conn->peer);
    for (int i = 0; i < NICS; i++) {
        CHECK_EQ(r2_conn_stays(r.conn), in_turn[i]);
        ((struct r2_path *)ep[in_turn[i]]->params.owner)->state =
            R2_PATH_TESTING; /* takes no chunks */
    }
    for (int i = 0; i < NICS; i++)
        ((struct r2_path *)ep[i]->params.owner)->state = R2_PATH_PROVEN;
    r2_peer_unlock(r.conn->peer);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(NICS, "R2CCL_MODE=migrate");
    place_nics();
    return check_main(argc, argv);
}
