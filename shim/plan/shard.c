#include "plan/shard.h"

#include <math.h>

#include "plan/schedule.h"

/* What a node carries each way if it sends as much as it receives. */
static double rate(const struct r2_shard_node *node)
{
    return fmin(node->out, node->in);
}

static double slowest(const struct r2_shard_input *in, int without)
{
    double least = INFINITY;

    for (int i = 0; i < in->p; i++)
        if (i != without)
            least = fmin(least, rate(&in->nodes[i]));
    return least;
}

/* Seconds for a byte of data, if `least` and `sum` are of the rates in one direction. */
static double bound(int p, double least, double sum)
{
    return least > 0 ? fmax(1 / least, 2.0 * (p - 1) / sum) : INFINITY;
}

double r2_shard_bound_ns(const struct r2_shard_input *in)
{
    double out = 0, into = 0, least_out = INFINITY, least_in = INFINITY;

    for (int i = 0; i < in->p; i++) {
        out += in->nodes[i].out;
        into += in->nodes[i].in;
        least_out = fmin(least_out, in->nodes[i].out);
        least_in = fmin(least_in, in->nodes[i].in);
    }
    if (in->p < 2)
        return 0;
    return 1e9 * (double)in->bytes *
           fmax(bound(in->p, least_out, out), bound(in->p, least_in, into));
}

/* What a rank of this rate can own while the others are busy: with the time t for a byte, it
 * carries rate x t, one of which is its own data in and out. */
static double room(const struct r2_shard_node *node, double t)
{
    return fmax(0, rate(node) * t - 1);
}

bool r2_shard_weights(const struct r2_shard_input *in, uint32_t *weights)
{
    double sum = 0, rooms = 0, t, exact = 0;
    uint32_t given = 0;

    for (int i = 0; i < in->p; i++)
        sum += rate(&in->nodes[i]);
    if (in->p < 1 || !(slowest(in, -1) > 0) || !isfinite(sum))
        return false;
    t = bound(in->p, slowest(in, -1), sum);
    for (int i = 0; i < in->p; i++)
        rooms += room(&in->nodes[i], t);
    for (int i = 0; i < in->p; i++) {
        /* Rounding the sums, not the weights: the last one ends at the whole. */
        exact += in->p < 3 ? 1.0 / in->p : room(&in->nodes[i], t) / rooms;
        weights[i] = (uint32_t)lround(exact * R2_SCHEDULE_UNIT) - given;
        given += weights[i];
    }
    return true;
}

static double per_node(const struct r2_shard_input *in)
{
    return in->per_node > 0 ? in->per_node : 1;
}

static double within_ns(const struct r2_shard_input *in)
{
    double k = per_node(in), bytes = 2 * (k - 1) / k * (double)in->bytes;

    return k > 1 ? 2 * in->hop_ns + (in->within > 0 ? 1e9 * bytes / in->within : 0) : 0;
}

double r2_shard_ns(const struct r2_shard_input *in, const uint32_t *weights)
{
    double n = (double)in->bytes, most = 0, owners = 0, worst = 0, rounds;

    if (in->p < 2)
        return 0;
    for (int i = 0; i < in->p; i++) {
        most = fmax(most, weights[i]);
        owners += weights[i] > 0;
    }
    rounds = fmax(1, ceil(n / per_node(in) * most / R2_SCHEDULE_UNIT / (double)in->piece));
    for (int i = 0; i < in->p; i++) {
        const struct r2_shard_node *node = &in->nodes[i];
        double share = (double)weights[i] / R2_SCHEDULE_UNIT, own = weights[i] > 0;
        double bytes = n * (1 + (in->p - 2) * share); /* each way */
        double messages = 2 * rounds * (owners - own + own * (in->p - 1));
        double port = bytes / rate(node) * (1 + 1 / rounds);

        worst = fmax(worst, fmax(1e9 * port, messages * in->message_ns));
    }
    return worst + 2 * in->hop_ns + within_ns(in);
}

double r2_shard_ring_ns(const struct r2_shard_input *in)
{
    double ranks = in->p * per_node(in);
    double bytes = 2 * (ranks - 1) / ranks * (double)in->bytes, worst = 0;

    if (in->p < 2)
        return 0;
    for (int i = 0; i < in->p; i++)
        worst = fmax(worst, bytes / rate(&in->nodes[i]));
    return 1e9 * worst + 2.0 * (in->p - 1) * in->hop_ns;
}

uint32_t r2_shard_tail(const struct r2_shard_input *in, int slow)
{
    double lost = 1 - rate(&in->nodes[slow]) / slowest(in, slow);

    return lost > 0 ? (uint32_t)(fmin(lost, 1) * (R2_SCHEDULE_UNIT - 1)) : 0;
}

double r2_shard_r2ccl_ns(const struct r2_shard_input *in, int slow, uint32_t tail,
                         unsigned int chunks)
{
    double n = (double)in->bytes, y = (double)tail / R2_SCHEDULE_UNIT, p = in->p;
    double least = rate(&in->nodes[slow]), spare = slowest(in, slow) - least;
    double all = 2 * (p - 1) / p * (1 - y) * n / least;
    double most = y > 0 ? 2 * (p - 2) / (p - 1) * y * n / fmax(spare, 0) : 0;
    double last = (1 + 1.0 / chunks) * y * n / least;

    return 1e9 * (fmax(all, most) + last) + (2 * (p - 1) + p) * in->hop_ns;
}
