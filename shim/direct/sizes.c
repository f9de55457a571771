#include "direct/sizes.h"

#include "direct/exec.h"

#define SLOT_MOST ((size_t)128 << 10)
#define SLOT_LEAST ((size_t)16 << 10)
#define ROUNDS 4 /* that the memory holds, at least */
#define POSTED 2 /* pieces on a lane */

#define PIECES 128 /* of the largest shard */
#define PIECE_LEAST ((size_t)32 << 10)

size_t r2_sizes_credit(int p)
{
    return R2_SIZES_CREDIT / (2 * (size_t)(p - 1));
}

size_t r2_sizes_slot(size_t memory, int p)
{
    size_t slot = SLOT_MOST, round = (size_t)r2_exec_round(p);

    while (slot > SLOT_LEAST &&
           (memory / slot / round < ROUNDS || POSTED * slot > r2_sizes_credit(p)))
        slot /= 2;
    return slot;
}

size_t r2_sizes_window(size_t memory, int p)
{
    size_t slot = r2_sizes_slot(memory, p);

    return memory / slot * (slot + R2_SIZES_BEHIND);
}

size_t r2_sizes_piece(size_t slot, int p, uint64_t bytes, const uint32_t *weights)
{
    size_t piece = PIECE_LEAST < slot ? PIECE_LEAST : slot;
    uint32_t most = 0;

    for (int r = 0; r < p; r++)
        most = weights[r] > most ? weights[r] : most;
    while (piece < slot && piece * PIECES < bytes / R2_SCHEDULE_UNIT * most)
        piece *= 2;
    return piece;
}
