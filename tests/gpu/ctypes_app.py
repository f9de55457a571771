#!/usr/bin/env python3
"""AllReduce through an NCCL that the program opens itself with dlopen, as vLLM and CuPy do.

Driven by run_ddp.py --program ctypes_app.py and started like ddp_train.py. Every step is an
AllReduce of numbers whose sum is known; its "loss" is how many of them were wrong, and the digest
is that of the last result. With --graph N every step replays a CUDA graph of N AllReduces in which
each feeds the next. With --again N there is a new communicator every N steps: many generations of
them in one process. Prints the same JSON lines as ddp_train.py.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import sys
import time
from typing import Any

torch: Any = importlib.import_module("torch")

FLOAT32, SUM, UNIQUE_ID = 7, 0, 128


class NcclError(Exception):
    """A call of NCCL's failed; the text has its words."""


class Nccl:
    """The few functions that are needed, of the library at `path`."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: Any) -> None:
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise NcclError(f"{name}: {self.lib.ncclGetErrorString(rc).decode()}")

    def version(self) -> int:
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        text = (ctypes.c_byte * UNIQUE_ID)()
        self.call("ncclGetUniqueId", text)
        return bytes(text)

    def init(self, world: int, unique_id: bytes, rank: int) -> ctypes.c_void_p:
        class Id(ctypes.Structure):
            _fields_ = (("text", ctypes.c_byte * UNIQUE_ID),)

        comm = ctypes.c_void_p()
        self.lib.ncclCommInitRank.argtypes = (
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, Id, ctypes.c_int)
        self.call("ncclCommInitRank", ctypes.byref(comm), world, Id.from_buffer_copy(unique_id),
                  rank)
        return comm

    def all_reduce(self, comm: ctypes.c_void_p, src: Any, dst: Any) -> None:
        self.call("ncclAllReduce", ctypes.c_void_p(src.data_ptr()),
                  ctypes.c_void_p(dst.data_ptr()), ctypes.c_size_t(src.numel()), FLOAT32, SUM, comm,
                  ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Work:
    """One step: `depth` AllReduces, each of which adds the ranks' numbers and feeds the next."""

    def __init__(self, nccl: Nccl, comm: ctypes.c_void_p, opts: argparse.Namespace, rank: int,
                 world: int) -> None:
        self.nccl, self.comm, self.depth = nccl, comm, max(1, opts.graph)
        count = opts.size // 4
        # Small whole numbers: sums are exact whatever the order of the ranks is.
        self.base = (torch.arange(count, device="cuda") % 61).float()
        self.rank, self.world = rank, world
        self.buffers = [torch.empty_like(self.base) for _ in range(self.depth + 1)]
        self.graph: Any = None
        if opts.graph:
            self.once(0)  # connections are made outside of the capture
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.reduce()

    def reduce(self) -> None:
        for i in range(self.depth):
            self.nccl.all_reduce(self.comm, self.buffers[i], self.buffers[i + 1])
            self.buffers[i + 1].div_(self.world)

    def once(self, step: int) -> int:
        """Runs a step; returns how many of its numbers are wrong."""
        self.buffers[0].copy_(self.base + (step % 7) + self.rank)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.reduce()
        want = self.base + (step % 7) + (self.world - 1) / 2
        return int((self.buffers[-1] != want).sum().item())

    def digest(self) -> str:
        return hashlib.sha256(self.buffers[-1].cpu().numpy().tobytes()).hexdigest()


def make_store(rank: int, world: int) -> Any:
    return torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                                      world, rank == 0)


def new_comm(nccl: Nccl, store: Any, rank: int, world: int, step: int) -> ctypes.c_void_p:
    if rank == 0:
        store.set(f"id {step}", nccl.unique_id())
    return nccl.init(world, bytes(store.get(f"id {step}")), rank)


def one_comm(nccl: Nccl, comm: ctypes.c_void_p, opts: argparse.Namespace, rank: int, world: int,
             steps: range) -> tuple[int, str]:
    """Runs these steps on a communicator and destroys it: how many numbers were wrong, and the
    digest of the last result."""
    work = Work(nccl, comm, opts, rank, world)
    wrong = 0
    for step in steps:
        bad = work.once(step)
        wrong += bad
        if rank == 0:
            emit(event="step", step=step + 1, loss=f"{bad} wrong")
    digest = work.digest()
    torch.cuda.synchronize()
    work.graph = None  # ncclCommDestroy waits for the graphs that use the communicator
    nccl.call("ncclCommDestroy", comm)
    return wrong, digest


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--size", type=int, default=8 << 20, help="bytes of an AllReduce")
    p.add_argument("--graph", type=int, default=0, help="AllReduces in a CUDA graph; 0: no graph")
    p.add_argument("--again", type=int, default=0, help="a new communicator every N steps; 0: one")
    p.add_argument("--nccl", default="libnccl.so.2", help="name or path for dlopen")
    p.add_argument("--backend", default="nccl")
    opts = p.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    nccl = Nccl(opts.nccl)
    store = make_store(rank, world)
    if rank == 0:
        emit(event="start", world=world, torch=str(torch.__version__), graph=opts.graph,
             nccl=nccl.version())
    began, wrong, digest = time.monotonic(), 0, ""
    each = opts.again or opts.steps
    for first in range(0, opts.steps, each):
        comm = new_comm(nccl, store, rank, world, first)
        bad, digest = one_comm(nccl, comm, opts, rank, world,
                               range(first, min(first + each, opts.steps)))
        wrong += bad
    emit(event="end", rank=rank, steps=opts.steps, losses=f"{wrong} wrong", weights=digest,
         seconds=round(time.monotonic() - began, 3))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
