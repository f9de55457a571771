/* The choice of NICs among the kernel's tables. Pure. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <linux/if_addr.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "topology/pick.h"

/* Not in net/if_arp.h; linux/if_arp.h does not get along with net/if.h. */
#define R2_ARPHRD_IP6GRE 823
#define R2_ARPHRD_NONE 0xfffe

/* How much is left out when nobody chose. NCCL's own order of preference, with the links that it
 * should have left out as well in the first stage. */
enum r2_stage {
    R2_STAGE_IPOIB,  /* names that start with ib */
    R2_STAGE_GOOD,   /* no loopback, docker, virbr, bridge, tunnel or link-local address */
    R2_STAGE_OTHERS, /* bridges, tunnels and link-local addresses too */
    R2_STAGE_DOCKER, /* names that start with docker */
    R2_STAGE_LOOPBACK,
    R2_STAGES,
};

struct r2_choice {
    const struct r2_settings *settings;
    const struct r2_net_tables *tables;
    int family; /* AF_UNSPEC: any */
    struct r2_pick *out;
    int max;
    int count;
    int missing; /* entries of R2CCL_NICS that name no NIC of this node */
    char *err;
    size_t errlen;
};

static bool r2_choose_starts(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static bool r2_choose_is_tunnel_or_bridge(const struct r2_net_link *link)
{
    static const char *const kinds[] = {"bridge",    "vxlan",     "geneve",    "gretap",
                                        "ip6gretap", "erspan",    "ip6erspan", "tun",
                                        "ovs",       "wireguard", "ifb",       "openvswitch"};

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(link->kind, kinds[i]) == 0) {
            return true;
        }
    }
    return link->type == ARPHRD_TUNNEL || link->type == ARPHRD_TUNNEL6 ||
           link->type == ARPHRD_SIT || link->type == ARPHRD_IPGRE ||
           link->type == R2_ARPHRD_IP6GRE || link->type == ARPHRD_PPP ||
           link->type == R2_ARPHRD_NONE;
}

static bool r2_choose_in_stage(const struct r2_net_link *link, enum r2_stage stage)
{
    bool loopback = (link->flags & IFF_LOOPBACK) || r2_choose_starts(link->name, "lo");
    bool docker = r2_choose_starts(link->name, "docker");

    switch (stage) {
    case R2_STAGE_IPOIB:
        return r2_choose_starts(link->name, "ib") && !loopback;
    case R2_STAGE_GOOD:
        return !loopback && !docker && !r2_choose_starts(link->name, "virbr") &&
               !r2_choose_is_tunnel_or_bridge(link);
    case R2_STAGE_OTHERS:
        return !loopback && !docker && !r2_choose_starts(link->name, "virbr");
    case R2_STAGE_DOCKER:
        return docker;
    default:
        return loopback;
    }
}

/* Lower is better; -1: not usable. */
static int r2_choose_addr_rank(const struct r2_choice *c, const struct r2_net_link *link,
                               const struct r2_net_addr *a, bool linklocal)
{
    const struct sockaddr *addr = (const struct sockaddr *)&a->addr;
    int family = addr->sa_family;

    if (a->ifindex != link->ifindex || (c->family != AF_UNSPEC && family != c->family) ||
        (a->flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED)) == IFA_F_DADFAILED ||
        (!linklocal && r2_sockaddr_is_linklocal(addr))) {
        return -1;
    }
    return (r2_sockaddr_is_linklocal(addr) ? 8 : 0) + (family == AF_INET6 ? 4 : 0) +
           (a->flags & IFA_F_DEPRECATED ? 2 : 0) +
           (a->flags & IFA_F_SECONDARY ? 1 : 0); /* the same bit as IFA_F_TEMPORARY */
}

