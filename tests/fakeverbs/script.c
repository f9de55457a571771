/* Chaos and commands.
 *
 * R2_FAKEVERBS_CHAOS, and the command "chaos ...": words NAME=NUMBER separated by commas:
 *   seed=N           of the random numbers (0: from the clock; printed with verbose=1).
 *   late_write=N     of 1000 writes land only after their acknowledgement.
 *   late_cqe=N       of 1000 completions come late.
 *   late_us=N        how late at most, for both.
 *   overtake=1       a late completion holds back only those of its own work queue (send or receive
 *                    queue of one queue pair); else all that are behind it in its completion queue.
 *   cmd_us=N         how long a verbs command takes before it has any effect, at most.
 *   dry=1            as soft-RoCE: flushes take 10 ms, and a receive that is posted to a queue
 *                    without any in ERR is never flushed.
 *   gpu=1            what is written into DMA buffers is not seen there before the same device
 *                    has read from one.
 *   lost_cqe=N       of a million completions vanish.
 *   error=N          of a million requests fail with some code.
 *   damage=N         of a million writes of more than a heartbeat arrive with a changed byte.
 *
 * Commands, one per datagram:
 *   port DEV PORT up|down|blackhole   the event follows for up and down.
 *   inject DEV STATUS       the next request of the device fails with that enum ibv_wc_status.
 *   injected                answers when that was, in nanoseconds of CLOCK_MONOTONIC (0: not yet).
 *   lose DEV KIND [N]       the next completion (the next N) whose wr_id >> 48 is KIND never comes
 *                           (KIND 0: takes it back).
 *   most DEV N              requests of more than N bytes vanish, and with them what follows on
 *                           their queue pairs (0: takes it back).
 *   event DEV TYPE PORT     an asynchronous event, by number of enum ibv_event_type.
 *   queue DEV TYPE N        one of its N-th queue pair that is connected, or of that one's
 *                           completion queue.
 *   freeze DEV N            its N-th queue pair that is connected neither completes nor fails
 *                           anything any more.
 *   gid DEV PORT INDEX A.B.C.D   another entry (0.0.0.0: none), and the event.
 *   lid DEV PORT LID        the subnet manager gives the port another LID, and says so: it is met
 *                           there from now on; queue pairs that are connected work on.
 *   pkey DEV PORT INDEX KEY another partition key, and the event; queue pairs keep theirs.
 *   fatal DEV               the device fails: event, no command works, nothing moves; it stays
 *                           listed.
 *   remove DEV              hot-unplug: event, no command works, it is listed no more, and what was
 *                           made on it is gone.
 *   vanish DEV              the same without a word: no event, commands succeed, nothing arrives.
 *   unload DEV              as soft-RoCE is taken away: listed no more, not opened any more; all on
 *                           it works on, and it is there until it is closed.
 *   restore DEV [NAME]      it is listed again, as another device of the same GUID, under that
 *                           name; it refuses the registrations that the old one was to refuse.
 *   hang DEV 0|1|2          commands do not come back; those of a device that was removed: unhang
 *                           (2: nor does what is asked about a port).
 *   hang DEV open|pd|device|gid|port|port1|port2   that one call does not come back, until unhang.
 *   refuse DEV reg|dereg|err|destroy|chain N   so many commands fail; dereg: of a page or more;
 *                           chain: of so many chains of send requests only the first one is taken.
 *   chaos ...
 *   attr NAME               answers with what fv_attr (fake.h) tells.
 *   overtaken               answers how many completions came before an older one of their queue.
 *
 * fv_script(), for a test in the same process (dlsym): the next large write is caught, and lands
 * when the test says so, not before.
 *   late MIN      it is acknowledged, but not in memory; nothing behind it on its queue pair is
 *                 executed, no flush of its queue pair is delivered, and it is not destroyed.
 *   network MIN   it is under way to its responder, with all that follows it.
 *   undying       destroying its responder does not come back either.
 *   break         its requester gives up: RETRY_EXC_ERR.
 *   release       all of that is over: it arrives.
 *   damage write|send|head MIN [AT]   instead: the next RDMA write, send, or send with an immediate
 *                 of that many bytes arrives with a changed one (that one, else the middle);
 *                 nobody is told; answers 2 then.
 *   show          as the driver of a GPU does it: everything that was written is visible.
 *   closed        answers how many devices were closed.
 *   freeze QPN    the same, and it never gives up: its requests neither complete nor fail.
 *   only ADDR     of all there is, only what was registered there is not deregistered (0: any).
 *   mute QPN      requests of that queue pair vanish: as where a switch has one way of several that
 *                 is broken, and this one's packets go by it.
 *   slow QPN RATE requests of that queue pair leave with so many bytes/s, and it never gives up: as
 *                 where packets get lost, and each one that arrives ends the counting of retries.
 *   receives QPN  answers how many receives are posted on it.
 *   peer ADDR LEN VIEW   a peer memory module knows that memory of a device, which needs no mapping
 *                 there: VIEW is the device's side of it (LEN 0: known no more).
 *   held DEV ADDR answers how many registrations of that address the device has.
 *   hung DEV      answers how many calls of the device do not come back.
 *   unread DEV    answers how many of its events nobody has read.
 *   where         answers 10 and the last digit of the device's name that sent what was caught.
 *   source        answers the number of the queue pair that sent what was caught or damaged.
 *   !COMMAND      as above.
 * Answers 1 once it is caught, 2 once it has landed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

FV_EXPORT int fv_script(const char *text);

static uint64_t next_random(void)
{
    uint64_t z = fv.chaos.rng += 0x9e3779b97f4a7c15u; /* splitmix64 */

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

