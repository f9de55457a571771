/* The choice of NICs, their weights, and the orders of failover and rails: on made-up tables
 * (rung 1). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/if_addr.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>

#include "check.h"
#include "topology/local.h"
#include "topology/nettables.h"
#include "topology/nics.h"
#include "topology/pick.h"

#define LOWER_UP 0x10000

static struct r2_net_link links[32];
static struct r2_net_addr addrs[64];
static struct r2_net_tables world;
static struct r2_settings settings;
static struct r2_pick picks[R2_MAX_NICS];
static char err[2048];

static void reset(void)
{
    memset(links, 0, sizeof(links));
    memset(addrs, 0, sizeof(addrs));
    memset(&settings, 0, sizeof(settings));
    world = (struct r2_net_tables){links, 0, addrs, 0};
}

static struct r2_net_link *add_link(const char *name, unsigned flags)
{
    struct r2_net_link *link = &links[world.nlinks++];

    snprintf(link->name, sizeof(link->name), "%s", name);
    link->ifindex = world.nlinks;
    link->flags = flags;
    link->type = ARPHRD_ETHER;
    return link;
}

static void to_addr(const char *text, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof(*out));
    if (strchr(text, ':')) {
        out->ss_family = AF_INET6;
        CHECK_EQ(inet_pton(AF_INET6, text, &((struct sockaddr_in6 *)out)->sin6_addr), 1);
    } else {
        out->ss_family = AF_INET;
        CHECK_EQ(inet_pton(AF_INET, text, &((struct sockaddr_in *)out)->sin_addr), 1);
    }
}

/* Adds an address to the link added last. */
static struct r2_net_addr *add_addr(const char *text, int prefixlen)
{
    struct r2_net_addr *addr = &addrs[world.naddrs++];

    addr->ifindex = world.nlinks;
    addr->prefixlen = prefixlen;
    to_addr(text, &addr->addr);
    return addr;
}

static struct r2_net_link *add_nic(const char *name, const char *address)
{
    struct r2_net_link *link = add_link(name, IFF_UP | LOWER_UP);

    add_addr(address, strchr(address, ':') ? 64 : 24);
    return link;
}

static void add_lo(void)
{
    add_link("lo", IFF_UP | LOWER_UP | IFF_LOOPBACK)->type = ARPHRD_LOOPBACK;
    add_addr("127.0.0.1", 8);
    add_addr("::1", 128);
}

/* A host as they are: two NICs among everything that is none. */
static void add_host(void)
{
    reset();
    add_lo();
    add_nic("eth10", "10.0.10.1");
    add_nic("eth2", "10.0.2.1");
    add_addr("fd00:2::1", 64);
    add_nic("docker0", "172.17.0.1");
    add_nic("virbr0", "192.168.122.1");
    strcpy(add_nic("br-1234", "172.18.0.1")->kind, "bridge");
    strcpy(add_nic("flannel.1", "10.244.0.0")->kind, "vxlan");
    add_nic("wg0", "10.9.0.1")->type = 0xfffe;
    strcpy(add_nic("cali1", "fe80::ecee")->kind, "veth");
    add_nic("nodelocal", "169.254.20.10");
    add_link("eth4", IFF_UP | LOWER_UP);
    add_link("eth5", 0);
    add_addr("10.0.5.1", 24);
}

static void check_picks(int n, const char *want)
{
    char got[1024] = "";

    for (int i = 0; i < n; i++) {
        char text[R2_NIC_NAME];

        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s/%s", i ? " " : "",
                 picks[i].link->name,
                 r2_addr_text((const struct sockaddr *)&picks[i].addr, text, sizeof(text)));
    }
    CHECK_STR(got, want);
}

static int choose(const char *nics)
{
    snprintf(settings.nics, sizeof(settings.nics), "%s", nics);
    err[0] = '\0';
    return r2_pick_choose(&settings, &world, picks, R2_MAX_NICS, err, sizeof(err));
}

