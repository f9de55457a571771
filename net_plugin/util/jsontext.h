/* Text in JSON. */
#ifndef R2_UTIL_JSONTEXT_H
#define R2_UTIL_JSONTEXT_H

#include <stdio.h>

/* `text` in quotes. Bytes that are no UTF-8 become U+FFFD. */
void r2_json_string(FILE *f, const char *text);

#endif
