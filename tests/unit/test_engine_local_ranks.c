/* The engine reads at its start how many ranks share the machine, from the launcher's variables
 * (rung 3). test_pollers has what follows. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>

#include "io/io.h"
#include "tcp_bed.h"

#define CORES 16 /* as the test has it: six threads */

/* In front of libc's. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    memset(set, 0, size);
    if (!pid && syscall(SYS_sched_getaffinity, 0, size, set) < 0)
        return -1;
    for (int i = 0; i < CORES && (!pid || pid == getpid()); i++)
        CPU_SET(i, set);
    return 0;
}

TEST(heard_at_the_start)
{
    bed_listen();
    CHECK_GE(r2_io_count(), 4);
    bed_connect();
    CHECK_EQ(r2_io_used(), 1);
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_LOG", "none", 1);
    setenv("LOCAL_WORLD_SIZE", "1000", 1);
    unsetenv("WORLD_SIZE");
    return check_main(argc, argv);
}