TEST(default_choice)
{
    add_host();
    check_picks(choose(""), "eth2/10.0.2.1 eth10/10.0.10.1");
}

TEST(default_without_carrier)
{
    reset();
    add_nic("eth0", "10.0.0.1")->flags = IFF_UP;
    add_nic("eth1", "10.0.1.1");
    check_picks(choose(""), "eth0/10.0.0.1 eth1/10.0.1.1");
}

TEST(default_ipoib_first)
{
    add_host();
    add_nic("ib0", "10.1.0.1");
    check_picks(choose(""), "ib0/10.1.0.1");
}

TEST(default_last_resorts)
{
    reset();
    add_lo();
    check_picks(choose(""), "lo/127.0.0.1");
    add_nic("docker0", "172.17.0.1");
    check_picks(choose(""), "docker0/172.17.0.1");
    strcpy(add_nic("tap0", "10.0.2.100")->kind, "tun");
    check_picks(choose(""), "tap0/10.0.2.100");
    reset();
    CHECK_EQ(choose(""), 0);
    CHECK_STR(err, "no usable NIC: there is nothing");
}

TEST(socket_ifname)
{
    add_host();
    strcpy(settings.nccl_socket_ifname, "eth1,docker");
    check_picks(choose(""), "docker0/172.17.0.1 eth10/10.0.10.1");
    strcpy(settings.nccl_socket_ifname, "=eth1,eth2");
    check_picks(choose(""), "eth2/10.0.2.1");
    strcpy(settings.nccl_socket_ifname, "^eth1");
    check_picks(choose(""), "eth2/10.0.2.1");
    strcpy(settings.nccl_socket_ifname, "^=eth1");
    check_picks(choose(""), "eth2/10.0.2.1 eth10/10.0.10.1");
    strcpy(settings.nccl_socket_ifname, "ens");
    CHECK_EQ(choose(""), 0);
    CHECK_MSG(strstr(err, "NCCL_SOCKET_IFNAME=ens") && strstr(err, "eth2 (10.0.2.1, fd00:2::1)"),
              "%s", err);
    /* R2CCL_NICS wins. */
    check_picks(choose("eth10"), "eth10/10.0.10.1");
}

TEST(socket_family)
{
    add_host();
    strcpy(settings.nccl_socket_family, "AF_INET6");
    check_picks(choose(""), "eth2/fd00:2::1");
    strcpy(settings.nccl_socket_family, "af_inet");
    check_picks(choose("eth2"), "eth2/10.0.2.1");
}

TEST(ib_hca)
{
    add_host();
    strcpy(links[1].rdma, "mlx5_0");
    strcpy(links[2].rdma, "mlx5_1");
    strcpy(settings.nccl_ib_hca, "mlx5_0:1");
    check_picks(choose(""), "eth10/10.0.10.1");
    strcpy(settings.nccl_ib_hca, "^mlx5_0");
    check_picks(choose(""), "eth2/10.0.2.1");
    strcpy(settings.nccl_ib_hca, "=mlx5");
    check_picks(choose(""), "eth2/10.0.2.1 eth10/10.0.10.1");
    strcpy(settings.nccl_ib_hca, "mlx5_0");
    strcpy(settings.nccl_socket_ifname, "eth2");
    check_picks(choose(""), "eth2/10.0.2.1");
}

TEST(ipv6_address_choice)
{
    reset();
    add_link("eth0", IFF_UP | LOWER_UP);
    add_addr("fd00::7", 64)->flags = IFA_F_TEMPORARY;
    add_addr("fd00::8", 64)->flags = IFA_F_DEPRECATED;
    add_addr("fe80::1", 64);
    add_addr("fd00::9", 64)->flags = IFA_F_DADFAILED;
    add_addr("fd00::1", 64);
    check_picks(choose(""), "eth0/fd00::1");
}

