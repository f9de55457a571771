/* engine/p2pchunk: when NCCL's variable is set, what is said of it, and to whom a user is told that
 * another process has another value (rung 2: the remote process is played by the test). */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>

#include "check.h"
#include "engine/message/message.h"
#include "enginelib/remote.h"

#define NAME "NCCL_P2P_NET_CHUNKSIZE"

static int warned; /* of pieces */
static char last[512];

__attribute__((format(printf, 5, 6))) static void hear(int level, unsigned long flags,
                                                       const char *file, int line, const char *fmt,
                                                       ...)
{
    va_list args;

    (void)flags;
    (void)file;
    (void)line;
    if (level != R2_LOG_WARN)
        return;
    va_start(args, fmt);
    vsnprintf(last, sizeof(last), fmt, args);
    va_end(args);
    warned += strstr(last, NAME) != NULL;
}

static const char *after(const char *before, uint64_t bytes)
{
    if (before)
        setenv(NAME, before, 1);
    else
        unsetenv(NAME);
    r2_p2pchunk_start(bytes, 22809);
    return getenv(NAME) ? getenv(NAME) : "(unset)";
}

TEST(set_where_nothing_is)
{
    CHECK_STR(after(NULL, 512 * 1024), "524288");
    CHECK_EQ(r2_p2pchunk_word(), 512);
    CHECK_STR(after("", 512 * 1024), "524288"); /* NCCL takes its default for that */
    CHECK_STR(after("131072", 512 * 1024), "131072");
    CHECK_EQ(r2_p2pchunk_word(), 128);
    CHECK_STR(after(NULL, 0), "(unset)");
    CHECK_EQ(r2_p2pchunk_word(), 128); /* NCCL's default */
}

/* The word says what NCCL takes. */
TEST(read_as_nccl_does)
{
    static const struct {
        const char *text;
        unsigned word;
    } all[] = {{"0x40000", 256}, {"131073", 129},     {"1", 1},
               {"0", 0},         {"-5", 0},           {"99999999999999999999", 128},
               {"524288", 512},  {"1000000000", 512}, {"abc", 0}};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        CHECK_STR(after(all[i].text, 512 * 1024), all[i].text);
        CHECK_EQ(r2_p2pchunk_word(), all[i].word);
    }
}

/* Old NCCL does not look whether its buffers have room; pieces are of whole pages. */
TEST(no_more_than_there_is_room_for)
{
    CHECK_STR(after(NULL, 4 << 20), "524288");
    setenv("NCCL_BUFFSIZE", "16777216", 1);
    CHECK_STR(after(NULL, 4 << 20), "2097152");
    CHECK_EQ(r2_p2pchunk_word(), 2048);
    CHECK_STR(after("16777216", 0), "16777216");
    CHECK_EQ(r2_p2pchunk_word(), 2048); /* NCCL takes no more */
    setenv("NCCL_BUFFSIZE", "1048576", 1);
    CHECK_STR(after(NULL, 512 * 1024), "131072");
    setenv("NCCL_BUFFSIZE", "8192", 1);
    CHECK_STR(after(NULL, 512 * 1024), "1024");
    setenv("NCCL_BUFFSIZE", "0", 1);
    CHECK_STR(after(NULL, 512 * 1024), "524288");
    unsetenv("NCCL_BUFFSIZE");
    setenv(NAME, "1048576", 1);
    r2_p2pchunk_start(0, 21805); /* takes what it is told, and does not look */
    CHECK_EQ(r2_p2pchunk_word(), 1024);
    CHECK_STR(after(NULL, 300001), "299008");
    CHECK_STR(after(NULL, 1), "4096");
}

