/* What NCCL's configuration files say, read before NCCL reads them (shim/real/conf.c). Rung 1, with
 * a mount namespace for what is in /etc. That the shim asks: tests/py/test_shim.py. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "real/conf.h"

#define NAME "R2CONF_TEST" /* no real file has it */
#define NEW 23203
#define CANNOT 77 /* exit code of a child without a namespace */

static char folder[] = "/tmp/r2conf-XXXXXX";

static const char *in_folder(const char *name)
{
    static char path[4][128];
    static int next;
    char *out = path[next++ % 4];

    snprintf(out, sizeof(path[0]), "%s/%s", folder, name);
    return out;
}

static void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    CHECK_MSG(file, "%s", path);
    CHECK(fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

/* What it gives, "-" for nothing. */
static const char *get(int version)
{
    static struct r2_conf_value value;
    const char *text = r2_conf_get(&value, NAME, version);

    return text ? text : "-";
}

TEST(lines)
{
    static const struct {
        const char *text, *expect;
        int version;
    } cases[] = {
        {NAME "=Socket\n", "Socket", NEW},
        {NAME "=Socket", "Socket", NEW},
        {NAME "=one\n" NAME "=two\n", "one", NEW},
        {NAME "=\n", "", NEW},
        {NAME "=a=b c\n", "a=b c", NEW},
        {NAME "= Socket \n", " Socket ", NEW},
        {NAME "=Socket\r\n", "Socket", NEW},
        {NAME "=Socket\r\n", "Socket\r", 22907},
        {NAME "=Socket\r\n", "Socket", 0},
        {"#" NAME "=x\n" NAME "=y\n", "y", NEW},
        {"\n\nnothing here\n=x\n" NAME "=y\n", "y", NEW},
        {NAME "\n", "-", NEW},
        {NAME "X=x\n", "-", NEW},
        {" " NAME "=x\n", "-", NEW},
        {NAME " =x\n", "-", NEW},
        {"R2CONF=x\n", "-", NEW},
        {"", "-", NEW},
    };

    setenv("NCCL_CONF_FILE", in_folder("lines"), 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        put(in_folder("lines"), cases[i].text);
        CHECK_STR(get(cases[i].version), cases[i].expect);
    }
}

/* NCCL takes 1023 characters of a value. */
TEST(long_lines)
{
    char text[5000] = NAME "=";

    memset(text + strlen(text), 'x', 4000);
    put(in_folder("lines"), text);
    setenv("NCCL_CONF_FILE", in_folder("lines"), 1);
    CHECK_EQ(strlen(get(NEW)), 1023);
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    put(in_folder("lines"), text);
    CHECK_STR(get(NEW), "-");
}

TEST(environment_wins)
{
    struct r2_conf_value value;

    put(in_folder("lines"), NAME "=file\n");
    setenv("NCCL_CONF_FILE", in_folder("lines"), 1);
    setenv(NAME, "own", 1);
    CHECK_STR(r2_conf_get(&value, NAME, NEW), "own");
    CHECK_STR(value.where, "");
    setenv(NAME, "", 1);
    CHECK_STR(get(NEW), "");
    unsetenv(NAME);
    CHECK_STR(r2_conf_get(&value, NAME, NEW), "file");
    CHECK_MSG(strcmp(value.where + strlen(" in "), in_folder("lines")) == 0, "%s", value.where);
    CHECK(getenv(NAME) == NULL);
}

/* Which file it is, and since when. */
TEST(own_file)
{
    put(in_folder("named"), NAME "=named\n");
    put(in_folder("other"), "OTHER=x\n");
    put(in_folder(".nccl.conf"), NAME "=home\n");
    setenv("HOME", folder, 1);
    setenv("NCCL_CONF_FILE", "", 1);
    CHECK_STR(get(NEW), "home");
    CHECK_STR(get(23000), "home");
    CHECK_STR(get(0), "home");
    CHECK_STR(get(22907), "-"); /* the password database's home */
    setenv("NCCL_CONF_FILE", in_folder("named"), 1);
    CHECK_STR(get(NEW), "named");
    CHECK_STR(get(22304), "named");
    CHECK_STR(get(22203), "-");
    setenv("NCCL_CONF_FILE", in_folder("other"), 1);
    CHECK_STR(get(NEW), "-"); /* in its place, not before it */
    unsetenv("NCCL_CONF_FILE");
    unsetenv("HOME");
    CHECK_STR(get(NEW), "-");
}

/* Nothing waits for a writer, or takes from NCCL what can be read once. */
TEST(no_file)
{
    CHECK_EQ(mkfifo(in_folder("fifo"), 0600), 0);
    setenv("NCCL_CONF_FILE", in_folder("fifo"), 1);
    CHECK_STR(get(NEW), "-");
    setenv("NCCL_CONF_FILE", folder, 1);
    CHECK_STR(get(NEW), "-");
    setenv("NCCL_CONF_FILE", in_folder("missing"), 1);
    CHECK_STR(get(NEW), "-");
}

static bool tell(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return done;
}

/* An /etc of its own. */
static void in_namespace(void)
{
    struct r2_conf_value value;
    char map[2][64], line[256];

    snprintf(map[0], sizeof(map[0]), "0 %u 1\n", geteuid());
    snprintf(map[1], sizeof(map[1]), "0 %u 1\n", getegid());
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) || !tell("/proc/self/setgroups", "deny") ||
        !tell("/proc/self/uid_map", map[0]) || !tell("/proc/self/gid_map", map[1]) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", "/etc", "tmpfs", 0, NULL) || creat("/etc/nccl.conf", 0600) < 0)
        _exit(CANNOT);
    put("/etc/nccl.conf", NAME "=system\n");
    setenv("NCCL_CONF_FILE", in_folder("other"), 1);
    CHECK_STR(r2_conf_get(&value, NAME, NEW), "system");
    CHECK_STR(value.where, " in /etc/nccl.conf");
    setenv("NCCL_CONF_FILE", in_folder("named"), 1);
    CHECK_STR(get(NEW), "named");
    unsetenv("NCCL_CONF_FILE");
    snprintf(line, sizeof(line), "me:x:%u:%u::%s:/bin/sh\n", getuid(), getgid(), folder);
    put("/etc/passwd", line);
    put("/etc/nsswitch.conf", "passwd: files\n");
    setenv("HOME", "/nowhere", 1);
    CHECK_STR(get(NEW), "system");
    CHECK_STR(get(22907), "home");
    _exit(0);
}

TEST(system_file)
{
    int status;
    pid_t child;

    put(in_folder("named"), NAME "=named\n");
    put(in_folder("other"), "OTHER=x\n");
    put(in_folder(".nccl.conf"), NAME "=home\n");
    child = fork();
    if (child == 0)
        in_namespace();
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == CANNOT)
        CHECK_SKIP("no namespaces");
    CHECK_EQ(WEXITSTATUS(status), 0);
}

static void clean(void)
{
    static const char *const names[] = {"lines", "named", "other", ".nccl.conf", "fifo"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        unlink(in_folder(names[i]));
    rmdir(folder);
}

int main(int argc, char **argv)
{
    CHECK(mkdtemp(folder) != NULL);
    atexit(clean);
    return check_main(argc, argv);
}
