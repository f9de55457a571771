/* This node's NICs: their states, links, transports, and what peers are told about them. */
#ifndef R2_ENGINE_NIC_NICS_H
#define R2_ENGINE_NIC_NICS_H

#include "engine/sched/sched.h"
#include "topology/nettables.h"

/* ---- nicrdma.c */
void r2_nic_publish_rdma(void);
/* NICs without an interface come behind the `n` that were found; returns how many there are now. */
int r2_nic_add_ports(int n);
/* Of weight 0: others of the node have RDMA and it has not. Nobody has named it, or only as the
 * place where ports without an interface meet their peers. */
bool r2_nic_stands_by(int nic);
/* Of a NIC without an interface: the state of its port, which stands for its link. Any thread. */
bool r2_nic_port_up(int nic);
void r2_nic_port_note(int nic, bool up);
/* It is usable, and by RDMA where memory of devices is among what it carries. Any thread. */
bool r2_nic_serves(int nic);
/* How many of the others do. */
int r2_nic_others(int nic);

/* ---- nicstate.c */
/* Paths of the NIC that answer. */
static inline int r2_nic_answers(int nic)
{
    const atomic_int *census = r2_eng.nic_state[nic].census;

    return atomic_load(&census[R2_CENSUS_IN]) + atomic_load(&census[R2_CENSUS_OUT]);
}
static inline bool r2_nic_usable(int nic)
{
    return r2_nic_word(nic) == R2_NIC_USABLE;
}
/* What engine/locate found about a local NIC: it fails for all peers at once. Takes peers' locks:
 * the caller holds none. */
void r2_nicstate_located(int nic, const char *why, uint64_t now);
/* Calls `each` with every endpoint of the NIC that is not closed, of all peers; outside all locks.
 */
void r2_nic_eps(int nic, void (*each)(struct r2_ep *ep, void *arg), void *arg);
void r2_nicstate_start(uint64_t now);
/* What it does for one NIC before anybody connects. */
void r2_nicstate_begin(int nic, uint64_t now);
/* Time passes; I/O thread 0. */
void r2_nicstate_tick(uint64_t now);
void r2_nicstate_drain(int nic, uint64_t now);
/* Undoes a drain; forgets past failures, here and at the peers. */
void r2_nicstate_undrain(int nic, uint64_t now);
/* Past failures are forgotten, by the peers too. */
void r2_nicstate_forgive(int nic, uint64_t now);
/* Tells all peers the NIC's state and weight, and weighs their paths anew. */
void r2_nicstate_announce(int nic);
/* Operators see that nobody can connect to it, or that one can again. */
void r2_nicstate_deaf(int nic, bool deaf);
/* A remark beside the NIC's state, which stays: its row has it until "" removes it or the state
 * changes. The text is always the same one. */
void r2_nicstate_remark(int nic, const char *cause);

/* What happened to the NIC's place; whether that changes it. I/O thread 0, and the thread of a port
 * without an interface. */
bool r2_nicstate_place(int nic, enum r2_place_event event, const char *cause, uint64_t now);

/* ---- niclink.c: links, addresses and interfaces of this node's NICs. I/O thread 0, which waits
 * for none of this: the kernel's answers come when they come, and a NIC is what it was until then.
 */
/* After r2_nicstate_start. `links` is kicked when answers are there or events were left, and calls
 * r2_niclink_answers; r2_eng.watch_fd.ready calls r2_niclink_events. */
void r2_niclink_start(struct r2_task *links);
void r2_niclink_answers(uint64_t now);
void r2_niclink_events(uint64_t now);
/* One transport of the NIC is gone (and has ended its endpoints), or back: tried again now. */
void r2_nic_transport(int nic, int transport, bool up, const char *cause, uint64_t now);
void r2_niclink_look(int nic, uint64_t now);
/* Every 20 ms: what could not be asked before; once a second a look at each NIC. */
void r2_niclink_tick(uint64_t now);
/* Asks about its link now, without waiting for an event, which the kernel may hold back for a
 * second. The answer makes the NIC's state follow; as a rule within a millisecond. */
void r2_niclink_ask(int nic);

/* ---- nicask.c: questions to the kernel about interfaces, put by a thread of their own */
/* Slots of questions: of each NIC one, about its link, and one for the tables. */
#define R2_NICASK_TABLES R2_MAX_NICS
#define R2_NICASK_SLOTS (R2_MAX_NICS + 1)

struct r2_nicask {
    int ifindex;     /* of a NIC's question */
    uint64_t moment; /* r2_linkwatch_moment when it was put */
    uint64_t number; /* of the answer: they come one after another, a greater one is newer */
    int rc;          /* R2_LINK_UP, _DOWN, _REMOVED or -errno; of the tables: 0 or -errno */
    struct r2_net_tables tables; /* R2_NICASK_TABLES, rc 0: whoever takes the answer frees them */
};

/* Once, before the first question: `answered` is kicked when an answer is there. */
void r2_nicask_start(struct r2_task *answered);
/* Puts a question; false when that of the slot is out (or its answer has not been taken): one at a
 * time. Does not wait, unless no thread can be started. One thread at a time: I/O thread 0, and
 * before it knows of the NICs the one that starts the engine. */
bool r2_nicask_put(int slot, int ifindex, uint64_t moment);
/* Answers that are there by now can be taken: what they say had been so before this call. For those
 * that come later the task is kicked again. By whoever puts questions, as is the next. */
void r2_nicask_ready(void);
/* Takes the slot's answer, if there is one that can be. */
bool r2_nicask_take(int slot, struct r2_nicask *out);

/* ---- nicreach.c: NICs that have reached nobody since the start. No function fails. */
/* I/O thread 0, without locks: time passes; what is done about it once a second. */
void r2_nicreach_tick(uint64_t now);
void r2_nicreach_look(void);
/* ---- nicquality.c: NICs that work, and lose packets or carry far less than the others. I/O thread
 * 0. */
void r2_nicquality_tick(uint64_t now);

/* ---- niccmd.c: the operator's commands, injected faults, housekeeping */
/* Commands that are there are carried out, faults that are over end. */
/* An injected fault, with its event; and its end, which forgives the NIC. I/O thread 0, or before
 * there are paths. */
struct r2_fault;
void r2_nic_inject(int nic, const struct r2_fault *fault);
void r2_nic_clear_fault(int nic, const char *who, uint64_t now);
/* R2CCL_FAULTS, and the faults that the reference's variables ask for. */
void r2_nicfaults_start(uint64_t now);
void r2_nicfaults_tick(uint64_t now);
void r2_niccmd_tick(uint64_t now);

#endif
