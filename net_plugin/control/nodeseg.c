#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "control/nodeseg.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/crc32c.h"

#define TOTAL ((off_t)(sizeof(struct r2_node_header) + R2_NODE_ROWS * sizeof(struct r2_node_row)))
#define ALIVE_AT 0
#define WRITE_AT 1
#define SETUP_TRIES 200 /* of 1 ms, while another process sets the object up */
#define FIRST_FD 3
#define STALE_S 600
#define SWEEP_MAX 256
#define KIND_MAX 5 /* enum r2_finding_kind */

struct r2_nodeseg {
    int fd;
    char name[96];
};

static uint64_t real_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int lock_at(int fd, short type, off_t at)
{
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};

    if (fcntl(fd, F_SETLK, &l) == 0)
        return 0;
    return errno == EACCES ? -EAGAIN : -errno;
}

static int lock_soon(int fd, short type, off_t at)
{
    struct timespec ms = {.tv_nsec = 1000000};
    int rc = -EAGAIN;

    for (int i = 0; i < SETUP_TRIES && rc == -EAGAIN; i++) {
        if (i)
            nanosleep(&ms, NULL);
        rc = lock_at(fd, type, at);
    }
    return rc;
}

static int read_at(int fd, void *buf, size_t len, off_t at)
{
    ssize_t n = pread(fd, buf, len, at);

    return n == (ssize_t)len ? 0 : n < 0 ? -errno : -ENODATA;
}

static int write_at(int fd, const void *buf, size_t len, off_t at)
{
    ssize_t n = pwrite(fd, buf, len, at);

    return n == (ssize_t)len ? 0 : n < 0 ? -errno : -EIO;
}

/* ---- rows */

static uint32_t row_crc(const struct r2_node_row *row)
{
    uint32_t crc = r2_crc32c(0, &row->state, sizeof(*row) - offsetof(struct r2_node_row, state));

    return crc ? crc : 1; /* a row of zeros is not one */
}

void r2_node_row_seal(struct r2_node_row *row)
{
    row->crc = row_crc(row);
}

bool r2_node_row_sound(const struct r2_node_row *row)
{
    return row->crc && row->crc == row_crc(row) && row->state <= R2_NODE_FAILED &&
           row->kind <= KIND_MAX && row->n_others <= R2_NODE_OTHERS &&
           (row->nic.family == 4 || row->nic.family == 6) &&
           memchr(row->name, 0, sizeof(row->name)) && memchr(row->why, 0, sizeof(row->why));
}

static off_t row_at(int i)
{
    return (off_t)(sizeof(struct r2_node_header) + (size_t)i * sizeof(struct r2_node_row));
}

static bool same_key(const struct r2_wire_addr *a, const struct r2_wire_addr *b)
{
    return a->family == b->family && memcmp(a->ip, b->ip, sizeof(a->ip)) == 0;
}

static bool read_row(const struct r2_nodeseg *s, int i, struct r2_node_row *row)
{
    return read_at(s->fd, row, sizeof(*row), row_at(i)) == 0 && r2_node_row_sound(row);
}

/* The row of the NIC, else an unsound one, else the oldest. */
static int slot_for(const struct r2_nodeseg *s, const struct r2_wire_addr *nic)
{
    uint64_t oldest = UINT64_MAX;
    int best = 0;

    for (int i = 0; i < R2_NODE_ROWS; i++) {
        struct r2_node_row row;
        bool sound = read_row(s, i, &row);

        if (sound && same_key(&row.nic, nic))
            return i;
        if ((sound ? row.epoch : 0) < oldest) {
            oldest = sound ? row.epoch : 0;
            best = i;
        }
    }
    return best;
}

int r2_nodeseg_write(struct r2_nodeseg *s, struct r2_node_row *row)
{
    uint64_t changes;
    int rc;

    rc = lock_at(s->fd, F_WRLCK, WRITE_AT);
    if (rc)
        return rc;
    rc = read_at(s->fd, &changes, sizeof(changes), offsetof(struct r2_node_header, changes));
    if (rc)
        goto out;
    changes++;
    row->epoch = changes;
    row->mono_ns = r2_now_ns();
    row->real_ns = real_ns();
    row->pid = (uint32_t)getpid();
    r2_node_row_seal(row);
    rc = write_at(s->fd, row, sizeof(*row), row_at(slot_for(s, &row->nic)));
    /* The count goes last: who sees it finds the row. */
    if (!rc)
        rc = write_at(s->fd, &changes, sizeof(changes), offsetof(struct r2_node_header, changes));
out:
    lock_at(s->fd, F_UNLCK, WRITE_AT);
    return rc;
}

bool r2_nodeseg_get(struct r2_nodeseg *s, const struct r2_wire_addr *nic, struct r2_node_row *out)
{
    for (int i = 0; i < R2_NODE_ROWS; i++) {
        if (read_row(s, i, out) && same_key(&out->nic, nic))
            return true;
    }
    return false;
}

/* ---- the object */

static void boot_id(char *out, size_t cap)
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, out, cap - 1);

    if (fd >= 0)
        close(fd);
    out[n > 0 ? n : 0] = '\0';
    out[strcspn(out, "\n")] = '\0';
}

