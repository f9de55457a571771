#include "tree.h"

#include <stdbool.h>

struct search { /* the place of `node` while the tree is walked from above */
    int n, node;
    struct hn_tree found;
};

/* Root of the nodes strictly between `low` and low + 2 * half, or -1. */
static int root_of(const struct search *s, int low, int half)
{
    while (half > 0 && low + half >= s->n)
        half /= 2;
    return half > 0 ? low + half : -1;
}

static void descend(struct search *s, int low, int half, int parent)
{
    while (half > 0 && low + half >= s->n)
        half /= 2;
    if (half == 0)
        return;
    int root = low + half, left = root_of(s, low, half / 2), right = root_of(s, root, half / 2);
    if (root == s->node) {
        s->found = (struct hn_tree){parent, {left, right, -1}};
        return;
    }
    if (s->node < root)
        descend(s, low, half / 2, root);
    else
        descend(s, root, half / 2, root);
}

static struct hn_tree first_tree(int nodes, int node)
{
    struct search s = {.n = nodes, .node = node, .found = {-1, {-1, -1, -1}}};
    int half = 1;
    while (half < nodes)
        half *= 2;
    half /= 2;
    if (node == 0)
        s.found.down[0] = root_of(&s, 0, half);
    else
        descend(&s, 0, half, 0);
    return s.found;
}

struct hn_tree hn_tree_node(int nodes, int which, int node)
{
    if (which == 0 || nodes < 2)
        return first_tree(nodes, node);
    bool mirror = nodes % 2 == 0;
    struct hn_tree tree = first_tree(nodes, mirror ? nodes - 1 - node : (node + nodes - 1) % nodes);
    int *links[1 + HN_ARITY] = {&tree.up, &tree.down[0], &tree.down[1], &tree.down[2]};
    for (int i = 0; i < 1 + HN_ARITY; i++)
        if (*links[i] >= 0)
            *links[i] = mirror ? nodes - 1 - *links[i] : (*links[i] + 1) % nodes;
    return tree;
}

static int first_rank(int nranks, const int *node_of, int node)
{
    for (int r = 0; r < nranks; r++)
        if (node_of[r] == node)
            return r;
    return -1;
}

struct hn_tree hn_tree_rank(int nranks, const int *node_of, int which, int rank)
{
    struct hn_tree tree = {-1, {-1, -1, -1}};
    int nodes = 0, before = -1, after = -1;
    for (int r = 0; r < nranks; r++) {
        nodes = node_of[r] >= nodes ? node_of[r] + 1 : nodes;
        if (node_of[r] == node_of[rank] && r < rank)
            before = r;
        if (node_of[r] == node_of[rank] && r > rank && after < 0)
            after = r;
    }
    if (before >= 0) {
        tree.up = before;
        tree.down[0] = after;
        return tree;
    }
    struct hn_tree node = hn_tree_node(nodes, which, node_of[rank]);
    tree.up = first_rank(nranks, node_of, node.up);
    for (int i = 0; i < 2; i++)
        tree.down[i] = first_rank(nranks, node_of, node.down[i]);
    tree.down[2] = after;
    return tree;
}

int hn_tree_depth(int nodes)
{
    int depth = 0;
    for (int reach = 1; reach < nodes; reach *= 2)
        depth++;
    return depth;
}
