/* A priority queue of nodes that live inside their owners: nothing is allocated, so nothing can
 * fail. A pairing heap (Fredman, Sedgewick, Sleator, Tarjan 1986): add in O(1), remove in O(log n)
 * amortised, from anywhere.
 *
 * Threads: none; the caller serialises. Zeroed memory is an empty queue and a node in none.
 */
#ifndef R2_UTIL_HEAP_H
#define R2_UTIL_HEAP_H

#include <stdint.h>

struct r2_heap_node {
    uint64_t key;
    struct r2_heap_node *child, *next; /* first child; next sibling */
    struct r2_heap_node *prev;         /* previous sibling, or the parent of a first child */
};

struct r2_heap {
    struct r2_heap_node *first; /* of the smallest key; NULL: empty */
};

/* The node is in no queue. */
void r2_heap_add(struct r2_heap *h, struct r2_heap_node *node, uint64_t key);
/* The node is in this queue. */
void r2_heap_remove(struct r2_heap *h, struct r2_heap_node *node);

#endif
