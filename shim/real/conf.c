#define _GNU_SOURCE
#include "real/conf.h"

#include <pwd.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINE 4096 /* of a file, as in NCCL: longer ones are several */
#define SYSTEM_FILE "/etc/nccl.conf"

static bool since(int version, int first)
{
    return version == 0 || version >= first;
}

static const char *home_of(int version, char *room, size_t size)
{
    struct passwd entry, *found = NULL;

    if (since(version, 23000))
        return getenv("HOME");
    return getpwuid_r(getuid(), &entry, room, size, &found) == 0 && found ? found->pw_dir : NULL;
}

/* The user's own file; empty: there is none. Paths that are too long are cut off, as in NCCL. */
static void find_own(char *path, size_t size, int version)
{
    const char *file = getenv("NCCL_CONF_FILE"), *home;
    char room[4096];

    path[0] = '\0';
    if (file && *file && since(version, 22300)) {
        snprintf(path, size, "%s", file);
        return;
    }
    home = home_of(version, room, sizeof(room));
    if (home)
        snprintf(path, size, "%s/.nccl.conf", home);
}

/* Whether the line sets `name`; then its value. */
static bool reads(char *line, const char *name, int version, struct r2_conf_value *room)
{
    size_t len = strlen(line), key = strcspn(line, "=");

    if (len > 0 && line[len - 1] == '\n')
        line[--len] = '\0';
    if (len > 0 && line[len - 1] == '\r' && since(version, 23000))
        line[--len] = '\0';
    if (key >= len || strlen(name) != key || strncmp(line, name, key) != 0)
        return false;
    snprintf(room->text, sizeof(room->text), "%s", line + key + 1);
    return true;
}

static bool find(const char *path, const char *name, int version, struct r2_conf_value *room)
{
    struct stat st;
    char line[LINE];
    bool found = false;
    FILE *file;

    if (stat(path, &st) || !S_ISREG(st.st_mode))
        return false;
    file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof(line), file))
        found = reads(line, name, version, room);
    fclose(file);
    if (found)
        snprintf(room->where, sizeof(room->where), " in %s", path);
    return found;
}

const char *r2_conf_get(struct r2_conf_value *room, const char *name, int version)
{
    const char *here = getenv(name);
    char path[1024];

    room->where[0] = '\0';
    if (here) /* an empty one too */
        return here;
    find_own(path, sizeof(path), version);
    if (find(path, name, version, room) || find(SYSTEM_FILE, name, version, room))
        return room->text;
    return NULL;
}
