/* Hash table from a 64-bit key (any value) to a pointer (never NULL).
 *
 * Open addressing with linear probing; grows at 3/4 load; deletion leaves no tombstones. Keys may
 * come from the wire: every table mixes in its own random seed. The table owns its slots, not what
 * the pointers lead to. The caller serialises access.
 */
#ifndef R2_UTIL_HASH_H
#define R2_UTIL_HASH_H

#include <stddef.h>
#include <stdint.h>

struct r2_hash_slot {
    uint64_t key;
    void *value; /* NULL: free */
};

struct r2_hash {
    struct r2_hash_slot *slots; /* NULL until the first put */
    size_t mask;                /* number of slots - 1 */
    size_t count;
    uint64_t seed;
};

void r2_hash_init(struct r2_hash *h);
/* Frees the slots; the table is empty and usable afterwards. */
void r2_hash_free(struct r2_hash *h);

/* 0, -EEXIST (the old value stays), -EINVAL (value is NULL) or -ENOMEM (nothing changed). */
int r2_hash_put(struct r2_hash *h, uint64_t key, void *value);
/* The value, or NULL. */
void *r2_hash_get(const struct r2_hash *h, uint64_t key);
/* Removes the key and returns its value, or NULL when it was not there. */
void *r2_hash_del(struct r2_hash *h, uint64_t key);

static inline size_t r2_hash_count(const struct r2_hash *h)
{
    return h->count;
}

#endif