/* Never one of the family `other`. */
static const struct r2_net_addr *r2_choose_best(const struct r2_choice *c,
                                                const struct r2_net_link *link, bool linklocal,
                                                int other)
{
    const struct r2_net_addr *best = NULL;
    int best_rank = 0;

    for (int i = 0; i < c->tables->naddrs; i++) {
        int rank = c->tables->addrs[i].addr.ss_family == other
                       ? -1
                       : r2_choose_addr_rank(c, link, &c->tables->addrs[i], linklocal);

        if (rank >= 0 && (!best || rank < best_rank)) {
            best = &c->tables->addrs[i];
            best_rank = rank;
        }
    }
    return best;
}

static const struct r2_net_addr *r2_choose_addr(const struct r2_choice *c,
                                                const struct r2_net_link *link, bool linklocal)
{
    return r2_choose_best(c, link, linklocal, AF_UNSPEC);
}

/* Peers may have addresses of the other family only. Not where the operator named an address. */
static void r2_choose_second(const struct r2_choice *c, struct r2_pick *pick)
{
    const struct r2_net_addr *a = r2_choose_best(c, pick->link, false, pick->addr.ss_family);

    if (a && !(pick->link->flags & IFF_LOOPBACK)) {
        pick->second = a->addr;
        pick->second_prefixlen = a->prefixlen;
    }
}

/* Adds one NIC, unless its interface (or, picked by address, its address) is there already. The
 * first one that there is no room for is said in the message, which is no error. */
static void r2_choose_add(struct r2_choice *c, const struct r2_net_link *link,
                          const struct sockaddr_storage *addr, int prefixlen, bool by_address)
{
    for (int i = 0; i < c->count; i++) {
        if (c->out[i].link == link &&
            (!by_address || r2_sockaddr_equal((const struct sockaddr *)&c->out[i].addr,
                                              (const struct sockaddr *)addr))) {
            return;
        }
    }
    if (c->count < c->max) {
        c->out[c->count] = (struct r2_pick){.link = link, .addr = *addr, .prefixlen = prefixlen};
        if (!by_address) {
            r2_choose_second(c, &c->out[c->count]);
        }
        c->count++;
    } else if (c->errlen && !c->err[0]) {
        char text[INET6_ADDRSTRLEN];

        snprintf(c->err, c->errlen,
                 "%d NICs are the most that R2CCL takes: %s and what comes behind it is left out; "
                 "R2CCL_NICS names those to use",
                 c->max,
                 by_address ? r2_addr_text((const struct sockaddr *)addr, text, sizeof(text))
                            : link->name);
    }
}

/* "eth2" before "eth10": digits compare as numbers. */
static int r2_choose_compare(const void *a, const void *b)
{
    return strverscmp((*(const struct r2_net_link *const *)a)->name,
                      (*(const struct r2_net_link *const *)b)->name);
}

/* All links in the order of their names; NULL if there is no memory. Freed by the caller. */
static const struct r2_net_link **r2_choose_sorted(const struct r2_net_tables *tables)
{
    const struct r2_net_link **sorted = calloc((size_t)tables->nlinks + 1, sizeof(*sorted));

    for (int i = 0; sorted && i < tables->nlinks; i++) {
        sorted[i] = &tables->links[i];
    }
    if (sorted) {
        qsort(sorted, (size_t)tables->nlinks, sizeof(*sorted), r2_choose_compare);
    }
    return sorted;
}

static bool r2_choose_excluded(const struct r2_pick_item *items, int nitems,
                               const struct r2_net_link *link, const struct sockaddr *addr)
{
    for (int i = 0; i < nitems; i++) {
        const struct r2_pick_item *item = &items[i];

        if (item->exclude &&
            ((item->kind == R2_PICK_NAME && strcmp(item->text, link->name) == 0) ||
             (item->kind == R2_PICK_PREFIX && r2_choose_starts(link->name, item->text)) ||
             (item->kind == R2_PICK_ADDRESS &&
              r2_sockaddr_equal((const struct sockaddr *)&item->addr, addr)))) {
            return true;
        }
    }
    return false;
}

/* ---- nobody chose, or by NCCL's variables or by exclusions only ---- */

