#include "settings/launch.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>

#include "settings/file.h"

/* Of the first that is set; -1: none, or no number. */
static int first_of(const char *const *names)
{
    for (; *names; names++) {
        const char *text = getenv(*names);
        char *end;
        long value;

        if (!text || !*text)
            continue;
        errno = 0;
        value = strtol(text, &end, 10);
        return errno || end == text || *end || value < 0 || value > INT_MAX ? -1 : (int)value;
    }
    return -1;
}

int r2_launch_rank(void)
{
    static const char *const names[] = {"RANK",     "OMPI_COMM_WORLD_RANK", "PMIX_RANK",
                                        "PMI_RANK", "SLURM_PROCID",         NULL};

    return first_of(names);
}

int r2_launch_local_rank(void)
{
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID", NULL};

    return first_of(names);
}

bool r2_launch_speaks(void)
{
    bool by_node = r2_file_lines()[0] || r2_file_complaints()[0];

    return (by_node ? r2_launch_local_rank() : r2_launch_rank()) <= 0;
}
