/* InfiniBand ports without an interface in the list of NICs, and a list that is too long. Rung 1.
 */
#include <arpa/inet.h>
#include <net/if_arp.h>

#include "check.h"
#include "topology/pick.h"

/* Ports without an interface: named, excluded, or all where nobody chose. */
TEST(ports_wanted)
{
    static const struct {
        const char *list;
        bool one, two; /* mlx5_0:1, mlx5_0:2 */
    } rows[] = {{"", true, true},
                {"^eth2", true, true},
                {"^mlx5_0:1", false, true},
                {"eth2", false, false},
                {"eth2,mlx5_0:2", false, true},
                {"eth2,mlx5_0:2,^mlx5_0:2", false, true}, /* the first that names it */
                {"mlx5_0:1,eth2,mlx5_0:2", true, true},
                {"eth2,mlx5_0:11", false, false},
                {"eth2,mlx5_0:x", false, false}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct r2_settings set;

        memset(&set, 0, sizeof(set));
        snprintf(set.nics, sizeof(set.nics), "%s", rows[i].list);
        CHECK_MSG(r2_nics_wants_port(&set, "mlx5_0", 1) == rows[i].one, "%s", rows[i].list);
        CHECK_MSG(r2_nics_wants_port(&set, "mlx5_0", 2) == rows[i].two, "%s", rows[i].list);
    }
}

/* A port comes behind the others: it is the fastest, so that a slow NIC becomes a spare. */
TEST(append)
{
    struct r2_nic nics[3];
    uint64_t seed = 7;

    memset(nics, 0, sizeof(nics));
    nics[0] = (struct r2_nic){.name = "eth0", .ifname = "eth0", .speed_mbps = 1000};
    nics[0].speed_known = nics[0].link_up = true;
    r2_pick_finish(nics, 1, &seed);
    CHECK_EQ(nics[0].weight, 100);
    for (int i = 1; i < 3; i++) {
        nics[i] = (struct r2_nic){.bare = true, .speed_mbps = 400000};
        nics[i].speed_known = nics[i].link_up = true;
        snprintf(nics[i].name, sizeof(nics[i].name), "mlx5_0:%d", i);
        r2_nics_append(nics, i, seed);
        CHECK_EQ(nics[i].weight, 100);
        CHECK_EQ(nics[i].rail, i);
    }
    CHECK_EQ(nics[0].weight, 0);
    CHECK(nics[1].guid && nics[1].guid != nics[2].guid && nics[1].guid != nics[0].guid);
}

/* Those that were picked by address are on one interface, whose name tells nothing. */
TEST(addresses_left_out)
{
    struct r2_net_link lo = {.ifindex = 1, .name = "lo", .type = ARPHRD_LOOPBACK};
    struct r2_net_addr addr = {.ifindex = 1, .prefixlen = 8};
    struct r2_net_tables tables = {&lo, 1, &addr, 1};
    struct sockaddr_in *in = (struct sockaddr_in *)&addr.addr;
    struct r2_pick picks[R2_MAX_NICS];
    struct r2_settings set;
    char err[512] = "";

    memset(&set, 0, sizeof(set));
    lo.flags = IFF_UP | IFF_LOOPBACK | 0x10000; /* IFF_LOWER_UP */
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 1; i <= R2_MAX_NICS + 1; i++) {
        size_t at = strlen(set.nics);

        snprintf(set.nics + at, sizeof(set.nics) - at, "%s127.0.%d.1", i > 1 ? "," : "", i);
    }
    CHECK_EQ(r2_pick_choose(&set, &tables, picks, R2_MAX_NICS, err, sizeof(err)), R2_MAX_NICS);
    CHECK_MSG(strstr(err, " 127.0.17.1 and what comes behind it is left out"), "%s", err);
}
