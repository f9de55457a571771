/* The object: opening, closing, the child after fork. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* fallocate */
#endif
#include "control/control.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/impl.h"
#include "util/exit.h"

#define MAX_OPENS 4096
#define FIRST_FD 3 /* never stdin, stdout or stderr of a program that closed its own */

/* For when there is no memory at all: untouched, it costs none. */
static struct r2_control reserve;
static struct r2_segment reserve_segment;

/* The newest shared object, so that exit() without close still counts as an end in order. */
static struct r2_control *last_opened;
static pid_t opener;

static void set_table(struct r2_segment *seg, enum r2_seg_kind kind, size_t offset, size_t stride,
                      uint32_t rows)
{
    *r2_control_table(seg, kind) = (struct r2_seg_table){
        .kind = kind,
        .offset = (uint32_t)offset,
        .stride = (uint32_t)stride,
        .rows = rows,
    };
}

#define TABLE(seg, kind, member, rows)                                                             \
    set_table(seg, kind, offsetof(struct r2_segment, member), sizeof((seg)->member) / (rows), rows)

static void write_header(struct r2_segment *seg)
{
    struct r2_seg_header *header = &seg->header;

    header->version = R2_SEG_VERSION;
    header->minor = R2_SEG_MINOR;
    header->total_size = sizeof(*seg);
    header->header_size = sizeof(*header);
    header->table_count = R2_SEG_KIND_TIMINGS;
    TABLE(seg, R2_SEG_KIND_PROCESS, process, 1);
    TABLE(seg, R2_SEG_KIND_COUNTERS, counters, 1);
    TABLE(seg, R2_SEG_KIND_GAUGES, gauges, 1);
    TABLE(seg, R2_SEG_KIND_NICS, nics, R2_SEG_MAX_NICS);
    TABLE(seg, R2_SEG_KIND_PEERS, peers, R2_SEG_MAX_PEERS);
    TABLE(seg, R2_SEG_KIND_PATHS, paths, R2_SEG_MAX_PATHS);
    TABLE(seg, R2_SEG_KIND_COMMANDS, commands, R2_SEG_MAX_COMMANDS);
    TABLE(seg, R2_SEG_KIND_EVENTS, events, R2_SEG_MAX_EVENTS);
    TABLE(seg, R2_SEG_KIND_COMMS, comms, R2_SEG_MAX_COMMS);
    TABLE(seg, R2_SEG_KIND_TIMINGS, timings, R2_SEG_MAX_TIMINGS);
    header->created_real_ns = r2_control_clock(CLOCK_REALTIME);
    header->alive_real_ns = header->created_real_ns;
    header->alive_mono_ns = r2_control_clock(CLOCK_MONOTONIC);
}

/* A new object under the first free name: base, base.1, ... Returns the descriptor or -errno. */
static int create_object(char *name, size_t size)
{
    size_t base = strlen(name);

    for (int i = 0; i < MAX_OPENS; i++) {
        int fd, moved;

        if (i > 0)
            snprintf(name + base, size - base, ".%d", i);
        fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0 && errno == EEXIST)
            continue;
        if (fd < 0 || fd >= FIRST_FD)
            return fd < 0 ? -errno : fd;
        moved = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD);
        if (moved < 0)
            moved = -errno;
        close(fd);
        if (moved < 0)
            shm_unlink(name);
        return moved;
    }
    return -EEXIST;
}

static int set_lock(int fd)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};

    return fcntl(fd, F_SETLK, &lock) ? -errno : 0;
}

/* Sets mode and group; a group that does not exist or is not ours leaves the object private. */
static int set_access(int fd, const char *group)
{
    char buf[4096], *end = NULL;
    struct group entry, *found = NULL;
    gid_t gid;

    if (fchmod(fd, 0600))
        return -errno;
    if (!group || !*group)
        return 0;
    gid = (gid_t)strtoul(group, &end, 10);
    if (*end) {
        if (getgrnam_r(group, &entry, buf, sizeof(buf), &found) || !found)
            return -ENOENT;
        gid = entry.gr_gid;
    }
    if (fchown(fd, (uid_t)-1, gid) || fchmod(fd, 0640))
        return -errno;
    return 0;
}