static int r2_choose_stage(struct r2_choice *c, enum r2_stage stage, const char *hca,
                           const struct r2_pick_item *items, int nitems)
{
    const char *ifname = items ? "" : c->settings->nccl_socket_ifname;
    bool named = ifname[0] && !r2_pick_nccl_is_exclusion(ifname);
    const struct r2_net_link **sorted = r2_choose_sorted(c->tables);

    if (!sorted) {
        return -ENOMEM;
    }
    for (int i = 0; i < c->tables->nlinks; i++) {
        const struct r2_net_link *link = sorted[i];
        const struct r2_net_addr *addr = r2_choose_addr(c, link, named || stage >= R2_STAGE_OTHERS);

        if (addr && (link->flags & IFF_UP) && r2_pick_nccl_match(ifname, link->name, false) &&
            (named || r2_choose_in_stage(link, stage)) &&
            (!hca || (link->rdma[0] ? r2_pick_nccl_match(hca, link->rdma, true)
                                    : r2_pick_nccl_is_exclusion(hca))) &&
            !r2_choose_excluded(items, nitems, link, (const struct sockaddr *)&addr->addr)) {
            r2_choose_add(c, link, &addr->addr, addr->prefixlen, false);
        }
    }
    free(sorted);
    return 0;
}

static int r2_choose_default(struct r2_choice *c, const struct r2_pick_item *items, int nitems)
{
    const char *ifname = items ? "" : c->settings->nccl_socket_ifname;
    const char *hca = c->settings->nccl_ib_hca;
    char have[512];
    int rc = 0;

    if (!ifname[0] && hca[0] && !items) {
        rc = r2_choose_stage(c, R2_STAGE_GOOD, hca, NULL, 0);
    }
    for (int stage = 0; stage < R2_STAGES && rc == 0 && c->count == 0; stage++) {
        rc = r2_choose_stage(c, (enum r2_stage)stage, NULL, items, nitems);
    }
    if (rc == 0 && c->count == 0) {
        r2_pick_describe(c->tables, have, sizeof(have));
        snprintf(c->err, c->errlen, "no usable NIC%s%s%s%s: there is %s",
                 ifname[0] ? " for NCCL_SOCKET_IFNAME=" : "", ifname,
                 c->family != AF_UNSPEC ? " with NCCL_SOCKET_FAMILY=" : "",
                 c->family != AF_UNSPEC ? c->settings->nccl_socket_family : "", have);
    }
    return rc ? rc : c->count;
}

/* ---- R2CCL_NICS ---- */

/* The first one is what the message says. The job may have been started anew after a NIC has died:
 * the others serve. */
static int r2_choose_missing(struct r2_choice *c, const char *text, const char *why)
{
    char have[1024];

    if (c->missing++ > 0)
        return 0;
    r2_pick_describe(c->tables, have, sizeof(have));
    snprintf(c->err, c->errlen, "R2CCL_NICS: %s %s; there is %s", text, why, have);
    return 0;
}

/* An empty list of NICs is an error, a shorter one a warning. */
static int r2_choose_left(struct r2_choice *c)
{
    size_t used = strnlen(c->err, c->errlen);

    if (c->missing == 0)
        return c->count;
    if (c->count == 0)
        return -ENODEV;
    snprintf(c->err + used, c->errlen - used, "%s; this process uses the other %d of its list",
             c->missing > 1 ? ", and more are missing" : "", c->count);
    return c->count;
}

