/* Settings from files: $R2CCL_CONF, else ~/.r2ccl.conf; then /etc/r2ccl.conf. A line is
 * R2CCL_NAME=VALUE; one that begins with # is a comment. The first line of a name counts, and the
 * user's file before the system's.
 *
 * The files are read once, by the first caller. Any thread. */
#ifndef R2_SETTINGS_FILE_H
#define R2_SETTINGS_FILE_H

#include <stddef.h>

/* The value of `name`, or NULL; `where` (may be NULL) is the path of the file. */
char *r2_file_get(const char *name, const char **where);
/* The lines as "NAME=VALUE", ended by NULL, as `environ` has them. */
char *const *r2_file_lines(void);
/* Sentences about lines that set nothing of R2CCL and about a file that cannot be read, each ended
 * by
 * '\n'. */
const char *r2_file_complaints(void);

#endif
