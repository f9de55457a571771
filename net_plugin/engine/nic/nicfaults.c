/* Faults that the environment asks for: R2CCL_FAULTS, and the variables by which the R2CC fork of
 * NCCL simulates failures. On I/O thread 0, or before it has anything to do. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/impl.h"
#include "engine/nic/faultrules.h"
#include "engine/nic/nics.h"
#include "settings/launch.h"

#define STEP 10 /* R2CC_DISCONNECTED_STEP, where it is not set */

static struct r2_fault_rule rules[R2_FAULT_RULES];
static int n_rules;
static uint64_t started_at;

static int number_or(const char *text, int otherwise)
{
    char *end;
    long value = strtol(text, &end, 10);

    return end == text || *end || value < 0 || value > INT32_MAX ? otherwise : (int)value;
}

/* This node's number in the job, as the launcher counts them; -1: it does not say. */
static int own_node(void)
{
    const char *group = getenv("GROUP_RANK"), *slurm = getenv("SLURM_NODEID");
    int rank = r2_launch_rank(), local = r2_launch_local_ranks(getenv);

    if (group && *group)
        return number_or(group, -1);
    if (getenv("SLURM_STEP_ID") && slurm && *slurm)
        return number_or(slurm, -1);
    return rank >= 0 && local > 0 ? rank / local : -1;
}

static bool is_own_node(const char *node)
{
    return strcmp(node, r2_eng.host) == 0 ||
           (isdigit((unsigned char)*node) && number_or(node, -2) == own_node());
}

static bool is_for_us(const struct r2_fault_rule *rule)
{
    return (!rule->node[0] || is_own_node(rule->node)) &&
           (rule->rank < 0 || rule->rank == r2_launch_rank());
}

/* By name, interface, address or RDMA device, or as the n-th of this process; -1. */
static int find_nic(const char *name)
{
    int nic = r2_control_nic_find(r2_eng.ctl, name);

    for (int i = 0; i < r2_local.n && nic < 0; i++)
        if (r2_local.nics[i].rdma[0] && strcmp(r2_local.nics[i].rdma, name) == 0)
            nic = i;
    if (nic < 0 && isdigit((unsigned char)*name))
        nic = number_or(name, -1);
    return nic < r2_local.n ? nic : -1;
}

static void apply(const struct r2_fault_rule *rule, uint64_t now)
{
    int nic = find_nic(rule->nic);

    if (nic < 0)
        R2_TELL("R2CCL_FAULTS: no NIC '%s' here (`r2ccl-ctl nics` lists them): this rule does "
                "nothing on this node",
                rule->nic);
    else if (rule->recover)
        r2_nic_clear_fault(nic, "R2CCL_FAULTS", now);
    else
        r2_nic_inject(nic, &rule->fault);
}

static void tell(const char *why, int nic, uint64_t ops)
{
    char when[48] = "at the start";

    if (ops)
        snprintf(when, sizeof(when), "at operation %llu", (unsigned long long)ops);
    R2_TELL("%s: the failure of NIC %s is simulated %s, as in the R2CC fork of NCCL", why,
            r2_nic_name(nic), when);
}

/* The last NIC that is left is never taken: nothing would run. */
static void simulate(const char *why, unsigned nics, uint64_t ops)
{
    struct r2_fault lost = {.kind = R2_SEG_FAULT_ERROR, .tx = true, .rx = true, .after_ops = ops};
    unsigned all = (1u << r2_local.n) - 1;

    if (nics && (nics & all) == all) {
        R2_TELL("%s takes all %d NICs of this node: none is taken", why, r2_local.n);
        return;
    }
    for (int i = 0; i < r2_local.n; i++) {
        if (nics >> i & 1) {
            r2_nic_inject(i, &lost);
            tell(why, i, ops);
        }
    }
}

/* A list of names or numbers; a number is also that at the end of a device's name (mlx5_3). */
static unsigned listed(const char *list)
{
    unsigned found = 0;
    char name[64];

    for (; *list; list += strcspn(list, ", \t"), list += strspn(list, ", \t")) {
        int nic;

        snprintf(name, sizeof(name), "%.*s", (int)strcspn(list, ", \t"), list);
        nic = find_nic(name);
        for (int i = 0; i < r2_local.n && nic < 0; i++) {
            const char *suffix = strrchr(r2_local.nics[i].rdma, '_');

            if (suffix && strcmp(suffix + 1, name) == 0)
                nic = i;
        }
        if (nic >= 0)
            found |= 1u << nic;
        else if (*name)
            R2_TELL("R2CC_FAILED_HCA, R2CC_DISCONNECTED_HCA: no NIC '%s' here", name);
    }
    return found;
}

static unsigned last(int count)
{
    unsigned nics = 0;

    for (int i = r2_local.n - count; i < r2_local.n; i++)
        nics |= i >= 0 ? 1u << i : 0;
    return nics;
}

/* R2CC_MODE=2 and 3, or the three variables alone. */
static void simulate_failed(const struct r2_settings *set)
{
    int node = number_or(set->r2cc_failed_node, 0), own = own_node();

    if (own < 0)
        R2_TELL("R2CC_FAILED_NODE=%d: the launcher does not say which node this is (GROUP_RANK, "
                "SLURM_NODEID, or the rank and the ranks of a node): no failure is simulated",
                node);
    else if (own == node && set->r2cc_failed_hca[0])
        simulate("R2CC_FAILED_HCA", listed(set->r2cc_failed_hca), 0);
    else if (own == node)
        simulate(set->r2cc_failed_count[0] ? "R2CC_FAILED_NIC_COUNT" : "R2CC_MODE",
                 last(number_or(set->r2cc_failed_count, 1)), 0);
}

static void simulate_reference(const struct r2_settings *set)
{
    if (set->r2cc_mode == R2_MODE_MIGRATE)
        simulate("R2CC_MODE=1", 1, 0);
    else if (set->r2cc_mode == R2_MODE_BALANCE || set->r2cc_mode == R2_MODE_ALLREDUCE ||
             set->r2cc_failed_hca[0] || set->r2cc_failed_count[0])
        simulate_failed(set);
    if (set->r2cc_disconnected_hca[0])
        simulate("R2CC_DISCONNECTED_HCA", listed(set->r2cc_disconnected_hca),
                 (uint64_t)number_or(set->r2cc_disconnected_step, STEP) + 1);
}

void r2_nicfaults_start(uint64_t now)
{
    char err[400];
    int n = r2_fault_rules_parse(r2_eng.set->faults, rules, err, sizeof(err));

    started_at = now;
    if (n < 0)
        R2_TELL_ONE("R2CCL_FAULTS is not followed: %s", err);
    for (int i = 0; i < n; i++)
        if (is_for_us(&rules[i]))
            rules[n_rules++] = rules[i];
    if (n_rules)
        R2_TELL("R2CCL_FAULTS injects faults into NICs of this process (%d rules)", n_rules);
    simulate_reference(r2_eng.set);
    r2_nicfaults_tick(now);
}

void r2_nicfaults_tick(uint64_t now)
{
    for (int i = 0; i < n_rules;) {
        if (now - started_at < rules[i].at_ns) {
            i++;
            continue;
        }
        apply(&rules[i], now);
        n_rules--;
        memmove(&rules[i], &rules[i + 1], (size_t)(n_rules - i) * sizeof(rules[0]));
    }
}