bool fv_chance(unsigned per, unsigned of)
{
    return per && next_random() % of < per;
}

uint64_t fv_random(uint64_t below)
{
    return below ? next_random() % below : 0;
}

void fv_chaos_parse(const char *text)
{
    static const struct {
        const char *name;
        size_t at;
    } words[] = {{"late_write", offsetof(struct fv_chaos, late_write)},
                 {"late_cqe", offsetof(struct fv_chaos, late_cqe)},
                 {"lost_cqe", offsetof(struct fv_chaos, lost_cqe)},
                 {"error", offsetof(struct fv_chaos, error)},
                 {"damage", offsetof(struct fv_chaos, damage)},
                 {"late_us", offsetof(struct fv_chaos, late_us)},
                 {"dry", offsetof(struct fv_chaos, dry)},
                 {"gpu", offsetof(struct fv_chaos, gpu)},
                 {"overtake", offsetof(struct fv_chaos, overtake)},
                 {"cmd_us", offsetof(struct fv_chaos, cmd_us)}};
    char copy[512], *save = NULL;

    snprintf(copy, sizeof(copy), "%s", text ? text : "");
    for (char *w = strtok_r(copy, ",", &save); w; w = strtok_r(NULL, ",", &save)) {
        char *eq = strchr(w, '=');

        if (!eq)
            continue;
        *eq = '\0';
        if (strcmp(w, "seed") == 0)
            fv.chaos.rng = fv.chaos.seed = strtoull(eq + 1, NULL, 0);
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            if (strcmp(w, words[i].name) == 0)
                *(unsigned *)(void *)((char *)&fv.chaos + words[i].at) =
                    (unsigned)strtoul(eq + 1, NULL, 0);
        }
    }
    if (!fv.chaos.rng)
        fv.chaos.rng = fv_now();
}

static struct fv_dev *named(const char *name)
{
    for (int i = fv.n_dev; i-- > 0;) { /* the last one that was put in */
        if (strcmp(fv.dev[i].base.name, name) == 0)
            return &fv.dev[i];
    }
    return NULL;
}

static void port_command(struct fv_dev *d, int port, const char *what)
{
    struct fv_port *p = &d->port[port];

    if (port < 1 || port > d->n_ports)
        return;
    p->blackhole = strcmp(what, "blackhole") == 0;
    if (p->blackhole)
        return;
    p->up = strcmp(what, "up") == 0;
    fv_async(d, p->up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, port, NULL);
}

