/* An application that is linked with NCCL, as nccl-tests are. */
#include "job.h"

int main(int argc, char **argv)
{
    return r2_job(argc, argv);
}
