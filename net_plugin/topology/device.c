#define _GNU_SOURCE
#include "topology/device.h"

#include <dirent.h>
#include <limits.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "util/ask.h"

static atomic_int r2_device_seconds = R2_DEVICE_SECONDS;

static int r2_device_ethtool(const char *ifname, void *request)
{
    struct ifreq ifr = {.ifr_data = request};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int rc;

    if (fd < 0) {
        fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    }
    if (fd < 0) {
        return -1;
    }
    snprintf(ifr.ifr_name, sizeof(ifr.ifr_name), "%s", ifname);
    rc = ioctl(fd, SIOCETHTOOL, &ifr);
    close(fd);
    return rc;
}

static int r2_device_speed(const char *ifname)
{
    /* The link mode masks follow the struct; the kernel says first how long they are. */
    union {
        struct ethtool_link_settings s;
        uint32_t room[16 + 3 * 127];
    } req = {.s = {.cmd = ETHTOOL_GLINKSETTINGS}};

    if (r2_device_ethtool(ifname, &req) || req.s.link_mode_masks_nwords >= 0) {
        return 0;
    }
    req.s.link_mode_masks_nwords = (int8_t)-req.s.link_mode_masks_nwords;
    req.s.cmd = ETHTOOL_GLINKSETTINGS;
    if (r2_device_ethtool(ifname, &req) || req.s.speed == (uint32_t)SPEED_UNKNOWN ||
        req.s.speed > INT_MAX) {
        return 0;
    }
    return (int)req.s.speed;
}

static int r2_device_permanent_mac(const char *ifname, unsigned char *mac, int maxlen)
{
    union {
        struct ethtool_perm_addr p;
        unsigned char room[sizeof(struct ethtool_perm_addr) + 32];
    } req = {.p = {.cmd = ETHTOOL_GPERMADDR, .size = 32}};
    static const unsigned char zero[32];
    const unsigned char *data = req.room + sizeof(struct ethtool_perm_addr);
    int len;

    if (r2_device_ethtool(ifname, &req) || req.p.size > 32 || memcmp(data, zero, req.p.size) == 0) {
        return 0;
    }
    len = (int)req.p.size < maxlen ? (int)req.p.size : maxlen;
    memcpy(mac, data, (size_t)len);
    return len;
}

/* The address of the PCI device, if the driver names one and it exists. */
static void r2_device_bus(const char *ifname, char *bus, size_t buslen)
{
    struct ethtool_drvinfo info = {.cmd = ETHTOOL_GDRVINFO};
    char path[128];

    bus[0] = '\0';
    if (r2_device_ethtool(ifname, &info) == 0) {
        int len = (int)strnlen(info.bus_info, sizeof(info.bus_info));

        snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.*s", len, info.bus_info);
        if (len > 0 && !memchr(info.bus_info, '/', (size_t)len) && access(path, F_OK) == 0) {
            snprintf(bus, buslen, "%.*s", len, info.bus_info);
        }
    }
}

static void r2_device_rdma(const char *bus, char *rdma, size_t rdmalen)
{
    char path[128];
    DIR *dir;

    rdma[0] = '\0';
    if (bus[0] == '\0') {
        return;
    }
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/infiniband", bus);
    dir = opendir(path);
    if (dir) {
        for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
            if (e->d_name[0] != '.') {
                snprintf(rdma, rdmalen, "%.63s", e->d_name);
                break;
            }
        }
        closedir(dir);
    }
}

/* The link below: of a VLAN or macvlan, or the first member of a bond. */
static const struct r2_net_link *r2_device_below(const struct r2_net_tables *tables,
                                                 const struct r2_net_link *link)
{
    if (link->lower) {
        return r2_net_tables_link(tables, link->lower);
    }
    for (int i = 0; strcmp(link->kind, "bond") == 0 && i < tables->nlinks; i++) {
        if (tables->links[i].master == link->ifindex) {
            return &tables->links[i];
        }
    }
    return NULL;
}