static void gid_command(struct fv_dev *d, int port, int index, const char *addr)
{
    union ibv_gid *g = &d->port[port].gid[index];
    uint32_t ip = inet_addr(addr);

    if (port < 1 || port > d->n_ports || index < 0 || index >= FV_GIDS)
        return;
    memset(g, 0, sizeof(*g));
    if (ip) {
        g->raw[10] = g->raw[11] = 0xff;
        memcpy(g->raw + 12, &ip, 4);
    }
    fv_async(d, IBV_EVENT_GID_CHANGE, port, NULL);
}

static void lid_command(struct fv_dev *d, int port, int lid)
{
    struct fv_port *p = &d->port[port];

    if (port < 1 || port > d->n_ports)
        return;
    p->lid = (uint16_t)lid;
    if (p->ib && d->listener[port] >= 0) {
        p->ip = htonl((ntohl(p->ip) & ~0x7fffu) | (uint32_t)lid);
        close(d->listener[port]);
        d->listener[port] = -1;
        if (fv_listen(d, port))
            abort();
    }
    fv_async(d, IBV_EVENT_LID_CHANGE, port, NULL);
}

static void pkey_command(struct fv_dev *d, int port, int index, int key)
{
    if (port < 1 || port > d->n_ports || index < 0 || index >= FV_PKEYS)
        return;
    d->port[port].pkey[index] = (uint16_t)key;
    fv_async(d, IBV_EVENT_PKEY_CHANGE, port, NULL);
}

/* The device's queue pair of that number among those that are connected; NULL: none. */
static struct fv_qp *connected(const struct fv_dev *d, int number)
{
    for (int i = 0; i < FV_QPS; i++) {
        struct fv_qp *qp = fv.qps[i];

        if (qp && qp->dev == d && qp->base.state == IBV_QPS_RTS && number-- == 0)
            return qp;
    }
    return NULL;
}

static void queue_command(struct fv_dev *d, enum ibv_event_type type, int number)
{
    struct fv_qp *qp = connected(d, number);

    if (qp)
        fv_async(d, type, 0, &qp->base);
}

static void freeze_command(struct fv_dev *d, int number)
{
    struct fv_qp *qp = connected(d, number);

    if (qp)
        qp->mute = qp->frozen = true;
}

static void refuse_command(struct fv_dev *d, const char *what, int n)
{
    if (strcmp(what, "reg") == 0)
        d->no_reg = n;
    else if (strcmp(what, "err") == 0)
        d->no_modify_err = n;
    else if (strcmp(what, "destroy") == 0)
        d->no_destroy = n;
    else if (strcmp(what, "dereg") == 0)
        d->no_dereg = n;
    else if (strcmp(what, "chain") == 0)
        d->no_chain = n;
}

unsigned fv_call(const char *word)
{
    static const struct {
        const char *word;
        unsigned at;
    } calls[] = {{"open", FV_AT_OPEN},     {"pd", FV_AT_PD},        {"device", FV_AT_DEVICE},
                 {"gid", FV_AT_GID},       {"port", FV_AT_PORT(0)}, {"port1", FV_AT_PORT(1)},
                 {"port2", FV_AT_PORT(2)}, {"fail", FV_FAILS},      {"ports-fail", FV_PORTS_FAIL}};
    unsigned at = 0;

    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        at |= strcmp(word, calls[i].word) == 0 ? calls[i].at : 0;
    return at;
}

