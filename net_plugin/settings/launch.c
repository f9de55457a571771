#include "settings/launch.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "settings/file.h"
#include "settings/settings.h"

#define MOST 1024      /* ranks of a node; what says more is wrong */
#define ALL (1L << 30) /* ranks of a job */

/* How many on the node, and in the job. */
static const struct {
    const char *local, *all;
} launchers[] = {
    {"LOCAL_WORLD_SIZE", "WORLD_SIZE"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"},
    {"MPI_LOCALNRANKS", "PMI_SIZE"},
    {"MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"},
};

/* The number that *at begins with, and *at after it; -1: none, or above `most`. */
static long take(const char **at, long most)
{
    long n = 0;

    if (!isdigit((unsigned char)**at))
        return -1;
    for (; isdigit((unsigned char)**at); (*at)++) {
        n = n * 10 + (**at - '0');
        if (n > most)
            return -1;
    }
    return n;
}

/* A variable that is a number and nothing else; -1. */
static long number(const char *text, long most)
{
    long n = text ? take(&text, most) : -1;

    return n >= 0 && !*text ? n : -1;
}

/* Of node `node` in Slurm's list, "4(x2),3": two with four, then one with three; -1. */
static long of_node(const char *list, long node)
{
    long tasks, nodes;

    for (;; list++) {
        tasks = take(&list, MOST);
        nodes = 1;
        if (list[0] == '(' && list[1] == 'x') {
            list += 2;
            nodes = take(&list, ALL);
            if (nodes < 1 || *list++ != ')')
                return -1;
        }
        if (tasks < 0 || (*list && *list != ','))
            return -1;
        if (node < nodes)
            return tasks;
        node -= nodes;
        if (!*list)
            return -1;
    }
}

/* Outside a step the variables are those of the allocation, and say nothing of who runs. */
static long of_slurm(r2_env_fn env)
{
    const char *list = env("SLURM_STEP_TASKS_PER_NODE");
    long node = number(env("SLURM_NODEID"), ALL);

    if (!env("SLURM_STEP_ID"))
        return -1;
    if (list)
        return node < 0 ? -1 : of_node(list, node);
    return number(env("SLURM_NTASKS_PER_NODE"), MOST);
}

int r2_launch_local_ranks(r2_env_fn env)
{
    long n;

    for (size_t i = 0; i < sizeof(launchers) / sizeof(launchers[0]); i++) {
        long all = number(env(launchers[i].all), ALL);

        n = number(env(launchers[i].local), MOST);
        if (n > 0 && (all < 1 || n <= all))
            return (int)n;
    }
    n = of_slurm(env);
    return n > 0 ? (int)n : 0;
}

/* Of the first that is set; -1: none, or no number. */
static int first_of(const char *const *names)
{
    for (; *names; names++) {
        const char *text = getenv(*names);

        if (text && *text)
            return (int)number(text, ALL);
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

const char *r2_port_range_text(char *out, size_t cap)
{
    const struct r2_port_range *range = &r2_settings_get()->ports;
    int ranks = r2_launch_local_ranks(getenv), ports = range->high - range->low + 1;
    char here[32] = "";

    out[0] = '\0';
    if (!range->high)
        return out;
    if (ranks)
        snprintf(here, sizeof(here), " (%d here)", ranks);
    snprintf(out, cap,
             "R2CCL_PORT_RANGE=%u-%u has %d port%s. A node needs one for each of its processes%s, "
             "two with the shim",
             range->low, range->high, ports, ports == 1 ? "" : "s", here);
    return out;
}
