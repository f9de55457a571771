"""One rank of a job that makes communicators one after the other, splits each, and ends the last
one by an abort from another thread.

    generations_worker.py FOLDER COUNT

Every sum is checked. The last rank stays away from the last operation until the others, whose
thread is inside it, have been told to abort.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from life_worker import await_file, code_of
from nccl_rank import RANK, RANKS, Nccl
from shrink_worker import WORDS


def check_sum(nccl: Nccl, comm: ctypes.c_void_p, ranks: list[int]) -> None:
    """Plans are for operations of that size."""
    send = (ctypes.c_float * WORDS)(*([float(RANK + 1)] * WORDS))
    recv = (ctypes.c_float * WORDS)()
    nccl.sum(send, recv, WORDS, comm)
    wanted = float(sum(rank + 1 for rank in ranks))
    if any(value != wanted for value in recv):
        raise AssertionError(f"rank {RANK}: not all of the sums are {wanted}")


def generation(nccl: Nccl, file: Path) -> None:
    world, half = nccl.init(file), ctypes.c_void_p()
    check_sum(nccl, world, list(range(RANKS)))
    nccl.check("ncclCommSplit", world, RANK % 2, RANK, ctypes.byref(half), None)
    check_sum(nccl, half, list(range(RANK % 2, RANKS, 2)))
    check_sum(nccl, world, list(range(RANKS)))
    nccl.check("ncclCommDestroy", half)
    nccl.check("ncclCommDestroy", world)


def aborted(nccl: Nccl, folder: Path) -> None:
    world = nccl.init(folder / "id.last")
    check_sum(nccl, world, list(range(RANKS)))
    if RANK == RANKS - 1:
        for rank in range(RANKS - 1):
            await_file(folder / f"aborted.{rank}")
        nccl.check("ncclCommAbort", world)
        return

    def abort() -> None:
        time.sleep(1)  # the operation is under way
        nccl.check("ncclCommAbort", world)

    watchdog = threading.Thread(target=abort)
    watchdog.start()
    code = code_of(nccl, world)
    watchdog.join()
    (folder / f"aborted.{RANK}").write_text(str(code))


def main() -> None:
    folder, nccl = Path(sys.argv[1]), Nccl(None)
    for number in range(int(sys.argv[2])):
        generation(nccl, folder / f"id.{number}")
    aborted(nccl, folder)


if __name__ == "__main__":
    main()
