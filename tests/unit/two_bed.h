/* Two processes over real sockets on loopback (rung 3), so that each has state and a secret of its
 * own: process 1 sends, process 0 receives. Every wait is bounded. */
#ifndef R2_TESTS_TWO_BED_H
#define R2_TESTS_TWO_BED_H

#include <sys/mman.h>
#include <sys/wait.h>

#include "await.h"
#include "tcp_bed.h"

static struct two_shared {
    char handle[R2_HANDLE_BYTES];
    atomic_int listening;
    atomic_int waiting, over; /* the test's */
} * sh;

static struct r2_conn *two_meet(bool sender)
{
    if (sender) {
        AWAIT(atomic_load(&sh->listening));
        memcpy(listen_handle, sh->handle, sizeof(listen_handle));
        CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
        AWAIT(r2_engine_connect(ctx, 0, listen_handle, &tx) == 0 && tx);
        return tx;
    }
    bed_listen();
    memcpy(sh->handle, listen_handle, sizeof(sh->handle));
    atomic_store(&sh->listening, 1);
    AWAIT(r2_engine_accept(listen_here, &rx) == 0 && rx);
    return rx;
}

static void two_part(bool sender)
{
    r2_engine_close(sender ? tx : rx);
    if (!sender)
        r2_engine_close_listen(listen_here);
    r2_engine_finalize(ctx);
}

/* Runs `one` in each, with 100 s for it, and wants both to end well. */
static void two_processes(void (*one)(bool sender))
{
    pid_t pids[2];

    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            alarm(100);
            one(i == 1);
            fflush(stdout);
            _exit(0);
        }
    }
    for (int i = 0; i < 2; i++) {
        int status = 0;

        CHECK(waitpid(pids[i], &status, 0) == pids[i]);
        CHECK_MSG(status == 0, "the %s ended with status 0x%x", i ? "sender" : "receiver", status);
    }
    munmap(sh, sizeof(*sh));
}

#endif
