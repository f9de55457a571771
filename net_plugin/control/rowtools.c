/* How a row is written so that readers in other processes never take half of it. */
#include <sched.h>
#include <string.h>

#include "control/impl.h"

#define SPINS 64

void r2_row_begin(uint32_t *seq)
{
    for (int spin = 0;; spin++) {
        uint32_t now = __atomic_load_n(seq, __ATOMIC_RELAXED);

        if (!(now & 1) && __atomic_compare_exchange_n(seq, &now, now + 1, true, __ATOMIC_ACQUIRE,
                                                      __ATOMIC_RELAXED))
            return;
        if (spin >= SPINS)
            sched_yield();
    }
}

void r2_row_end(uint32_t *seq)
{
    uint32_t now = __atomic_load_n(seq, __ATOMIC_RELAXED);

    __atomic_store_n(seq, now + 1, __ATOMIC_RELEASE);
}

void r2_row_bytes(void *field, const void *data, size_t n)
{
    uint64_t *word = field;

    for (size_t i = 0; i < n / 8; i++) {
        uint64_t value;

        memcpy(&value, (const char *)data + i * 8, 8);
        __atomic_store_n(&word[i], value, __ATOMIC_RELEASE);
    }
}

void r2_row_text(char *field, size_t size, const char *text)
{
    char buf[256] = {0};
    size_t n = text ? strnlen(text, size) : 0;

    if (size > sizeof(buf))
        size = sizeof(buf);
    if (n > size - 1) {
        n = size - 1;
        while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
            n--;
    }
    if (n > 0)
        memcpy(buf, text, n);
    r2_row_bytes(field, buf, size);
}

size_t r2_row_words(const char *text, size_t room)
{
    size_t n = strnlen(text, room + 1), word = room;

    if (n <= room)
        return n;
    while (word > room / 2 && text[word] != ' ')
        word--;
    if (text[word] == ' ')
        return word;
    for (n = room; n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80;)
        n--;
    return n ? n : room; /* no character begins there: it is no text, but it comes to an end */
}

void r2_row_cause(char *field, size_t size, const char *text)
{
    static const char more[] = " ...";
    char buf[256];
    size_t n;

    if (size > sizeof(buf))
        size = sizeof(buf);
    if (!text || strnlen(text, size) < size) {
        r2_row_text(field, size, text);
        return;
    }
    n = r2_row_words(text, size - sizeof(more));
    memcpy(buf, text, n);
    memcpy(buf + n, more, sizeof(more));
    r2_row_text(field, size, buf);
}

void r2_row_mark(struct r2_control *ctl, enum r2_seg_kind kind, uint32_t row)
{
    uint32_t *high = &r2_control_table(ctl->seg, kind)->high;
    uint32_t now = __atomic_load_n(high, __ATOMIC_RELAXED);

    while (now < row + 1 && !__atomic_compare_exchange_n(high, &now, row + 1, true,
                                                         __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
}
