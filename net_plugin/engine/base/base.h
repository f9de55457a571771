/* What all layers of the engine share: its objects, and what is known about this node's NICs. */
#ifndef R2_ENGINE_BASE_BASE_H
#define R2_ENGINE_BASE_BASE_H

#include "engine/objects.h"

/* ---- base.c: what is known about this node's NICs; any thread */
/* As r2_transport_events.meeting. */
int r2_nic_meeting(void);
/* The NIC that has this address, -1: none, it is another node's. */
int r2_nic_own(const struct r2_wire_addr *addr);
/* A path over the NIC has proven itself, to a peer that is not on this node. */
void r2_nic_met(int nic);
/* Fills r2_eng.near, once the NICs are known. */
void r2_near_find(void);
/* What peers are told about it. */
static inline enum r2_nic_word r2_nic_word(int nic)
{
    return (enum r2_nic_word)atomic_load(&r2_eng.nic_state[nic].word);
}

static inline const char *r2_nic_name(int nic)
{
    return nic >= 0 && nic < r2_local.n ? r2_local.nics[nic].name : "?";
}

#endif
