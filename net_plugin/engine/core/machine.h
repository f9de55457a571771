/* What the tables of the state machines (*.def) are read with. Pure. */
#ifndef R2_ENGINE_CORE_MACHINE_H
#define R2_ENGINE_CORE_MACHINE_H

struct r2_machine_row {
    unsigned char state, event, next;
};

/* One transition of the machine with this prefix. */
#define R2_MACHINE_ROW(prefix, state, event, next)                                                 \
    {prefix##_##state, prefix##_EV_##event, prefix##_##next},

/* NULL: the table has none. */
static inline const struct r2_machine_row *r2_machine_find(const struct r2_machine_row *rows,
                                                           unsigned n, unsigned state,
                                                           unsigned event)
{
    for (unsigned i = 0; i < n; i++) {
        if (rows[i].state == state && rows[i].event == event)
            return &rows[i];
    }
    return 0;
}

/* What follows; without a row in the table, the state itself. */
static inline unsigned r2_machine_next(const struct r2_machine_row *rows, unsigned n,
                                       unsigned state, unsigned event)
{
    const struct r2_machine_row *row = r2_machine_find(rows, n, state, event);

    return row ? row->next : state;
}

#define R2_MACHINE_ROWS(rows) rows, sizeof(rows) / sizeof((rows)[0])
#define R2_MACHINE_NEXT(rows, state, event) r2_machine_next(R2_MACHINE_ROWS(rows), state, event)

#endif
