#include "comms/calls.h"

#include <stddef.h>
#include <string.h>

void r2_calls_add(struct r2_calls *c, uint64_t number, uint64_t bytes, bool taken)
{
    struct r2_calls_entry call = {number, bytes, c->of[0].taken + taken};

    memmove(c->of + 1, c->of, sizeof(c->of) - sizeof(c->of[0]));
    c->of[0] = call;
}

static const struct r2_calls_entry *find(const struct r2_calls *c, uint64_t number)
{
    for (int i = 0; i < R2_CALLS; i++)
        if (number && c->of[i].number == number)
            return &c->of[i];
    return NULL;
}

bool r2_calls_differ(const struct r2_calls *a, const struct r2_calls *b,
                     struct r2_calls_difference *out)
{
    bool found = false;

    for (int i = 0; i < R2_CALLS; i++) {
        const struct r2_calls_entry *one = find(a, a->of[i].number),
                                    *other = find(b, a->of[i].number);

        if (!one || !other || one->taken == other->taken)
            continue;
        found = true;
        out->number = one->number;
        out->first = one->taken > other->taken;
        out->taken_bytes = out->first ? one->bytes : other->bytes;
        out->left_bytes = out->first ? other->bytes : one->bytes;
    }
    return found;
}
