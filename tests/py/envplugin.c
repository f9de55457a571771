/* An env plugin of NCCL: it knows one variable better than the environment. */
#include <stdlib.h>
#include <string.h>

static int begin(unsigned char major, unsigned char minor, unsigned char patch, const char *suffix)
{
    (void)major, (void)minor, (void)patch, (void)suffix;
    return 0;
}

static int end(void)
{
    return 0;
}

static const char *get(const char *name)
{
    return strcmp(name, "NCCL_SOCKET_IFNAME") ? getenv(name) : "=lo";
}

const struct {
    const char *name;
    int (*init)(unsigned char, unsigned char, unsigned char, const char *);
    int (*finalize)(void);
    const char *(*get)(const char *);
} ncclEnvPlugin_v1 = {"test", begin, end, get};
