#include "plan/trace.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/crc32c.h"

#define CRC 9 /* 8 digits and a blank */
#define MAGIC "r2ccl-plan-trace "
#define SUMMARY 400
#define SHOWN 16 /* ranks of an order that the summary shows */

uint64_t r2_trace_name(uint64_t parent, uint64_t ordinal, uint64_t salt, int nranks, int rank,
                       int device)
{
    uint64_t words[6] = {parent, ordinal, salt, (uint64_t)nranks, (uint64_t)rank, (uint64_t)device};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (int w = 0; w < 6; w++)
        for (int bit = 0; bit < 64; bit += 8)
            hash = (hash ^ (words[w] >> bit & 0xff)) * UINT64_C(0x100000001b3);
    return hash ? hash : 1;
}

/* ---- writing */

/* `line` with its checksum in front and a newline behind; takes it over. */
static char *seal(char *body, size_t len)
{
    char *line = malloc(CRC + len + 2);

    if (line) {
        snprintf(line, CRC + 1, "%08" PRIx32 " ", r2_crc32c(0, body, len));
        memcpy(line + CRC, body, len);
        memcpy(line + CRC + len, "\n", 2);
    }
    free(body);
    return line;
}

__attribute__((format(printf, 1, 2))) static char *put(const char *fmt, ...)
{
    char *body = malloc(SUMMARY);
    va_list ap;
    int len;

    if (!body)
        return NULL;
    va_start(ap, fmt);
    len = vsnprintf(body, SUMMARY, fmt, ap);
    va_end(ap);
    return seal(body, (size_t)len);
}

char *r2_trace_put_head(void)
{
    return put(MAGIC "%d", R2_TRACE_VERSION);
}

char *r2_trace_put_comm(const struct r2_trace_comm *comm)
{
    return put("comm %016" PRIx64 " run %016" PRIx64 " ranks %d rank %d", comm->name, comm->run,
               comm->nranks, comm->rank);
}

/* For people; nothing reads it. */
static void summarise(const struct r2_plan_table *t, char out[SUMMARY])
{
    const struct r2_plan_entry *e = t->nentries ? &t->entries[0] : NULL;
    size_t at = 0;

    at += (size_t)snprintf(out, SUMMARY, "%s%d communicators%s", e ? "tree, " : "stock, ",
                           t->ncomms, t->ncomms ? ":" : "");
    for (int c = 0; c < t->ncomms && at < SUMMARY / 2; c++) {
        for (int r = 0; r < t->nranks && r < SHOWN && at < SUMMARY / 2; r++)
            at += (size_t)snprintf(out + at, SUMMARY - at, " %" PRIu32, t->comms[c].ranks[r]);
        at += (size_t)snprintf(out + at, SUMMARY - at, "%s;", t->nranks > SHOWN ? " ..." : "");
    }
    snprintf(out + at, SUMMARY - at, " %.150s", t->reason);
    for (char *p = out; *p; p++)
        *p = isprint((unsigned char)*p) ? *p : '?';
}

char *r2_trace_put_plan(uint64_t name, uint64_t from, const struct r2_plan_table *table)
{
    static const char digits[] = "0123456789abcdef";
    struct r2_plan_table bare = *table;
    char summary[SUMMARY], *body;
    unsigned char *bytes;
    void *packed;
    size_t at, len;

    for (int c = 0; c < bare.ncomms; c++)
        memset(bare.comms[c].id, 0, sizeof(bare.comms[c].id));
    if (r2_plan_table_pack(&bare, &packed, &len))
        return NULL;
    bytes = packed;
    body = malloc(100 + 2 * len + SUMMARY);
    if (!body) {
        free(bytes);
        return NULL;
    }
    at = (size_t)sprintf(body, "plan %016" PRIx64 " from %" PRIu64 " table ", name, from);
    for (size_t i = 0; i < len; i++) {
        body[at++] = digits[bytes[i] >> 4];
        body[at++] = digits[bytes[i] & 15];
    }
    summarise(table, summary);
    at += (size_t)sprintf(body + at, " | %s", summary);
    free(bytes);
    return seal(body, at);
}

/* ---- reading */

