/* The receiver gives credit for small messages once for every few of them. One such frame is lost
 * with all paths: the credit must be said again, or the sender stops at the 17th message.
 *
 *   R2CCL_NICS=127.0.1.1,127.0.2.1 attack_credit     exit 0: all messages arrived
 */
#define _GNU_SOURCE
#include "attack.h"
#include "io/fault.h"

static void sync2(void)
{
    char go = 1;

    xfer(&go, 1, true);
    xfer(&go, 1, false);
}

static int credit(void)
{
    char buf[2048];
    struct r2_conn *c = make(side == 0);

    for (int m = 0; m < 40; m++) {
        struct r2_req *r = NULL;
        struct r2_fault f = {.tx = true, .kind = R2_SEG_FAULT_BLACKHOLE};
        int ndev;

        r2_engine_devices(&ndev);
        sync2();
        if (side == 1 && m == 8) /* the credit of message 8 gets stuck, then lost */
            for (int i = 0; i < ndev; i++)
                r2_fault_set(i, &f);
        if (side == 1)
            r2_engine_irecv(c, buf, sizeof(buf), 0, NULL, &r);
        sync2();
        if (side == 0)
            r2_engine_isend(c, buf, sizeof(buf), 0, NULL, &r);
        if (side == 1 && m == 8) {
            pause_us(50000);
            f.kind = R2_SEG_FAULT_ERROR;
            f.rx = true;
            for (int i = 0; i < ndev; i++)
                r2_fault_set(i, &f);
            until_pathless(100);
            for (int i = 0; i < ndev; i++)
                r2_fault_clear(i);
        }
        if (!done_within(8000, r)) {
            fprintf(stderr, "side %d: message %d hangs\n", side, m);
            _exit(3);
        }
    }
    printf("side %d ok\n", side);
    return 0;
}

int main(int argc, char **argv)
{
    (void)argc;
    if (!getenv("ATTACK_FD"))
        attack_child(argv);
    attack_begin();
    return credit();
}
