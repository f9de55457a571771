/* The table of what socket errors mean (rung 1): whole, unambiguous, and the one that
 * docs/failures.md shows. */
#include "check.h"
#include "document.h"
#include "transport/tcp/errors.h"

static void test_rows(void)
{
    int n = 0;

    for (const struct r2_tcp_error *e; (e = r2_tcp_error_row(n))->name; n++) {
        CHECK_MSG(e->cause[0], "%s", e->name);
        CHECK_LT(strlen(e->cause), 64);
        CHECK_LT((int)e->whose, (int)R2_WHOSE_COUNT);
        CHECK(r2_tcp_error(e->err) == e); /* the first of its errno */
        CHECK(r2_tcp_error(-e->err) == e);
        CHECK_MSG(e->err || !r2_tcp_error_row(n + 1)->name, "%s is not the last row", e->name);
    }
    CHECK_GT(n, 20);
    CHECK_STR(r2_tcp_error(ECONNREFUSED)->name, "ECONNREFUSED");
    CHECK_EQ(r2_tcp_error(ECONNREFUSED)->whose, R2_WHOSE_REMOTE_PROCESS);
    CHECK_EQ(r2_tcp_error(ENETDOWN)->whose, R2_WHOSE_LOCAL_LINK);
    CHECK_EQ(r2_tcp_error(ETIMEDOUT)->whose, R2_WHOSE_NETWORK);
}

static void test_unknown(void)
{
    static const int errs[] = {0, 1234567, INT32_MIN, INT32_MAX, -4096, EXDEV};

    for (unsigned i = 0; i < sizeof(errs) / sizeof(errs[0]); i++)
        CHECK_STR(r2_tcp_error(errs[i])->name, "any other");
    CHECK_STR(r2_tcp_whose((enum r2_tcp_whose)99), "unknown");
}

static void test_documented(void)
{
    const char *text = document("docs/failures.md");
    char row[512];

    for (int i = 0; r2_tcp_error_row(i)->name; i++) {
        const struct r2_tcp_error *e = r2_tcp_error_row(i);

        snprintf(row, sizeof(row), "| %s | %s | %s |\n", e->name, e->cause, r2_tcp_whose(e->whose));
        CHECK_MSG(strstr(text, row), "docs/failures.md lacks the row\n%s", row);
    }
}

static const struct check_test tests[] = {
    {"rows", test_rows},
    {"unknown", test_unknown},
    {"documented", test_documented},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