static void r2_device_ask_bus(void *item)
{
    struct r2_net_link *link = item;

    r2_device_bus(link->name, link->bus, sizeof(link->bus));
    r2_device_rdma(link->bus, link->rdma, sizeof(link->rdma));
}

void r2_device_decorate(struct r2_net_tables *tables)
{
    bool *answered = calloc((size_t)tables->nlinks + 1, sizeof(*answered));

    _Static_assert(sizeof(struct r2_net_link) <= R2_ASK_SIZE, "an item");
    if (answered) {
        r2_ask_all(tables->links, sizeof(*tables->links), tables->nlinks, r2_device_ask_bus,
                   answered, &r2_device_seconds);
    }
    for (int i = 0; i < tables->nlinks; i++) {
        tables->links[i].silent = !answered || !answered[i];
    }
    free(answered);
    /* Twice: a VLAN on a bond has its hardware two links down. */
    for (int i = 0; i < 2 * tables->nlinks; i++) {
        struct r2_net_link *link = &tables->links[i % tables->nlinks];
        const struct r2_net_link *below = link->bus[0] ? NULL : r2_device_below(tables, link);

        if (below && below != link) {
            memcpy(link->bus, below->bus, sizeof(link->bus));
            memcpy(link->rdma, below->rdma, sizeof(link->rdma));
        }
    }
}

void r2_device_pci(const char *bus, char *path, size_t pathlen, int *numa)
{
    char name[192];
    char real[PATH_MAX];
    FILE *f;

    path[0] = '\0';
    *numa = -1;
    if (bus[0] == '\0') {
        return;
    }
    snprintf(name, sizeof(name), "/sys/bus/pci/devices/%.100s", bus);
    if (realpath(name, real) && strlen(real) < pathlen) {
        memcpy(path, real, strlen(real) + 1);
    }
    snprintf(name, sizeof(name), "/sys/bus/pci/devices/%.100s/numa_node", bus);
    f = fopen(name, "re");
    if (f) {
        if (fscanf(f, "%d", numa) != 1 || *numa < 0) {
            *numa = -1;
        }
        fclose(f);
    }
}

static int r2_device_port(const char *ifname)
{
    char name[128];
    int port = -1;
    FILE *f;

    snprintf(name, sizeof(name), "/sys/class/net/%.32s/dev_port", ifname);
    f = fopen(name, "re");
    if (f) {
        if (fscanf(f, "%d", &port) != 1) {
            port = -1;
        }
        fclose(f);
    }
    return port + 1;
}

static void r2_device_ask_facts(void *item)
{
    struct r2_device_facts *f = item;

    if (f->silent) {
        return;
    }
    f->speed = r2_device_speed(f->name);
    f->port = f->has_port ? r2_device_port(f->name) : 0;
    f->mac_len = r2_device_permanent_mac(f->name, f->mac, sizeof(f->mac));
}

void r2_device_ask(struct r2_device_facts *facts, int n)
{
    bool *answered = calloc((size_t)n + 1, sizeof(*answered));

    _Static_assert(sizeof(struct r2_device_facts) <= R2_ASK_SIZE, "an item");
    if (answered) {
        r2_ask_all(facts, sizeof(*facts), n, r2_device_ask_facts, answered, &r2_device_seconds);
    }
    for (int i = 0; i < n; i++) {
        facts[i].silent |= !answered || !answered[i];
    }
    free(answered);
}

uint64_t r2_device_host_id(void)
{
    char text[256] = "";
    uint64_t hash = 0xcbf29ce484222325u;
    size_t len = 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");

    if (f) {
        len = fread(text, 1, 64, f);
        fclose(f);
    }
    gethostname(text + len, sizeof(text) - len - 1);
    for (const char *p = text; *p; p++) {
        hash = (hash ^ (unsigned char)*p) * 0x100000001b3u;
    }
    return hash;
}
