/* What a member sends, to ranks of its roster and to the rendezvous, and the fence that its
 * state sets for the application's thread. Service thread. */
#include <string.h>

#include "agree/internal.h"

void r2_agree_member_fence(struct r2_agree *a)
{
    uint64_t fence = a->state == R2_AGREE_OFF ? UINT64_MAX : r2_agree_machine_fence(&a->machine);

    atomic_store(&a->fence, a->life != R2_LIFE_ON || a->told ? 0 : fence);
}

void r2_agree_member_send(struct r2_agree *a, uint32_t rank, enum r2_agree_kind kind,
                          const void *first, size_t first_len, const void *second,
                          size_t second_len)
{
    struct r2_agree_frame f = {.kind = kind,
                               .from = (uint32_t)a->rank,
                               .to = rank,
                               .len = (uint32_t)(first_len + second_len)};
    const struct r2_agree_hello *to;

    if (!a->roster.seats || rank >= a->roster.nranks) {
        return;
    }
    to = &a->roster.processes[a->roster.seats[rank].process];
    memcpy(f.token, a->token, R2_AGREE_TOKEN);
    atomic_fetch_add_explicit(&a->sent, 1, memory_order_relaxed); /* a figure, orders nothing */
    r2_agree_service_send(to->process, &to->addr, &f, first, first_len, second);
}

enum r2_agree_way r2_agree_member_way(struct r2_agree *a, uint32_t rank)
{
    const struct r2_agree_hello *to;

    if (!a->roster.seats || rank >= a->roster.nranks) {
        return R2_WAY_NONE;
    }
    to = &a->roster.processes[a->roster.seats[rank].process];
    return r2_agree_service_way(to->process, &to->addr);
}

void r2_agree_member_say(struct r2_agree *a, uint32_t rank, const struct r2_agree_msg *msg)
{
    bool plan = msg->type == R2_AGREE_PROPOSE;
    uint8_t text[R2_AGREE_MSG_BYTES];

    r2_agree_msg_encode(text, msg);
    r2_agree_member_send(a, rank, R2_FRAME_MACHINE, text, sizeof(text), plan ? a->plan : NULL,
                         plan ? a->plan_len : 0);
}

void r2_agree_member_to_root(struct r2_agree *a, enum r2_agree_kind kind, const void *payload,
                             size_t len)
{
    struct r2_agree_frame f = {.kind = kind, .from = (uint32_t)a->rank, .len = (uint32_t)len};

    memcpy(f.token, a->token, R2_AGREE_TOKEN);
    r2_agree_service_send(NULL, &a->root, &f, payload, len, NULL);
}
