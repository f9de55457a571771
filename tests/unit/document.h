/* A page of the docs, for tests that hold it to the code. */
#ifndef R2_TESTS_DOCUMENT_H
#define R2_TESTS_DOCUMENT_H

#include <stdio.h>

#include "check.h"

/* The page's text, up to 128 KiB; the next call's overwrites it. Skips the test outside a checkout.
 */
static inline const char *document(const char *path)
{
    static char text[1 << 17];
    FILE *f = fopen(path, "r");
    size_t len;

    if (!f)
        CHECK_SKIP("docs/ is not here: run in the checkout");
    len = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    CHECK_LT(len, sizeof(text) - 1);
    text[len] = 0;
    return text;
}

#endif
