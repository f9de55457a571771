/* The process row: who this is, from the caller, from /proc and from the launcher's variables. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/impl.h"
#include "settings/launch.h"

static const char *const ranks_variables[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                              "SLURM_NTASKS", NULL};
static const char *const job_variables[] = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID",
                                            "TORCHELASTIC_RUN_ID", NULL};

static const char *first_set(const char *const *names)
{
    for (; *names; names++) {
        const char *value = getenv(*names);

        if (value && *value)
            return value;
    }
    return NULL;
}

static int number_or(const char *text, int otherwise)
{
    char *end;
    long value;

    if (!text)
        return otherwise;
    errno = 0;
    value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < 0 || value > INT_MAX)
        return otherwise;
    return (int)value;
}

static ssize_t read_file(const char *path, char *buf, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0)
        return -errno;
    n = read(fd, buf, size - 1);
    close(fd);
    buf[n < 0 ? 0 : n] = '\0';
    return n;
}

uint64_t r2_control_start_ticks(void)
{
    char buf[1024], *at;

    if (read_file("/proc/self/stat", buf, sizeof(buf)) <= 0)
        return 0;
    at = strrchr(buf, ')'); /* the program's name may hold anything */
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

uint64_t r2_control_pidns(void)
{
    struct stat st;

    return stat("/proc/self/ns/pid", &st) ? 0 : (uint64_t)st.st_ino;
}

static void set_command(struct r2_seg_process *row)
{
    char buf[sizeof(row->command)];
    ssize_t n = read_file("/proc/self/cmdline", buf, sizeof(buf));

    for (ssize_t i = 0; i < n - 1; i++)
        if (buf[i] == '\0')
            buf[i] = ' ';
    r2_row_text(row->command, sizeof(row->command), n > 0 ? buf : NULL);
}

static void set_host(struct r2_seg_process *row, const char *host)
{
    char buf[sizeof(row->host)];

    if (!host || !*host) {
        if (gethostname(buf, sizeof(buf)))
            buf[0] = '\0';
        buf[sizeof(buf) - 1] = '\0';
        host = buf;
    }
    r2_row_text(row->host, sizeof(row->host), host);
}

void r2_control_describe(struct r2_control *ctl, const struct r2_control_info *info)
{
    struct r2_seg_process *row = &ctl->seg->process;
    const char *job = info->job && *info->job ? info->job : first_set(job_variables);
    int rank = info->rank >= 0 ? info->rank : r2_launch_rank();
    int ranks = info->ranks > 0 ? info->ranks : number_or(first_set(ranks_variables), 0);

    r2_row_begin(&row->seq);
    r2_row_u32((uint32_t *)&row->rank, (uint32_t)rank);
    r2_row_u32(&row->ranks, (uint32_t)ranks);
    r2_row_u32(&row->pid, (uint32_t)getpid());
    r2_row_u32(&row->uid, (uint32_t)geteuid());
    r2_row_u64(&row->pidns, r2_control_pidns());
    r2_row_u64(&row->start_ticks, r2_control_start_ticks());
    r2_row_u64(&row->comm, info->comm);
    r2_row_u32(&row->nccl_version, info->nccl_version);
    r2_row_u32(&row->net_api, info->net_api);
    r2_row_u32(&row->verify, info->verify ? 1 : 0);
    r2_row_u32(&row->plan, (uint32_t)info->plan);
    r2_row_bytes(row->process_id, info->process_id, sizeof(row->process_id));
    r2_row_text(row->job, sizeof(row->job), job);
    r2_row_text(row->mode, sizeof(row->mode), info->mode);
    r2_row_text(row->plugin_version, sizeof(row->plugin_version),
                info->plugin_version ? info->plugin_version : R2_VERSION);
    set_host(row, info->host);
    set_command(row);
    r2_row_end(&row->seq);
}

void r2_control_set_warning(struct r2_control *ctl, const char *text)
{
    struct r2_seg_process *row = &ctl->seg->process;

    r2_row_begin(&row->seq);
    r2_row_text(row->warning, sizeof(row->warning), text);
    r2_row_end(&row->seq);
}

void r2_control_set_missing(struct r2_control *ctl, uint64_t bits)
{
    __atomic_fetch_or(&ctl->seg->gauges.missing, bits, __ATOMIC_RELAXED);
}
