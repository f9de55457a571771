#define _GNU_SOURCE
#include "util.h"
#include "../pause.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_once_t log_once = PTHREAD_ONCE_INIT;
static int log_level = 0;
static FILE *log_file;
static char log_host[64];
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;
static char error_shared[512] = "no error; this library is a stand-in for NCCL on host memory";
static _Thread_local char error_text[512];

uint64_t hn_util_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t hn_util_random(void)
{
    uint64_t value = 0;
    if (getrandom(&value, sizeof(value), 0) != (ssize_t)sizeof(value))
        value = hn_util_now() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid();
    return value;
}

uint64_t hn_util_hash(const void *data, size_t bytes, uint64_t seed)
{
    const unsigned char *p = data;
    uint64_t h = 0xcbf29ce484222325u ^ seed;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

long hn_util_env(const char *name, long def, long lo, long hi)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return def;
    char *end;
    errno = 0;
    long value = strtol(text, &end, 0);
    if (errno || *end || value < lo || value > hi) {
        HN_WARN("%s=%s ignored: a number from %ld to %ld is needed; using %ld", name, text, lo, hi,
                def);
        return def;
    }
    return value;
}

enum hn_harsh hn_util_harsh(void)
{
    static atomic_int cached = -1;
    int level = atomic_load_explicit(&cached, memory_order_relaxed);
    if (level >= 0)
        return (enum hn_harsh)level;
    const char *text = getenv("HOSTNCCL_HARSH");
    level = HN_HARSH_SPARSE;
    if (text && !strcasecmp(text, "off"))
        level = HN_HARSH_OFF;
    else if (text && !strcasecmp(text, "full"))
        level = HN_HARSH_FULL;
    else if (text && *text && strcasecmp(text, "sparse"))
        HN_WARN("HOSTNCCL_HARSH=%s ignored: off, sparse or full is needed", text);
    atomic_store_explicit(&cached, level, memory_order_relaxed);
    return (enum hn_harsh)level;
}

/* NCCL_DEBUG_FILE knows %h (host) and %p (process). */
static FILE *open_log(const char *pattern)
{
    char path[512];
    size_t at = 0;
    for (const char *p = pattern; *p && at + 80 < sizeof(path); p++) {
        if (p[0] == '%' && p[1] == 'h')
            at += (size_t)snprintf(path + at, sizeof(path) - at, "%s", log_host);
        else if (p[0] == '%' && p[1] == 'p')
            at += (size_t)snprintf(path + at, sizeof(path) - at, "%d", (int)getpid());
        else {
            path[at++] = *p;
            continue;
        }
        p++;
    }
    path[at] = '\0';
    if (!strcasecmp(path, "stdout"))
        return stdout;
    FILE *file = strcasecmp(path, "stderr") ? fopen(path, "w") : stderr;
    return file ? file : stderr;
}

static void log_setup(void)
{
    static const char *const names[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
    const char *level = getenv("NCCL_DEBUG");
    for (int i = 0; level && i < 6; i++)
        if (!strcasecmp(level, names[i]))
            log_level = i;
    gethostname(log_host, sizeof(log_host) - 1);
    const char *file = getenv("NCCL_DEBUG_FILE");
    log_file = file && *file ? open_log(file) : stderr;
}

static void log_line(int level, const char *file, int line, const char *text)
{
    char place[128] = "";
    if (level == 2 && file) {
        const char *base = strrchr(file, '/');
        snprintf(place, sizeof(place), " [%s:%d]", base ? base + 1 : file, line);
    }
    fprintf(log_file, "%s:%d:%d NCCL %s (stand-in)%s %s\n", log_host, (int)getpid(),
            (int)syscall(SYS_gettid),
            level <= 2   ? "WARN"
            : level == 3 ? "INFO"
                         : "TRACE",
            place, text);
    fflush(log_file);
}

void hn_util_logger(int level, unsigned long flags, const char *file, int line, const char *fmt,
                    ...)
{
    (void)flags;
    pthread_once(&log_once, log_setup);
    if (level > log_level)
        return;
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    log_line(level, file, line, text);
}

ncclResult_t hn_util_fail(ncclResult_t result, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(error_text, sizeof(error_text), fmt, args);
    va_end(args);
    pthread_mutex_lock(&error_lock);
    memcpy(error_shared, error_text, sizeof(error_shared));
    pthread_mutex_unlock(&error_lock);
    HN_WARN("%s (%s)", error_text, ncclGetErrorString(result));
    return result;
}

const char *hn_util_last_error(void)
{
    if (!error_text[0]) {
        pthread_mutex_lock(&error_lock);
        memcpy(error_text, error_shared, sizeof(error_text));
        pthread_mutex_unlock(&error_lock);
        static _Thread_local char copy[512];
        memcpy(copy, error_text, sizeof(copy));
        error_text[0] = '\0';
        return copy;
    }
    return error_text;
}

#define NAP_US 200

void hn_util_idle(struct hn_idle *idle, bool progress)
{
    static atomic_long spin = -1, longest = NAP_US;
    if (progress) {
        idle->since = 0;
        return;
    }
    long us = atomic_load_explicit(&spin, memory_order_relaxed);
    if (us < 0) {
        us = hn_util_env("HOSTNCCL_SPIN_US", 50, 0, 1000000);
        atomic_store_explicit(&longest, hn_util_env("HOSTNCCL_NAP_US", NAP_US, 20, 100000),
                              memory_order_relaxed);
        atomic_store_explicit(&spin, us, memory_order_relaxed);
    }
    uint64_t now = hn_util_now();
    if (!idle->since)
        idle->since = now;
    uint64_t idle_ns = now - idle->since;
    if (idle_ns < (uint64_t)us * 1000) {
        sched_yield();
        return;
    }
    long most = atomic_load_explicit(&longest, memory_order_relaxed);
    pause_us(most <= NAP_US && idle_ns < 5000000 ? 20 : (unsigned long)most);
}
