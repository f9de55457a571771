#!/bin/bash
# vLLM on two nodes, tensor parallel over all their GPUs. Run it on each node:
#   NODE_RANK=0 MASTER_ADDR=node1 ./vllm.sh MODEL               on node1
#   NODE_RANK=1 MASTER_ADDR=node1 ./vllm.sh MODEL --headless    on node2
# Expected on node1: "Application startup complete." Then `curl node1:8000/v1/models` names MODEL.
set -eu

export R2CCL_DLSYM=1 # vLLM opens NCCL with dlopen
export R2CCL_JOB=${R2CCL_JOB:-vllm}

exec r2ccl-ctl run --preload -- vllm serve "$@" \
    --tensor-parallel-size "${GPUS:-16}" --nnodes "${NNODES:-2}" \
    --node-rank "${NODE_RANK:?the number of this node, from 0}" \
    --master-addr "${MASTER_ADDR:?the first node}"
