/* The user's own NCCL: which one a call belongs to, and where its functions are.
 *
 * A process may hold several NCCLs (PyTorch's own and another library's). A call goes to the one
 * that the caller would have got without the shim:
 *   1. R2CCL_REAL_NCCL, if set, for every call;
 *   2. what the global search scope has behind the shim (RTLD_NEXT);
 *   3. what the calling object's own dependencies have: PyTorch's case, where Python loads all of
 * it with RTLD_LOCAL;
 *   4. a loaded library by the name libnccl.so.2 or librccl.so.1, then any loaded library that has
 * NCCL's functions;
 *   5. only in the library with NCCL's name: a libnccl.so.2 on disk (LD_LIBRARY_PATH, the Python
 *      packages of loaded libraries, the usual folders).
 * A call with a communicator goes to the NCCL that made it (comms/comms.h).
 *
 * Two things cannot be told apart. One: callers without a dependency on NCCL, when two NCCLs are
 * loaded with RTLD_LOCAL. These are ctypes and other dlopen users, whose calls reach us from libffi
 * or from the program. Their calls without a communicator go to the first one found. Two: a call
 * site whose object was unloaded and replaced by another at the same address.
 *
 * Everything here may be called from any thread. Nothing is ever unloaded or freed: an NCCL that
 * was found is held open, so that its functions stay where they are.
 */
#ifndef R2_REAL_REAL_H
#define R2_REAL_REAL_H

#include <stdbool.h>
#include <stddef.h>

#include "nccl/ids.h"

#define R2_EXPORT __attribute__((visibility("default")))

#define R2_REAL_MAX 8 /* NCCLs in one process */

struct r2_real {
    void *fn[R2_API_COUNT]; /* NULL: this NCCL lacks it */
    void *handle;           /* of dlopen; NULL: the global scope behind us */
    void *base;             /* where it is loaded */
    int version;            /* 22809 is 2.28.9; 0: it did not say */
    char path[512];
};

/* The NCCL of a call from the code at `caller`, or NULL when there is none. Costs a table look-up
 * for a call site that was seen before. *internal: the caller is that NCCL itself, which calls some
 * of its own public functions, and the dynamic linker leads those calls here. */
struct r2_real *r2_real_for(const void *caller, bool *internal);

/* More than one NCCL has been found. */
bool r2_real_several(void);

/* The NCCL that `address` lies in, if it is the one that calls of unknown callers reach. */
struct r2_real *r2_real_at(const void *address);

/* The address of any function of `real`, by name, or NULL. */
void *r2_real_symbol(struct r2_real *real, const char *name);

/* dlsym itself, past every wrapper. RTLD_NEXT means behind the shim. */
void *r2_real_dlsym(void *handle, const char *name);
/* A sanitizer's runtime looks its functions up through our dlsym before it can record anything. */
#define R2_UNSANITIZED __attribute__((no_sanitize("thread", "address", "undefined")))

typedef void *(*r2_real_dlsym_fn)(void *, const char *);
r2_real_dlsym_fn r2_real_dlsym_address(void);

/* Where the shim itself is loaded, its file, and a function that it exports (NULL: none). */
const void *r2_real_own_base(void);
const char *r2_real_own_path(void);
void *r2_real_own_symbol(const char *name);

/* search.c: opens a libnccl.so.2 on disk that is not the shim; NULL when there is none. */
void *r2_real_search(void);

/* plugin.c: brings the net plugin in, once, so that `real`'s search for its default plugin finds it
 * loaded. Says in one warning what keeps NCCL from using it, in the environment or in the files
 * that NCCL adds to it (conf.h). */
void r2_real_plugin_load(struct r2_real *real);

/* A symbol of the net plugin that was brought in; NULL: none was. */
void *r2_real_plugin_symbol(const char *name);

/* lacks.c: one warning with the functions of `real` that the library with NCCL's name does not
 * have (only there). */
void r2_real_tell_lacking(struct r2_real *real);

/* Around fork: the list of NCCLs is at rest. */
void r2_real_before_fork(void);
void r2_real_after_fork(void);

#endif
