#!/usr/bin/env python3
"""AllReduce through JAX, one process per device: XLA opens NCCL with dlopen.

Driven by run_ddp.py --program jax_app.py. Every step is a psum of numbers whose sum is known.
Prints the same JSON lines as ddp_train.py; the "loss" is how many numbers were wrong. --backend
gloo runs it on CPUs, which only tries the script itself.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others use the GPU as well
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
numpy: Any = importlib.import_module("numpy")


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def make_step(world: int, count: int) -> Any:
    """A function of the step: the sum over all ranks, and how many of its numbers are wrong."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((world,), ("ranks",))

    def mine(add: Any) -> Any:
        base = jnp.arange(count, dtype=jnp.int32) % 61
        rank = jax.lax.axis_index("ranks")
        total = jax.lax.psum((base + add + rank).astype(jnp.float32), "ranks")
        want = world * (base + add) + world * (world - 1) // 2
        return total, (total != want.astype(jnp.float32)).sum()

    return jax.jit(jax.shard_map(mine, mesh=mesh, in_specs=(spec(),), out_specs=(spec(), spec())))


def local(array: Any) -> Any:
    return numpy.asarray(array.addressable_data(0))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--size", type=int, default=8 << 20, help="bytes of an AllReduce")
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    opts = p.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if opts.backend == "gloo":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(where, world, rank)
    step_of = make_step(world, opts.size // 4)
    if rank == 0:
        emit(event="start", world=world, jax=jax.__version__,
             devices=[str(device) for device in jax.devices()])
    began, wrong = time.monotonic(), 0
    total: Any = None
    for step in range(opts.steps):
        total, bad_there = step_of(jnp.int32(step % 7))
        bad = int(local(bad_there))
        wrong += bad
        if rank == 0:
            emit(event="step", step=step + 1, loss=f"{bad} wrong")
    emit(event="end", rank=rank, steps=opts.steps, losses=f"{wrong} wrong",
         weights=hashlib.sha256(local(total).tobytes()).hexdigest(),
         seconds=round(time.monotonic() - began, 3))
    jax.distributed.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
