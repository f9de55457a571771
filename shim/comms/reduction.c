#include "comms/reduction.h"

#include <pthread.h>
#include <stdlib.h>

struct used {
    struct used *next;
    struct r2_comm *comm;
    r2_nccl_comm handle;
    int op;
    int uses;                     /* recorded operations */
    int destroys;                 /* calls that wait for these */
    int (*fn)(int, r2_nccl_comm); /* ... of this function */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static struct used *all;

/* Where it hangs in the list; the list's end: nowhere. A handle may be given out again while an
 * operation on the one before is still recorded: the entry tells them apart. */
static struct used **find(const struct r2_comm *comm, r2_nccl_comm handle, int op)
{
    struct used **at = &all;

    while (*at && ((*at)->comm != comm || (*at)->handle != handle || (*at)->op != op))
        at = &(*at)->next;
    return at;
}

bool r2_reduction_use(struct r2_comm *comm, r2_nccl_comm handle, int op)
{
    struct used **at, *used;

    pthread_mutex_lock(&lock);
    at = find(comm, handle, op);
    if (!*at && (*at = malloc(sizeof(**at))) != NULL)
        **at = (struct used){.comm = comm, .handle = handle, .op = op};
    used = *at;
    if (used)
        used->uses++;
    pthread_mutex_unlock(&lock);
    return used != NULL;
}

bool r2_reduction_destroy(int (*fn)(int, r2_nccl_comm), int op, struct r2_comm *comm,
                          r2_nccl_comm handle)
{
    struct used *used;

    pthread_mutex_lock(&lock);
    used = *find(comm, handle, op);
    if (used) {
        used->fn = fn;
        used->destroys++;
    }
    pthread_mutex_unlock(&lock);
    return used != NULL;
}

int r2_reduction_release(struct r2_comm *comm, r2_nccl_comm handle, int op)
{
    int first = R2_NCCL_OK;
    struct used **at, *used;

    pthread_mutex_lock(&lock);
    at = find(comm, handle, op);
    used = *at;
    if (used && --used->uses == 0)
        *at = used->next;
    else
        used = NULL; /* others have it recorded still */
    pthread_mutex_unlock(&lock);
    /* With an aborted communicator NCCL has freed its reductions. */
    for (int i = 0; used && i < used->destroys && !(comm && r2_comms_gone(comm)); i++) {
        int result = used->fn(op, handle);

        first = first == R2_NCCL_OK ? result : first;
    }
    free(used);
    return first;
}
