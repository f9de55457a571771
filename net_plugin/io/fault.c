#include "io/fault.h"

#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "settings/values.h"
#include "topology/nics.h"
#include "util/clock.h"
#include "util/random.h"

#define PIECE (64 * 1024)
#define RTO_NS (200 * R2_NS_PER_MS)
#define PPM 1e6

const char r2_fault_kinds[] = "blackhole, error, slow=RATE, loss=PERCENT";

static const char *const names[] = {
    [R2_SEG_FAULT_BLACKHOLE] = "blackhole",
    [R2_SEG_FAULT_ERROR] = "error",
    [R2_SEG_FAULT_SLOW] = "slow",
    [R2_SEG_FAULT_LOSS] = "loss",
};

struct slot {
    pthread_mutex_t lock;
    struct r2_fault f;
    bool in_force;
    bool changed;
    uint64_t until_ns;     /* once in force; 0: until cleared */
    uint64_t moved;        /* bytes since it was set */
    uint64_t ops;          /* operations since it was set */
    uint64_t tokens_ns[2]; /* SLOW: the time up to which the direction is paid for */
    uint64_t stall_until[2];
    uint64_t to_next[2]; /* LOSS: bytes until the dice are thrown again */
    struct r2_prng prng;
};

atomic_bool r2_fault_armed[R2_MAX_NICS];

static atomic_bool counts_ops[R2_MAX_NICS]; /* its fault begins at an operation */
static atomic_bool any_counts;

