/* What accept made of the plans of a rank: kept while they may be looked up, then given back by the
 * service thread. */
#include <stdlib.h>

#include "agree/internal.h"

/* Member lock held. */
void r2_agree_member_discard(struct r2_agree *a, void *object)
{
    if (!object) {
        return;
    }
    if (a->ngarbage == a->garbage_room) {
        int room = a->garbage_room ? a->garbage_room * 2 : 8;
        void **more = realloc(a->garbage, (size_t)room * sizeof(*more));

        if (!more) {
            return; /* leaked rather than freed under somebody's hands */
        }
        a->garbage = more;
        a->garbage_room = room;
    }
    a->garbage[a->ngarbage++] = object;
}

void r2_agree_member_drop(struct r2_agree *a, uint64_t epoch, bool before, uint64_t keep)
{
    int n = 0;

    for (int i = 0; i < a->nobjects; i++) {
        struct r2_agree_object *o = &a->objects[i];

        if (o->epoch != keep && (before ? o->epoch < epoch : o->epoch == epoch)) {
            r2_agree_member_discard(a, o->object);
        } else {
            a->objects[n++] = *o;
        }
    }
    a->nobjects = n;
}

void r2_agree_member_collect(struct r2_agree *a)
{
    for (;;) {
        void *object = NULL;

        pthread_mutex_lock(&a->lock);
        if (a->ngarbage > 0) {
            object = a->garbage[--a->ngarbage];
        }
        pthread_mutex_unlock(&a->lock);
        if (!object) {
            return;
        }
        if (a->ops && a->ops->release) {
            a->ops->release(a->user, object);
        }
    }
}
