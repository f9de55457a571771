/* At the end of each table of a state machine (*.def). No guard: each table includes it. */
#undef R2_STATE
#undef R2_EVENT
#undef R2_NEXT
