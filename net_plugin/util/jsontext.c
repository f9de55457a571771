#include "util/jsontext.h"

#include <stdint.h>

/* The length of the UTF-8 sequence at `text` (1 to 4), 0 if it is not well-formed. */
static int r2_json_utf8(const unsigned char *text)
{
    int len = text[0] < 0x80 ? 1 : text[0] >= 0xf0 ? 4 : text[0] >= 0xe0 ? 3 : 2;
    uint32_t code = text[0] & (len == 1 ? 0x7f : 0xff >> (len + 1));
    static const uint32_t lowest[] = {0, 0, 0x80, 0x800, 0x10000};

    if (text[0] > 0xf4 || (text[0] >= 0x80 && text[0] < 0xc2)) {
        return 0;
    }
    for (int i = 1; i < len; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (text[i] & 0x3f);
    }
    return code < lowest[len] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : len;
}

void r2_json_string(FILE *f, const char *text)
{
    fputc('"', f);
    while (*text) {
        int len = r2_json_utf8((const unsigned char *)text);

        if (len == 0) {
            fputs("\\ufffd", f);
        } else if ((unsigned char)*text < 0x20 || *text == 0x7f) {
            fprintf(f, "\\u%04x", (unsigned)(unsigned char)*text);
        } else {
            fprintf(f, "%s%.*s", *text == '"' || *text == '\\' ? "\\" : "", len, text);
        }
        text += len ? len : 1;
    }
    fputc('"', f);
}
