/* Intrusive doubly linked list. A list head and its links have the same type; an empty list and an
 * unlinked node both point to themselves.
 *
 * Ownership: the list owns nothing. Threads: none of its own; the caller serialises access.
 */
#ifndef R2_UTIL_LIST_H
#define R2_UTIL_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct r2_list {
    struct r2_list *prev;
    struct r2_list *next;
};

#define R2_LIST_INIT(name)                                                                         \
    {                                                                                              \
        &(name), &(name)                                                                           \
    }

/* The object of `type` whose member `member` is at `ptr`. */
#define R2_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

static inline void r2_list_init(struct r2_list *l)
{
    l->prev = l;
    l->next = l;
}

/* True for a list without nodes, and for a node that is in no list. */
static inline bool r2_list_empty(const struct r2_list *l)
{
    return l->next == l;
}

static inline void r2_list_insert_between(struct r2_list *node, struct r2_list *prev,
                                          struct r2_list *next)
{
    node->prev = prev;
    node->next = next;
    prev->next = node;
    next->prev = node;
}

static inline void r2_list_add_tail(struct r2_list *list, struct r2_list *node)
{
    r2_list_insert_between(node, list->prev, list);
}

static inline void r2_list_add_head(struct r2_list *list, struct r2_list *node)
{
    r2_list_insert_between(node, list, list->next);
}

/* Unlinks `node` and makes it empty again: deleting twice is harmless. */
static inline void r2_list_del(struct r2_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    r2_list_init(node);
}

/* First node, or NULL when the list is empty. */
static inline struct r2_list *r2_list_first(const struct r2_list *list)
{
    return list->next == list ? NULL : list->next;
}

/* Moves every node of `from` to the end of `to`; `from` is empty afterwards. */
static inline void r2_list_splice_tail(struct r2_list *to, struct r2_list *from)
{
    if (r2_list_empty(from)) {
        return;
    }
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    r2_list_init(from);
}

/* Every object of `type` whose `member` is in the list. The plain form forbids deleting `it` inside
 * the loop; in the other it (and only it) may be deleted. */
#define R2_LIST_EACH(it, type, member, list)                                                       \
    for (type *it = R2_CONTAINER_OF((list)->next, type, member); &it->member != (list);            \
         it = R2_CONTAINER_OF(it->member.next, type, member))
#define R2_LIST_EACH_SAFE(it, type, member, list)                                                  \
    for (type *it = R2_CONTAINER_OF((list)->next, type, member),                                   \
              *it##_next = R2_CONTAINER_OF(it->member.next, type, member);                         \
         &it->member != (list);                                                                    \
         it = it##_next, it##_next = R2_CONTAINER_OF(it->member.next, type, member))

/* `it` is a struct r2_list *. The plain form forbids deleting `it` inside the loop. */
#define R2_LIST_FOR_EACH(it, list) for ((it) = (list)->next; (it) != (list); (it) = (it)->next)

/* `tmp` is a second struct r2_list *: `it` (and only `it`) may be deleted inside the loop. */
#define R2_LIST_FOR_EACH_SAFE(it, tmp, list)                                                       \
    for ((it) = (list)->next, (tmp) = (it)->next; (it) != (list); (it) = (tmp), (tmp) = (it)->next)

#endif
