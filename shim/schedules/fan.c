/* What the application does to its communicator, done to those beside it. */
#define _GNU_SOURCE
#include "real/nest.h"
#include "schedules/second_inside.h"

bool r2_seconds_any(struct r2_seconds *s)
{
    bool any;

    pthread_mutex_lock(&s->lock);
    any = s->all != NULL;
    pthread_mutex_unlock(&s->lock);
    return any;
}

/* NCCL meets all ranks of a communicator to suspend or resume it, so each of them has to come to
 * the same ones, in the same order: those that a plan in force has named, by their keys. One that
 * is being made, or was made here and failed elsewhere, is not among them. */
static bool together(enum r2_api function)
{
    return function == R2_API_ncclCommSuspend || function == R2_API_ncclCommResume;
}

/* Behind those of the same key. */
static void put_by_key(struct r2_second **out, int n, struct r2_second *c)
{
    for (; n > 0 && out[n - 1]->key > c->key; n--)
        out[n] = out[n - 1];
    out[n] = c;
}

/* The made ones, held, so that they can be looked at without the list's lock. */
static int hold(struct r2_seconds *s, struct r2_second **out, int room, bool agreed)
{
    int n = 0;

    pthread_mutex_lock(&s->lock);
    for (struct r2_second *c = s->all; c && n < room; c = c->next) {
        pthread_mutex_lock(&c->lock);
        if (c->state == R2_SECOND_MADE && (c->agreed || !agreed)) {
            atomic_fetch_add_explicit(&c->holders, 1, memory_order_relaxed);
            put_by_key(out, n++, c);
        }
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* Before each call, and for this one only: while one call waits, an abort may end all of them. The
 * handle stays as it is from R2_SECOND_MADE on; only who may use it changes. */
static bool borrow(struct r2_second *c, bool ask, bool ends)
{
    bool there;

    pthread_mutex_lock(&c->lock);
    there = c->state == R2_SECOND_MADE;
    if (there) {
        *(ask ? &c->askers : &c->callers) += 1;
        c->theirs |= ends;
    }
    pthread_mutex_unlock(&c->lock);
    return there;
}

static void give_back(struct r2_second *c, bool ask)
{
    pthread_mutex_lock(&c->lock);
    *(ask ? &c->askers : &c->callers) -= 1;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
}

/* NCCL resumes only what it has suspended; one may have been made since. Relaxed: whoever suspends
 * and resumes a communicator does so one after the other. */
static bool concerns(const struct r2_second *c, enum r2_api function)
{
    return function != R2_API_ncclCommResume ||
           atomic_load_explicit(&c->suspended, memory_order_relaxed);
}

static void note(struct r2_second *c, enum r2_api function)
{
    if (together(function))
        atomic_store_explicit(&c->suspended, function == R2_API_ncclCommSuspend,
                              memory_order_relaxed);
}

int r2_seconds_fan(struct r2_seconds *s, enum r2_api function, bool has_flags, int flags)
{
    struct r2_second *all[4 * R2_PLAN_ORDERS];
    int n = hold(s, all, 4 * R2_PLAN_ORDERS, together(function)), first = R2_NCCL_OK;
    void *fn = s->config.real->fn[function];

    r2_call_nest();
    for (int i = 0; i < n; i++) {
        if (fn && concerns(all[i], function) && borrow(all[i], false, !together(function))) {
            int result = has_flags ? ((int (*)(r2_nccl_comm, int))fn)(all[i]->handle, flags)
                                   : ((int (*)(r2_nccl_comm))fn)(all[i]->handle);

            if (result == R2_NCCL_OK)
                note(all[i], function);
            give_back(all[i], false);
            first = first == R2_NCCL_OK ? result : first;
        }
        r2_second_drop(all[i]);
    }
    r2_call_unnest();
    return first;
}

int r2_seconds_async(struct r2_seconds *s)
{
    int (*fn)(r2_nccl_comm, int *) = s->config.real->fn[R2_API_ncclCommGetAsyncError];
    struct r2_second *all[4 * R2_PLAN_ORDERS];
    int n = hold(s, all, 4 * R2_PLAN_ORDERS, false), first = R2_NCCL_OK;

    r2_call_nest();
    for (int i = 0; i < n; i++) {
        if (fn && first == R2_NCCL_OK && borrow(all[i], true, false)) {
            int error = R2_NCCL_OK, result = fn(all[i]->handle, &error);

            give_back(all[i], true);
            first = result != R2_NCCL_OK           ? result
                    : error == R2_NCCL_IN_PROGRESS ? R2_NCCL_OK
                                                   : error;
        }
        r2_second_drop(all[i]);
    }
    r2_call_unnest();
    return first;
}
