/* What became of the promise? Asked on behalf of a rank that waits, and now and then of one that
 * does not yet. */
#include "agree/internal.h"
#include "util/clock.h"

#define R2_ASK_LEADER_NS (20 * R2_NS_PER_MS) /* into a wait */
#define R2_ASK_AGAIN_NS (200 * R2_NS_PER_MS) /* then again; doubles */
#define R2_ASK_DEAF_NS R2_NS_PER_S           /* a leader so long silent: ask others, too */
#define R2_ASK_FIRST 8                       /* so many; doubles */
#define R2_ASK_MOST_NS (5 * R2_NS_PER_S)
#define R2_ASK_IDLE_NS (5 * R2_NS_PER_S) /* a promise that nobody waits for yet */

void r2_agree_ask_begin(struct r2_agree *a, uint64_t now)
{
    a->ask_wait_ns = 0;
    a->ask_width = 0;
    a->ask_ns = now + R2_ASK_IDLE_NS;
}

/* The leader is silent. Others may know, or settle it by saying never. Not all at once: hundreds of
 * ranks wait for the same thing, and one that has learnt it tells everybody who asks. Starts with
 * the next ranks, doubles, comes round. */
static void r2_ask_others(struct r2_agree *a, const struct r2_agree_msg *msg)
{
    int most = a->nranks - 2; /* all but the leader and itself */

    a->ask_width = a->ask_width ? a->ask_width * 2 : R2_ASK_FIRST;
    a->ask_width = a->ask_width < most ? a->ask_width : most;
    for (int i = 0; i < a->ask_width; i++) {
        int rank = 1 + (a->rank + a->ask_at + i) % (a->nranks - 1);

        if (rank == a->rank) {
            a->ask_at++;
            rank = 1 + (a->rank + a->ask_at + i) % (a->nranks - 1);
        }
        r2_agree_member_say(a, (uint32_t)rank, msg);
    }
    a->ask_at = (a->ask_at + a->ask_width) % (a->nranks - 1);
}

void r2_agree_ask_turn(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_msg msg;
    uint64_t since;
    bool open;

    pthread_mutex_lock(&a->lock);
    open = a->rank != R2_AGREE_LEADER && r2_agree_machine_ask(&a->machine, &msg);
    since = a->waiting_since;
    pthread_mutex_unlock(&a->lock);
    if (!open) {
        return;
    }
    if (since && a->ask_wait_ns == 0) { /* the wait has just begun: the answer may be on its way */
        a->ask_wait_ns = R2_ASK_LEADER_NS;
        a->ask_ns = since + R2_ASK_LEADER_NS;
    }
    if (now >= a->ask_ns) {
        r2_agree_member_say(a, R2_AGREE_LEADER, &msg);
        if (since && now >= since + R2_ASK_DEAF_NS && now >= a->leader_heard_ns + R2_ASK_DEAF_NS) {
            r2_ask_others(a, &msg);
        }
        if (since) {
            a->ask_wait_ns =
                a->ask_wait_ns < R2_ASK_AGAIN_NS ? R2_ASK_AGAIN_NS : a->ask_wait_ns * 2;
        }
        if (a->ask_wait_ns > R2_ASK_MOST_NS) {
            a->ask_wait_ns = R2_ASK_MOST_NS;
        }
        a->ask_ns = now + (since ? a->ask_wait_ns : R2_ASK_IDLE_NS);
    }
    a->deadline_ns = a->ask_ns < a->deadline_ns ? a->ask_ns : a->deadline_ns;
}
