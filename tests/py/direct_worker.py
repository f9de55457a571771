"""One rank of a job whose AllReduce is R2CCL's own: rank 0 stays away from the second operation,
rank 1 aborts from another thread while it waits in it, the others hear of it. Or, with "dies", the
last rank ends before the second operation, and the others abort it when they hear of that.

    direct_worker.py FOLDER [dies]
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from nccl_rank import FLOAT, RANK, RANKS, SUM, Nccl

COUNT = 1 << 20
REMOTE, INTERNAL = 6, 3


def reduce(nccl: Nccl, comm: ctypes.c_void_p) -> int:
    data = (ctypes.c_float * COUNT)()
    count = ctypes.c_size_t(COUNT)
    return int(nccl.nccl.ncclAllReduce(data, data, count, FLOAT, SUM, comm, ctypes.c_void_p()))


def abort_soon(nccl: Nccl, comm: ctypes.c_void_p) -> None:
    time.sleep(1)
    nccl.check("ncclCommAbort", comm)


def remote_error(nccl: Nccl, comm: ctypes.c_void_p) -> bool:
    error = ctypes.c_int()
    nccl.check("ncclCommGetAsyncError", comm, ctypes.byref(error))
    return error.value == REMOTE


def all_have(folder: Path, word: str) -> None:
    """Each rank has come so far."""
    (folder / f"{word}.{RANK}").touch()
    while len(list(folder.glob(f"{word}.*"))) < RANKS:
        time.sleep(0.01)


def dies(nccl: Nccl, comm: ctypes.c_void_p, folder: Path) -> None:
    """The call returns when the stream would go on: not before the communicator is aborted."""
    all_have(folder, "first")  # the last rank's sums have left
    if RANK == RANKS - 1:
        os._exit(0)
    caller = threading.Thread(target=reduce, args=(nccl, comm))
    caller.start()
    end = time.monotonic() + 20
    while not remote_error(nccl, comm):
        assert time.monotonic() < end, "no error"
        time.sleep(0.01)
    time.sleep(1)  # the other ranks' word comes, too
    assert caller.is_alive(), "the stream went on without a sum"
    nccl.check("ncclCommAbort", comm)
    caller.join(10)
    assert not caller.is_alive(), "the stream still waits"
    print("waited", flush=True)


def main() -> None:
    nccl, folder = Nccl(None), Path(sys.argv[1])
    comm = nccl.init(folder / "id")
    assert reduce(nccl, comm) == 0
    if sys.argv[2:] == ["dies"]:
        dies(nccl, comm, folder)
        return
    if RANK == 1:
        watchdog = threading.Thread(target=abort_soon, args=(nccl, comm))
        watchdog.start()
    begun = time.monotonic()
    code = reduce(nccl, comm) if RANK else 0
    took = time.monotonic() - begun
    # Rank 1 may hear of rank 2's error before it is through.
    assert code in ((0,), (INTERNAL, REMOTE), (REMOTE,))[min(RANK, 2)], code
    assert RANK == 0 or 0.5 < took < 10, took
    if RANK == 1:
        watchdog.join()
    all_have(folder, "done")
    if RANK != 1:
        nccl.check("ncclCommAbort", comm)


if __name__ == "__main__":
    main()
