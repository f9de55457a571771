#!/usr/bin/env python3
"""AllReduce through CuPy, which opens NCCL itself.

Driven by run_ddp.py --program cupy_app.py. Every step is an AllReduce of numbers whose sum is
known. Prints the same JSON lines as ddp_train.py; the "loss" is how many numbers were wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pickle
import socket
import sys
import time
from typing import Any

cupy: Any = importlib.import_module("cupy")
nccl: Any = importlib.import_module("cupy.cuda.nccl")  # cupy.cuda does not import it


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def share_id(rank: int, world: int) -> Any:
    """The id of rank 0, over a socket of our own: bytes, or signed bytes in a tuple (CuPy 13)."""
    at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        own = nccl.get_unique_id()
        with socket.create_server(at) as server:
            for _ in range(world - 1):
                conn, _where = server.accept()
                with conn:
                    conn.sendall(pickle.dumps(own))
        return own
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(at, timeout=30) as conn, conn.makefile("rb") as file:
                return pickle.load(file)
        except (OSError, EOFError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--size", type=int, default=8 << 20, help="bytes of an AllReduce")
    p.add_argument("--backend", default="nccl")
    opts = p.parse_args()
    if not nccl.available:
        print("cupy_app: CuPy finds no libnccl.so.2: set NCCL_LIB", file=sys.stderr)
        return 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cupy.cuda.Device(int(os.environ["LOCAL_RANK"])).use()
    comm = nccl.NcclCommunicator(world, share_id(rank, world), rank)
    base = (cupy.arange(opts.size // 4) % 61).astype(cupy.float32)
    result = cupy.empty_like(base)
    stream = cupy.cuda.get_current_stream()
    if rank == 0:
        emit(event="start", world=world, cupy=cupy.__version__, nccl=nccl.get_version())
    began, wrong = time.monotonic(), 0
    for step in range(opts.steps):
        mine = base + (step % 7) + rank
        comm.allReduce(mine.data.ptr, result.data.ptr, base.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM,
                       stream.ptr)
        want = world * (base + (step % 7)) + world * (world - 1) // 2
        bad = int((result != want).sum())  # waits for the stream
        wrong += bad
        if rank == 0:
            emit(event="step", step=step + 1, loss=f"{bad} wrong")
    digest = hashlib.sha256(cupy.asnumpy(result).tobytes()).hexdigest()
    emit(event="end", rank=rank, steps=opts.steps, losses=f"{wrong} wrong", weights=digest,
         seconds=round(time.monotonic() - began, 3))
    comm.destroy()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
