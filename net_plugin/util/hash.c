#include "util/hash.h"

#include <errno.h>
#include <stdlib.h>

#include "util/random.h"

#define HASH_FIRST_SLOTS 16

void r2_hash_init(struct r2_hash *h)
{
    h->slots = NULL;
    h->mask = 0;
    h->count = 0;
    if (r2_random_bytes(&h->seed, sizeof(h->seed)) != 0) {
        h->seed = (uint64_t)(uintptr_t)h; /* worse distribution against an attacker, no more */
    }
}

void r2_hash_free(struct r2_hash *h)
{
    free(h->slots);
    h->slots = NULL;
    h->mask = 0;
    h->count = 0;
}

static size_t hash_home(const struct r2_hash *h, uint64_t key)
{
    uint64_t x = key ^ h->seed;

    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return (size_t)(x ^ (x >> 32)) & h->mask;
}

/* The slot of the key, or the free slot where it would go. Needs at least one free slot. */
static size_t hash_find(const struct r2_hash *h, uint64_t key)
{
    size_t i = hash_home(h, key);

    while (h->slots[i].value && h->slots[i].key != key) {
        i = (i + 1) & h->mask;
    }
    return i;
}

static int hash_grow(struct r2_hash *h)
{
    size_t old_slots = h->slots ? h->mask + 1 : 0;
    size_t slots = old_slots ? old_slots * 2 : HASH_FIRST_SLOTS;
    struct r2_hash_slot *old = h->slots;
    struct r2_hash_slot *fresh = calloc(slots, sizeof(*fresh));

    if (!fresh) {
        return -ENOMEM;
    }
    h->slots = fresh;
    h->mask = slots - 1;
    for (size_t i = 0; i < old_slots; i++) {
        if (old[i].value) {
            h->slots[hash_find(h, old[i].key)] = old[i];
        }
    }
    free(old);
    return 0;
}

int r2_hash_put(struct r2_hash *h, uint64_t key, void *value)
{
    size_t i;

    if (!value) {
        return -EINVAL;
    }
    if (r2_hash_get(h, key)) {
        return -EEXIST;
    }
    if (!h->slots || (h->count + 1) * 4 > (h->mask + 1) * 3) {
        int err = hash_grow(h);

        if (err) {
            return err;
        }
    }
    i = hash_find(h, key);
    h->slots[i].key = key;
    h->slots[i].value = value;
    h->count++;
    return 0;
}

void *r2_hash_get(const struct r2_hash *h, uint64_t key)
{
    return h->slots ? h->slots[hash_find(h, key)].value : NULL;
}

void *r2_hash_del(struct r2_hash *h, uint64_t key)
{
    size_t hole;
    size_t i;
    void *value;

    if (!h->slots) {
        return NULL;
    }
    hole = hash_find(h, key);
    value = h->slots[hole].value;
    if (!value) {
        return NULL;
    }
    /* Close the hole: move back every follower whose home does not lie between hole and it. */
    for (i = (hole + 1) & h->mask; h->slots[i].value; i = (i + 1) & h->mask) {
        size_t home = hash_home(h, h->slots[i].key);

        if (((i - home) & h->mask) >= ((i - hole) & h->mask)) {
            h->slots[hole] = h->slots[i];
            hole = i;
        }
    }
    h->slots[hole].value = NULL;
    h->count--;
    return value;
}
