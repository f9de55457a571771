#include <stdio.h>

#include "probe.h"

static void head(struct bed *bed, const char *name)
{
    printf("%s\"%s\": ", bed->first_item ? "" : ", ", name);
    bed->first_item = false;
}

void report_begin(struct bed *bed, const char *step)
{
    printf("{\"step\": \"%s\"", step);
    bed->section = NULL;
    bed->begin_us = now_us();
}

static void section(struct bed *bed, const char *name)
{
    printf("%s, \"%s\": {", bed->section ? "}" : "", name);
    bed->section = name;
    bed->first_item = true;
}

void report_end(struct bed *bed)
{
    printf("%s, \"seconds\": %.2f}\n", bed->section ? "}" : "",
           (double)(now_us() - bed->begin_us) / 1e6);
    fflush(stdout);
}

void facts(struct bed *bed)
{
    section(bed, "facts");
}

void durations(struct bed *bed)
{
    section(bed, "ms");
}

void info(struct bed *bed)
{
    section(bed, "info");
}

void say_text(struct bed *bed, const char *name, const char *value)
{
    head(bed, name);
    printf("\"%s\"", value);
}

void say_bool(struct bed *bed, const char *name, bool value)
{
    head(bed, name);
    fputs(value ? "true" : "false", stdout);
}

void say_int(struct bed *bed, const char *name, long long value)
{
    head(bed, name);
    printf("%lld", value);
}

void say_ms(struct bed *bed, const char *name, int64_t us)
{
    head(bed, name);
    printf("%.1f", (double)us / 1000);
}

void say_statuses(struct bed *bed, const char *name, const struct side *side)
{
    uint64_t known = 0;
    const char *comma = "";
    head(bed, name);
    putchar('[');
    for (int i = 0; i < side->seen_count; i++) {
        enum ibv_wc_status status = side->seen[i].wc.status;
        if (known & (1ull << status))
            continue;
        known |= 1ull << status;
        printf("%s\"%s\"", comma, status_name(status));
        comma = ", ";
    }
    putchar(']');
}

void say_events(struct bed *bed, const char *name, const struct side *side)
{
    head(bed, name);
    putchar('[');
    for (int i = 0; i < side->event_count; i++)
        printf("%s\"%s\"", i ? ", " : "", event_name(side->events[i].type));
    putchar(']');
}

const char *status_name(enum ibv_wc_status status)
{
    static const char *const names[] = {
        "SUCCESS",          "LOC_LEN_ERR",       "LOC_QP_OP_ERR",     "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",     "WR_FLUSH_ERR",      "MW_BIND_ERR",       "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",   "REM_INV_REQ_ERR",   "REM_ACCESS_ERR",    "REM_OP_ERR",
        "RETRY_EXC_ERR",    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR",  "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR",    "INV_EECN_ERR",      "INV_EEC_STATE_ERR", "FATAL_ERR",
        "RESP_TIMEOUT_ERR", "GENERAL_ERR",
    };
    return (size_t)status < sizeof(names) / sizeof(names[0]) ? names[status] : "UNKNOWN";
}

const char *opcode_name(enum ibv_wc_opcode opcode)
{
    switch ((int)opcode) {
    case IBV_WC_SEND:
        return "SEND";
    case IBV_WC_RDMA_WRITE:
        return "RDMA_WRITE";
    case IBV_WC_RDMA_READ:
        return "RDMA_READ";
    case IBV_WC_RECV:
        return "RECV";
    case IBV_WC_RECV_RDMA_WITH_IMM:
        return "RECV_RDMA_WITH_IMM";
    default:
        return "OTHER";
    }
}

const char *event_name(enum ibv_event_type type)
{
    static const char *const names[] = {
        "CQ_ERR",
        "QP_FATAL",
        "QP_REQ_ERR",
        "QP_ACCESS_ERR",
        "COMM_EST",
        "SQ_DRAINED",
        "PATH_MIG",
        "PATH_MIG_ERR",
        "DEVICE_FATAL",
        "PORT_ACTIVE",
        "PORT_ERR",
        "LID_CHANGE",
        "PKEY_CHANGE",
        "SM_CHANGE",
        "SRQ_ERR",
        "SRQ_LIMIT_REACHED",
        "QP_LAST_WQE_REACHED",
        "CLIENT_REREGISTER",
        "GID_CHANGE",
        "WQ_FATAL",
    };
    return (size_t)type < sizeof(names) / sizeof(names[0]) ? names[type] : "UNKNOWN";
}