static int r2_choose_by_name(struct r2_choice *c, const struct r2_pick_item *item,
                             const struct r2_pick_item *items, int nitems)
{
    const struct r2_net_link **sorted = r2_choose_sorted(c->tables);
    bool exists = false;
    bool usable = false;

    if (!sorted) {
        return -ENOMEM;
    }
    for (int i = 0; i < c->tables->nlinks; i++) {
        const struct r2_net_link *link = sorted[i];
        const struct r2_net_addr *addr = r2_choose_addr(c, link, true);

        if (item->kind == R2_PICK_NAME ? strcmp(link->name, item->text) != 0
                                       : !r2_choose_starts(link->name, item->text)) {
            continue;
        }
        exists = true;
        if (addr &&
            !r2_choose_excluded(items, nitems, link, (const struct sockaddr *)&addr->addr)) {
            usable = true;
            r2_choose_add(c, link, &addr->addr, addr->prefixlen, false);
        }
    }
    free(sorted);
    if (!exists) {
        return r2_choose_missing(c, item->text,
                                 item->kind == R2_PICK_NAME
                                     ? "does not exist (a prefix is written with *)"
                                     : "is the prefix of no interface");
    }
    return usable ? 0
                  : r2_choose_missing(c, item->text,
                                      "has no usable address, or every match is excluded");
}

static int r2_choose_by_address(struct r2_choice *c, const struct r2_pick_item *item)
{
    const struct sockaddr *want = (const struct sockaddr *)&item->addr;
    const char *scope = strchr(item->text, '%');

    for (int i = 0; i < c->tables->naddrs; i++) {
        const struct r2_net_addr *addr = &c->tables->addrs[i];
        const struct sockaddr *have = (const struct sockaddr *)&addr->addr;
        const struct r2_net_link *link = r2_net_tables_link(c->tables, addr->ifindex);
        bool same = r2_sockaddr_in_prefix(want, have, 128);

        if (!link || (scope && strcmp(scope + 1, link->name) != 0 &&
                      strtol(scope + 1, NULL, 10) != link->ifindex)) {
            continue;
        }
        if (same) {
            r2_choose_add(c, link, &addr->addr, addr->prefixlen, true);
            return 0;
        }
        /* Every address of a loopback's subnet is local: 127.0.1.1 needs no configuration. */
        if ((link->flags & IFF_LOOPBACK) && r2_sockaddr_is_loopback(want) &&
            r2_sockaddr_in_prefix(want, have, addr->prefixlen)) {
            r2_choose_add(c, link, &item->addr, addr->prefixlen, true);
            return 0;
        }
    }
    return r2_choose_missing(c, item->text, "is no address of this node");
}

int r2_pick_choose(const struct r2_settings *settings, const struct r2_net_tables *tables,
                   struct r2_pick *out, int max, char *err, size_t errlen)
{
    struct r2_choice c = {.settings = settings,
                          .tables = tables,
                          .out = out,
                          .max = max,
                          .err = err,
                          .errlen = errlen};
    struct r2_pick_item items[R2_PICK_ITEMS];
    int nitems = r2_pick_parse(settings->nics, items, R2_PICK_ITEMS, err, errlen);
    bool only_exclusions = true, only_ports = true;
    int rc = 0;

    if (nitems >= 0 && errlen) {
        err[0] = '\0';
    }
    c.family = strcasecmp(settings->nccl_socket_family, "AF_INET") == 0    ? AF_INET
               : strcasecmp(settings->nccl_socket_family, "AF_INET6") == 0 ? AF_INET6
                                                                           : AF_UNSPEC;
    for (int i = 0; i < nitems; i++) {
        only_exclusions &= items[i].exclude;
        only_ports &= items[i].exclude || items[i].kind == R2_PICK_PORT;
    }
    if (nitems <= 0 || only_exclusions) {
        return nitems < 0 ? nitems : r2_choose_default(&c, nitems ? items : NULL, nitems);
    }
    if (only_ports) {
        snprintf(err, errlen,
                 "R2CCL_NICS=%s names InfiniBand ports only; name an interface with an address as "
                 "well, which may be slow: queue pairs are agreed on over it",
                 settings->nics);
        return -EINVAL;
    }
    for (int i = 0; i < nitems && rc == 0; i++) {
        if (items[i].exclude || items[i].kind == R2_PICK_PORT) {
            continue;
        }
        rc = items[i].kind == R2_PICK_ADDRESS ? r2_choose_by_address(&c, &items[i])
                                              : r2_choose_by_name(&c, &items[i], items, nitems);
    }
    return rc ? rc : r2_choose_left(&c);
}
