/* What an error of a socket means: one table for journal causes, messages and documentation
 * (docs/failures.md has the same rows; test_tcp_errors compares them). Pure. */
#ifndef R2_TRANSPORT_TCP_ERRORS_H
#define R2_TRANSPORT_TCP_ERRORS_H

enum r2_tcp_whose {
    R2_WHOSE_UNKNOWN,
    R2_WHOSE_LOCAL_LINK,
    R2_WHOSE_LOCAL_CONFIG,
    R2_WHOSE_LOCAL_HOST,
    R2_WHOSE_NETWORK,
    R2_WHOSE_REMOTE_HOST,
    R2_WHOSE_REMOTE_PROCESS,
    R2_WHOSE_COUNT
};

struct r2_tcp_error {
    int err;           /* positive errno, 0: any other */
    const char *name;  /* "ECONNRESET" */
    const char *cause; /* for people, at most 63 bytes: the segment has room for no more */
    enum r2_tcp_whose whose;
};

/* The row of an errno of either sign; the last row, "any other", for one that is not listed. */
const struct r2_tcp_error *r2_tcp_error(int err);
/* Row number i; a NULL name ends the table. */
const struct r2_tcp_error *r2_tcp_error_row(int i);
const char *r2_tcp_whose(enum r2_tcp_whose whose); /* "local link" */

#endif
