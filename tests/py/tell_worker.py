"""One rank of a job whose ranks neither abort nor end when NCCL fails: only what they are told of
it is seen.

    tell_worker.py FOLDER

AllReduces in a loop. Another thread asks ncclCommGetAsyncError, as a watchdog does, and leaves its
first error in FOLDER/told.RANK. After FOLDER/stop appears the process ends at once, with code 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from nccl_rank import RANK, Nccl, NcclError

WORDS = 1 << 10
IN_PROGRESS = 7

nccl = Nccl(None)


def watch(comm: ctypes.c_void_p, folder: Path) -> None:
    error, told = ctypes.c_int(0), False
    while not (folder / "stop").exists():
        nccl.check("ncclCommGetAsyncError", comm, ctypes.byref(error))
        if not told and error.value not in (0, IN_PROGRESS):
            (folder / f"told.{RANK}").write_text(str(error.value))
            told = True
        time.sleep(0.005)
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    comm = nccl.init(folder / "id")
    threading.Thread(target=watch, args=(comm, folder)).start()
    send, recv = (ctypes.c_float * WORDS)(1.0), (ctypes.c_float * WORDS)()
    try:
        for _ in range(200):
            nccl.sum(send, recv, WORDS, comm)
        (folder / f"works.{RANK}").touch()
        while True:
            nccl.sum(send, recv, WORDS, comm)
    except NcclError as err:
        print(f"rank {RANK}: {err}", flush=True)


if __name__ == "__main__":
    main()
