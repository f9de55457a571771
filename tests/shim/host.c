/* An application that opens a library which is linked with NCCL, with RTLD_LOCAL: as Python opens
 * PyTorch. Several libraries, separated by commas in argv[1], are used one after the other. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    char *rest = NULL;
    int code = 0;

    if (argc < 2)
        return 2;
    for (char *name = strtok_r(argv[1], ",", &rest); name && !code;
         name = strtok_r(NULL, ",", &rest)) {
        void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        int (*job)(int, char **) = handle ? dlsym(handle, "r2_job") : NULL;

        if (!job) {
            fprintf(stderr, "%s: %s\n", name, dlerror());
            return 2;
        }
        code = job(argc - 1, argv + 1);
    }
    return code;
}
