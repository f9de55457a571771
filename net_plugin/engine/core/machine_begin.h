/* At the start of each table of a state machine (*.def): who reads it defines what he takes. No
 * guard: each table includes it. */
#ifndef R2_STATE
#define R2_STATE(name, ...)
#endif
#ifndef R2_EVENT
#define R2_EVENT(name, ...)
#endif
#ifndef R2_NEXT
#define R2_NEXT(state, event, next)
#endif
