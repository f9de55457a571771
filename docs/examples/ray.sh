#!/bin/bash
# Ray: workers inherit the environment of `ray start`, so R2CCL has to be there. Run it on each node:
#   ./ray.sh --head --port 6379             on the first node
#   ./ray.sh --address node1:6379           on the others
# Expected: `ray status` lists all nodes. When a job runs, `r2ccl-ctl ps` on a node lists its workers.
set -eu

export R2CCL_DLSYM=1 # vLLM and CuPy open NCCL with dlopen
export R2CCL_JOB=${R2CCL_JOB:-ray}

exec r2ccl-ctl run --preload -- ray start --block "$@"
