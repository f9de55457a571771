/* The double binary tree that NCCL's Tree algorithm runs on, built here from its description as a
 * recursion over ranges: written apart from shim/plan/tree.c, so that the two can be compared.
 *
 * First tree over nodes 0 .. n-1: node 0 is the root, with one child. Nodes between two multiples
 * of a power of two 2h form a subtree whose root lies h above the lower one; where that is beyond
 * the last node, the half below it takes the subtree's place. Second tree: the mirror image for an
 * even n, else all nodes shifted by one. Pure. */
#ifndef HOSTNCCL_TREE_H
#define HOSTNCCL_TREE_H

enum { HN_ARITY = 3 }; /* most children of a rank: two nodes' and the next rank of its own */

struct hn_tree { /* -1: none */
    int up;
    int down[HN_ARITY];
};

/* Place of `node` among `nodes` in tree `which`, 0 or 1: nodes above and below. */
struct hn_tree hn_tree_node(int nodes, int which, int node);

/* The same for a rank. node_of[nranks] numbers the nodes in the order of their first ranks; the
 * ranks of a node form a chain, whose first rank has the node's links. */
struct hn_tree hn_tree_rank(int nranks, const int *node_of, int which, int rank);

/* Levels below the root, of nodes. */
int hn_tree_depth(int nodes);

#endif