TEST(named)
{
    add_host();
    check_picks(choose("eth10,eth2"), "eth10/10.0.10.1 eth2/10.0.2.1");
    check_picks(choose("eth*,^eth2"), "eth5/10.0.5.1 eth10/10.0.10.1");
    check_picks(choose("=eth10"), "eth10/10.0.10.1");
    check_picks(choose("eth2,eth2,eth*"), "eth2/10.0.2.1 eth5/10.0.5.1 eth10/10.0.10.1");
    check_picks(choose("^eth10"), "eth2/10.0.2.1");
    check_picks(choose("^eth10,lo"), "eth2/10.0.2.1");
    /* A NIC that is down at the start is a NIC when it was named. */
    check_picks(choose("eth5"), "eth5/10.0.5.1");
    check_picks(choose("docker0,lo"), "docker0/172.17.0.1 lo/127.0.0.1");
}

TEST(by_address)
{
    add_host();
    check_picks(choose("127.0.1.1,127.0.2.1,127.0.1.1"), "lo/127.0.1.1 lo/127.0.2.1");
    check_picks(choose("::1,fd00:2::1"), "lo/::1 eth2/fd00:2::1");
    check_picks(choose("10.0.2.1,fd00:2::1"), "eth2/10.0.2.1 eth2/fd00:2::1");
    CHECK_EQ(choose("10.0.2.9"), -ENODEV);
    CHECK_MSG(strstr(err, "R2CCL_NICS: 10.0.2.9 is no address of this node") &&
                  strstr(err, "lo (127.0.0.1, ::1)"),
              "%s", err);
    CHECK_EQ(choose("::2"), -ENODEV);
}

TEST(missing)
{
    add_host();
    CHECK_EQ(choose("eth7,eth8"), -ENODEV);
    CHECK_MSG(strstr(err, "eth7 does not exist") && strstr(err, "eth10 (10.0.10.1)"), "%s", err);
    check_picks(choose("eth2,eth4,eth10"), "eth2/10.0.2.1 eth10/10.0.10.1");
    CHECK_MSG(strstr(err, "eth4 has no usable address") && strstr(err, "uses the other 2"), "%s",
              err);
    check_picks(choose("eth7,eth2,10.0.2.9"), "eth2/10.0.2.1");
    CHECK_MSG(strstr(err, "eth7 does not exist") && strstr(err, "and more are missing"), "%s", err);
    CHECK_EQ(choose("ens*"), -ENODEV);
    CHECK_EQ(choose("eth4"), -ENODEV);
    CHECK_MSG(strstr(err, "eth4 has no usable address"), "%s", err);
    CHECK_EQ(choose("eth2,^eth*"), -ENODEV);
    CHECK_EQ(choose("eth2,eth/0"), -EINVAL);
}

TEST(bad_lists)
{
    static const char *const bad[] = {
        "eth0,",   ",eth0", "eth0,,eth1", "eth 0",         "^",   "=",
        "*eth",    "e*h0",  "eth0:1",     "1.2.3.4.5x/24", "^^a", "a-name-that-is-too-long",
        "fd00:::1"};

    add_host();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_MSG(choose(bad[i]) == -EINVAL, "\"%s\": %s", bad[i], err);
        CHECK_MSG(strncmp(err, "R2CCL_NICS", 10) == 0, "%s", err);
    }
}

TEST(sixteen_at_most)
{
    reset();
    for (int i = 0; i < 20; i++) {
        char name[16];
        char text[32];

        snprintf(name, sizeof(name), "eth%d", i);
        snprintf(text, sizeof(text), "10.0.%d.1", i);
        add_nic(name, text);
    }
    CHECK_EQ(choose(""), R2_MAX_NICS);
    CHECK_STR(picks[R2_MAX_NICS - 1].link->name, "eth15");
    CHECK(strstr(err, "eth16 and what comes behind it is left out"));
    CHECK_EQ(choose("^eth3"), R2_MAX_NICS);
    CHECK(strstr(err, "eth17 and"));
    CHECK_EQ(choose("eth1*,eth17"), 11);
    CHECK_STR(err, ""); /* all of them */
}