static int fill_header(struct r2_node_header *h, const char *host)
{
    struct stat st;

    memset(h, 0, sizeof(*h));
    if (stat("/proc/self/ns/net", &st))
        return -errno; /* without it two nodes could be taken for one */
    h->magic = R2_NODE_MAGIC;
    h->version = R2_NODE_VERSION;
    h->header_size = sizeof(*h);
    h->row_size = sizeof(struct r2_node_row);
    h->rows = R2_NODE_ROWS;
    h->netns = (uint64_t)st.st_ino;
    h->uid = geteuid();
    h->created_real_ns = real_ns();
    snprintf(h->host, sizeof(h->host), "%s", host);
    boot_id(h->boot_id, sizeof(h->boot_id));
    return 0;
}

static bool same_object(const struct r2_node_header *a, const struct r2_node_header *b)
{
    return a->magic == b->magic && a->version == b->version && a->header_size == b->header_size &&
           a->row_size == b->row_size && a->rows == b->rows && a->netns == b->netns &&
           a->uid == b->uid && memcmp(a->host, b->host, sizeof(a->host)) == 0 &&
           memcmp(a->boot_id, b->boot_id, sizeof(a->boot_id)) == 0;
}

/* Under the write lock. An object that does not fit is made anew if nobody else holds it. */
static int set_up(int fd, const struct r2_node_header *want)
{
    struct r2_node_header have;
    struct stat st;
    int rc;

    if (fstat(fd, &st))
        return -errno;
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid())
        return -EPERM;
    if (st.st_size == TOTAL && read_at(fd, &have, sizeof(have), 0) == 0 && same_object(&have, want))
        return 0;
    rc = lock_at(fd, F_WRLCK, ALIVE_AT);
    if (rc)
        return rc == -EAGAIN ? -EPROTO : rc;
    if (ftruncate(fd, 0) || fchmod(fd, 0600))
        return -errno;
    rc = posix_fallocate(fd, 0, TOTAL);
    if (rc == EOPNOTSUPP || rc == EINVAL)
        rc = ftruncate(fd, TOTAL) ? errno : 0;
    return rc ? -rc : write_at(fd, want, sizeof(*want), 0);
}

/* Never stdin, stdout or stderr of a program that closed its own. */
static int open_high(const char *name)
{
    int fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600), moved;

    if (fd < 0 || fd >= FIRST_FD)
        return fd < 0 ? -errno : fd;
    moved = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD);
    if (moved < 0)
        moved = -errno;
    close(fd);
    return moved;
}

/* Objects of other nodes of this user (containers and labs come and go) that nobody holds and
 * nobody has written for a while. */
static void sweep(const char *own)
{
    DIR *dir = opendir("/dev/shm");
    time_t old = time(NULL) - STALE_S;
    char prefix[64];
    struct dirent *e;

    snprintf(prefix, sizeof(prefix), "r2ccl-node.%u.", (unsigned)geteuid());
    for (int n = 0; dir && n < SWEEP_MAX && (e = readdir(dir));) {
        struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 2};
        struct stat st;
        int fd;

        if (strncmp(e->d_name, prefix, strlen(prefix)) || !strcmp(e->d_name, own + 1))
            continue;
        n++;
        fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0)
            continue;
        if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_mtime < old &&
            fcntl(fd, F_GETLK, &l) == 0 && l.l_type == F_UNLCK)
            unlinkat(dirfd(dir), e->d_name, 0);
        close(fd);
    }
    if (dir)
        closedir(dir);
}

int r2_nodeseg_open(struct r2_nodeseg **out, const char *host)
{
    struct r2_nodeseg *s = calloc(1, sizeof(*s));
    struct r2_node_header want;
    int rc;

    *out = NULL;
    if (!s)
        return -ENOMEM;
    rc = fill_header(&want, host);
    if (rc)
        goto fail;
    snprintf(
        s->name, sizeof(s->name), "/r2ccl-node.%u.%llu.%08x", want.uid,
        (unsigned long long)want.netns,
        r2_crc32c(r2_crc32c(0, want.boot_id, sizeof(want.boot_id)), want.host, sizeof(want.host)));
    sweep(s->name);
    s->fd = rc = open_high(s->name);
    if (rc < 0)
        goto fail;
    rc = lock_soon(s->fd, F_WRLCK, WRITE_AT);
    if (!rc)
        rc = set_up(s->fd, &want);
    if (!rc)
        rc = lock_soon(s->fd, F_RDLCK, ALIVE_AT);
    if (rc) {
        close(s->fd);
        goto fail;
    }
    lock_at(s->fd, F_UNLCK, WRITE_AT);
    *out = s;
    return 0;
fail:
    free(s);
    return rc;
}

void r2_nodeseg_close(struct r2_nodeseg *s)
{
    if (!s)
        return;
    if (s->fd >= 0)
        close(s->fd);
    free(s);
}

void r2_nodeseg_child(struct r2_nodeseg *s)
{
    if (!s || s->fd < 0)
        return;
    close(s->fd);
    s->fd = -1;
}

const char *r2_nodeseg_name(const struct r2_nodeseg *s)
{
    return s->name;
}
