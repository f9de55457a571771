/* What an error of a socket means: one table for the journal, status and messages. Pure. */
#ifndef R2_TRANSPORT_TCP_ERRORS_H
#define R2_TRANSPORT_TCP_ERRORS_H

struct r2_tcp_error {
    int err;           /* positive errno, 0: any other */
    const char *name;  /* "ECONNRESET" */
    const char *cause; /* for people, at most 63 bytes: the segment has room for no more */
};

/* The row of an errno of either sign; the last row, "any other", for one that is not listed. */
const struct r2_tcp_error *r2_tcp_error(int err);
/* Row number i; a NULL name ends the table. */
const struct r2_tcp_error *r2_tcp_error_row(int i);

#endif
