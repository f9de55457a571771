/* Objects that processes left behind: kept for the journal's readers, but not for ever. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "control/impl.h"

#define DIRECTORY "/dev/shm"
#define KEEP 16                              /* the newest */
#define KEEP_YOUNG 64                        /* ... which have just ended, if there is room */
#define YOUNG_NS (UINT64_C(60) * 1000000000) /* heard of lately; without a header: being set up */
#define OLD_NS (UINT64_C(3600) * 1000000000) /* always removed */
#define MAX_LEFT 1024                        /* looked at in one sweep */

struct left {
    char name[R2_CONTROL_NAME];
    uint64_t age_ns;
};

/* Somebody has it open who said so, as its maker does to its end (control.c). *pid: who, 0 if that
 * cannot be known. */
static bool holder(int fd, int *pid)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};

    *pid = 0;
    if (fcntl(fd, F_GETLK, &lock))
        return true;
    if (lock.l_type != F_UNLCK && lock.l_pid > 0)
        *pid = lock.l_pid;
    return lock.l_type != F_UNLCK;
}

static bool is_held(int fd)
{
    int pid;

    return holder(fd, &pid);
}

/* How long ago anything was heard of the object at `fd`; 0 if it is alive or not ours to judge.
 * Other processes' objects only: closing a descriptor of the own one would drop the own lock. */
static uint64_t age_of(int fd, uint64_t now)
{
    struct r2_seg_header header = {0};
    struct stat st;
    uint64_t last;

    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_uid != geteuid())
        return 0;
    if (is_held(fd))
        return 0;
    last = (uint64_t)st.st_ctim.tv_sec * 1000000000u + (uint64_t)st.st_ctim.tv_nsec;
    if (pread(fd, &header, sizeof(header), 0) == (ssize_t)sizeof(header) &&
        header.magic == R2_SEG_MAGIC) {
        if (header.alive_real_ns > last)
            last = header.alive_real_ns;
        if (header.ended_real_ns > last)
            last = header.ended_real_ns;
    } else if (last + YOUNG_NS > now) {
        return 0;
    }
    return last < now ? now - last : 0;
}

static int open_left(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
}

static uint64_t age_of_name(int dir, const char *name, uint64_t now)
{
    int fd = open_left(dir, name);
    uint64_t age;

    if (fd < 0)
        return 0;
    age = age_of(fd, now);
    close(fd);
    return age;
}

static int by_age(const void *a, const void *b)
{
    const struct left *x = a, *y = b;

    return x->age_ns < y->age_ns ? -1 : x->age_ns > y->age_ns;
}

static bool is_own(const char *name, const char *own)
{
    size_t n = strlen(own);

    return !strncmp(name, own, n) && (name[n] == '\0' || name[n] == '.');
}

/* Half of the shared memory is free: what lies there keeps nobody from making more. */
static bool has_room(int dir)
{
    struct statvfs fs;

    return !fstatvfs(dir, &fs) && fs.f_bavail >= fs.f_blocks / 2;
}

static int collect(DIR *dir, const char *prefix, const char *own, uint64_t now, struct left *left)
{
    struct dirent *entry;
    int n = 0;

    while (n < MAX_LEFT && (entry = readdir(dir)) != NULL) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) || is_own(entry->d_name, own) ||
            strlen(entry->d_name) >= sizeof(left[n].name))
            continue;
        left[n].age_ns = age_of_name(dirfd(dir), entry->d_name, now);
        if (left[n].age_ns == 0)
            continue;
        memcpy(left[n].name, entry->d_name, strlen(entry->d_name) + 1);
        n++;
    }
    return n;
}

int r2_control_sweep(const char *prefix, const char *own, uint64_t now)
{
    DIR *dir = opendir(DIRECTORY);
    struct left *left = NULL;
    int n, young, removed = 0;

    if (!dir)
        return 0;
    left = calloc(MAX_LEFT, sizeof(*left));
    if (!left)
        goto out;
    n = collect(dir, prefix, own, now, left);
    qsort(left, (size_t)n, sizeof(*left), by_age);
    young = has_room(dirfd(dir)) ? KEEP_YOUNG : KEEP;
    for (int i = 0; i < n; i++) {
        if ((i < KEEP && left[i].age_ns < OLD_NS) || (i < young && left[i].age_ns < YOUNG_NS))
            continue;
        if (!unlinkat(dirfd(dir), left[i].name, 0))
            removed++;
    }
out:
    free(left);
    closedir(dir);
    return removed;
}

int r2_control_count_held(const char *prefix, const char *own, r2_control_holder_fn each, void *arg)
{
    DIR *dir = opendir(DIRECTORY);
    struct dirent *entry;
    struct stat st;
    int fd, pid, n = 0;

    if (!dir)
        return 0;
    while ((entry = readdir(dir)) != NULL) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) || is_own(entry->d_name, own) ||
            fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode) ||
            st.st_uid != geteuid()) /* other users' may say what they like */
            continue;
        fd = open_left(dirfd(dir), entry->d_name);
        if (fd < 0)
            continue;
        if (holder(fd, &pid)) {
            n++;
            if (each)
                each(arg, pid);
        }
        close(fd);
    }
    closedir(dir);
    return n;
}
