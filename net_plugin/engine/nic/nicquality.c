/* NICs that work badly from the start: they lose packets, or carry far less than their siblings.
 *
 * A path is judged by its own best and by its siblings (core/grey). Where every NIC loses packets,
 * no sibling does better; a NIC that was never faster is at its best. Nothing needs to be done
 * about either: paths pull. But somebody has to look at the cable, so operators are told. */
#include <stdio.h>
#include <string.h>

#include "engine/nic/nics.h"

#define LOOK_NS (1 * R2_NS_PER_S)
#define LEAST 100      /* segments, or */
#define LEAST_AGAIN 10 /* sent again, for a window */
#define LOSSY_PPM 50000
#define CLEAN_PPM 10000
#define LOOKS_WELL 5

enum kind { LOSSY, BEHIND, KINDS };

/* Looks in a row until it is said, and until it is said along with another NIC. */
static const int looks[KINDS] = {[LOSSY] = 3, [BEHIND] = 10};
static const int looks_along[KINDS] = {[LOSSY] = 1, [BEHIND] = 5};

static struct quality {
    uint64_t segments, resent; /* when the window began */
    struct {
        int bad, good; /* looks in a row */
        bool told;
        char text[64];
    } of[KINDS];
} quality[R2_MAX_NICS];
static uint64_t looked_at;

enum found { GOOD, BAD, UNKNOWN };

/* By the segments since the last look at which there were enough. */
static enum found lossy(int nic, char *text, size_t cap)
{
    struct r2_seg_nic_counters *n = r2_control_nic_counters(r2_eng.ctl, nic);
    uint64_t all = __atomic_load_n(&n->tx_segments, __ATOMIC_RELAXED);
    uint64_t again = __atomic_load_n(&n->retransmits, __ATOMIC_RELAXED);
    struct quality *q = &quality[nic];
    uint64_t segments = all - q->segments, resent = again - q->resent, ppm;

    if (segments < LEAST && (resent < LEAST_AGAIN || !segments))
        return UNKNOWN;
    q->segments = all;
    q->resent = again;
    ppm = resent >= segments ? 1000000 : resent * 1000000 / segments;
    r2_gauge(&n->loss_ppm, ppm);
    if (ppm < LOSSY_PPM || resent < LEAST_AGAIN)
        return ppm <= CLEAN_PPM ? GOOD : UNKNOWN;
    snprintf(text, cap, "%u %% of its segments are sent again", (unsigned)(ppm / 10000));
    return BAD;
}

/* One that is to carry less by its weight is not behind. Loopback addresses have no wire that could
 * be wrong: the machine's cores differ there. */
static enum found behind(int nic, char *text, size_t cap)
{
    bool full = atomic_load(&r2_eng.nic_state[nic].weight) == R2_WEIGHT_FULL;
    uint32_t share = full && !r2_local.nics[nic].loopback ? r2_grey_nic_behind(nic) : 0;

    if (!share)
        return GOOD;
    snprintf(text, cap, "carries %u %% of what its siblings carry", share < 10 ? 1 : share / 10);
    return BAD;
}

static void take_back(int nic, enum kind kind)
{
    const char *what = kind == LOSSY ? "its segments are hardly sent again any more"
                                     : "carries as much as its siblings again";

    quality[nic].of[kind].told = false;
    r2_nic_journal(nic, R2_EV_WARNING, what);
    r2_nicstate_remark(nic, "");
    R2_INFO("NIC %s: %s", r2_nic_name(nic), what);
}

/* Whether the NIC is to be named for this, with others or not. */
static bool look(int nic, enum kind kind)
{
    struct quality *q = &quality[nic];
    char text[sizeof(q->of[kind].text)];
    enum found found =
        kind == LOSSY ? lossy(nic, text, sizeof(text)) : behind(nic, text, sizeof(text));

    if (found == UNKNOWN)
        return false;
    q->of[kind].bad = found == BAD ? q->of[kind].bad + 1 : 0;
    q->of[kind].good = found == GOOD ? q->of[kind].good + 1 : 0;
    if (q->of[kind].told && q->of[kind].good >= LOOKS_WELL)
        take_back(nic, kind);
    if (!q->of[kind].told && found == BAD)
        snprintf(q->of[kind].text, sizeof(text), "%s", text);
    return !q->of[kind].told && q->of[kind].bad >= looks[kind];
}

/* One line for all NICs that are so now. */
static void tell(enum kind kind)
{
    static const char *const remedy[] = {
        [LOSSY] = "Packets are lost: look at cable, switch port, MTU and congestion, here and at "
                  "the peers",
        [BEHIND] = "Look at the speed of its link and its PCIe slot, here and at the peers",
    };
    char names[R2_MAX_NICS * 110] = "";

    for (int i = 0; i < r2_local.n; i++) {
        struct quality *q = &quality[i];
        size_t at = strlen(names);

        if (q->of[kind].told || q->of[kind].bad < looks_along[kind])
            continue;
        q->of[kind].told = true;
        r2_nic_journal(i, R2_EV_WARNING, q->of[kind].text);
        snprintf(names + at, sizeof(names) - at, "%sNIC %s: %s", at ? "; " : "", r2_nic_name(i),
                 q->of[kind].text);
    }
    R2_TELL("%s. %s. `r2ccl-ctl nics` and `paths` show more", names, remedy[kind]);
}

/* Beside a state that says more itself there is no word. */
static void remark(int nic)
{
    const struct quality *q = &quality[nic];

    if (!r2_nic_trusted(nic))
        return;
    for (int kind = 0; kind < KINDS; kind++) {
        if (q->of[kind].told) {
            r2_nicstate_remark(nic, q->of[kind].text);
            return;
        }
    }
}

void r2_nicquality_tick(uint64_t now)
{
    if (now - looked_at < LOOK_NS)
        return;
    looked_at = now;
    for (int kind = 0; kind < KINDS; kind++) {
        bool new = false;

        for (int i = 0; i < r2_local.n; i++)
            new |= look(i, (enum kind)kind);
        if (new)
            tell((enum kind)kind);
    }
    for (int i = 0; i < r2_local.n; i++)
        remark(i);
}