static struct slot slots[R2_MAX_NICS] = {
    [0 ... R2_MAX_NICS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

/* 100mbit, 1.5gbit/s, 10MB/s: bits in powers of 1000, bytes of 1024. */
static int rate_of(const char *text, uint64_t *out)
{
    static const char prefixes[] = "kmgt";
    const char *end = text, *prefix;
    double rate, step;
    int power;

    if (r2_value_decimal(&end, &rate))
        return -EINVAL;
    prefix = *end ? strchr(prefixes, tolower((unsigned char)*end)) : NULL;
    power = prefix ? (int)(prefix - prefixes) + 1 : 0;
    end += power > 0;
    if (strcasecmp(end, "bit") == 0 || strcasecmp(end, "bit/s") == 0) {
        step = 1000;
        rate /= 8;
    } else if (strcmp(end, "B") == 0 || strcmp(end, "B/s") == 0) {
        step = 1024;
    } else {
        return -EINVAL;
    }
    for (; power > 0; power--)
        rate *= step;
    if (!(rate >= 1 && rate < 9e18))
        return -EINVAL;
    *out = (uint64_t)rate;
    return 0;
}

static int percent_of(const char *text, uint32_t *ppm)
{
    double percent;

    if (r2_value_decimal(&text, &percent) || (*text && strcmp(text, "%") != 0) ||
        !(percent * PPM / 100 >= 0.5 && percent <= 100))
        return -EINVAL;
    *ppm = percent * PPM / 100 < 1 ? 1 : (uint32_t)(percent * PPM / 100 + 0.5);
    return 0;
}

int r2_fault_kind(const char *text, struct r2_fault *f)
{
    size_t len = strcspn(text, "=");
    const char *value = text[len] ? text + len + 1 : NULL;

    for (unsigned kind = R2_SEG_FAULT_NONE + 1; kind <= R2_SEG_FAULT_LAST; kind++)
        if (strlen(names[kind]) == len && strncmp(text, names[kind], len) == 0)
            f->kind = (enum r2_seg_fault)kind;
    if (f->kind == R2_SEG_FAULT_SLOW)
        return value ? rate_of(value, &f->rate) : -EINVAL;
    if (f->kind == R2_SEG_FAULT_LOSS)
        return value ? percent_of(value, &f->loss_ppm) : -EINVAL;
    return f->kind == R2_SEG_FAULT_NONE || value ? -EINVAL : 0;
}

static void strike(struct slot *s)
{
    s->in_force = true;
    s->until_ns = s->f.for_ns ? r2_now_ns() + s->f.for_ns : 0;
}

void r2_fault_set(int nic, const struct r2_fault *fault)
{
    struct slot *s = &slots[nic];

    pthread_mutex_lock(&s->lock);
    s->f = *fault;
    s->moved = s->ops = 0;
    s->in_force = false;
    if (fault->after_bytes == 0 && fault->after_ops == 0)
        strike(s);
    atomic_store(&counts_ops[nic], fault->after_ops != 0);
    if (fault->after_ops)
        atomic_store(&any_counts, true);
    s->changed = true;
    memset(s->tokens_ns, 0, sizeof(s->tokens_ns));
    memset(s->stall_until, 0, sizeof(s->stall_until));
    memset(s->to_next, 0, sizeof(s->to_next));
    r2_prng_seed(&s->prng, r2_now_ns());
    atomic_store(&r2_fault_armed[nic], fault->kind != R2_SEG_FAULT_NONE);
    pthread_mutex_unlock(&s->lock);
}

void r2_fault_clear(int nic)
{
    struct r2_fault none = {.kind = R2_SEG_FAULT_NONE};

    r2_fault_set(nic, &none);
}

enum r2_fault_news r2_fault_tick(int nic, uint64_t now)
{
    struct slot *s = &slots[nic];
    enum r2_fault_news news;

    pthread_mutex_lock(&s->lock);
    news = s->changed ? R2_FAULT_CHANGED : R2_FAULT_SAME;
    s->changed = false;
    if (s->f.kind != R2_SEG_FAULT_NONE && s->in_force && s->until_ns && now >= s->until_ns) {
        s->f.kind = R2_SEG_FAULT_NONE;
        s->in_force = false;
        news = R2_FAULT_OVER;
        atomic_store(&r2_fault_armed[nic], false);
    }
    pthread_mutex_unlock(&s->lock);
    return news;
}

static bool applies(const struct slot *s, int dir)
{
    return s->in_force && (dir == R2_FAULT_TX ? s->f.tx : s->f.rx);
}

/* Token bucket with a burst of 20 ms or one piece. */
static size_t allow_slow(struct slot *s, int dir, size_t want, uint64_t now, uint64_t *retry)
{
    uint64_t rate = s->f.rate ? s->f.rate : 1;
    uint64_t burst_ns = 20 * R2_NS_PER_MS;

    if (s->tokens_ns[dir] + burst_ns < now)
        s->tokens_ns[dir] = now - burst_ns;
    if (s->tokens_ns[dir] > now) {
        *retry = s->tokens_ns[dir];
        return 0;
    }
    if (want > PIECE)
        want = PIECE;
    s->tokens_ns[dir] += want * R2_NS_PER_S / rate;
    return want;
}

static size_t allow_loss(struct slot *s, int dir, size_t want, uint64_t now, uint64_t *retry)
{
    if (s->stall_until[dir] > now) {
        *retry = s->stall_until[dir];
        return 0;
    }
    if (s->to_next[dir] == 0) {
        s->to_next[dir] = PIECE;
        if (r2_prng_below(&s->prng, 1000000) < s->f.loss_ppm) {
            s->stall_until[dir] = now + RTO_NS;
            *retry = s->stall_until[dir];
            return 0;
        }
    }
    if (want > s->to_next[dir])
        want = s->to_next[dir];
    s->to_next[dir] -= want;
    return want;
}

size_t r2_fault_allow(int nic, int dir, size_t want, uint64_t *retry_ns)
{
    struct slot *s = &slots[nic];
    size_t ok = want;

    if (!atomic_load_explicit(&r2_fault_armed[nic], memory_order_relaxed))
        return want;
    pthread_mutex_lock(&s->lock);
    *retry_ns = 0;
    if (s->f.kind != R2_SEG_FAULT_NONE && !s->in_force) {
        s->moved += want;
        if (s->f.after_bytes && s->moved >= s->f.after_bytes) {
            strike(s);
            s->changed = true;
        }
    } else if (applies(s, dir)) {
        uint64_t now = r2_now_ns();

        if (s->f.kind == R2_SEG_FAULT_BLACKHOLE || s->f.kind == R2_SEG_FAULT_ERROR)
            ok = 0;
        else if (s->f.kind == R2_SEG_FAULT_SLOW)
            ok = allow_slow(s, dir, want, now, retry_ns);
        else if (s->f.kind == R2_SEG_FAULT_LOSS)
            ok = allow_loss(s, dir, want, now, retry_ns);
    }
    pthread_mutex_unlock(&s->lock);
    return ok;
}

static void count_op(int nic)
{
    struct slot *s = &slots[nic];

    pthread_mutex_lock(&s->lock);
    if (s->f.kind != R2_SEG_FAULT_NONE && !s->in_force && ++s->ops >= s->f.after_ops) {
        strike(s);
        s->changed = true;
        atomic_store(&counts_ops[nic], false);
    }
    pthread_mutex_unlock(&s->lock);
}

void r2_fault_op(void)
{
    if (!atomic_load_explicit(&any_counts, memory_order_relaxed))
        return;
    for (int nic = 0; nic < R2_MAX_NICS; nic++)
        if (atomic_load_explicit(&counts_ops[nic], memory_order_relaxed))
            count_op(nic);
}

void r2_fault_unmoved(int nic, int dir, size_t bytes)
{
    struct slot *s = &slots[nic];

    if (!bytes || !atomic_load_explicit(&r2_fault_armed[nic], memory_order_relaxed))
        return;
    pthread_mutex_lock(&s->lock);
    if (s->f.kind != R2_SEG_FAULT_NONE && !s->in_force) {
        s->moved -= bytes < s->moved ? bytes : s->moved;
    } else if (applies(s, dir) && s->f.kind == R2_SEG_FAULT_SLOW) {
        uint64_t paid = bytes * R2_NS_PER_S / (s->f.rate ? s->f.rate : 1);

        s->tokens_ns[dir] -= paid < s->tokens_ns[dir] ? paid : s->tokens_ns[dir];
    } else if (applies(s, dir) && s->f.kind == R2_SEG_FAULT_LOSS) {
        s->to_next[dir] += bytes;
        if (s->to_next[dir] > PIECE)
            s->to_next[dir] = PIECE;
    }
    pthread_mutex_unlock(&s->lock);
}

bool r2_fault_is(int nic, enum r2_seg_fault kind, int dir)
{
    struct slot *s = &slots[nic];
    bool yes;

    if (!atomic_load_explicit(&r2_fault_armed[nic], memory_order_relaxed))
        return false;
    pthread_mutex_lock(&s->lock);
    yes = s->f.kind == kind && applies(s, dir);
    pthread_mutex_unlock(&s->lock);
    return yes;
}

void r2_fault_text(int nic, char *out, size_t cap)
{
    struct slot *s = &slots[nic];
    const char *dir;
    char detail[48] = "";

    pthread_mutex_lock(&s->lock);
    dir = s->f.tx && s->f.rx ? "both" : s->f.tx ? "tx" : "rx";
    if (s->f.kind == R2_SEG_FAULT_SLOW)
        snprintf(detail, sizeof(detail), " %llu B/s", (unsigned long long)s->f.rate);
    else if (s->f.kind == R2_SEG_FAULT_LOSS)
        snprintf(detail, sizeof(detail), " %u ppm", s->f.loss_ppm);
    if (s->f.kind == R2_SEG_FAULT_NONE)
        snprintf(out, cap, "%s", "");
    else
        snprintf(out, cap, "%s%s %s%s", names[s->f.kind], detail, dir,
                 s->in_force ? "" : " (armed)");
    pthread_mutex_unlock(&s->lock);
}
