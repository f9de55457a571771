/* Descriptors made by the engine, so that a forked child can close its copies. */
#include <stdatomic.h>
#include <unistd.h>

#include "io/io.h"

#define MAX_TRACKED 65536

static atomic_bool tracked[MAX_TRACKED];

void r2_io_fd_track(int fd)
{
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