/* Memory is taken now (posix_fallocate): a full /dev/shm is an error here, not a silence later. */
static int make_object(struct r2_control *ctl, const char *base)
{
    int fd, rc;

    snprintf(ctl->name, sizeof(ctl->name), "/%s", base);
    fd = create_object(ctl->name, sizeof(ctl->name));
    if (fd < 0) {
        ctl->name[0] = '\0';
        return fd;
    }
    rc = set_lock(fd);
    if (rc == 0)
        rc = -posix_fallocate(fd, 0, sizeof(struct r2_segment));
    if (rc == -EOPNOTSUPP || rc == -EINVAL)
        rc = ftruncate(fd, sizeof(struct r2_segment)) ? -errno : 0;
    ctl->shadow = rc ? NULL : calloc(1, sizeof(*ctl->shadow));
    if (!ctl->shadow) {
        shm_unlink(ctl->name);
        ctl->name[0] = '\0';
        close(fd);
        return rc ? rc : -ENOMEM;
    }
    ctl->fd = fd;
    return 0;
}

static int map_private(struct r2_control *ctl)
{
    void *seg = mmap(NULL, sizeof(struct r2_segment), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (seg == MAP_FAILED)
        return -errno;
    ctl->seg = seg;
    return 0;
}

static struct r2_control *use_reserve(void)
{
    memset(&reserve, 0, sizeof(reserve));
    reserve.fd = -1;
    reserve.in_reserve = true;
    reserve.seg = &reserve_segment;
    return &reserve;
}

/* What the names of this process's objects begin with. */
static void base_name(char out[R2_CONTROL_BASE])
{
    snprintf(out, R2_CONTROL_BASE, R2_CONTROL_PREFIX "%u.%llu.%d.%llu", (unsigned)geteuid(),
             (unsigned long long)r2_control_pidns(), (int)getpid(),
             (unsigned long long)r2_control_start_ticks());
}

static int open_shared(struct r2_control *ctl, const char *shm_group, char *warning, size_t size)
{
    int rc;

    base_name(ctl->base);
    r2_control_sweep(R2_CONTROL_PREFIX, ctl->base, r2_control_clock(CLOCK_REALTIME));
    rc = make_object(ctl, ctl->base);
    if (rc)
        return rc;
    rc = set_access(ctl->fd, shm_group);
    if (rc)
        snprintf(warning, size, "group '%s' cannot read this: %s", shm_group ? shm_group : "",
                 strerror(-rc));
    return 0;
}

int r2_control_open(struct r2_control **out, const struct r2_control_info *info)
{
    struct r2_control *ctl = calloc(1, sizeof(*ctl));
    char warning[sizeof(ctl->seg->process.warning)] = {0};

    int rc = -ENOMEM;

    if (ctl)
        ctl->fd = -1;
    if (!ctl || map_private(ctl)) {
        free(ctl);
        ctl = use_reserve();
    } else {
        rc = info->hidden ? 0 : open_shared(ctl, info->shm_group, warning, sizeof(warning));
    }
    write_header(ctl->seg);
    r2_control_describe(ctl, info);
    if (warning[0])
        r2_control_set_warning(ctl, warning);
    r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_STARTED,
                                                       .cause = ctl->seg->process.command});
    ctl->seg->header.magic = R2_SEG_MAGIC;
    r2_control_publish(ctl, true); /* the magic word last */
    if (ctl->fd >= 0) {
        opener = getpid();
        __atomic_store_n(&last_opened, ctl, __ATOMIC_RELEASE);
    }
    *out = ctl;
    return rc;
}

/* Gives back the object's memory for rows that were never used: what stays for readers is small. */
static void punch(struct r2_control *ctl, enum r2_seg_kind kind)
{
    const struct r2_seg_table *table = r2_control_table(ctl->seg, kind);
    uint32_t high = __atomic_load_n(&table->high, __ATOMIC_RELAXED);
    off_t page = sysconf(_SC_PAGESIZE);
    off_t from = (off_t)table->offset + (off_t)high * table->stride;
    off_t to = (off_t)table->offset + (off_t)table->rows * table->stride;

    from = (from + page - 1) / page * page;
    to = to / page * page;
    /* Only memory is at stake: a system that cannot do it keeps the pages. */
    if (ctl->fd >= 0 && high <= table->rows && from < to)
        (void)!fallocate(ctl->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from);
}

