/* What NCCL will find in its environment, before it has read its configuration files: at its first
 * call it puts what they say into the environment, where nothing is set yet. Nothing is set here.
 *
 * Read as NCCL does: NCCL_CONF_FILE (2.23 and later) or .nccl.conf in the user's home (2.30 and
 * later: $HOME, before: the password database's), then /etc/nccl.conf; of a name that comes twice
 * the first counts. Lines without "=", and those that begin with #, say nothing. What is no regular
 * file is not opened: it may wait for a writer, and could not be read a second time.
 */
#ifndef R2_REAL_CONF_H
#define R2_REAL_CONF_H

struct r2_conf_value {
    char text[1024];       /* as much as NCCL takes */
    char where[1024 + 16]; /* " in FILE"; "" for the environment */
};

/* The value of a variable, or NULL: it is not set. Valid as long as *room is and nobody changes the
 * environment. version: NCCL's, 0 if it did not say. Reads files, each time. Any thread; errors in
 * reading are as no file. */
const char *r2_conf_get(struct r2_conf_value *room, const char *name, int version);

#endif
