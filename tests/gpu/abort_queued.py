#!/usr/bin/env python3
"""How NCCL's ncclCommAbort ends two communicators whose operations hang one behind the other.

    abort_queued.py            # with a GPU, NCCL of PyTorch's wheel; two nodes' ranks share it

Two ranks (NCCL_HOSTID makes them nodes) have two communicators. One rank stops; the other puts an
AllReduce of each on one stream and aborts both: one after the other, from either end, and in a
group. NCCL's abort waits for what is on the stream, so the first abort of the communicator that is
behind never returns. Why the shim ends a communicator and those of its plans in a group
(shim/api/life.c). Prints a line per way; exit code 0: the group's ended, 1: not; 2: no GPU.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import sys
import threading
import time
from multiprocessing.synchronize import Event
from typing import Any

WAYS = ("front", "behind", "group")
LIMIT_S = 15.0
COUNT = 1 << 20


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def library() -> ctypes.CDLL:
    import torch  # noqa: F401  PyTorch's wheel loads its own NCCL

    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "libnccl.so" in line:
                return ctypes.CDLL(line.split()[-1])
    return ctypes.CDLL("libnccl.so.2")


def check(result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL says {result}")


def reduce(nccl: Any, comm: Any, data: Any, stream: int) -> None:
    pointer = ctypes.c_void_p(data.data_ptr())
    check(
        nccl.ncclAllReduce(
            pointer, pointer, ctypes.c_size_t(COUNT), 7, 0, comm, ctypes.c_void_p(stream)
        )
    )


def end(nccl: Any, way: str, front: Any, behind: Any) -> None:
    if way == "group":
        check(nccl.ncclGroupStart())
    for comm in (front, behind) if way == "front" else (behind, front):
        check(nccl.ncclCommAbort(comm))
    if way == "group":
        check(nccl.ncclGroupEnd())


def rank_main(rank: int, way: str, ids: list[bytes], stop: Event, took: Any) -> None:
    os.environ.update(
        NCCL_HOSTID=f"node{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0", NCCL_NET="Socket"
    )
    import torch

    nccl = library()
    torch.cuda.set_device(0)
    data = torch.ones(COUNT, device="cuda")
    comms = []
    for raw in ids:
        comm = ctypes.c_void_p()
        check(nccl.ncclCommInitRank(ctypes.byref(comm), 2, Id.from_buffer_copy(raw), rank))
        comms.append(comm)
    stream = torch.cuda.Stream()
    for comm in comms:
        reduce(nccl, comm, data, stream.cuda_stream)
    stream.synchronize()
    if rank == 1:
        stop.wait(4 * LIMIT_S)
        os._exit(0)
    for comm in comms:
        reduce(nccl, comm, data, stream.cuda_stream)
    time.sleep(1)
    begin = time.monotonic()
    thread = threading.Thread(target=end, args=(nccl, way, *comms), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    took.value = -1.0 if thread.is_alive() else time.monotonic() - begin
    os._exit(0)


def new_ids() -> list[bytes]:
    nccl = library()
    ids = []
    for _ in range(2):
        unique = Id()
        check(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        ids.append(bytes(unique))
    return ids


def make_ids(pipe: Any) -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    pipe.send(new_ids())
    pipe.recv()  # its threads are what ranks meet at


def run(way: str) -> float:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    root = context.Process(target=make_ids, args=(theirs,))
    root.start()
    ids = ours.recv()
    stop, took = context.Event(), context.Value("d", -2.0)
    ranks = [context.Process(target=rank_main, args=(r, way, ids, stop, took)) for r in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(4 * LIMIT_S)
    stop.set()
    ours.send(None)
    for process in [*ranks, root]:
        process.join(5)
        if process.is_alive():
            process.kill()
    return float(took.value)


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return 2
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())), flush=True)
    took = {}
    for way in WAYS:
        took[way] = run(way)
        says = {-1.0: f"not ended after {LIMIT_S:.0f} s", -2.0: "did not run"}
        print(f"{way:8}{says.get(took[way], f'ended after {took[way]:.2f} s')}", flush=True)
    return 0 if took["group"] >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
