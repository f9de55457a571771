/* Reading and writing the values of settings. Pure: text in, value out. Each parser returns 0 or
 * -EINVAL, takes no blanks, and leaves the output alone on error. */
#ifndef R2_SETTINGS_VALUES_H
#define R2_SETTINGS_VALUES_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "settings/settings.h"

int r2_value_bool(const char *text, bool *out);
int r2_value_int(const char *text, int *out);
/* As NCCL reads its own variables: a number in C's notations, whatever stands behind it; what is
 * none is 0. `otherwise`: nothing is set (NULL or empty), or it is out of range. */
int64_t r2_value_nccl(const char *text, int64_t otherwise);
/* 4096, 64K, 1M, 2G, with an optional B or iB behind the letter. */
int r2_value_size(const char *text, uint64_t *out);
/* 100ms, 60s, 1.5s, 50us, 2min, 1h; a plain number is in `unit` (ns, us, ms, s, min or h). */
int r2_value_duration(const char *text, const char *unit, uint64_t *out_ns);
/* `choices` as in settings.def: "name [synonym]|name [synonym]". */
int r2_value_enum(const char *text, const char *choices, int *out);
/* Digits, or digits with a part behind a point, whatever the locale; moves `*text` behind them. */
int r2_value_decimal(const char **text, double *out);
int r2_value_ports(const char *text, struct r2_port_range *out);
/* 0-3,8: the set of cores; "" is an empty set. */
int r2_value_cpus(const char *text, cpu_set_t *out);

/* The canonical name of value number `value`, "" if there is none. */
void r2_value_enum_name(const char *choices, int value, char *out, size_t outlen);
/* Exact text with the largest fitting suffix: 8K, 100ms, 60s. */
void r2_value_size_text(uint64_t bytes, char *out, size_t outlen);
void r2_value_duration_text(uint64_t ns, char *out, size_t outlen);

#endif