TEST(fuzz)
{
    static const char *const pieces[] = {",",  "^",   "=",    "*",         "eth",       "2", "10",
                                         "lo", "127", ".",    ":",         "::1",       "%", "0.1",
                                         " ",  "/",   "\xff", "127.0.1.1", "fd00:2::1", "a"};
    int chosen = 0;

    add_host();
    for (unsigned long i = check_rounds(50000); i > 0; i--) {
        char list[200] = "";
        struct r2_pick_item items[R2_PICK_ITEMS];
        uint64_t n = check_below(9);
        int rc;

        for (uint64_t k = 0; k < n; k++) {
            strcat(list, pieces[check_below(sizeof(pieces) / sizeof(pieces[0]))]);
        }
        rc = r2_pick_parse(list, items, (int)check_below(4), err, sizeof(err));
        CHECK(rc >= -EINVAL && rc <= 3);
        rc = choose(list);
        CHECK(rc == -EINVAL || rc == -ENODEV || (rc >= 0 && rc <= R2_MAX_NICS));
        CHECK_MSG(rc > 0 || err[0], "no message for \"%s\"", list);
        chosen += rc > 0;
        r2_pick_nccl_match(list, "eth2", true);
    }
    CHECK_GT(chosen, 100); /* not all of it is refused at the door */
}

TEST(long_list)
{
    char list[R2_SETTING_TEXT];

    add_host();
    memset(list, 'a', 500);
    list[500] = '\0';
    CHECK_EQ(choose(list), -EINVAL);
    list[0] = '\0';
    for (int i = 0; i < R2_PICK_ITEMS + 1; i++) {
        strcat(list, i ? ",lo" : "lo");
    }
    CHECK_EQ(choose(list), -EINVAL);
    CHECK_MSG(strstr(err, "too many entries"), "%s", err);
}

/* ---- names, weights, guids ---- */

TEST(finish)
{
    struct r2_nic nics[5];
    uint64_t seed[5] = {1, 1, 2, 2, 3};

    memset(nics, 0, sizeof(nics));
    for (int i = 0; i < 5; i++) {
        snprintf(nics[i].ifname, sizeof(nics[i].ifname), "eth%d", i);
        nics[i].ifindex = i + 1;
        nics[i].link_up = true;
        to_addr("10.0.0.1", &nics[i].addr);
    }
    nics[1].ifindex = 1;
    to_addr("10.0.0.2", &nics[1].addr);
    nics[0].speed_mbps = nics[1].speed_mbps = 100000;
    nics[0].speed_known = nics[1].speed_known = true;
    nics[2].speed_mbps = 9999;
    nics[2].speed_known = true;
    nics[3].link_up = false;
    r2_pick_finish(nics, 5, seed);
    CHECK_STR(nics[0].name, "10.0.0.1");
    CHECK_STR(nics[1].name, "10.0.0.2");
    CHECK_STR(nics[2].name, "eth2");
    CHECK_EQ(nics[0].weight, 100);
    CHECK_EQ(nics[2].weight, 0);
    CHECK_EQ(nics[3].speed_mbps, 100000); /* no carrier: one of its kind */
    CHECK_EQ(nics[3].weight, 100);
    CHECK_EQ(nics[4].speed_mbps, R2_NIC_MIN_REPORT); /* does not say: never a spare */
    CHECK_EQ(nics[4].weight, 10);
    CHECK_EQ(r2_nic_report_speed(&nics[2]), R2_NIC_MIN_REPORT);
    r2_local.n = 5;
    memcpy(r2_local.nics, nics, sizeof(nics));
    CHECK_EQ(r2ccl_local_speed(), 4 * UINT64_C(12500000000)); /* all but the spare */
    r2_local.nics[0].speed_mbps = r2_local.nics[1].speed_mbps = 1000;
    r2_local.nics[3].speed_mbps = 1000;
    CHECK_EQ(r2ccl_local_speed(), UINT64_C(103000) * 125000);
    r2_local.nics[0].speed_known = r2_local.nics[1].speed_known = r2_local.nics[2].speed_known =
        false;
    CHECK_EQ(r2ccl_local_speed(), 4 * UINT64_C(12500000000)); /* nothing is known of any */
    for (int i = 0; i < 5; i++) {
        CHECK_NE(nics[i].guid, 0);
        CHECK_EQ(nics[i].rail, i);
        for (int k = 0; k < i; k++) {
            CHECK_NE(nics[i].guid, nics[k].guid);
        }
    }
    CHECK(strcmp(nics[0].name, nics[1].name));
}