static uint16_t opens(struct remote *r, struct r2_ep *ep, uint64_t conn, uint16_t word)
{
    struct r2_msg_open m = {.conn = conn, .listen = r->listen_id, .p2p_chunk = word};
    struct r2_msg_open_ack ack = {.status = 1};

    CHECK_EQ(fake_ctrl(ep, R2_F_OPEN, &m, sizeof(m)), 0);
    CHECK_GE(remote_hear(ep, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
    return (uint16_t)ack.status;
}

/* NCCL compares nothing: it is told once for each process, and the connection is made, as
 * collectives do not mind. */
TEST(another_one_is_told)
{
    struct remote r;
    struct r2_ep *ep;

    after(NULL, 512 * 1024);
    remote_new(&r, false, 1);
    CHECK(remote_open(&r, 1));
    CHECK(r2_log_settle(REMOTE_WAIT_MS * R2_NS_PER_MS));
    CHECK_EQ(warned, 0);
    ep = fake_newest(r.id, 0, R2_VIA_TCP);
    CHECK(ep);
    CHECK_EQ(opens(&r, ep, 700, 128), 0);
    CHECK(r2_log_settle(REMOTE_WAIT_MS * R2_NS_PER_MS));
    CHECK_EQ(warned, 1);
    CHECK(strstr(last, "512 KiB here and 128 KiB at"));
    CHECK_EQ(opens(&r, ep, 701, 128), 0);
    CHECK(r2_log_settle(REMOTE_WAIT_MS * R2_NS_PER_MS));
    CHECK_EQ(warned, 1);
}

/* What it says itself when it connects. */
TEST(it_says_its_own)
{
    struct r2_msg_open m = {0};
    struct r2_conn *conn = NULL;
    struct remote r;
    struct r2_ep *ep;

    after("262144", 0);
    remote_new(&r, true, 1);
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, r.handle, &conn), 0);
    ep = fake_find(r.id, 0, 0, 0);
    CHECK(ep && fake_up(ep) && remote_prove(&r, ep));
    CHECK_GE(remote_hear(ep, R2_F_OPEN, &m, sizeof(m)), 0);
    CHECK_EQ(m.p2p_chunk, 256);
}

TEST(memory_is_said)
{
    uint64_t mib = 1 << 20;
    char text[400];

    r2_p2pchunk_memory(512 * mib, 8, 512 * 1024, text, sizeof(text));
    CHECK_MSG(strstr(text, "512 MiB of memory for 8 ranks") && strstr(text, "4.0 times") &&
                  strstr(text, "R2CCL_P2P_CHUNK=128K"),
              "%s", text);
    r2_p2pchunk_memory(512 * mib, 8, 128 * 1024, text, sizeof(text));
    CHECK_STR(text, "");
    r2_p2pchunk_memory(8192 * mib, 8, 512 * 1024, text, sizeof(text));
    CHECK_STR(text, "");
    r2_p2pchunk_memory(0, 8, 512 * 1024, text, sizeof(text));
    CHECK_STR(text, "");
}

static void put(const char *root, const char *group, const char *text)
{
    char path[256];
    FILE *file;

    snprintf(path, sizeof(path), "%s%s", root, group);
    mkdir(path, 0700);
    snprintf(path, sizeof(path), "%s%s/memory.max", root, group);
    file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

TEST(limit_of_groups)
{
    char root[] = "/tmp/r2test-cgroup-XXXXXX", command[128];

    CHECK(mkdtemp(root) != NULL);
    put(root, "", "max\n");
    put(root, "/job", "104857600\n");
    put(root, "/job/step", "209715200\n");
    put(root, "/other", "5\n");
    CHECK_EQ(r2_p2pchunk_limit(root, "1:name=x:/other\n0::/job/step\n"), 104857600);
    CHECK_EQ(r2_p2pchunk_limit(root, "0::/\n"), 0);
    CHECK_EQ(r2_p2pchunk_limit(root, ""), 0);
    CHECK_EQ(r2_p2pchunk_limit(root, "0::/none/there\n"), 0);
    snprintf(command, sizeof(command), "rm -r %s", root);
    CHECK_EQ(system(command), 0);
}

int main(int argc, char **argv)
{
    unsetenv("NCCL_BUFFSIZE");
    remote_engine(1, NULL);
    r2_log_set(hear);
    return check_main(argc, argv);
}
