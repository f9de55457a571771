/* What operators are told of a NIC that reaches nobody, over a scripted transport. One test thread.
 */
#ifndef R2_TESTS_UNREACHED_BED_H
#define R2_TESTS_UNREACHED_BED_H

#include "check.h"
#include "control/impl.h"
#include "enginelib/remote.h"
#include "journal_look.h"

#define LOOKS 10
#define WAIT_MS 20000
#define WORD "has reached no peer yet"

static struct remote r;

/* What operators see; on I/O thread 0, which writes it. */
static char seen[80];

static void see(int nic)
{
    snprintf(seen, sizeof(seen), "%.79s", r2_eng.ctl->seg->nics[r2_eng.nic_state[nic].row].cause);
}

static inline const char *cause_of(int nic)
{
    CHECK(remote_command(see, nic));
    return seen;
}

static inline bool marked(int nic)
{
    return strncmp(cause_of(nic), WORD, strlen(WORD)) == 0;
}

/* Warnings about the NIC in the journal that begin like that. */
static inline int warned(int nic, const char *begins)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;
    uint64_t to = journal_head(seg);
    int n = 0;

    for (uint64_t i = journal_tail(seg); i < to; i++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, i);

        n += e && e->event == R2_EV_WARNING && strcmp(e->nic, r2_nic_name(nic)) == 0 &&
             strncmp(e->cause, begins, strlen(begins)) == 0;
    }
    return n;
}

#endif
