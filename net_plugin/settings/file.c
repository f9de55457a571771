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
#define BAD_LINES 3 /* that are named, of each file */
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

static void complain_of_named(const char *path, const char *what)
{
    char where[LINE + 16];

    snprintf(where, sizeof(where), "R2CCL_CONF=%s", path);
    complain(where, 0, what);
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

static bool has(const char *path, const char *name)
{
    size_t len = strlen(name);

    for (int i = 0; i < files.count; i++) {
        if (files.where[i] == path && strncmp(files.lines[i], name, len) == 0 &&
            files.lines[i][len] == '=')
            return true;
    }
    return false;
}

/* Why the line is not read; NULL if it is. */
static const char *take(const char *path, char *line)
{
    char *text = trim(line), *value = strchr(text, '=');

    if (text[0] == '\0' || text[0] == '#')
        return NULL;
    if (!value || strncmp(text, "R2CCL_", 6) != 0)
        return "write R2CCL_NAME=VALUE; this line is not read";
    *value = '\0';
    text = trim(text);
    if (has(path, text))
        return "an earlier line sets the same; this line is not read";
    if (files.count == LINES)
        return "too many settings; this one is not read";
    if (asprintf(&files.lines[files.count], "%s=%s", text, trim(value + 1)) < 0) {
        files.lines[files.count] = NULL;
        return strerror(ENOMEM);
    }
    files.where[files.count++] = path;
    return NULL;
}

static void take_lines(const char *path, FILE *f)
{
    char line[LINE];
    int bad = 0;

    for (int number = 1; fgets(line, sizeof(line), f); number++) {
        const char *why = take(path, line);

        if (why && ++bad <= BAD_LINES)
            complain(path, number, why);
    }
    if (bad > BAD_LINES) {
        snprintf(line, sizeof(line), "%d more lines are not read", bad - BAD_LINES);
        complain(path, 0, line);
    }
}

static void read_file(const char *path, bool wanted)
{
    struct stat st;
    FILE *f;

    /* A pipe or a device could keep the reader waiting for ever. */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        complain(path, 0, "this is no file of settings");
        return;
    }
    f = fopen(path, "re");
    if (!f) {
        if (wanted)
            complain_of_named(path, strerror(errno));
        else if (errno != ENOENT)
            complain(path, 0, strerror(errno));
        return;
    }
    take_lines(path, f);
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
