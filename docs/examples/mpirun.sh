#!/bin/bash
# nccl-tests under Open MPI, after a check of the hosts.
#   HOSTS=node1,node2 ./mpirun.sh -b 8 -e 1G -f 2
# Expected, at the end: "# Out of bounds values : 0 OK".
# During the run, on node1: `r2ccl-ctl fail-nic eth3 --for 10s`. The run goes on and ends with the same line.
set -eu

hosts=${HOSTS:?two or more hosts with commas between them}
gpus=${GPUS:-8}
count=$(tr ',' '\n' <<<"$hosts" | wc -l)

# 1: warnings; 2: the job would fail; 3: a host gave no answer.
code=0
r2ccl-ctl doctor --hosts "$hosts" --quiet || code=$?
[ "$code" -le 1 ] || exit "$code"

# shellcheck disable=SC2086 # MPI_ARGS: words for mpirun, as "--mca oob_tcp_if_include eth0"
exec r2ccl-ctl run --preload -- mpirun ${MPI_ARGS:-} -n $((count * gpus)) \
    --host "${hosts//,/:$gpus,}:$gpus" \
    -x LD_PRELOAD -x NCCL_NET_PLUGIN -x NCCL_NET_PLUGIN_REF_COUNT -x R2CCL_JOB \
    "${PERF:-all_reduce_perf}" "$@"
