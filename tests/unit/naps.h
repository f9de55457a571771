/* How often the I/O threads of this process have gone to sleep. */
#ifndef R2_TESTS_NAPS_H
#define R2_TESTS_NAPS_H

#include "check.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

/* Of all of them together; fails where there is none. */
static long naps(void)
{
    DIR *dir = opendir("/proc/self/task");
    struct dirent *d;
    int threads = 0;
    long sum = 0;

    CHECK(dir);
    while ((d = readdir(dir))) {
        char path[300], line[128], name[32] = "";
        FILE *f;
        long n;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", d->d_name);
        f = fopen(path, "r");
        while (f && fgets(line, sizeof(line), f)) {
            sscanf(line, "Name: %31s", name);
            if (strncmp(name, "r2ccl-io", 8) == 0 &&
                sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1) {
                sum += n;
                threads++;
            }
        }
        if (f)
            fclose(f);
    }
    closedir(dir);
    CHECK(threads);
    return sum;
}

#endif
