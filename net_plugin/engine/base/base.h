/* What all layers of the engine share: its objects, and what is known about this node's NICs. */
#ifndef R2_ENGINE_BASE_BASE_H
#define R2_ENGINE_BASE_BASE_H

#include "engine/objects.h"

/* ---- base.c: what is known about this node's NICs; any thread */
/* As r2_transport_events.meeting. */
int r2_nic_meeting(void);
/* The NIC that has this address, -1: none, it is another node's. */
int r2_nic_own(const struct r2_wire_addr *addr);
/* What it was before the event. */
enum r2_nicreach r2_nic_reach(int nic, enum r2_nicreach_event event);
struct r2_health r2_nic_health(int nic);
/* It is usable, and has not just come back. */
bool r2_nic_trusted(int nic);
/* Its failures count no more; if they kept it out of use, the next tick ends that. */
void r2_nic_forget(int nic);
/* Fills r2_eng.near, once the NICs are known. */
void r2_near_find(void);
static inline bool r2_nic_is_up(int nic)
{
    return atomic_load(&r2_eng.nic_state[nic].place) == R2_PLACE_UP;
}

/* What peers are told about it. */
static inline enum r2_nic_word r2_nic_word(int nic)
{
    return (enum r2_nic_word)atomic_load(&r2_eng.nic_state[nic].word);
}

void r2_nic_journal(int nic, enum r2_seg_event event, const char *cause);

static inline const char *r2_nic_name(int nic)
{
    return nic >= 0 && nic < r2_local.n ? r2_local.nics[nic].name : "?";
}

/* ---- colls.c: times of collectives: on and off, and out into the control segment */
/* The operator's word. 0, or -EOPNOTSUPP where NCCL has not taken the plugin's profiler. */
int r2_colls_record(bool on, char *result, size_t size);
/* I/O thread 0: what has ended goes into the segment. */
void r2_colls_tick(uint64_t now);

#endif
