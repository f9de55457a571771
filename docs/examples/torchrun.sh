#!/bin/bash
# PyTorch on two nodes, with R2CCL under NCCL. Run it on each node:
#   NODE_RANK=0 MASTER_ADDR=node1 ./torchrun.sh train.py     on node1
#   NODE_RANK=1 MASTER_ADDR=node1 ./torchrun.sh train.py     on node2
# Expected: the output of train.py is as without R2CCL. With NCCL_DEBUG=INFO, NCCL says "Using network R2CCL".
# `r2ccl-ctl status` on a node lists its ranks.
set -eu

export R2CCL_JOB=${R2CCL_JOB:-train} # the name of the job, the same on all nodes

exec r2ccl-ctl run --preload -- torchrun \
    --nnodes "${NNODES:-2}" --node-rank "${NODE_RANK:?the number of this node, from 0}" \
    --nproc-per-node "${GPUS:-8}" \
    --master-addr "${MASTER_ADDR:?the first node}" --master-port "${MASTER_PORT:-29500}" \
    "$@"
