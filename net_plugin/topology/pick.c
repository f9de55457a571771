#define _GNU_SOURCE
#include "topology/pick.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int r2_pick_address(const char *text, struct sockaddr_storage *out)
{
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
    char plain[R2_NIC_NAME];
    const char *scope = strchr(text, '%');

    memset(out, 0, sizeof(*out));
    if (inet_pton(AF_INET, text, &in->sin_addr) == 1) {
        in->sin_family = AF_INET;
        return 0;
    }
    snprintf(plain, sizeof(plain), "%.*s", (int)strcspn(text, "%"), text);
    memset(out, 0, sizeof(*out));
    if (inet_pton(AF_INET6, plain, &in6->sin6_addr) != 1) {
        return -EINVAL;
    }
    in6->sin6_family = AF_INET6;
    if (scope && scope[1]) {
        /* A name is resolved when the tables are at hand. */
        in6->sin6_scope_id = (uint32_t)strtoul(scope + 1, NULL, 10);
    }
    return 0;
}

/* "mlx5_0:1" */
static bool r2_pick_is_port(const char *text)
{
    const char *colon = strchr(text, ':');
    size_t digits = colon ? strspn(colon + 1, "0123456789") : 0;

    return colon && colon != text && digits > 0 && digits < 4 && colon[1 + digits] == '\0' &&
           !strpbrk(text, " \t^=*/");
}

static int r2_pick_item(const char *text, bool exclude, struct r2_pick_item *item, char *err,
                        size_t errlen)
{
    size_t len = strlen(text);
    bool exact;

    item->exclude = exclude || *text == '^';
    text += *text == '^';
    exact = *text == '=';
    text += exact;
    len = strlen(text);
    item->kind = len && text[len - 1] == '*' && !exact ? R2_PICK_PREFIX : R2_PICK_NAME;
    snprintf(item->text, sizeof(item->text), "%s", text);
    if (item->kind == R2_PICK_PREFIX) {
        item->text[len - 1] = '\0';
    } else if (!exact && r2_pick_address(text, &item->addr) == 0) {
        item->kind = R2_PICK_ADDRESS;
    } else if (r2_pick_is_port(text)) {
        item->kind = R2_PICK_PORT;
        return 0;
    }
    if (len == 0 || strpbrk(item->text, " \t^=*/") ||
        (item->kind != R2_PICK_ADDRESS && (len >= IFNAMSIZ || strchr(item->text, ':')))) {
        snprintf(
            err, errlen,
            "R2CCL_NICS: \"%s\" is neither an interface nor an address; an entry is a name "
            "(eth0), a prefix (eth*), an exclusion (^eth0), an IP address or an InfiniBand port "
            "(mlx5_0:1)",
            text);
        return -EINVAL;
    }
    return 0;
}

int r2_pick_parse(const char *list, struct r2_pick_item *items, int max, char *err, size_t errlen)
{
    bool exclude = *list == '^';
    int count = 0;

    for (const char *p = list; *p;) {
        size_t len = strcspn(p, ",");
        char text[R2_NIC_NAME];
        int rc;

        if (len >= sizeof(text) || count == max) {
            snprintf(err, errlen, "R2CCL_NICS: %s: \"%.80s\"",
                     count == max ? "too many entries" : "an entry is too long", p);
            return -EINVAL;
        }
        memcpy(text, p, len);
        text[len] = '\0';
        rc = r2_pick_item(text, exclude, &items[count], err, errlen);
        if (rc) {
            return rc;
        }
        count++;
        p += len;
        if (*p == ',' && p[1] == '\0') {
            snprintf(err, errlen, "R2CCL_NICS: \"%s\" ends with a comma", list);
            return -EINVAL;
        }
        p += *p == ',';
    }
    return count;
}

bool r2_pick_nccl_is_exclusion(const char *list)
{
    return *list == '^';
}

bool r2_pick_nccl_match(const char *list, const char *name, bool ports)
{
    bool exclude = *list == '^';
    bool exact;
    bool found = false;

    list += exclude;
    exact = *list == '=';
    list += exact;
    if (*list == '\0') {
        return true;
    }
    while (*list && !found) {
        size_t entry = strcspn(list, ",");
        size_t len = ports ? strcspn(list, ",:") : entry;

        found = len > 0 && strncmp(name, list, len) == 0 && (!exact || name[len] == '\0');
        list += entry;
        list += *list == ',';
    }
    return found != exclude;
}

void r2_pick_describe(const struct r2_net_tables *tables, char *out, size_t outlen)
{
    size_t at = 0;

    snprintf(out, outlen, "nothing");
    for (int i = 0; i < tables->nlinks && at < outlen; i++) {
        const struct r2_net_link *link = &tables->links[i];
        const char *separator = " (";

        at += (size_t)snprintf(out + at, outlen - at, "%s%s", i ? ", " : "", link->name);
        for (int k = 0; k < tables->naddrs && at < outlen; k++) {
            const struct r2_net_addr *addr = &tables->addrs[k];
            char text[R2_NIC_NAME];

            if (addr->ifindex == link->ifindex) {
                r2_addr_text((const struct sockaddr *)&addr->addr, text, sizeof(text));
                at += (size_t)snprintf(out + at, outlen - at, "%s%s", separator, text);
                separator = ", ";
            }
        }
        if (at < outlen && *separator == ',') {
            at += (size_t)snprintf(out + at, outlen - at, ")");
        }
    }
    if (at >= outlen && outlen > 4) {
        memcpy(out + outlen - 4, "...", 4);
    }
}

