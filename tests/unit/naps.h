/* How often the I/O threads of this process have gone to sleep, and whether they sleep now. */
#ifndef R2_TESTS_NAPS_H
#define R2_TESTS_NAPS_H

#include "check.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

struct naps {
    long n; /* of all of them together */
    bool asleep;
};

/* Fails where there is no I/O thread. */
static struct naps naps_now(void)
{
    DIR *dir = opendir("/proc/self/task");
    struct dirent *d;
    struct naps found = {.asleep = true};
    int threads = 0;

    CHECK(dir);
    while ((d = readdir(dir))) {
        char path[300], line[128], name[32] = "", state = 0;
        FILE *f;
        long n;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", d->d_name);
        f = fopen(path, "r");
        while (f && fgets(line, sizeof(line), f)) {
            sscanf(line, "Name: %31s", name);
            sscanf(line, "State: %c", &state);
            if (strncmp(name, "r2ccl-io", 8) == 0 &&
                sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1) {
                found.n += n;
                found.asleep &= state == 'S';
                threads++;
            }
        }
        if (f)
            fclose(f);
    }
    closedir(dir);
    CHECK(threads);
    return found;
}

static inline long naps(void)
{
    return naps_now().n;
}

#endif