void fv_command(char *text)
{
    char verb[32] = "", dev[64] = "", word[64] = "";
    struct fv_dev *d;
    int a = 0, b = 0, c = 0;

    sscanf(text, "%31s %63s", verb, dev);
    if (strcmp(verb, "chaos") == 0) {
        fv_chaos_parse(text + 6);
        return;
    }
    if (strcmp(verb, "unhang") == 0) {
        for (int i = 0; i < fv.n_dev; i++)
            fv.dev[i].hang = 0, fv.dev[i].stuck = 0;
        fv.no_list = 0;
        pthread_cond_broadcast(&fv.unhang);
        return;
    }
    d = named(dev);
    if (!d)
        return;
    if (strcmp(verb, "port") == 0 && sscanf(text, "%*s %*s %d %63s", &a, word) == 2) {
        port_command(d, a, word);
    } else if (strcmp(verb, "inject") == 0 && sscanf(text, "%*s %*s %d", &a) == 1) {
        fv.inject = a;
        fv.injected_ns = 0;
        fv.inject_dev = d;
    } else if (strcmp(verb, "lose") == 0 && sscanf(text, "%*s %*s %d %d", &a, &b) >= 1) {
        d->lose = a;
        d->lose_n = b > 0 ? b : 1;
    } else if (strcmp(verb, "most") == 0 && sscanf(text, "%*s %*s %d", &a) == 1) {
        d->most = (uint32_t)a;
    } else if (strcmp(verb, "event") == 0 && sscanf(text, "%*s %*s %d %d", &a, &b) == 2) {
        fv_async(d, (enum ibv_event_type)a, b, NULL);
    } else if (strcmp(verb, "queue") == 0 && sscanf(text, "%*s %*s %d %d", &a, &b) == 2) {
        queue_command(d, (enum ibv_event_type)a, b);
    } else if (strcmp(verb, "freeze") == 0 && sscanf(text, "%*s %*s %d", &a) == 1) {
        freeze_command(d, a);
    } else if (strcmp(verb, "gid") == 0 && sscanf(text, "%*s %*s %d %d %63s", &a, &b, word) == 3) {
        gid_command(d, a, b, word);
    } else if (strcmp(verb, "lid") == 0 && sscanf(text, "%*s %*s %d %i", &a, &b) == 2) {
        lid_command(d, a, b);
    } else if (strcmp(verb, "pkey") == 0 && sscanf(text, "%*s %*s %d %d %i", &a, &b, &c) == 3) {
        pkey_command(d, a, b, c);
    } else if (strcmp(verb, "fatal") == 0) {
        d->fatal = true;
        fv_async(d, IBV_EVENT_DEVICE_FATAL, 0, NULL);
    } else if (strcmp(verb, "remove") == 0 || strcmp(verb, "vanish") == 0) {
        fv_remove(d, verb[0] == 'v');
    } else if (strcmp(verb, "unload") == 0) {
        fv_unload(d);
    } else if (strcmp(verb, "restore") == 0) {
        fv_restore(d, sscanf(text, "%*s %*s %63s", word) == 1 ? word : dev);
    } else if (strcmp(verb, "hang") == 0 && sscanf(text, "%*s %*s %d", &a) == 1) {
        d->hang = a;
        pthread_cond_broadcast(&fv.unhang);
    } else if (strcmp(verb, "hang") == 0 && sscanf(text, "%*s %*s %63s", word) == 1) {
        d->stuck |= fv_call(word);
    } else if (strcmp(verb, "refuse") == 0 && sscanf(text, "%*s %*s %63s %d", word, &a) == 2) {
        refuse_command(d, word, a);
    }
}

bool fv_catches(const struct fv_pkt *p)
{
    struct fv_script *s = &fv.script;

    if (!s->min || s->caught || p->op != IBV_WR_RDMA_WRITE || p->len < s->min)
        return false;
    s->caught = true;
    s->src = p->src;
    s->dest = p->dest;
    return true;
}

void fv_spoil(const struct fv_pkt *p, uint8_t *body)
{
    struct fv_script *s = &fv.script;
    bool asked = s->spoil && p->len >= s->spoil && p->op == s->spoil_op;

    if (asked) {
        s->spoil = 0;
        s->landed = true;
        s->src = p->src;
    }
    if (body && (asked || (p->op == IBV_WR_RDMA_WRITE && p->len > sizeof(uint64_t) &&
                           fv_chance(fv.chaos.damage, 1000000))))
        body[asked && s->spoil_at < p->len ? s->spoil_at : p->len / 2] ^= 0x10;
}

static void damage(const char *kind, unsigned min, unsigned at)
{
    fv.script = (struct fv_script){.spoil = min,
                                   .spoil_at = at,
                                   .spoil_op = kind[0] == 'w'   ? IBV_WR_RDMA_WRITE
                                               : kind[0] == 's' ? IBV_WR_SEND
                                                                : IBV_WR_SEND_WITH_IMM};
}

