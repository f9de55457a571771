"""One rank of a job whose AllReduces are floats that do not add up alike in every order.

    plan_worker.py FOLDER [PAUSE_MS]

Two communicators: all ranks, and a split of it with the ranks the other way round. Operations
alternate. FOLDER/stop has the number of the last one of each. FOLDER/RANK gets a line per
operation: communicator, number, the digest of the result's bytes. Exit codes: 0, or 2 after an
error of NCCL. Then both communicators are aborted, and FOLDER/aborted.RANK appears. A line of JSON
says how long that took and how long until no thread of the shim makes a communicator any more.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
import time
from pathlib import Path

from nccl_rank import RANK, RANKS, Nccl, NcclError

WORDS = (1 << 18) + 96  # above 1 MiB: an operation that plans are for

nccl = Nccl(None)


def making() -> int:
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("r2ccl-make") for name in names)


class Work:
    def __init__(self, folder: Path) -> None:
        self.world, self.turned = nccl.init(folder / "id"), ctypes.c_void_p()
        nccl.check("ncclCommSplit", self.world, 7, RANKS - RANK, ctypes.byref(self.turned), None)
        numbers = random.Random(1000 + RANK)
        self.send = (ctypes.c_float * WORDS)(*(numbers.uniform(-1, 1) for _ in range(WORDS)))
        self.recv = (ctypes.c_float * WORDS)()

    def reduce(self, comm: ctypes.c_void_p) -> str:
        nccl.sum(self.send, self.recv, WORDS, comm)
        return hashlib.sha256(self.recv).hexdigest()[:16]

    def abort(self, folder: Path) -> None:
        begin = time.monotonic()
        nccl.check("ncclCommAbort", self.turned)
        nccl.check("ncclCommAbort", self.world)
        aborted = time.monotonic()
        (folder / f"aborted.{RANK}").touch()
        while making() and time.monotonic() < aborted + 60:
            time.sleep(0.01)
        took = {"abort": aborted - begin, "making": time.monotonic() - aborted, "left": making()}
        print(json.dumps(took), flush=True)

    def end(self) -> None:
        nccl.check("ncclCommDestroy", self.turned)
        nccl.check("ncclCommDestroy", self.world)


def run(folder: Path, pause: float) -> None:
    work = Work(folder)
    try:
        operate(work, folder, pause)
    except NcclError:
        work.abort(folder)
        raise
    work.end()


def operate(work: Work, folder: Path, pause: float) -> None:
    with (folder / str(RANK)).open("w", encoding="utf-8", buffering=1) as out:
        number, stop = 0, folder / "stop"
        while not stop.exists() or number <= int(stop.read_text()):
            for name, comm in (("world", work.world), ("turned", work.turned)):
                out.write(f"{name} {number} {work.reduce(comm)}\n")
            number += 1
            time.sleep(pause)


def main() -> int:
    pause = float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0
    try:
        run(Path(sys.argv[1]), pause)
    except NcclError as err:
        print(f"rank {RANK}: {err}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