/* ---- orders ---- */

static void place(struct r2_nic *nic, const char *pci, int numa)
{
    memset(nic, 0, sizeof(*nic));
    snprintf(nic->pci_path, sizeof(nic->pci_path), "%s", pci);
    nic->numa = numa;
    nic->weight = 100;
}

static void check_order(const struct r2_nic *nics, int n, int home, const char *want)
{
    int order[R2_MAX_NICS];
    char got[64] = "";

    r2_nics_order(nics, n, home, order);
    for (int i = 0; i < n; i++) {
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%d", order[i]);
    }
    CHECK_STR(got, want);
}

TEST(failover_order)
{
    struct r2_nic nics[6];

    place(&nics[0], "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0", 0);
    place(&nics[1], "/sys/devices/pci0000:80/0000:80:02.0/0000:81:00.0", 1);
    place(&nics[2], "/sys/devices/pci0000:16/0000:16:04.0/0000:19:00.0", 0);
    place(&nics[3], "/sys/devices/pci0000:16/0000:16:02.0/0000:17:01.0/0000:1a:00.0", 0);
    place(&nics[4], "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.1", 0);
    place(&nics[5], "/sys/devices/pci0000:80/0000:80:02.0/0000:81:00.1", 1);
    check_order(nics, 6, 0, "043215"); /* same card, same switch, same node, across */
    check_order(nics, 6, 1, "152340");
    nics[4].weight = 0;
    check_order(nics, 6, 0, "032154");
    check_order(nics, 6, 4, "403251"); /* home first even if it is a spare */
}

static void check_rails(const char *local, int prefixlen, int index, const char *const *remote,
                        int n, const char *want)
{
    struct sockaddr_storage addr[R2_MAX_NICS];
    struct r2_nic nic = {.prefixlen = prefixlen};
    int order[R2_MAX_NICS];
    char got[64] = "";
    int count;

    to_addr(local, &nic.addr);
    for (int i = 0; i < n; i++) {
        to_addr(remote[i], &addr[i]);
    }
    count = r2_rail_candidates(&nic, index, addr, n, order);
    for (int i = 0; i < count; i++) {
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%d", order[i]);
    }
    CHECK_STR(got, want);
}

TEST(rails)
{
    static const char *const rails[] = {"10.0.0.2", "10.0.1.2", "10.0.2.2", "10.0.3.2"};
    static const char *const lo[] = {"127.0.1.2", "127.0.2.2", "10.0.0.2", "::1"};
    static const char *const mixed[] = {"fd00::2", "10.0.0.2", "fd00:1::2"};

    check_rails("10.0.2.1", 24, 2, rails, 4, "2301"); /* its rail, then the next ones */
    check_rails("10.0.2.1", 24, 0, rails, 4, "2013"); /* the subnet counts more than the index */
    check_rails("10.0.0.1", 16, 1, rails, 4, "1230"); /* one subnet for all: by index */
    check_rails("10.9.0.1", 24, 5, rails, 4, "1230"); /* routed: by index modulo */
    check_rails("127.0.1.1", 8, 1, lo, 4, "10");      /* loopback only with loopback */
    check_rails("10.0.0.1", 24, 0, lo, 4, "2");
    check_rails("fd00:1::1", 64, 0, mixed, 3, "20");
    check_rails("::1", 128, 0, mixed, 3, "");
    check_rails("10.0.0.1", 24, 0, rails, 0, "");
}

