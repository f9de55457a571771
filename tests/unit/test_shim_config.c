/* What the shim makes of a communicator's configuration, over the no-op NCCL. Rung 2. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "comm_row.h"
#include "noop_bed.h"

#define R2_OWN(name, since, ret, params) ret name params;
#include "nccl/nccl.def"

static bool followed(r2_nccl_comm handle)
{
    struct r2_comm *comm = r2_comms_hold(handle);
    bool has;

    CHECK(comm != NULL);
    has = comm->follow != NULL;
    r2_comms_drop(comm);
    return has;
}

/* With blocking=0 a communicator has no agreement, also where NCCL is through with making it when
 * the call returns: on another rank it may not be. */
TEST(nonblocking_and_made_at_once)
{
    struct r2_nccl_config config = {
        .size = sizeof(config), .magic = R2_NCCL_CONFIG_MAGIC, .blocking = 1};
    r2_nccl_comm comms[2], child;
    struct r2_nccl_id id;

    for (int blocking = 0; blocking < 2; blocking++) {
        config.blocking = blocking;
        CHECK_EQ(ncclGetUniqueId(&id), 0);
        CHECK_EQ(ncclCommInitRankConfig(&comms[blocking], 2, id, 0, &config), 0);
        CHECK_EQ(followed(comms[blocking]), blocking);
        CHECK_EQ(row_of(comms[blocking]).state, R2_SEG_COMM_READY);
    }
    config.blocking = 0;
    CHECK_EQ(ncclCommSplit(comms[1], 1, 0, &child, &config), 0);
    CHECK(!followed(child));
    CHECK_EQ(ncclCommDestroy(child), 0);
    CHECK_EQ(ncclCommSplit(comms[1], 1, 0, &child, NULL), 0); /* as its parent */
    CHECK(followed(child));
    CHECK_EQ(ncclCommDestroy(child), 0);
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    CHECK_EQ(ncclCommInitRank(&child, 2, id, 1), 0);
    unsetenv("NCCL_COMM_BLOCKING");
    CHECK(!followed(child));
    CHECK_EQ(ncclCommDestroy(child), 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(ncclCommDestroy(comms[i]), 0);
}

/* With a configuration, every function that takes one. */
static void make_each_way(r2_nccl_comm parent, struct r2_nccl_config *config, const char *name,
                          bool follows)
{
    static int last = 1;
    r2_nccl_comm made[5];
    struct r2_nccl_id id;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRankConfig(&made[0], 2, id, 0, config), 0);
    CHECK_EQ(ncclCommSplit(parent, 1, 0, &made[1], config), 0);
    CHECK_EQ(ncclCommShrink(parent, &last, 1, &made[2], config, 0), 0);
    CHECK_EQ(ncclCommGrow(parent, 3, &id, 2, &made[3], config), 0);
    CHECK_EQ(ncclCommInitRankScalable(&made[4], 3, 1, 1, &id, config), 0);
    CHECK_EQ(row_of(made[4]).rank, 1);
    for (int i = 0; i < 5; i++) {
        CHECK_STR(row_of(made[i]).name, name);
        CHECK_EQ(followed(made[i]), follows && i < 3); /* the others have no agreement */
        CHECK_EQ(ncclCommDestroy(made[i]), 0);
    }
}

/* A configuration of NCCL 2.18 ends before the newer fields: nothing behind it may be touched. */
TEST(read_no_further_than_its_size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = offsetof(struct r2_nccl_config, name);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct r2_nccl_config whole = {.size = sizeof(whole), .magic = R2_NCCL_CONFIG_MAGIC};
    struct r2_nccl_config *old;
    r2_nccl_comm parent;
    struct r2_nccl_id id;

    CHECK(pages != MAP_FAILED);
    CHECK_EQ(mprotect(pages + page, page, PROT_NONE), 0);
    old = (struct r2_nccl_config *)(pages + page - size);
    old->size = size;
    old->magic = R2_NCCL_CONFIG_MAGIC;
    old->version = 21800;
    old->blocking = whole.blocking = 1;
    whole.name = "tensor parallel";
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&parent, 3, id, 0), 0);
    make_each_way(parent, old, "", true);
    make_each_way(parent, &whole, "tensor parallel", true);
    old->blocking = 0;
    make_each_way(parent, old, "", false);
    make_each_way(parent, NULL, "", true);
    CHECK_EQ(ncclCommDestroy(parent), 0);
    munmap(pages, 2 * page);
}

int main(int argc, char **argv)
{
    noop_bed(NULL);
    return check_main(argc, argv);
}
