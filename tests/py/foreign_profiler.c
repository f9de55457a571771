/* A user's own profiler for NCCL: writes a line into FOREIGN_PROFILER_LOG for each communicator and
 * each collective. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_abi/nccl_profiler_abi.h"

static void line(const char *text)
{
    const char *name = getenv("FOREIGN_PROFILER_LOG");
    FILE *f = name ? fopen(name, "a") : NULL;

    if (f) {
        fprintf(f, "%s\n", text);
        fclose(f);
    }
}

static int init(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int nodes,
                int ranks, int rank, r2_nccl_logger log)
{
    (void)comm_id, (void)comm_name, (void)nodes, (void)ranks, (void)rank, (void)log;
    *ctx = &mask;
    *mask = R2_PROF_COLL;
    line("init");
    return 0;
}

static int start_event(void *ctx, void **event, struct r2_prof_event *what)
{
    (void)ctx;
    *event = NULL;
    if (what->type == R2_PROF_COLL)
        line(what->coll.func);
    return 0;
}

static int stop_event(void *event)
{
    (void)event;
    return 0;
}

static int record_state(void *event, int state, void *args)
{
    (void)event, (void)state, (void)args;
    return 0;
}

static int finalize(void *ctx)
{
    (void)ctx;
    return 0;
}

__attribute__((visibility("default"))) const struct r2_ncclprofiler_v5 ncclProfiler_v5 = {
    "foreign", init, start_event, stop_event, record_state, finalize,
};
