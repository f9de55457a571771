#include "plan/times.h"

static int class_of(uint64_t bytes)
{
    int c = 0;

    for (bytes >>= 20; bytes > 1 && c < R2_TIMES_CLASSES - 1; bytes >>= 1)
        c++;
    return c;
}

uint64_t r2_times_behind(int class)
{
    return class == R2_TIMES_CLASSES - 1 ? UINT64_MAX : UINT64_C(2) << (20 + class);
}

uint64_t r2_times_done(const struct r2_times *t)
{
    uint64_t bits = 0;

    for (int c = 0; c < R2_TIMES_CLASSES; c++)
        bits |= (uint64_t)(t->known.of[false][c] > 0) << c | (uint64_t)(t->known.of[true][c] > 0)
                                                                 << (R2_TIMES_CLASSES + c);
    return t->epoch << 32 | bits;
}

bool r2_times_needs(uint64_t done, uint64_t epoch, bool planned, uint64_t bytes)
{
    int bit = class_of(bytes) + (planned ? R2_TIMES_CLASSES : 0);

    return (uint32_t)epoch != done >> 32 || !(done >> bit & 1);
}

static float median(float *each, unsigned n)
{
    for (unsigned i = 1; i < n; i++) {
        float it = each[i];
        unsigned at = i;

        for (; at > 0 && each[at - 1] > it; at--)
            each[at] = each[at - 1];
        each[at] = it;
    }
    return n % 2 ? each[n / 2] : (each[n / 2 - 1] + each[n / 2]) / 2;
}

void r2_times_add(struct r2_times *t, uint64_t epoch, bool planned, uint64_t bytes, uint64_t ns)
{
    unsigned wanted = planned ? R2_TIMES_PLAN : R2_TIMES_STOCK, *seen;
    int c = class_of(bytes);

    if (bytes == 0 || epoch < t->epoch)
        return;
    if (epoch > t->epoch)
        *t = (struct r2_times){.epoch = epoch};
    if (t->skipped < R2_TIMES_SKIP) {
        t->skipped++;
        return;
    }
    seen = &t->seen[planned][c];
    if (*seen == wanted)
        return;
    t->each[planned][c][(*seen)++] = (float)((double)ns / (double)bytes);
    if (*seen == wanted)
        t->known.of[planned][c] = median(t->each[planned][c], wanted);
}
