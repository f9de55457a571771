#define _GNU_SOURCE
#include "settings/file.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SYSTEM_FILE "/etc/r2ccl.conf"
#define LINES 256
#define LINE 2048
#define BLANKS " \t\r\n"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct {
    char own[LINE]; /* path; "" for none */
    char *lines[LINES + 1];
    const char *where[LINES];
    int count;
    char complaints[2048];
} files;

static void complain(const char *path, int line, const char *what)
{
    size_t at = strlen(files.complaints);

    if (line)
        snprintf(files.complaints + at, sizeof(files.complaints) - at, "%s, line %d: %s\n", path,
                 line, what);
    else
        snprintf(files.complaints + at, sizeof(files.complaints) - at, "%s: %s\n", path, what);
}

/* Without the blanks around it. */
static char *trim(char *text)
{
    size_t len;

    text += strspn(text, BLANKS);
    len = strlen(text);
    while (len && strchr(BLANKS, text[len - 1]))
        text[--len] = '\0';
    return text;
}

static void take(const char *path, int number, char *line)
{
    char *text = trim(line), *value = strchr(text, '=');

    if (text[0] == '\0' || text[0] == '#')
        return;
    if (!value || strncmp(text, "R2CCL_", 6) != 0) {
        complain(path, number, "write R2CCL_NAME=VALUE; this line is not read");
        return;
    }
    *value = '\0';
    if (files.count == LINES) {
        complain(path, number, "too many settings; this one is not read");
        return;
    }
    if (asprintf(&files.lines[files.count], "%s=%s", trim(text), trim(value + 1)) < 0) {
        files.lines[files.count] = NULL;
        return;
    }
    files.where[files.count++] = path;
}

static void read_file(const char *path, bool wanted)
{
    char line[LINE];
    struct stat st;
    FILE *f;

    /* A pipe or a device could keep the reader waiting for ever. */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        complain(path, 0, "this is no file of settings");
        return;
    }
    f = fopen(path, "re");
    if (!f) {
        if (wanted || errno != ENOENT)
            complain(path, 0, strerror(errno));
        return;
    }
    for (int number = 1; fgets(line, sizeof(line), f); number++)
        take(path, number, line);
    fclose(f);
}

static void load(void)
{
    /* A process with rights that its caller may not have reads the system's file only. */
    const char *named = secure_getenv("R2CCL_CONF"), *home = secure_getenv("HOME");

    if (named && named[0])
        snprintf(files.own, sizeof(files.own), "%s", named);
    else if (home && home[0])
        snprintf(files.own, sizeof(files.own), "%s/.r2ccl.conf", home);
    if (files.own[0])
        read_file(files.own, named && named[0]);
    read_file(SYSTEM_FILE, false);
}

char *r2_file_get(const char *name, const char **where)
{
    size_t len = strlen(name);

    pthread_once(&once, load);
    for (int i = 0; i < files.count; i++) {
        if (strncmp(files.lines[i], name, len) == 0 && files.lines[i][len] == '=') {
            if (where)
                *where = files.where[i];
            return files.lines[i] + len + 1;
        }
    }
    return NULL;
}

char *const *r2_file_lines(void)
{
    pthread_once(&once, load);
    return files.lines;
}

const char *r2_file_complaints(void)
{
    pthread_once(&once, load);
    return files.complaints;
}
