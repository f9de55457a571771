/* Rung 1: the tables and rules of the verbs transport. */
#include "check.h"
#include "document.h"

#ifdef R2_HAVE_VERBS
#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

#include "control/segment.h"
#include "transport/verbs/card.h"
#include "transport/verbs/tables.h"

/* The cause that people read names whose fault it was, whole, and the error number fits it: the
 * engine counts no failure of a NIC for these two. */
static void whose_fault(const struct r2_wc_info *info)
{
    static const char *const said[] = {[R2_BLAME_NOBODY] = "",
                                       [R2_BLAME_PATH] = "(path's or peer's fault)",
                                       [R2_BLAME_LOCAL] = "(this NIC's fault)",
                                       [R2_BLAME_REMOTE] = "(peer's fault)",
                                       [R2_BLAME_MEMORY] = "(no NIC's fault)"};
    struct r2_seg_path row;

    CHECK(strstr(info->meaning, said[info->blame]) != NULL);
    CHECK_EQ(strstr(info->meaning, "fault)") != NULL, info->blame != R2_BLAME_NOBODY);
    CHECK(strlen(info->meaning) < sizeof(row.cause));
    CHECK_EQ(info->err == EFAULT || info->err == EACCES, info->blame == R2_BLAME_MEMORY);
}

TEST(every_code_is_known)
{
    for (int s = IBV_WC_SUCCESS; s <= IBV_WC_TM_RNDV_INCOMPLETE; s++) {
        const struct r2_wc_info *info = r2_wc_info(s);

        CHECK_EQ(info->status, s);
        CHECK(info->name[0] && info->meaning[0]);
        CHECK_EQ(info->err == 0, s == IBV_WC_SUCCESS);
        whose_fault(info);
    }
    CHECK_EQ(r2_wc_info(IBV_WC_RETRY_EXC_ERR)->blame, R2_BLAME_PATH);
    CHECK_EQ(r2_wc_info(IBV_WC_REM_ACCESS_ERR)->blame, R2_BLAME_MEMORY); /* blames no NIC */
    CHECK_EQ(r2_wc_info(IBV_WC_WR_FLUSH_ERR)->blame, R2_BLAME_NOBODY);
    CHECK_EQ(r2_wc_info(4711)->status, -1);
    CHECK(r2_wc_info(4711)->err);
    whose_fault(r2_wc_info(4711));
}

TEST(every_event_is_known)
{
    static const int read_again[] = {IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE,
                                     IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
                                     IBV_EVENT_CLIENT_REREGISTER};

    for (int t = IBV_EVENT_CQ_ERR; t <= IBV_EVENT_WQ_FATAL; t++)
        CHECK_EQ(r2_async_info(t)->type, t);
    CHECK_EQ(r2_async_info(IBV_EVENT_PORT_ERR)->act, R2_ASYNC_DOWN);
    CHECK_EQ(r2_async_info(IBV_EVENT_PORT_ERR)->scope, R2_ASYNC_PORT);
    CHECK_EQ(r2_async_info(IBV_EVENT_PORT_ACTIVE)->act, R2_ASYNC_UP);
    CHECK_EQ(r2_async_info(IBV_EVENT_DEVICE_FATAL)->act, R2_ASYNC_GONE);
    for (size_t i = 0; i < sizeof(read_again) / sizeof(read_again[0]); i++) {
        CHECK_EQ(r2_async_info(read_again[i])->act, R2_ASYNC_REFRESH);
        CHECK_EQ(r2_async_info(read_again[i])->scope, R2_ASYNC_PORT);
    }
    CHECK_EQ(r2_async_info(IBV_EVENT_QP_FATAL)->scope, R2_ASYNC_QP);
    CHECK_EQ(r2_async_info(4711)->act, R2_ASYNC_IGNORE);
}

/* A row of the table: its events, and what follows. */
static bool row_names(const char *text, const char *follows, const char *name)
{
    char end[96], found[64];
    const char *row, *at;

    snprintf(end, sizeof(end), " | %s |\n", follows);
    at = strstr(text, end);
    if (!at)
        return false;
    for (row = at; row[-1] != '\n'; row--)
        ;
    snprintf(found, sizeof(found), " %s", name);
    for (const char *p = row; (p = strstr(p, found)) && p < at; p++) {
        if (p[strlen(found)] == ',' || p + strlen(found) == at)
            return true;
    }
    return false;
}

