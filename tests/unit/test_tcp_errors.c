/* The table of what socket errors mean (rung 1): whole and unambiguous. */
#include "check.h"
#include "transport/tcp/errors.h"

TEST(rows)
{
    int n = 0;

    for (const struct r2_tcp_error *e; (e = r2_tcp_error_row(n))->name; n++) {
        CHECK_MSG(e->cause[0], "%s", e->name);
        CHECK_LT(strlen(e->cause), 64);
        CHECK(r2_tcp_error(e->err) == e); /* the first of its errno */
        CHECK(r2_tcp_error(-e->err) == e);
        CHECK_MSG(e->err || !r2_tcp_error_row(n + 1)->name, "%s is not the last row", e->name);
    }
    CHECK_GT(n, 20);
    CHECK_STR(r2_tcp_error(ECONNREFUSED)->name, "ECONNREFUSED");
}

TEST(unknown)
{
    static const int errs[] = {0, 1234567, INT32_MIN, INT32_MAX, -4096, EXDEV};

    for (unsigned i = 0; i < sizeof(errs) / sizeof(errs[0]); i++)
        CHECK_STR(r2_tcp_error(errs[i])->name, "any other");
}
