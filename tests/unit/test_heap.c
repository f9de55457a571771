/* The priority queue of timers against a plain array (rung 1). */
#include "check.h"
#include "util/heap.h"

#define NODES 300
#define STEPS 60000

static struct r2_heap_node nodes[NODES];
static bool in[NODES];
static uint64_t keys[NODES];

static uint64_t smallest(void)
{
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < NODES; i++)
        least = in[i] && keys[i] < least ? keys[i] : least;
    return least;
}

static void add(struct r2_heap *h, int i, uint64_t key)
{
    r2_heap_add(h, &nodes[i], key);
    keys[i] = key;
    in[i] = true;
}

/* Adds, removes from anywhere and takes the first, as timers are set, moved and fired; few keys, so
 * that many are equal. */
TEST(as_an_array)
{
    struct r2_heap h = {0};
    int count = 0;

    for (int step = 0; step < STEPS; step++) {
        int i = (int)check_below(NODES);

        if (!in[i]) {
            add(&h, i, 1 + check_below(step % 2 ? 40 : UINT32_MAX));
            count++;
        } else if (check_below(2)) {
            r2_heap_remove(&h, &nodes[i]);
            in[i] = false;
            count--;
        } else if (h.first) {
            i = (int)(h.first - nodes);
            r2_heap_remove(&h, h.first);
            in[i] = false;
            count--;
        }
        CHECK_EQ(h.first != NULL, count > 0);
        if (!count)
            continue;
        CHECK_EQ(h.first->key, smallest());
        CHECK(in[h.first - nodes]);
        CHECK_EQ(keys[h.first - nodes], h.first->key);
    }
    for (uint64_t last = 0; count; count--) { /* nothing was lost, and all come in order */
        int i;

        CHECK(h.first);
        i = (int)(h.first - nodes);
        CHECK(in[i] && keys[i] >= last);
        last = keys[i];
        in[i] = false;
        r2_heap_remove(&h, h.first);
    }
    CHECK(!h.first);
}