/* The table of events in docs/failures.md is this one. */
TEST(documented)
{
    static const char *const follows[] = {
        [R2_ASYNC_FAIL] = "the paths of that completion queue or queue pair end",
        [R2_ASYNC_DOWN] = "the port's paths end, none is made until PORT_ACTIVE",
        [R2_ASYNC_UP] = "read again, then used",
        [R2_ASYNC_REFRESH] = "read again",
        [R2_ASYNC_GONE] = "the device is not used until it is listed anew"};
    const char *text = document("docs/failures.md");

    for (int t = IBV_EVENT_CQ_ERR; t <= IBV_EVENT_WQ_FATAL; t++) {
        const struct r2_async_info *info = r2_async_info(t);

        if (info->act == R2_ASYNC_IGNORE) /* named in the text above the table */
            CHECK_MSG(strstr(text, info->name), "docs/failures.md lacks %s", info->name);
        else
            CHECK_MSG(row_names(text, follows[info->act], info->name),
                      "docs/failures.md: %s is not in the row of '%s'", info->name,
                      follows[info->act]);
    }
}

TEST(hca_list)
{
    CHECK(r2_hca_match("", "mlx5_0", 1));
    CHECK(r2_hca_match(NULL, "mlx5_0", 1));
    CHECK(r2_hca_match("mlx5", "mlx5_10", 2));
    CHECK(!r2_hca_match("mlx4", "mlx5_0", 1));
    CHECK(r2_hca_match("mlx5_1", "mlx5_10", 1)); /* a prefix */
    CHECK(!r2_hca_match("=mlx5_1", "mlx5_10", 1));
    CHECK(r2_hca_match("=mlx5_1,mlx5_10", "mlx5_10", 1));
    CHECK(r2_hca_match("=mlx5_1:2", "mlx5_1", 2));
    CHECK(!r2_hca_match("=mlx5_1:2", "mlx5_1", 1));
    CHECK(!r2_hca_match("^mlx5_1", "mlx5_1", 1));
    CHECK(r2_hca_match("^mlx5_1", "mlx5_0", 1));
    CHECK(r2_hca_match("^=mlx5_1", "mlx5_10", 1));
    CHECK(!r2_hca_match("^=mlx5_1:1", "mlx5_1", 1));
    CHECK(r2_hca_match("^=mlx5_1:1", "mlx5_1", 2));
}

TEST(gid_rule)
{
    const uint8_t none[16] = {0}, link[16] = {0xfe, 0x80, [15] = 1};
    const uint8_t mine[16] = {[10] = 0xff, [11] = 0xff, 10, 0, 0, 1};
    const uint8_t other[16] = {[10] = 0xff, [11] = 0xff, 10, 0, 0, 2};
    const uint8_t six[16] = {0xfd, [15] = 1};

    CHECK_LT(r2_gid_score(none, R2_GID_V2, mine), 0);
    CHECK_GT(r2_gid_score(mine, R2_GID_V1, mine), r2_gid_score(other, R2_GID_V2, mine));
    CHECK_GT(r2_gid_score(mine, R2_GID_V2, mine), r2_gid_score(mine, R2_GID_V1, mine));
    CHECK_GT(r2_gid_score(mine, R2_GID_V2, mine), r2_gid_score(mine, R2_GID_UNKNOWN, mine));
    CHECK_GT(r2_gid_score(other, R2_GID_V2, NULL), r2_gid_score(six, R2_GID_V2, NULL));
    CHECK_GT(r2_gid_score(six, R2_GID_V1, NULL), r2_gid_score(link, R2_GID_V2, NULL));
}

