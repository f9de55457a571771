/* Lists of NICs as users write them, and the choice among the kernel's tables. Pure. */
#ifndef R2_TOPOLOGY_PICK_H
#define R2_TOPOLOGY_PICK_H

#include "topology/nettables.h"
#include "topology/nics.h"

#define R2_PICK_ITEMS 64

/* PORT: of an RDMA device, "mlx5_0:1" as in NCCL_IB_HCA. */
enum r2_pick_kind { R2_PICK_NAME, R2_PICK_PREFIX, R2_PICK_ADDRESS, R2_PICK_PORT };

struct r2_pick_item {
    enum r2_pick_kind kind;
    bool exclude;
    char text[R2_NIC_NAME]; /* without ^, = and * */
    struct sockaddr_storage addr;
};

/* Reads R2CCL_NICS. Returns the number of items, or -EINVAL with a message. A list that starts
 * with ^ consists of exclusions. */
int r2_pick_parse(const char *list, struct r2_pick_item *items, int max, char *err, size_t errlen);

/* NCCL's own lists (NCCL_SOCKET_IFNAME, NCCL_IB_HCA): "a,b" prefixes, "=a,b" exact names,
 * "^a,b" none of these, "^=a,b". A port ("mlx5_0:1") is ignored when `ports` is set. An empty
 * list has everything in it. */
bool r2_pick_nccl_match(const char *list, const char *name, bool ports);
bool r2_pick_nccl_is_exclusion(const char *list);

/* One NIC of the choice. */
struct r2_pick {
    const struct r2_net_link *link;
    struct sockaddr_storage addr;
    int prefixlen;
    struct sockaddr_storage second; /* of the other family; family 0: none */
    int second_prefixlen;
};

/* Chooses among the tables as nics.h says. Returns the number chosen, or -errno with a message;
 * for 0, `err` says why there is none. */
int r2_pick_choose(const struct r2_settings *settings, const struct r2_net_tables *tables,
                   struct r2_pick *out, int max, char *err, size_t errlen);

/* What exists, for messages: "eth0 (10.0.0.1, fd00::1), lo (127.0.0.1)". */
void r2_pick_describe(const struct r2_net_tables *tables, char *out, size_t outlen);

/* Fills in what depends on the other NICs: unique names, unknown speeds, weights, rails, and
 * the guid, for which `seed` holds a hash of each NIC's hardware. */
void r2_pick_finish(struct r2_nic *nics, int n, const uint64_t *seed);

#endif
