/* SipHash-2-4 with a 128-bit tag: authenticates short messages under a 128-bit secret.
 * Thread-safe, never fails. */
#ifndef R2_UTIL_SIPHASH_H
#define R2_UTIL_SIPHASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void r2_siphash128(const uint8_t key[16], const void *data, size_t len, uint8_t out[16]);

/* Compares two tags in a time that does not depend on where they differ. */
bool r2_tag_equal(const uint8_t a[16], const uint8_t b[16]);

#endif
