/* Where memory is short while a device does not do what it is told (rung 3; verbs_bed.h says what
 * it cannot prove). */
#define _GNU_SOURCE
#include <pthread.h>

#include "verbs_bed.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature) /* clang */
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

#if defined(R2_HAVE_VERBS) && !defined(SANITIZED)

#include "transport/verbs/verbs.h"

#define SIZE 8192

static struct bed bed;
static uint8_t in[2][SIZE];
static atomic_bool short_of_it;

void *__libc_calloc(size_t n, size_t size);

/* The second device's command thread gets no memory. */
void *calloc(size_t n, size_t size)
{
    struct r2_hca *hca = atomic_load(&short_of_it) ? r2_verbs.slots[1].now : NULL;

    if (hca && pthread_equal(hca->thread, pthread_self())) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_calloc(n, size);
}

/* A device does not deregister some memory in a moment when there is none to note that in: it is
 * asked for again all the same, and other memory is let go of. */
TEST(deregister)
{
    struct r2_mr *mr[2];

    bed_open(&bed, 2);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(r2_engine_reg(bed.rx, in[i], SIZE, 1, &mr[i]), 0);
    bed_script("!refuse fv1 dereg 1");
    atomic_store(&short_of_it, true);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr[0]), -ETIMEDOUT);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr[1]), 0);
    atomic_store(&short_of_it, false);
    CHECK_EQ(r2_engine_reg(bed.rx, in[0], SIZE, 1, &mr[0]), 0);
    CHECK_EQ(r2_engine_dereg(bed.rx, mr[0]), 0);
    bed_close(&bed);
}

#else

int main(void)
{
    return CHECK_SKIPPED; /* sanitizers have a calloc of their own */
}

#endif
