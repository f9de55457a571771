/* The RDMA half of NICs: what the verbs transport says about them, and what is published. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/nic/nics.h"
#include "topology/pick.h"

static atomic_bool port_down[R2_MAX_NICS]; /* of NICs without an interface */

/* A port, as users write it, of a device that was left out: it may be right, and it costs the
 * others nothing. */
static bool is_left_out(const char *port)
{
    char device[R2_NIC_NAME];
    size_t len = strcspn(port, ":");

    if (len >= sizeof(device))
        return false;
    memcpy(device, port, len);
    device[len] = '\0';
    return r2_eng.ops->left_out(device);
}

/* A port that R2CCL_NICS names and that is none of `found`; NULL: there is no such name. */
static const char *named_in_vain(const struct r2_nic *found, int m)
{
    static struct r2_pick_item items[R2_PICK_ITEMS];
    char err[128];
    int n = r2_pick_parse(r2_eng.set->nics, items, R2_PICK_ITEMS, err, sizeof(err));

    for (int i = 0; i < n; i++) {
        bool there =
            items[i].kind != R2_PICK_PORT || items[i].exclude || is_left_out(items[i].text);

        for (int k = 0; k < m && !there; k++)
            there = strcmp(items[i].text, found[k].name) == 0;
        if (!there)
            return items[i].text;
    }
    return NULL;
}

int r2_nic_add_ports(int n)
{
    struct r2_nic found[R2_MAX_NICS];
    uint64_t seed[R2_MAX_NICS];
    int m = n > 0 ? r2_eng.ops->ports(r2_local.nics, n, found, seed, R2_MAX_NICS - n) : 0;
    const char *missing = n > 0 ? named_in_vain(found, m) : NULL;

    if (missing)
        R2_TELL("R2CCL_NICS: %s is not usable: it is no InfiniBand port of this node, NCCL_IB_HCA "
                "excludes it, or the list has its interface (`ibstat` shows ports; name a port by "
                "its interface if it has one). This process uses the other %d of its list",
                missing, n + m);
    for (int i = 0; i < m; i++) {
        r2_local.nics[n + i] = found[i];
        r2_nics_append(r2_local.nics, n + i, seed[i]);
        atomic_store(&port_down[n + i], !found[i].link_up);
    }
    return n + m;
}

/* R2CCL_NICS names NICs, and not only such as are left out. */
static bool named(void)
{
    static struct r2_pick_item items[R2_PICK_ITEMS];
    char err[128];
    int n = r2_pick_parse(r2_eng.set->nics, items, R2_PICK_ITEMS, err, sizeof(err));

    for (int i = 0; i < n; i++) {
        if (!items[i].exclude)
            return true;
    }
    return false;
}

bool r2_nic_stands_by(int nic)
{
    struct r2_rdma_info info;
    bool any = false, meets = false;

    for (int i = 0; i < r2_local.n; i++) {
        any |= r2_eng.ops->rdma(i, &info);
        meets |= r2_local.nics[i].bare; /* an interface must be named, for ports to meet by */
    }
    if (!any || r2_eng.ops->rdma(nic, &info) || (named() && !meets))
        return false;
    R2_INFO("NIC %s is on standby: other NICs have RDMA and it does not. To use it with them, run "
            "`r2ccl-ctl set-weight` or name only interfaces in R2CCL_NICS",
            r2_nic_name(nic));
    return true;
}

bool r2_nic_port_up(int nic)
{
    return !atomic_load(&port_down[nic]);
}

void r2_nic_port_note(int nic, bool up)
{
    atomic_store(&port_down[nic], !up);
}

bool r2_nic_serves(int nic)
{
    struct r2_rdma_info info;

    if (!r2_nic_usable(nic))
        return false;
    return !r2_eng.device_memory || (r2_eng.ops->rdma(nic, &info) && info.active);
}

int r2_nic_others(int nic)
{
    int n = 0;

    for (int i = 0; i < r2_local.n; i++)
        n += i != nic && r2_nic_serves(i);
    return n;
}

void r2_nic_publish_rdma(void)
{
    for (int i = 0; i < r2_local.n; i++) {
        struct r2_rdma_info info;
        struct r2_control_rdma row;

        if (!r2_eng.ops->rdma(i, &info))
            continue;
        row = (struct r2_control_rdma){.device = info.device,
                                       .port = info.port,
                                       .state = info.state,
                                       .phys = info.phys,
                                       .link = info.link,
                                       .gbps = info.gbps,
                                       .queue_pairs = info.queue_pairs,
                                       .lid = info.lid};
        memcpy(row.gid, info.gid, sizeof(row.gid));
        r2_control_nic_rdma(r2_eng.ctl, r2_eng.nic_state[i].row, &row);
    }
}
