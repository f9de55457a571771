/* Rules of R2CCL_FAULTS: faults that a process injects into its own NICs. Pure.
 *
 *     NIC KIND [direction=tx|rx|both] [after=BYTES] [ops=N] [for=TIME] [at=TIME] [node=N] [rank=N]
 *
 * divided by ";" or by lines, in the words of `r2ccl-ctl faults apply`; `ops` is the process's N-th
 * send or receive, `node` and `rank` are who it is for. Node: a number, or a name. */
#ifndef R2_ENGINE_NIC_FAULTRULES_H
#define R2_ENGINE_NIC_FAULTRULES_H

#include <stddef.h>

#include "io/fault.h"

#define R2_FAULT_RULES 64

struct r2_fault_rule {
    char nic[64];
    char node[64]; /* "": any */
    int rank;      /* -1: any */
    bool recover;
    uint64_t at_ns; /* since the start */
    struct r2_fault fault;
};

/* Number of rules, at most R2_FAULT_RULES, or -EINVAL with a message in `err`. */
int r2_fault_rules_parse(const char *text, struct r2_fault_rule *out, char *err, size_t errlen);

#endif
