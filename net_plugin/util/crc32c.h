/* CRC32C (Castagnoli, reflected polynomial 0x82F63B78), by the CPU's instruction where it has one.
 *
 * Start with crc = 0 and pass each result to the next call: r2_crc32c(r2_crc32c(0, a), b) is the
 * sum of a followed by b. Thread-safe, never fails.
 */
#ifndef R2_UTIL_CRC32C_H
#define R2_UTIL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

uint32_t r2_crc32c(uint32_t crc, const void *data, size_t len);

/* The table version, for CPUs without the instruction and for tests. Same contract. */
uint32_t r2_crc32c_table(uint32_t crc, const void *data, size_t len);

#endif
