#!/bin/bash
# A job whose NCCL_* variables come from an env plugin (NCCL 2.28.7 and later, for example Google's gIB):
#   NCCL_ENV_PLUGIN=/path/to/libnccl-env.so ./env-plugin.sh torchrun --nproc-per-node 8 train.py
# R2CCL asks the same env plugin for variables such as NCCL_SOCKET_IFNAME. `r2ccl-ctl doctor` cannot see them.
# Expected: NCCL says "Using network R2CCL". If it names another network, the env plugin sets NCCL_NET.
set -eu

: "${NCCL_ENV_PLUGIN:?the env plugin, a path or its name}"
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} # NCCL says which network it uses

exec r2ccl-ctl run -- "$@"
