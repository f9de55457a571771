/* PID 1 of the RDMA guest: mounts what Linux programs expect, loads the modules that /modules
 * lists (in that order), then runs commands for the host over a virtio port.
 *
 * Host to guest, one line per command, \n and \\ escaped:
 *     run ID MILLISECONDS COMMAND     started at once, several may run side by side; killed with
 *                                     all that it started at its time limit
 *     kill ID                         kills it now
 *     off                             powers off
 * Guest to host, JSON lines:
 *     {"hello": KERNEL, "failed": ["module: reason", ...]}
 *     {"id": ID, "out": TEXT}         stdout and stderr as they come; bytes as latin-1
 *     {"id": ID, "exit": CODE, "ms": N}   128 + signal if killed, 137 at the time limit too
 *
 * A guest is used by one test and thrown away: the agent trusts its host.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../pause.h"

#define MAX_JOBS 32
#define LINE_BYTES 16384
#define READ_BYTES 4096

struct job {
    long id;
    pid_t pid; /* 0: the row is free */
    int out;   /* read end of its output; -1: at its end */
    bool over;
    int status;
    int64_t begin_ms, end_ms, limit_ms;
};

static struct job jobs[MAX_JOBS];
static int port = -1;

static int64_t now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

static void send_all(const char *text, size_t len)
{
    while (len > 0) {
        ssize_t n = write(port, text, len);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return;
        if (n > 0) {
            text += n;
            len -= (size_t)n;
        }
    }
}

/* Writes text[0..len) to `to` as the inside of a JSON string; six bytes per byte at most. */
static size_t escape(char *to, const char *text, size_t len)
{
    char *at = to;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            at += sprintf(at, "\\%c", c);
        else if (c >= 0x20 && c < 0x7f)
            *at++ = (char)c;
        else
            at += sprintf(at, "\\u%04x", c);
    }
    return (size_t)(at - to);
}

static int load_module(const char *file)
{
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = syscall(SYS_finit_module, fd, "", 0) == 0 || errno == EEXIST ? 0 : -errno;
    close(fd);
    return rc;
}

/* Loads what /modules lists; what failed goes into `failed` as the inside of a JSON list. */
static void load_modules(char *failed, size_t size)
{
    char line[256];
    size_t at = 0;
    failed[0] = 0;
    FILE *list = fopen("/modules", "re");
    if (!list)
        return;
    while (fgets(line, sizeof(line), list)) {
        line[strcspn(line, "\n")] = 0;
        int rc = load_module(line);
        if (rc != 0 && at < size)
            at += (size_t)snprintf(failed + at, size - at, "%s\"%s: %s\"", at ? ", " : "", line,
                                   strerror(-rc));
    }
    fclose(list);
}

static void mount_all(void)
{
    static const char *const what[][2] = {
        {"proc", "/proc"},     {"sysfs", "/sys"}, {"devtmpfs", "/dev"},
        {"tmpfs", "/dev/shm"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"},
    };
    for (size_t i = 0; i < sizeof(what) / sizeof(what[0]); i++) {
        mkdir(what[i][1], 01777);
        if (mount(what[i][0], what[i][1], what[i][0], 0, NULL) != 0)
            fprintf(stderr, "agent: mount %s: %s\n", what[i][1], strerror(errno));
    }
    if (symlink("/proc/self/fd", "/dev/fd") != 0)
        fprintf(stderr, "agent: /dev/fd: %s\n", strerror(errno));
    mkdir("/dev/pts", 0755);
    mount("devpts", "/dev/pts", "devpts", 0, NULL);
}

/* The only virtio port there is; -1: none yet. */
static int open_port(void)
{
    DIR *folder = opendir("/sys/class/virtio-ports");
    int fd = -1;
    for (struct dirent *e; fd < 0 && folder && (e = readdir(folder));) {
        char name[300];
        if (e->d_name[0] == '.')
            continue;
        snprintf(name, sizeof(name), "/dev/%s", e->d_name);
        fd = open(name, O_RDWR | O_CLOEXEC);
    }
    if (folder)
        closedir(folder);
    return fd;
}

static void run_command(long id, int64_t limit_ms, const char *command)
{
    struct job *job = jobs;
    int ends[2];
    while (job < jobs + MAX_JOBS && job->pid)
        job++;
    if (job == jobs + MAX_JOBS || pipe2(ends, O_CLOEXEC) != 0) {
        char line[100];
        send_all(line, (size_t)snprintf(line, sizeof(line),
                                        "{\"id\": %ld, \"exit\": 126, \"ms\": 0}\n", id));
        return;
    }
    pid_t pid = fork();
    if (pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        setsid();
        int null = open("/dev/null", O_RDONLY);
        dup2(null, 0);
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    *job = (struct job){.id = id, .pid = pid, .out = ends[0], .begin_ms = now_ms()};
    job->limit_ms = job->begin_ms + limit_ms;
}

/* Passes on what a job wrote. False at the end of its output. */
static bool pass_output(struct job *job)
{
    static char raw[READ_BYTES], line[READ_BYTES * 6 + 64];
    ssize_t n = read(job->out, raw, sizeof(raw));
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) {
        close(job->out);
        job->out = -1;
        return false;
    }
    size_t at = (size_t)sprintf(line, "{\"id\": %ld, \"out\": \"", job->id);
    at += escape(line + at, raw, (size_t)n);
    at += (size_t)sprintf(line + at, "\"}\n");
    send_all(line, at);
    return true;
}

/* A job is over when its shell is; what it left running keeps no one waiting. */
static void finish_job(struct job *job)
{
    char line[128];
    while (job->out >= 0 && pass_output(job))
        ;
    if (job->out >= 0)
        close(job->out);
    int code = WIFEXITED(job->status) ? WEXITSTATUS(job->status) : 128 + WTERMSIG(job->status);
    send_all(line,
             (size_t)snprintf(line, sizeof(line), "{\"id\": %ld, \"exit\": %d, \"ms\": %ld}\n",
                              job->id, code, (long)(job->end_ms - job->begin_ms)));
    job->pid = 0;
}

static void reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (struct job *job = jobs; job < jobs + MAX_JOBS; job++)
            if (job->pid == pid) {
                job->over = true;
                job->status = status;
                job->end_ms = now_ms();
            }
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++)
        if (job->pid && job->over)
            finish_job(job);
}

