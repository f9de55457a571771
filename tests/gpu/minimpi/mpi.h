/*
 * minimpi: the part of MPI that nccl-tests calls, over plain TCP.
 *
 * It exists so that nccl-tests runs as separate processes in lab nodes without an MPI installation
 * and without mpirun: every rank is started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
 * torchrun sets them. Rank 0 listens on MASTER_ADDR:MASTER_PORT, the others connect to it, and
 * every collective goes through rank 0. It is slow and small on purpose: nothing here is timed.
 *
 * Limits, each with a clear message when met: one communicator (MPI_Comm_split must put all ranks
 * into one group and keep their order), contiguous basic types, one thread at a time.
 * Every function returns MPI_SUCCESS or ends the process with exit code 1.
 */
#ifndef R2_MINIMPI_MPI_H
#define R2_MINIMPI_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Op;

#define MPI_SUCCESS 0
#define MPI_COMM_NULL ((MPI_Comm)0)
#define MPI_COMM_WORLD ((MPI_Comm)1)
#define MPI_IN_PLACE ((void *)1)

#define MPI_DATATYPE_NULL ((MPI_Datatype)0)
#define MPI_BYTE ((MPI_Datatype)1)
#define MPI_CHAR ((MPI_Datatype)2)
#define MPI_INT ((MPI_Datatype)3)
#define MPI_LONG ((MPI_Datatype)4)
#define MPI_LONG_LONG ((MPI_Datatype)5)
#define MPI_INT64_T ((MPI_Datatype)6)
#define MPI_DOUBLE ((MPI_Datatype)7)

#define MPI_OP_NULL ((MPI_Op)0)
#define MPI_SUM ((MPI_Op)1)
#define MPI_MIN ((MPI_Op)2)
#define MPI_MAX ((MPI_Op)3)

int MPI_Init(int *argc, char ***argv);
int MPI_Finalize(void);
int MPI_Abort(MPI_Comm comm, int code);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm *out);
int MPI_Comm_free(MPI_Comm *comm);
int MPI_Barrier(MPI_Comm comm);
int MPI_Bcast(void *buf, int count, MPI_Datatype type, int root, MPI_Comm comm);
/* The receive count and type must equal the send ones (always so in nccl-tests). */
int MPI_Gather(const void *send, int scount, MPI_Datatype stype, void *recv, int rcount,
               MPI_Datatype rtype, int root, MPI_Comm comm);
int MPI_Allgather(const void *send, int scount, MPI_Datatype stype, void *recv, int rcount,
                  MPI_Datatype rtype, MPI_Comm comm);
int MPI_Allreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm);

#ifdef __cplusplus
}
#endif
#endif
