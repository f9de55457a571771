/* What attempts to reach a process come to. */
#define _GNU_SOURCE
#define R2_ENGINELIB
#include <string.h>

#include "fake.h"

#define POLICIES 4096

static struct {
    uint8_t process[16];
    int rc;
} policies[POLICIES];
static int n_policies;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */

/* Its place, or that of the next one. */
static int place_of(const uint8_t process[16])
{
    int i = 0;

    while (i < n_policies && memcmp(policies[i].process, process, 16) != 0)
        i++;
    return i;
}

int fake_policy_of(const uint8_t process[16])
{
    int at, rc;

    pthread_mutex_lock(&lock);
    at = place_of(process);
    rc = at < n_policies ? policies[at].rc : 0;
    pthread_mutex_unlock(&lock);
    return rc;
}

void fake_policy(const uint8_t process[16], int rc)
{
    int at;

    pthread_mutex_lock(&lock);
    at = place_of(process);
    if (at < POLICIES) {
        memcpy(policies[at].process, process, 16);
        policies[at].rc = rc;
        n_policies = at < n_policies ? n_policies : at + 1;
    }
    pthread_mutex_unlock(&lock);
}