static int nibble(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

struct reader {
    struct r2_trace *trace;
    int line;
    char *why;
};

__attribute__((format(printf, 3, 4))) static int bad(struct reader *r, int rc, const char *fmt, ...)
{
    int at = r->line ? snprintf(r->why, R2_TRACE_WHY, "line %d ", r->line) : 0;
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(r->why + at, (size_t)(R2_TRACE_WHY - at), fmt, ap);
    va_end(ap);
    return rc;
}

static void *grow(void *array, int n, size_t size)
{
    return n & (n - 1) ? array : realloc(array, (size_t)(n ? 2 * n : 1) * size);
}

static int read_comm(struct reader *r, const char *body)
{
    struct r2_trace_comm comm = {0}, *more;
    int end = 0;

    if (sscanf(body, "comm %16" SCNx64 " run %16" SCNx64 " ranks %9d rank %9d%n", &comm.name,
               &comm.run, &comm.nranks, &comm.rank, &end) != 4 ||
        body[end] || comm.nranks < 1 || comm.rank < 0 || comm.rank >= comm.nranks)
        return bad(r, -EINVAL, "says nothing that this version understands");
    if (r2_trace_find(r->trace, comm.name))
        return bad(r, -EINVAL, "names a communicator for the second time");
    more = grow(r->trace->comms, r->trace->ncomms, sizeof(*more));
    if (!more)
        return bad(r, -ENOMEM, "is too much for the memory");
    r->trace->comms = more;
    more[r->trace->ncomms++] = comm;
    return 0;
}

static int read_table(struct reader *r, struct r2_plan_table **out, const char *hex, int nranks)
{
    size_t digits = strcspn(hex, " "), len = digits / 2;
    unsigned char *bytes = malloc(len + 1);
    int rc = digits % 2 ? -EINVAL : 0;

    if (!bytes)
        return bad(r, -ENOMEM, "is too much for the memory");
    for (size_t i = 0; i < len && rc == 0; i++) {
        int high = nibble(hex[2 * i]), low = nibble(hex[2 * i + 1]);

        rc = high < 0 || low < 0 ? -EINVAL : 0;
        bytes[i] = (unsigned char)(high << 4 | low);
    }
    rc = rc ? rc : r2_plan_table_decode(out, bytes, len, nranks);
    free(bytes);
    return rc == -EINVAL ? bad(r, rc, "has no plan for %d ranks", nranks) : rc;
}

static int read_plan(struct reader *r, const char *body)
{
    struct r2_trace_plan plan = {0}, *more;
    struct r2_trace_comm *comm;
    uint64_t name;
    int end = 0, rc;

    if (sscanf(body, "plan %16" SCNx64 " from %20" SCNu64 " table %n", &name, &plan.from, &end) !=
            2 ||
        !end)
        return bad(r, -EINVAL, "says nothing that this version understands");
    comm = (struct r2_trace_comm *)r2_trace_find(r->trace, name);
    if (!comm)
        return bad(r, -EINVAL, "has a plan of a communicator that is not named before it");
    if (plan.from <= (comm->nplans ? comm->plans[comm->nplans - 1].from : 0))
        return bad(r, -EINVAL, "has a plan that is not later than the one before it");
    rc = read_table(r, &plan.table, body + end, comm->nranks);
    if (rc)
        return rc;
    more = grow(comm->plans, comm->nplans, sizeof(*more));
    if (!more) {
        r2_plan_table_free(plan.table);
        return bad(r, -ENOMEM, "is too much for the memory");
    }
    comm->plans = more;
    more[comm->nplans++] = plan;
    return 0;
}

static int read_head(struct reader *r, const char *line)
{
    size_t magic = strlen(MAGIC);
    char *end;
    long version;

    if (strlen(line) < CRC + magic || strncmp(line + CRC, MAGIC, magic) != 0)
        return bad(r, -EINVAL, "is not the beginning of a trace of plans");
    version = strtol(line + CRC + magic, &end, 10);
    if (version != R2_TRACE_VERSION)
        return bad(r, -EINVAL, "says version %ld, and this R2CCL reads version %d", version,
                   R2_TRACE_VERSION);
    return *end ? bad(r, -EINVAL, "is damaged") : 0;
}

/* Whether what is behind the checksum is what it was. */
static bool whole(const char *line, size_t len)
{
    uint32_t crc = 0;

    if (len < CRC || line[CRC - 1] != ' ')
        return false;
    for (int i = 0; i < CRC - 1; i++) {
        if (nibble(line[i]) < 0)
            return false;
        crc = crc << 4 | (uint32_t)nibble(line[i]);
    }
    return crc == r2_crc32c(0, line + CRC, len - CRC);
}

static int read_line(struct reader *r, const char *line, size_t len)
{
    int rc;

    if (memchr(line, 0, len))
        return bad(r, -EINVAL, "is damaged (a zero byte)");
    rc = r->line == 1 ? read_head(r, line) : 0; /* first: what it is not, said as such */
    if (rc)
        return rc;
    if (!whole(line, len))
        return bad(r, -EINVAL, "is damaged (its checksum does not agree)");
    if (r->line == 1)
        return 0;
    return line[CRC] == 'c' ? read_comm(r, line + CRC) : read_plan(r, line + CRC);
}

static int read_lines(struct reader *r, char *text, size_t len)
{
    int rc = 0;

    while (len > 0 && rc == 0) {
        char *end = memchr(text, '\n', len);

        r->line++;
        if (!end)
            return bad(r, -EINVAL,
                       "is cut off; without it the trace is good up to the plan before");
        *end = '\0';
        rc = read_line(r, text, (size_t)(end - text));
        len -= (size_t)(end - text) + 1;
        text = end + 1;
    }
    return rc;
}

int r2_trace_parse(struct r2_trace **out, const char *text, size_t len, char *why)
{
    struct reader r = {.trace = calloc(1, sizeof(*r.trace)), .why = why};
    char *copy = malloc(len + 1);
    int rc;

    *out = NULL;
    why[0] = '\0';
    if (!r.trace || !copy)
        rc = bad(&r, -ENOMEM, "there is no memory for it");
    else if (len == 0)
        rc = bad(&r, -EINVAL, "it is empty");
    else if (len > R2_TRACE_BYTES)
        rc = bad(&r, -EINVAL, "it has more than %lu MiB", R2_TRACE_BYTES >> 20);
    else
        rc = read_lines(&r, memcpy(copy, text, len), len);
    free(copy);
    if (rc)
        r2_trace_free(r.trace);
    else
        *out = r.trace;
    return rc;
}

void r2_trace_free(struct r2_trace *trace)
{
    for (int c = 0; trace && c < trace->ncomms; c++) {
        for (int p = 0; p < trace->comms[c].nplans; p++)
            r2_plan_table_free(trace->comms[c].plans[p].table);
        free(trace->comms[c].plans);
    }
    if (trace)
        free(trace->comms);
    free(trace);
}

/* ---- use */

const struct r2_trace_comm *r2_trace_find(const struct r2_trace *trace, uint64_t name)
{
    for (int c = 0; c < trace->ncomms; c++)
        if (trace->comms[c].name == name)
            return &trace->comms[c];
    return NULL;
}

static bool same_entry(const struct r2_plan_entry *a, const struct r2_plan_entry *b)
{
    bool same = a->coll == b->coll && a->type_class == b->type_class &&
                a->schedule == b->schedule && a->segments == b->segments &&
                a->from_bytes == b->from_bytes && a->below_bytes == b->below_bytes;

    for (int p = 0; same && p < a->segments; p++)
        same = a->comm[p] == b->comm[p] && a->boundary[p] == b->boundary[p];
    return same;
}

bool r2_trace_same(const struct r2_plan_table *a, const struct r2_plan_table *b)
{
    bool same = a->nranks == b->nranks && a->ncomms == b->ncomms && a->nentries == b->nentries;

    for (int c = 0; same && c < a->ncomms; c++)
        same = a->comms[c].key == b->comms[c].key &&
               memcmp(a->comms[c].ranks, b->comms[c].ranks,
                      (size_t)a->nranks * sizeof(*a->comms[c].ranks)) == 0;
    for (int e = 0; same && e < a->nentries; e++)
        same = same_entry(&a->entries[e], &b->entries[e]);
    return same;
}