static void mark_ended(struct r2_control *ctl)
{
    punch(ctl, R2_SEG_KIND_PEERS);
    punch(ctl, R2_SEG_KIND_PATHS);
    punch(ctl, R2_SEG_KIND_EVENTS);
    punch(ctl, R2_SEG_KIND_TIMINGS);
    r2_control_journal(ctl, &(struct r2_control_event){.event = R2_EV_ENDED});
    r2_gauge(&ctl->seg->header.ended_real_ns, r2_control_clock(CLOCK_REALTIME));
    r2_control_publish(ctl, true);
}

/* Other threads may still run: nothing is unmapped here. A forked child has another pid. */
__attribute__((destructor(R2_EXIT_CONTROL))) static void at_exit(void)
{
    struct r2_control *ctl = __atomic_load_n(&last_opened, __ATOMIC_ACQUIRE);

    if (ctl && opener == getpid())
        mark_ended(ctl);
}

void r2_control_close(struct r2_control *ctl)
{
    struct r2_control *self = ctl;

    if (!ctl)
        return;
    __atomic_compare_exchange_n(&last_opened, &self, NULL, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_RELAXED);
    mark_ended(ctl);
    if (ctl->in_reserve)
        return;
    munmap(ctl->seg, sizeof(*ctl->seg));
    if (ctl->fd >= 0)
        close(ctl->fd);
    free(ctl->shadow);
    free(ctl);
}

void r2_control_child(struct r2_control *ctl)
{
    if (!ctl || ctl->fd < 0)
        return;
    /* Fresh memory in place: pointers into it stay valid, and no row is left begun by a thread that
     * does not exist here. */
    (void)!mmap(ctl->seg, sizeof(*ctl->seg), PROT_READ | PROT_WRITE,
                MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    close(ctl->fd);
    ctl->fd = -1;
    ctl->name[0] = '\0';
    __atomic_store_n(&last_opened, NULL, __ATOMIC_RELEASE);
}

int r2_control_neighbours(const struct r2_control *ctl, r2_control_holder_fn each, void *arg)
{
    return ctl->fd < 0 ? 0 : r2_control_count_held(R2_CONTROL_PREFIX, ctl->base, each, arg);
}

struct r2_segment *r2ccl_control_segment(void)
{
    struct r2_control *ctl = __atomic_load_n(&last_opened, __ATOMIC_ACQUIRE);

    return ctl ? ctl->seg : NULL;
}

const char *r2_control_name(const struct r2_control *ctl)
{
    return ctl->name;
}

struct r2_segment *r2_control_segment(struct r2_control *ctl)
{
    return ctl->seg;
}

void r2_count_time(struct r2_seg_times *times, uint64_t ns)
{
    static const uint64_t within[R2_SEG_TIMES - 1] = {
        R2_SEG_WITHIN_1MS,   R2_SEG_WITHIN_3MS,   R2_SEG_WITHIN_10MS, R2_SEG_WITHIN_30MS,
        R2_SEG_WITHIN_100MS, R2_SEG_WITHIN_300MS, R2_SEG_WITHIN_1S,   R2_SEG_WITHIN_3S,
        R2_SEG_WITHIN_10S,   R2_SEG_WITHIN_30S};
    uint64_t us = ns / 1000;
    int at = 0;

    while (at < R2_SEG_TIMES - 1 && us > within[at])
        at++;
    r2_count(&times->us, us);
    r2_count(&times->count[at], 1);
}

struct r2_seg_counters *r2_control_counters(struct r2_control *ctl)
{
    return &ctl->seg->counters;
}

struct r2_seg_gauges *r2_control_gauges(struct r2_control *ctl)
{
    return &ctl->seg->gauges;
}
