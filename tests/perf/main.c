#include <stdlib.h>
#include <string.h>

#include "perf.h"

static void allocate(struct perf *p)
{
    p->room = (p->o.max_bytes / p->data.es + (size_t)p->ranks.nranks) * p->data.es;
    p->send = perf_gpu_alloc(p->room);
    p->recv = perf_gpu_alloc(p->room);
    p->small = perf_gpu_alloc(4096);
    p->host = malloc(p->room + 1);
    if (!p->host)
        perf_die("no memory for %zu bytes", p->room);
    memset(p->host, 0, p->room);
    perf_gpu_write(p->send, p->host, p->room);
    perf_gpu_write(p->recv, p->host, p->room);
}

static void join(struct perf *p)
{
    ncclUniqueId id = {{0}};
    ncclResult_t rc = ncclSuccess;
    if (p->ranks.rank == 0)
        rc = p->nccl.GetUniqueId(&id);
    if (rc != ncclSuccess)
        perf_watch_failed(p, rc, "ncclGetUniqueId");
    perf_ranks_share(&p->ranks, &id, sizeof(id));
    rc = p->nccl.CommInitRank(&p->comm, p->ranks.nranks, id, p->ranks.rank);
    if (rc != ncclSuccess) {
        p->comm = NULL;
        perf_watch_failed(p, rc, "ncclCommInitRank");
    }
}

int main(int argc, char **argv)
{
    static struct perf p; /* the watching thread may look at it while main returns */
    perf_options_parse(&p.o, argc, argv);
    perf_ranks_read(&p.ranks);
    if (p.o.root >= p.ranks.nranks)
        perf_die("--root %d is not one of %d ranks", p.o.root, p.ranks.nranks);
    perf_lib_load(&p.nccl, p.o.nccl);
    perf_gpu_open(&p.nccl, p.ranks.local_rank);
    perf_data_init(&p.data, &p.o, p.ranks.nranks);
    allocate(&p);
    join(&p);
    perf_watch_start(&p);
    if (p.o.duration > 0)
        perf_run_loop(&p);
    else
        perf_run_table(&p);
    int code = perf_report_end(&p);
    perf_watch_begin("ncclCommDestroy", 0, 0);
    ncclResult_t rc = p.nccl.CommDestroy(p.comm);
    perf_watch_end();
    p.comm = NULL;
    if (rc != ncclSuccess)
        perf_watch_failed(&p, rc, "ncclCommDestroy");
    perf_gpu_free(p.send);
    perf_gpu_free(p.recv);
    perf_gpu_free(p.small);
    free(p.host);
    free(p.data.inputs);
    free(p.data.result);
    return code;
}