static void obey(char *line)
{
    long id, limit;
    int used = 0;
    char *to = line;
    if (strcmp(line, "off") == 0) {
        sync();
        reboot(RB_POWER_OFF);
    }
    if (sscanf(line, "kill %ld", &id) == 1) {
        for (struct job *job = jobs; job < jobs + MAX_JOBS; job++)
            if (job->pid && job->id == id)
                kill(-job->pid, SIGKILL);
        return;
    }
    if (sscanf(line, "run %ld %ld %n", &id, &limit, &used) < 2 || !used)
        return;
    for (const char *from = line + used;; from++) {
        if (from[0] == '\\' && from[1]) {
            from++;
            *to++ = *from == 'n' ? '\n' : *from;
        } else if (!(*to++ = *from)) {
            break;
        }
    }
    run_command(id, limit, line);
}

/* Reads what the host wrote; lines may come in pieces. */
static void read_host(void)
{
    static char text[LINE_BYTES];
    static size_t have;
    ssize_t n = read(port, text + have, sizeof(text) - 1 - have);
    if (n <= 0) {
        pause_us(10000); /* the host's end is not open (yet) */
        return;
    }
    have += (size_t)n;
    for (char *end; (end = memchr(text, '\n', have));) {
        size_t used = (size_t)(end + 1 - text);
        char line[LINE_BYTES];
        memcpy(line, text, used);
        line[used - 1] = 0;
        have -= used;
        memmove(text, text + used, have);
        obey(line);
    }
    if (have == sizeof(text) - 1)
        have = 0;
}

static int wait_ms(void)
{
    int64_t least = 1000, now = now_ms();
    for (struct job *job = jobs; job < jobs + MAX_JOBS; job++)
        if (job->pid && job->limit_ms - now < least)
            least = job->limit_ms > now ? job->limit_ms - now : 0;
    return (int)least;
}

static void serve(int signals)
{
    struct pollfd fds[MAX_JOBS + 2];
    struct signalfd_siginfo info;
    fds[0] = (struct pollfd){.fd = port, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = signals, .events = POLLIN};
    for (int i = 0; i < MAX_JOBS; i++)
        fds[i + 2] = (struct pollfd){.fd = jobs[i].pid ? jobs[i].out : -1, .events = POLLIN};
    poll(fds, MAX_JOBS + 2, wait_ms());
    for (int i = 0; i < MAX_JOBS; i++) {
        if (fds[i + 2].revents)
            pass_output(&jobs[i]);
        if (jobs[i].pid && !jobs[i].over && now_ms() >= jobs[i].limit_ms)
            kill(-jobs[i].pid, SIGKILL);
    }
    if (fds[1].revents && read(signals, &info, sizeof(info)) > 0)
        reap();
    if (fds[0].revents)
        read_host();
}

int main(void)
{
    char failed[2048], line[4096];
    struct utsname kernel;
    sigset_t child;
    mount_all();
    load_modules(failed, sizeof(failed));
    (void)WITHIN_MS(10000, (port = open_port()) >= 0);
    if (port < 0) {
        fprintf(stderr, "agent: no virtio port within 10 s; modules that failed: %s\n", failed);
        reboot(RB_POWER_OFF);
    }
    setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
    setenv("HOME", "/tmp", 1);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    uname(&kernel);
    send_all(line, (size_t)snprintf(line, sizeof(line), "{\"hello\": \"%s\", \"failed\": [%s]}\n",
                                    kernel.release, failed));
    for (;;)
        serve(signals);
}
