/* What the tables of the state machines (*.def) are read with. Pure. */
#ifndef R2_ENGINE_CORE_MACHINE_H
#define R2_ENGINE_CORE_MACHINE_H

struct r2_machine_row {
    unsigned char state, event, next;
};

/* What follows; without a row in the table, the state itself. */
static inline unsigned r2_machine_find(const struct r2_machine_row *rows, unsigned n,
                                       unsigned state, unsigned event)
{
    for (unsigned i = 0; i < n; i++) {
        if (rows[i].state == state && rows[i].event == event)
            return rows[i].next;
    }
    return state;
}

#define R2_MACHINE_NEXT(rows, state, event)                                                        \
    r2_machine_find(rows, sizeof(rows) / sizeof((rows)[0]), state, event)

#endif