/* ---- what depends on the others ---- */

static void r2_pick_names(struct r2_nic *nics, int n)
{
    for (int i = 0; i < n; i++) {
        bool alone = true;

        for (int k = 0; k < n; k++) {
            alone &= k == i || nics[k].ifindex != nics[i].ifindex;
        }
        if (alone) {
            snprintf(nics[i].name, sizeof(nics[i].name), "%s", nics[i].ifname);
        } else {
            r2_addr_text((const struct sockaddr *)&nics[i].addr, nics[i].name,
                         sizeof(nics[i].name));
        }
    }
}

static void r2_pick_weights(struct r2_nic *nics, int n)
{
    int fastest = 0;

    for (int i = 0; i < n; i++) {
        if (nics[i].speed_known && nics[i].speed_mbps > fastest) {
            fastest = nics[i].speed_mbps;
        }
    }
    for (int i = 0; i < n; i++) {
        /* A NIC without carrier often does not say its speed: it is taken for one of its kind. */
        if (!nics[i].speed_known) {
            nics[i].speed_mbps = !nics[i].link_up && fastest ? fastest : R2_NIC_MIN_REPORT;
        }
    }
    for (int i = 0; i < n; i++) {
        int64_t top = fastest > nics[i].speed_mbps ? fastest : nics[i].speed_mbps;
        int64_t percent = (int64_t)nics[i].speed_mbps * 100 / top;

        nics[i].weight = (int)(percent < 1 ? 1 : percent);
        if (nics[i].speed_known && (int64_t)nics[i].speed_mbps * 10 < top) {
            nics[i].weight = 0;
        }
    }
}

static uint64_t r2_pick_mix(uint64_t hash, const char *text)
{
    for (; *text; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93u;
    return hash ^ hash >> 32;
}

static void r2_pick_guid(struct r2_nic *nics, int i, uint64_t seed)
{
    bool taken;

    nics[i].rail = i;
    nics[i].guid = r2_pick_mix(seed, nics[i].name);
    do {
        taken = nics[i].guid == 0;
        for (int k = 0; k < i; k++) {
            taken |= nics[k].guid == nics[i].guid;
        }
        nics[i].guid += taken;
    } while (taken);
}

void r2_pick_finish(struct r2_nic *nics, int n, const uint64_t *seed)
{
    r2_pick_names(nics, n);
    r2_pick_weights(nics, n);
    for (int i = 0; i < n; i++) {
        r2_pick_guid(nics, i, seed[i]);
    }
}

const char *r2_nic_place_text(const struct r2_nic *nic, char *out, size_t outlen)
{
    if (!nic->bare) {
        return r2_addr_text((const struct sockaddr *)&nic->addr, out, outlen);
    }
    snprintf(out, outlen, "0x%016llx", (unsigned long long)nic->port_guid);
    return out;
}

void r2_nics_append(struct r2_nic *nics, int n, uint64_t seed)
{
    r2_pick_weights(nics, n + 1);
    r2_pick_guid(nics, n, seed);
}

/* The first item that is about that port; NULL: none. `*others`: some item names another NIC, or
 * the list is wrong. */
static const struct r2_pick_item *r2_pick_port(const struct r2_settings *settings,
                                               const char *device, int port,
                                               struct r2_pick_item items[R2_PICK_ITEMS],
                                               bool *others)
{
    char name[R2_NIC_NAME], err[8];
    int n = r2_pick_parse(settings->nics, items, R2_PICK_ITEMS, err, sizeof(err));

    *others = n < 0;
    snprintf(name, sizeof(name), "%.50s:%d", device, port);
    for (int i = 0; i < n; i++) {
        if (items[i].kind == R2_PICK_PORT && strcmp(items[i].text, name) == 0) {
            return &items[i];
        }
        *others |= !items[i].exclude;
    }
    return NULL;
}

bool r2_nics_wants_port(const struct r2_settings *settings, const char *device, int port)
{
    struct r2_pick_item items[R2_PICK_ITEMS];
    bool others;
    const struct r2_pick_item *item = r2_pick_port(settings, device, port, items, &others);

    return item ? !item->exclude : !others;
}

bool r2_nics_names_port(const struct r2_settings *settings, const char *device, int port)
{
    struct r2_pick_item items[R2_PICK_ITEMS];
    bool others;
    const struct r2_pick_item *item = r2_pick_port(settings, device, port, items, &others);

    return item && !item->exclude;
}

int r2_nic_report_speed(const struct r2_nic *nic)
{
    return nic->speed_mbps > R2_NIC_MIN_REPORT ? nic->speed_mbps : R2_NIC_MIN_REPORT;
}
