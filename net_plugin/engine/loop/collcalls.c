/* What NCCL's profiler tells about collectives, with the time added (base/colls.c has the rest). */
#include "engine/loop/loop.h"

uint64_t r2_engine_coll_begin(const struct r2_coll *what)
{
    return r2_coll_begin(&r2_eng.colls, what, r2_now_ns());
}

void r2_engine_coll_handed(uint64_t handle)
{
    r2_coll_handed(&r2_eng.colls, handle, r2_now_ns());
}

bool r2_engine_coll_op_begin(uint64_t handle)
{
    return r2_coll_op_begin(&r2_eng.colls, handle);
}

void r2_engine_coll_op_end(uint64_t handle)
{
    r2_coll_op_end(&r2_eng.colls, handle, r2_now_ns());
}

void r2_engine_coll_moves(uint64_t handle, bool sent)
{
    if (r2_coll_wants_first(&r2_eng.colls, handle, sent))
        r2_coll_moves(&r2_eng.colls, handle, sent, r2_now_ns());
}
