"""One rank of a job that goes on without its last rank.

    shrink_worker.py FOLDER

AllReduces of floats that do not add up alike in every order. FOLDER/shrink has the number of the
last one of all ranks; then the last rank leaves and the others shrink the communicator. FOLDER/stop
has the number of the last one. FOLDER/RANK gets a line per operation: ranks, number, the digest of
the result's bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
import time
from pathlib import Path

from nccl_rank import RANK, RANKS, Nccl

WORDS = (1 << 18) + 96  # above 1 MiB: an operation that plans are for
PAUSE = 0.01


def operate(nccl: Nccl, comm: ctypes.c_void_p, ranks: int, end: Path) -> None:
    """Until the operation that `end` names."""
    numbers = random.Random(1000 + RANK)
    send = (ctypes.c_float * WORDS)(*(numbers.uniform(-1, 1) for _ in range(WORDS)))
    recv = (ctypes.c_float * WORDS)()
    number = 0
    with (end.parent / str(RANK)).open("a", encoding="utf-8", buffering=1) as out:
        while not end.exists() or number <= int(end.read_text()):
            nccl.sum(send, recv, WORDS, comm)
            out.write(f"{ranks} {number} {hashlib.sha256(recv).hexdigest()[:16]}\n")
            number += 1
            time.sleep(PAUSE)


def last_sum(folder: Path) -> None:
    """Until the others have had the last operation: an abort ends what this rank still sends."""
    ends = f"{RANKS} {folder.joinpath('shrink').read_text().strip()} "
    until = time.monotonic() + 240
    while not all(ends in (folder / str(rank)).read_text() for rank in range(RANKS - 1)):
        if time.monotonic() > until:
            raise TimeoutError(f"not all ranks have had operation {ends}")
        time.sleep(PAUSE)


def main() -> None:
    folder, nccl = Path(sys.argv[1]), Nccl(None)
    world, fewer = nccl.init(folder / "id"), ctypes.c_void_p()
    operate(nccl, world, RANKS, folder / "shrink")
    if RANK < RANKS - 1:
        last = (ctypes.c_int * 1)(RANKS - 1)
        nccl.check("ncclCommShrink", world, last, 1, ctypes.byref(fewer), None, 0)
        nccl.check("ncclCommDestroy", world)
        operate(nccl, fewer, RANKS - 1, folder / "stop")
        nccl.check("ncclCommDestroy", fewer)
    else:
        last_sum(folder)
        nccl.check("ncclCommAbort", world)


if __name__ == "__main__":
    main()