static void release(void)
{
    struct fv_script *s = &fv.script;

    for (int i = 0; i < FV_QPS; i++) {
        struct fv_qp *qp = fv.qps[i];

        if (!qp || !fv_holds(qp))
            continue;
        for (struct fv_late *l = qp->late; l; l = l->next)
            l->held = false;
        fv_place_late(qp, 0, true);
        qp->flush_at = 0;
        s->landed = true;
    }
    for (struct fv_conn *c = fv.conns; c; c = c->next)
        c->kept = false;
    s->no_destroy = false;
    s->min = 0;
    pthread_cond_broadcast(&fv.unhang);
}

static int held(const char *dev, const void *addr)
{
    int n = 0;

    for (int i = 0; i < FV_MRS; i++)
        n += fv.mrs[i] && fv.mrs[i]->base.addr == addr &&
             strcmp(fv_dev_of(fv.mrs[i]->base.context)->base.name, dev) == 0;
    return n;
}

FV_EXPORT int fv_script(const char *text)
{
    struct fv_script *s = &fv.script;
    char kind[16], dev[64];
    void *addr, *view;
    size_t len;
    unsigned min = 0, at = UINT_MAX;
    int answer;

    pthread_mutex_lock(&fv.lock);
    if (sscanf(text, "late %u", &min) == 1 || sscanf(text, "network %u", &min) == 1)
        *s = (struct fv_script){
            .min = min, .in_network = text[0] == 'n', .no_destroy = s->no_destroy};
    else if (sscanf(text, "damage %15s %u %u", kind, &min, &at) >= 2)
        damage(kind, min, at);
    else if (strcmp(text, "undying") == 0)
        s->no_destroy = true;
    else if (strcmp(text, "break") == 0 && s->caught && fv_qp_find(s->src))
        fv_qp_fail(fv_qp_find(s->src), IBV_WC_RETRY_EXC_ERR);
    else if (strcmp(text, "release") == 0)
        release();
    else if (strcmp(text, "show") == 0)
        for (int i = 0; i < fv.n_dev; i++)
            fv_show(&fv.dev[i]);
    else if (sscanf(text, "mute %u", &min) == 1 && fv_qp_find(min))
        fv_qp_find(min)->mute = true;
    else if (sscanf(text, "freeze %u", &min) == 1 && fv_qp_find(min))
        fv_qp_find(min)->mute = fv_qp_find(min)->frozen = true;
    else if (sscanf(text, "slow %u %u", &min, &at) == 2 && fv_qp_find(min))
        fv_qp_find(min)->slow = at;
    else if (sscanf(text, "peer %p %zu %p", &addr, &len, &view) == 3)
        fv_peer(addr, len, view);
    else if (sscanf(text, "only %p", &addr) == 1)
        fv.only = addr;
    else if (text[0] == '!')
        fv_command((char *)(uintptr_t)text + 1);
    fv_wake();
    answer = s->landed ? 2 : s->caught ? 1 : 0;
    if (strcmp(text, "closed") == 0)
        answer = fv.n_closed;
    if (sscanf(text, "held %63s %p", dev, &addr) == 2)
        answer = held(dev, addr);
    if (sscanf(text, "hung %63s", dev) == 1 && named(dev))
        answer = named(dev)->hung;
    if (sscanf(text, "unread %63s", dev) == 1 && named(dev))
        answer = (int)(named(dev)->ev_tail - named(dev)->ev_head);
    if (sscanf(text, "receives %u", &min) == 1 && fv_qp_find(min))
        answer = (int)(fv_qp_find(min)->r_posted - fv_qp_find(min)->r_done);
    if (strcmp(text, "source") == 0)
        answer = (int)s->src;
    if (strcmp(text, "where") == 0 && fv_qp_find(s->src)) {
        const char *name = fv_qp_find(s->src)->dev->base.name;

        answer = 10 + name[strlen(name) - 1] - '0';
    }
    pthread_mutex_unlock(&fv.lock);
    return answer;
}