TEST(prefix)
{
    struct sockaddr_storage a;
    struct sockaddr_storage b;

    to_addr("10.0.0.127", &a);
    to_addr("10.0.0.128", &b);
    CHECK(r2_sockaddr_in_prefix((struct sockaddr *)&a, (struct sockaddr *)&b, 24));
    CHECK(!r2_sockaddr_in_prefix((struct sockaddr *)&a, (struct sockaddr *)&b, 25));
    CHECK(r2_sockaddr_in_prefix((struct sockaddr *)&a, (struct sockaddr *)&b, 0));
    CHECK(!r2_sockaddr_in_prefix((struct sockaddr *)&a, (struct sockaddr *)&b, 200));
    to_addr("fd00::1", &b);
    CHECK(!r2_sockaddr_in_prefix((struct sockaddr *)&a, (struct sockaddr *)&b, 0));
}

/* ---- a NIC that moves */

static struct r2_nic moved_nics[2];

static int find_again(int which, int family, const char *want)
{
    struct r2_nic out;
    int rc = r2_nic_find_again(&world, moved_nics, 2, which, &moved_nics[which], family, &out);
    char text[64];

    if (rc == 0)
        CHECK_STR(r2_addr_text((const struct sockaddr *)&out.addr, text, sizeof(text)), want);
    return rc ? rc : out.ifindex;
}

TEST(find_again)
{
    struct r2_net_addr *a;

    reset();
    memset(moved_nics, 0, sizeof(moved_nics));
    for (int i = 0; i < 2; i++) {
        snprintf(moved_nics[i].ifname, sizeof(moved_nics[i].ifname), "eth%d", i);
        moved_nics[i].family = AF_INET;
        moved_nics[i].ifindex = 40 + i;
        moved_nics[i].prefixlen = 24;
    }
    to_addr("10.0.0.1", &moved_nics[0].addr);
    to_addr("10.0.1.1", &moved_nics[1].addr);
    CHECK_EQ(find_again(0, 0, ""), -ENODEV);
    add_link("eth0", IFF_UP | LOWER_UP);
    CHECK_EQ(find_again(0, 0, ""), -EADDRNOTAVAIL);
    add_addr("fe80::1", 64); /* link-local is no place for a NIC that was elsewhere */
    CHECK_EQ(find_again(0, 0, ""), -EADDRNOTAVAIL);
    a = add_addr("fd00::1", 64);
    CHECK_EQ(find_again(0, 0, "fd00::1"), 1);
    CHECK_EQ(find_again(0, AF_INET, ""), -EADDRNOTAVAIL);
    a->flags = IFA_F_DADFAILED;
    CHECK_EQ(find_again(0, 0, ""), -EADDRNOTAVAIL);
    a->flags = 0;
    add_addr("192.168.0.1", 24);
    CHECK_EQ(find_again(0, 0, "192.168.0.1"), 1);
    a = add_addr("10.0.0.9", 24);
    a->flags = IFA_F_SECONDARY;
    CHECK_EQ(find_again(0, 0, "10.0.0.9"), 1);
    add_addr("10.0.0.1", 24);
    CHECK_EQ(find_again(0, 0, "10.0.0.1"), 1);
    CHECK_EQ(find_again(1, 0, ""), -ENODEV);
    /* Two NICs of one interface: neither takes the other's address. */
    snprintf(moved_nics[1].ifname, sizeof(moved_nics[1].ifname), "eth0");
    moved_nics[0].ifindex = 1;
    moved_nics[1].prefixlen = 8;
    CHECK_EQ(find_again(1, 0, "10.0.0.9"), 1);
}
