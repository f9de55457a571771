/* The choice of NICs as JSON, and their order, for r2ccl-ctl. */
#define _GNU_SOURCE
#include "topology/view.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topology/device.h"
#include "topology/nics.h"
#include "topology/pick.h"
#include "util/jsontext.h"

static void r2_view_text(FILE *f, const char *key, const char *text)
{
    fprintf(f, ", \"%s\": ", key);
    r2_json_string(f, text);
}

static void r2_view_nic(FILE *f, const struct r2_nic *nic)
{
    char text[R2_NIC_NAME];

    fputs("{\"name\": ", f);
    r2_json_string(f, nic->name);
    r2_view_text(f, "ifname", nic->ifname);
    r2_view_text(f, "addr", r2_addr_text((const struct sockaddr *)&nic->addr, text, sizeof(text)));
    r2_view_text(f, "pci_path", nic->pci_path);
    r2_view_text(f, "rdma", nic->rdma);
    fprintf(f, ", \"prefixlen\": %d, \"mtu\": %d, \"numa\": %d, \"rdma_port\": %d", nic->prefixlen,
            nic->mtu, nic->numa, nic->rdma_port);
    fprintf(f, ", \"speed_mbps\": %d, \"weight\": %d, \"rail\": %d",
            nic->speed_known ? nic->speed_mbps : 0, nic->weight, nic->rail);
    fprintf(f, ", \"link_up\": %s, \"loopback\": %s, \"silent\": %s}",
            nic->link_up ? "true" : "false", nic->loopback ? "true" : "false",
            nic->silent ? "true" : "false");
}

static void r2_view_others(FILE *f, const struct r2_settings *settings,
                           const struct r2_net_tables *tables)
{
    struct r2_pick picks[R2_MAX_NICS];
    char err[1024];
    int n = r2_pick_choose(settings, tables, picks, R2_MAX_NICS, err, sizeof(err));
    bool first = true;

    for (int i = 0; i < tables->nlinks; i++) {
        char out[1024];
        const char *why =
            r2_pick_why_not(settings, tables, picks, n, &tables->links[i], out, sizeof(out));

        if (why[0]) {
            fputs(first ? "{\"name\": " : ",\n {\"name\": ", f);
            r2_json_string(f, tables->links[i].name);
            r2_view_text(f, "why", why);
            fputs("}", f);
            first = false;
        }
    }
}

static void r2_view_write(FILE *f)
{
    const struct r2_settings *settings = r2_settings_get();
    struct r2_nic nics[R2_MAX_NICS];
    struct r2_net_tables tables;
    char err[2048];
    int n = r2_nics_find(settings, nics, R2_MAX_NICS, err, sizeof(err));

    fputs("{\"error\": ", f);
    r2_json_string(f, err);
    fputs(", \"nics\": [", f);
    for (int i = 0; i < n; i++) {
        fputs(i ? ",\n " : "", f);
        r2_view_nic(f, &nics[i]);
    }
    fputs("],\n\"others\": [", f);
    if (r2_net_tables_read(&tables) == 0) {
        r2_device_decorate(&tables);
        r2_view_others(f, settings, &tables);
        r2_net_tables_free(&tables);
    }
    fputs("]}\n", f);
}

char *r2ccl_nics_json(void)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);

    if (!f) {
        return NULL;
    }
    r2_view_write(f);
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    return text;
}

int r2ccl_nics_order(int n, const char *const *pci_paths, const int *numa, const int *weights,
                     int home, int *order)
{
    struct r2_nic *nics;

    if (n < 1 || n > 1024 || home < 0 || home >= n) {
        return -EINVAL;
    }
    nics = calloc((size_t)n, sizeof(*nics));
    if (!nics) {
        return -ENOMEM;
    }
    for (int i = 0; i < n; i++) {
        snprintf(nics[i].pci_path, sizeof(nics[i].pci_path), "%s", pci_paths[i]);
        nics[i].numa = numa[i];
        nics[i].weight = weights[i];
    }
    r2_nics_order(nics, n, home, order);
    free(nics);
    return 0;
}
