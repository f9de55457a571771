/* A small job of two ranks in one process, for programs that reach NCCL in different ways. */
#ifndef JOB_H
#define JOB_H

/* argv[1]: what to do (job.c). Returns an exit code; prints "ok" when all results were right. */
__attribute__((visibility("default"))) int r2_job(int argc, char **argv);

#endif
