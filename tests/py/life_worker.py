"""One rank of a job that suspends and revokes its communicator, or grows it.

    life_worker.py FOLDER revoke|grow

Operations are those of shrink_worker.py. Files of FOLDER that say after which operation something
happens: pause (suspend and resume), stall (the last rank stands still), grow, back (from the grown
communicator to the one it came from), stop. FOLDER/codes.RANK: what NCCL said to operations that
it was to refuse.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from nccl_rank import FLOAT, RANK, RANKS, SUM, Id, Nccl
from shrink_worker import WORDS, operate

DEFAULT, SUSPEND_MEM = 0, 1
PATIENCE_S = 240


def code_of(nccl: Nccl, comm: ctypes.c_void_p) -> int:
    """Of an operation that plans are for."""
    data = (ctypes.c_float * WORDS)()
    count = ctypes.c_size_t(WORDS)
    return int(nccl.nccl.ncclAllReduce(data, data, count, FLOAT, SUM, comm, ctypes.c_void_p()))


def await_file(file: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} does not appear")
        time.sleep(0.002)


def revoke_when_told(nccl: Nccl, comm: ctypes.c_void_p, folder: Path) -> None:
    """As a watchdog does."""
    await_file(folder / "revoke")
    nccl.check("ncclCommRevoke", comm, DEFAULT)


def revoke(nccl: Nccl, folder: Path) -> None:
    world, fewer, error = nccl.init(folder / "id"), ctypes.c_void_p(), ctypes.c_int(-1)
    operate(nccl, world, RANKS, folder / "pause")
    nccl.check("ncclCommSuspend", world, SUSPEND_MEM)
    codes = [code_of(nccl, world)]
    nccl.check("ncclCommResume", world)
    (folder / f"resumed.{RANK}").touch()
    operate(nccl, world, RANKS, folder / "stall")
    if RANK == RANKS - 1:
        await_file(folder / "stop")
        nccl.check("ncclCommAbort", world)
        return
    watchdog = threading.Thread(target=revoke_when_told, args=(nccl, world, folder))
    watchdog.start()
    codes.append(code_of(nccl, world))  # that the last rank does not come to
    watchdog.join()
    codes.append(code_of(nccl, world))
    nccl.check("ncclCommGetAsyncError", world, ctypes.byref(error))
    codes.append(error.value)
    (folder / f"codes.{RANK}").write_text(" ".join(map(str, codes)))
    last = (ctypes.c_int * 1)(RANKS - 1)
    nccl.check("ncclCommShrink", world, last, 1, ctypes.byref(fewer), None, DEFAULT)
    nccl.check("ncclCommDestroy", world)
    operate(nccl, fewer, RANKS - 1, folder / "stop")
    nccl.check("ncclCommDestroy", fewer)


def grow(nccl: Nccl, folder: Path) -> None:
    """The last rank comes later."""
    old, grown, invitation = ctypes.c_void_p(), ctypes.c_void_p(), Id()
    file, new = folder / "invitation", RANK == RANKS - 1
    if not new:
        unique = nccl.unique_id(folder / "id")
        nccl.check("ncclCommInitRank", ctypes.byref(old), RANKS - 1, unique, RANK)
        operate(nccl, old, RANKS - 1, folder / "grow")
    if RANK == 0:
        nccl.check("ncclCommGetUniqueId", old, ctypes.byref(invitation))
        file.with_suffix(".new").write_bytes(bytes(invitation))
        file.with_suffix(".new").rename(file)
    elif new:
        await_file(file)
        ctypes.memmove(ctypes.byref(invitation), file.read_bytes(), 128)
    known = ctypes.byref(invitation) if new or RANK == 0 else None
    place = RANK if new else -1
    nccl.check("ncclCommGrow", old, RANKS, known, place, ctypes.byref(grown), None)
    operate(nccl, grown, RANKS, folder / "back")
    nccl.check("ncclCommDestroy", grown)
    if not new:
        operate(nccl, old, RANKS - 1, folder / "stop")
        nccl.check("ncclCommDestroy", old)


if __name__ == "__main__":
    {"revoke": revoke, "grow": grow}[sys.argv[2]](Nccl(None), Path(sys.argv[1]))
