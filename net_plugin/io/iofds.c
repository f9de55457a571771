/* Descriptors made by the engine, so that a forked child can close its copies; and how many more
 * the process may have. */
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io/io.h"

#define MAX_TRACKED 65536
#define FREE_EIGHTHS                                                                               \
    3 /* of the limit, for whoever comes first; the rest is for the other peers                    \
       */

static atomic_bool tracked[MAX_TRACKED];

static atomic_int newest, limit; /* limit 0: none is known */

/* A number is the lowest that is free, so it tells how many descriptors the process has. */
bool r2_io_fds_short(void)
{
    int most = atomic_load_explicit(&limit, memory_order_relaxed);

    return most && atomic_load_explicit(&newest, memory_order_relaxed) >= most / 8 * FREE_EIGHTHS;
}

int r2_io_fds_limit(void)
{
    return atomic_load_explicit(&limit, memory_order_relaxed);
}

void r2_io_fds_raise(void)
{
    struct rlimit now, more;

    if (getrlimit(RLIMIT_NOFILE, &now))
        return;
    more = now;
    more.rlim_cur = now.rlim_max < MAX_TRACKED ? now.rlim_max : MAX_TRACKED;
    if (more.rlim_cur > now.rlim_cur && setrlimit(RLIMIT_NOFILE, &more) == 0)
        now = more;
    atomic_store(&limit, now.rlim_cur < MAX_TRACKED ? (int)now.rlim_cur : MAX_TRACKED);
}

void r2_io_fd_track(int fd)
{
    atomic_store_explicit(&newest, fd, memory_order_relaxed);
    if (fd >= 0 && fd < MAX_TRACKED)
        atomic_store_explicit(&tracked[fd], true, memory_order_relaxed);
}

void r2_io_fd_untrack(int fd)
{
    if (fd >= 0 && fd < MAX_TRACKED)
        atomic_store_explicit(&tracked[fd], false, memory_order_relaxed);
}

void r2_io_child(void)
{
    for (int fd = 0; fd < MAX_TRACKED; fd++) {
        if (atomic_load_explicit(&tracked[fd], memory_order_relaxed)) {
            close(fd);
            r2_io_fd_untrack(fd);
        }
    }
}
