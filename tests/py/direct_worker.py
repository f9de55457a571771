"""One rank of a job whose AllReduce is R2CCL's own: rank 0 stays away from the second operation,
rank 1 aborts from another thread while it waits in it, the others hear of it.

    direct_worker.py FOLDER
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from nccl_rank import FLOAT, RANK, SUM, Nccl

COUNT = 1 << 20
REMOTE, INTERNAL = 6, 3


def reduce(nccl: Nccl, comm: ctypes.c_void_p) -> int:
    data = (ctypes.c_float * COUNT)()
    count = ctypes.c_size_t(COUNT)
    return int(nccl.nccl.ncclAllReduce(data, data, count, FLOAT, SUM, comm, ctypes.c_void_p()))


def abort_soon(nccl: Nccl, comm: ctypes.c_void_p) -> None:
    time.sleep(1)
    nccl.check("ncclCommAbort", comm)


def main() -> None:
    nccl, folder = Nccl(None), Path(sys.argv[1])
    comm = nccl.init(folder / "id")
    assert reduce(nccl, comm) == 0
    if RANK == 1:
        watchdog = threading.Thread(target=abort_soon, args=(nccl, comm))
        watchdog.start()
    begun = time.monotonic()
    code = reduce(nccl, comm) if RANK else 0
    took = time.monotonic() - begun
    # Rank 1 may hear of rank 2's error before it is through.
    assert code in ((0,), (INTERNAL, REMOTE), (REMOTE,))[min(RANK, 2)], code
    assert RANK == 0 or 0.5 < took < 10, took
    (folder / f"done.{RANK}").touch()
    if RANK == 1:
        watchdog.join()
    while len(list(folder.glob("done.*"))) < 3:
        time.sleep(0.01)
    if RANK != 1:
        nccl.check("ncclCommAbort", comm)


if __name__ == "__main__":
    main()
