#include "plan/sizes.h"

#include "plan/schedule.h"

#define SLOT_MOST ((size_t)128 << 10)
#define SLOT_LEAST ((size_t)16 << 10)
#define ROUNDS 4 /* that the memory holds, at least */
#define ROUNDS_AHEAD 9
#define POSTED 2 /* pieces on a lane */

#define OF_A_NIC ((size_t)1 << 20) /* posted for each that is left of some */

#define MEMORY_LEAST ((size_t)8 << 20)
#define MEMORY_MOST ((size_t)16 << 20) /* for slow NICs */
#define MEMORY_MOST_FAST ((size_t)64 << 20)

#define RATE_OF_SLOW 6250e6 /* bytes/s: four NICs of 12.5 Gbit/s */
#define TIMES_MOST 8        /* 400 Gbit/s */

#define PIECES 32 /* of the largest shard */
#define PIECE_LEAST ((size_t)32 << 10)

/* What is posted, and the memory, last for a time: at twice the rate it takes twice of them. */
static double times(uint64_t rate, double least)
{
    double t = (double)rate / RATE_OF_SLOW;

    return t < least ? least : t > TIMES_MOST ? TIMES_MOST : t;
}

static size_t memory_of(int p)
{
    size_t wanted = ROUNDS_AHEAD * (size_t)r2_sizes_round(p) * SLOT_MOST;

    return wanted < MEMORY_LEAST ? MEMORY_LEAST : wanted > MEMORY_MOST ? MEMORY_MOST : wanted;
}

/* A rank receives contributions and sums from all others. */
static size_t per_lane(int p)
{
    return R2_SIZES_CREDIT / (2 * (size_t)(p - 1));
}

/* In 1/R2_SCHEDULE_UNIT of the data: what of it a rank receives. */
static uint64_t received(int p, uint32_t weight)
{
    return R2_SCHEDULE_UNIT + (uint64_t)(p - 2) * weight;
}

static uint32_t most_of(int p, const uint32_t *weights)
{
    uint32_t most = 0;

    for (int r = 0; r < p; r++)
        most = weights[r] > most ? weights[r] : most;
    return most;
}

/* Who owns nothing gets no contributions, and from those no sums come. */
static size_t used_lanes(int p, int rank, const uint32_t *weights)
{
    size_t n = weights[rank] ? (size_t)(p - 1) : 0;

    for (int r = 0; r < p; r++)
        n += r != rank && weights[r];
    return n;
}

static size_t of_slow(int p, int rank, const uint32_t *weights, unsigned nics)
{
    uint64_t mine = received(p, weights[rank]), most = received(p, most_of(p, weights));
    size_t n = used_lanes(p, rank, weights);

    size_t share, pieces;

    if (n == 0 || mine >= most - most / 32)
        return per_lane(p);
    share = nics * OF_A_NIC * mine / most / n;
    pieces = 1 + (nics * mine + most / 2) / most;
    return share < pieces * SLOT_MOST ? share : pieces * SLOT_MOST;
}

size_t r2_sizes_credit(int p, int rank, const uint32_t *weights, unsigned nics, uint64_t rate)
{
    return (size_t)(times(rate, 1) * (double)of_slow(p, rank, weights, nics));
}

struct r2_sizes_window r2_sizes_window(int p, uint64_t rate, int per_node)
{
    size_t slot = SLOT_MOST, round = (size_t)r2_sizes_round(p), memory = memory_of(p), least;

    while (slot > SLOT_LEAST && (memory / slot / round < ROUNDS || POSTED * slot > per_lane(p)))
        slot /= 2;
    least = memory < ROUNDS * round * slot ? memory : ROUNDS * round * slot;
    memory = (size_t)(times(rate, 1.0 / per_node) * (double)memory);
    memory = memory < least ? least : memory < MEMORY_MOST_FAST ? memory : MEMORY_MOST_FAST;
    return (struct r2_sizes_window){.slot = slot, .n_slots = (int)(memory / slot)};
}

size_t r2_sizes_piece(size_t slot, int p, uint64_t bytes, const uint32_t *weights)
{
    size_t piece = PIECE_LEAST < slot ? PIECE_LEAST : slot;
    uint32_t most = most_of(p, weights);

    while (piece < slot && piece * PIECES < bytes / R2_SCHEDULE_UNIT * most)
        piece *= 2;
    return piece;
}
