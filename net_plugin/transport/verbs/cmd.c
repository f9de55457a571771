/* The command thread of a device. It may be stuck in the kernel for ever: nobody waits for it
 * without a limit, and what it is late with is not assumed to have happened. It ends with the last
 * user of the device, and closes it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>

#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/thread.h"

static void *cmd_main(void *arg)
{
    struct r2_hca *hca = arg;

    pthread_setname_np(pthread_self(), "r2ccl-verbs");
    pthread_mutex_lock(&hca->lock);
    for (;;) {
        struct r2_list *n = r2_list_first(&hca->cmds);
        struct r2_cmd *cmd;

        if (!n && !hca->users)
            break;
        if (!n) {
            pthread_cond_wait(&hca->more, &hca->lock);
            continue;
        }
        cmd = R2_CONTAINER_OF(n, struct r2_cmd, node);
        r2_list_del(n);
        cmd->queued = false;
        hca->busy_since = r2_now_ns();
        pthread_mutex_unlock(&hca->lock);
        cmd->run(cmd);
        pthread_mutex_lock(&hca->lock);
        hca->busy_since = 0;
    }
    pthread_mutex_unlock(&hca->lock);
    r2_hca_close(hca);
    return NULL;
}

bool r2_cmd_stuck(struct r2_hca *hca)
{
    bool stuck;

    pthread_mutex_lock(&hca->lock);
    stuck = hca->busy_since && r2_now_ns() - hca->busy_since > R2_VERBS_MEET_NS;
    pthread_mutex_unlock(&hca->lock);
    return stuck;
}

int r2_cmd_start(struct r2_hca *hca)
{
    return -r2_thread_start_on(&hca->thread, NULL, cmd_main, hca);
}

void r2_cmd_give(struct r2_hca *hca, struct r2_cmd *cmd, void (*run)(struct r2_cmd *cmd))
{
    r2_list_init(&cmd->node);
    cmd->queued = false;
    cmd->run = run;
    r2_cmd_post(hca, cmd);
}

void r2_cmd_post(struct r2_hca *hca, struct r2_cmd *cmd)
{
    pthread_mutex_lock(&hca->lock);
    if (!cmd->queued) {
        cmd->queued = true;
        r2_list_add_tail(&hca->cmds, &cmd->node);
        pthread_cond_signal(&hca->more);
    }
    pthread_mutex_unlock(&hca->lock);
}
