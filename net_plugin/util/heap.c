#include "util/heap.h"

#include <stddef.h>

/* Two roots, either may be NULL. */
static struct r2_heap_node *meld(struct r2_heap_node *a, struct r2_heap_node *b)
{
    if (!a || !b)
        return a ? a : b;
    if (b->key < a->key) {
        struct r2_heap_node *other = a;

        a = b;
        b = other;
    }
    b->prev = a;
    b->next = a->child;
    if (a->child)
        a->child->prev = b;
    a->child = b;
    return a;
}

/* Siblings become one tree: in pairs from left to right, then these from right to left, which is
 * what the bound on the cost rests on. */
static struct r2_heap_node *meld_all(struct r2_heap_node *first)
{
    struct r2_heap_node *pairs = NULL, *root = NULL;

    while (first) {
        struct r2_heap_node *a = first, *b = a->next, *pair;

        first = b ? b->next : NULL;
        a->next = a->prev = NULL;
        if (b)
            b->next = b->prev = NULL;
        pair = meld(a, b);
        pair->next = pairs;
        pairs = pair;
    }
    while (pairs) {
        struct r2_heap_node *rest = pairs->next;

        pairs->next = NULL;
        root = meld(root, pairs);
        pairs = rest;
    }
    return root;
}

void r2_heap_add(struct r2_heap *h, struct r2_heap_node *node, uint64_t key)
{
    *node = (struct r2_heap_node){.key = key};
    h->first = meld(h->first, node);
}

void r2_heap_remove(struct r2_heap *h, struct r2_heap_node *node)
{
    struct r2_heap_node *below = meld_all(node->child);

    if (node == h->first) {
        h->first = below;
    } else {
        if (node->prev->child == node)
            node->prev->child = node->next;
        else
            node->prev->next = node->next;
        if (node->next)
            node->next->prev = node->prev;
        h->first = meld(h->first, below);
    }
    *node = (struct r2_heap_node){0};
}