TEST(gid_fits)
{
    const uint8_t link[16] = {0xfe, 0x80, [15] = 1};
    const uint8_t four[16] = {[10] = 0xff, [11] = 0xff, 10, 1, 2, 3},
                  six[16] = {0xfd, 0x12, [15] = 1};
    static const char *const bad[] = {"",    "10.0.0.0",    "10.0.0.0/",   "10.0.0.0/33",
                                      "/8",  "10.0.0/8",    "fd00::/129",  "fd00::/-1",
                                      "x/8", "10.0.0.0/8 ", "10.0.0.0/8/8"};
    static const struct {
        const char *text;
        bool four, six;
    } ranges[] = {
        {"10.0.0.0/8", true, false},  {"10.1.2.0/23", true, false},  {"10.1.0.0/23", false, false},
        {"10.1.2.3/32", true, false}, {"10.1.2.2/32", false, false}, {"0.0.0.0/0", true, false},
        {"fd00::/8", false, true},    {"fd10::/12", false, true},    {"fd20::/12", false, false},
        {"fd12::1/128", false, true}, {"::/0", true, true}};
    struct r2_gid_wants none = {0}, wants = {.v4 = true}, old = {.version = 1};

    CHECK(r2_gid_fits(four, R2_GID_V1, &none) && r2_gid_fits(six, R2_GID_V2, &none));
    CHECK(r2_gid_fits(four, R2_GID_V1, &wants) && !r2_gid_fits(six, R2_GID_V1, &wants));
    wants = (struct r2_gid_wants){.v6 = true};
    CHECK(!r2_gid_fits(four, R2_GID_V1, &wants) && r2_gid_fits(six, R2_GID_V1, &wants));
    CHECK(!r2_gid_fits(link, R2_GID_V2, &wants) && r2_gid_fits(link, R2_GID_V2, &none));
    CHECK(r2_gid_range("fe80::/10", &wants) && r2_gid_fits(link, R2_GID_V2, &wants));
    CHECK(r2_gid_fits(four, R2_GID_V1, &old) && !r2_gid_fits(four, R2_GID_V2, &old));
    CHECK(r2_gid_fits(four, R2_GID_UNKNOWN, &old)); /* nobody can say */
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        struct r2_gid_wants w = {0};

        CHECK_MSG(r2_gid_range(ranges[i].text, &w), "%s", ranges[i].text);
        CHECK_MSG(r2_gid_fits(four, R2_GID_V2, &w) == ranges[i].four, "%s", ranges[i].text);
        CHECK_MSG(r2_gid_fits(six, R2_GID_V2, &w) == ranges[i].six, "%s", ranges[i].text);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK_MSG(!r2_gid_range(bad[i], &none), "%s", bad[i]);
}

static struct r2_verbs_card card(void)
{
    struct r2_verbs_card c = {.magic = R2_VERBS_MAGIC,
                              .version = R2_VERBS_VERSION,
                              .len = sizeof(c),
                              .link = IBV_LINK_LAYER_ETHERNET,
                              .mtu = IBV_MTU_4096,
                              .n_bulk = 2,
                              .ctrl = 17,
                              .beat = 18,
                              .bulk = {19, 20}};

    return c;
}

TEST(cards)
{
    struct r2_verbs_card c = card();

    CHECK_EQ(r2_verbs_card_check(&c, IBV_LINK_LAYER_ETHERNET), 0);
    CHECK_EQ(r2_verbs_card_check(&c, IBV_LINK_LAYER_INFINIBAND), -EPROTONOSUPPORT);
    c.status = ESTALE;
    CHECK_EQ(r2_verbs_card_check(&c, IBV_LINK_LAYER_ETHERNET), -ESTALE);
    c.status = 0xffffffff;
    CHECK_EQ(r2_verbs_card_check(&c, IBV_LINK_LAYER_ETHERNET), -EPROTO);
#define BAD(field, value)                                                                          \
    do {                                                                                           \
        c = card();                                                                                \
        c.field = (value);                                                                         \
        CHECK_EQ(r2_verbs_card_check(&c, IBV_LINK_LAYER_ETHERNET), -EPROTO);                       \
    } while (0)
    BAD(magic, 1);
    BAD(version, R2_VERBS_VERSION - 1);
    BAD(version, R2_VERBS_VERSION + 1);
    BAD(len, sizeof(struct r2_verbs_card) - 1);
    BAD(n_bulk, 0);
    BAD(n_bulk, R2_VERBS_MAX_BULK + 1);
    BAD(mtu, 0);
    BAD(mtu, 6);
    BAD(ctrl, 0);
    BAD(ctrl, 0x1000000);
    BAD(beat, 0);
    BAD(bulk[1], 0);
    BAD(psn, 0x1000000);
}

TEST(rates)
{
    CHECK_EQ(r2_port_rate_gbps(2, 32), 100);  /* 4x EDR */
    CHECK_EQ(r2_port_rate_gbps(2, 64), 200);  /* 4x HDR */
    CHECK_EQ(r2_port_rate_gbps(2, 128), 400); /* 4x NDR */
    CHECK_EQ(r2_port_rate_gbps(1, 1), 2);
    CHECK_EQ(r2_port_rate_gbps(3, 32), 0);
    CHECK_STR(r2_port_state_text(4), "Active");
    CHECK_STR(r2_port_state_text(99), "unknown");
}
#else
int main(void)
{
    puts("no <infiniband/verbs.h> here");
    return CHECK_SKIPPED;
}
#endif
