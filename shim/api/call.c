/* Around every real call: which NCCL, nested or not, switched on or not. */
#define _GNU_SOURCE
#include "api/call.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "comms/comms.h"
#include "settings/launch.h"
#include "settings/settings.h"
#include "util/log.h"

#define OLDEST 21800

enum { UNKNOWN, ON, OFF };
static atomic_int state;
/* A call has begun that may leave something behind. Set on its thread before the call does
 * anything, and read in a forked child: a thread that comes later is not there. */
static atomic_bool used;

static void before_fork(void)
{
    r2_comms_before_fork();
    r2_real_before_fork();
}

static void after_fork(void)
{
    r2_real_after_fork();
    r2_comms_after_fork();
}

static void in_child(void)
{
    /* The child's copy is inert, as the plugin's is: other locks may be held by threads that are
     * not there, and its communicators are the parent's. It only looks up which NCCL a call goes
     * to. */
    after_fork();
    if (!atomic_load(&used))
        return; /* the parent has nothing yet: this is a process like any other */
    atomic_store(&state, OFF);
}

/* Programs ask for these, or only look functions up, before they fork the processes that use
 * NCCL. */
static bool leaves_nothing(enum r2_api id)
{
    return id == R2_API_ncclGetVersion || id == R2_API_ncclGetErrorString ||
           id == R2_API_ncclGetLastError;
}

/* Settings that do nothing beside others. */
static void say_idle(const struct r2_settings *settings)
{
    const char *plan = r2_settings_getenv("R2CCL_PLAN");
    bool direct = settings->allreduce == R2_ALLREDUCE_DIRECT;

    if (settings->mode <= R2_MODE_BALANCE && plan && plan[0] && strcmp(plan, "off") != 0)
        R2_TELL_ONE("R2CCL_PLAN=%s does nothing in R2CCL_MODE=off, migrate or balance", plan);
    if (settings->mode > R2_MODE_BALANCE && settings->mode != R2_MODE_AUTO &&
        settings->plan != R2_PLAN_SETTING_AUTO)
        R2_TELL_ONE("R2CCL_MODE=%d takes no schedule with R2CCL_PLAN=%s: unset R2CCL_PLAN",
                    settings->mode, plan);
    if (settings->mode == R2_MODE_OFF && direct)
        R2_TELL_ONE("R2CCL_ALLREDUCE=direct does nothing in R2CCL_MODE=off");
    if (settings->mode == R2_MODE_ALLREDUCE && direct)
        R2_TELL_ONE("R2CCL_MODE=r2ccl-allreduce takes no schedule with R2CCL_ALLREDUCE=direct");
}

static void start(void)
{
    const struct r2_settings *settings = r2_settings_get();

    r2_log_set_verbosity(settings->log);
    pthread_atfork(before_fork, after_fork, in_child);
    atomic_store(&state, settings->mode == R2_MODE_OFF ? OFF : ON);
    say_idle(settings);
}

bool r2_shim_on(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int now = atomic_load_explicit(&state, memory_order_acquire);

    if (now == UNKNOWN) {
        pthread_once(&once, start);
        now = atomic_load_explicit(&state, memory_order_acquire);
    }
    return now == ON;
}

static void *refuse(struct r2_call *call, enum r2_api id)
{
    static atomic_char told[R2_API_COUNT];

    if (!call->real) {
        call->error = R2_NCCL_SYSTEM;
        R2_WARN_ONCE("%s was called and no NCCL is loaded: link the program with NCCL, or name one "
                     "with R2CCL_REAL_NCCL=/path/libnccl.so.2",
                     r2_api_names[id]);
        return NULL;
    }
    call->error = R2_NCCL_USAGE;
    if (!atomic_exchange(&told[id], 1))
        R2_WARN(
            "%s was called, but the NCCL in use, %d.%d.%d at %s, does not have it (it came with "
            "%d.%d)",
            r2_api_names[id], call->real->version / 10000, call->real->version / 100 % 100,
            call->real->version % 100, call->real->path, r2_api_since[id] / 10000,
            r2_api_since[id] / 100 % 100);
    return NULL;
}

static bool too_old(const struct r2_real *real)
{
    if (real->version == 0 || real->version >= OLDEST)
        return false;
    R2_WARN_ONCE("NCCL %d.%d.%d at %s is too old for R2CCL, which needs 2.18: it runs without",
                 real->version / 10000, real->version / 100 % 100, real->version % 100, real->path);
    return true;
}

void *r2_call_enter(struct r2_call *call, enum r2_api id, r2_nccl_comm handle, const void *caller)
{
    bool outer = !r2_call_nested() && r2_shim_on(), internal = false;

    if (outer && !leaves_nothing(id))
        atomic_store_explicit(&used, true, memory_order_relaxed);
    *call = (struct r2_call){.real = r2_real_for(caller, &internal)};
    if (handle && (outer || r2_real_several()))
        call->comm = r2_comms_hold(handle);
    if (call->comm)
        call->real = r2_comms_real(call->comm);
    if (!call->real || !call->real->fn[id]) {
        if (call->comm)
            r2_comms_drop(call->comm);
        return refuse(call, id);
    }
    if (outer && !internal && !too_old(call->real)) {
        call->active = true;
        r2_real_plugin_load(call->real);
    }
    r2_call_nest();
    return call->real->fn[id];
}

void r2_call_leave(struct r2_call *call)
{
    r2_call_unnest();
    if (call->comm)
        r2_comms_drop(call->comm);
}
