"""One rank of a job that does with its communicator what r2ccl_perf never would.

    failover_worker.py WHAT ID_FILE [COUNT]

recreate: COUNT communicators one after the other, each used; rank and growth as a line of JSON.
fork: a child in the middle, which ends as Python does; the parent goes on.
leave: rank 1 ends with code 0 in the middle, without destroying anything; rank 0 must get an error.
Exit codes: 0 right, 1 a wrong value, 2 an error of NCCL.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import sys
import time
from pathlib import Path

from nccl_rank import RANK, RANKS, Nccl, NcclError

WORDS = 200_000


class Ring:
    """A communicator of all ranks, and one all-reduce on it whose result is looked at."""

    def __init__(self, nccl: Nccl, file: Path) -> None:
        self.nccl = nccl
        self.comm = nccl.init(file)
        self.send = (ctypes.c_float * WORDS)(*([float(RANK + 1)] * WORDS))
        self.recv = (ctypes.c_float * WORDS)()
        self.right = array.array("f", [float(RANKS * (RANKS + 1) // 2)] * WORDS).tobytes()

    def reduce(self, words: int = WORDS) -> None:
        ctypes.memset(self.recv, 0xDB, 4 * words)
        self.nccl.sum(self.send, self.recv, words, self.comm)
        if bytes(self.recv)[: 4 * words] != self.right[: 4 * words]:
            print(f"rank {RANK}: wrong values", flush=True)
            os._exit(1)

    def destroy(self) -> None:
        self.nccl.check("ncclCommDestroy", self.comm)


def usage() -> dict[str, int]:
    """What this process holds of the kernel."""
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def recreate(nccl: Nccl, file: Path, count: int) -> None:
    early: dict[str, int] = {}
    for number in range(count):
        ring = Ring(nccl, file.with_name(f"{file.name}{number}"))
        ring.reduce(20_000)
        ring.destroy()
        if number == count // 4:
            time.sleep(0.5)
            early = usage()
    time.sleep(0.5)
    print(json.dumps({"rank": RANK, "early": early, "late": usage()}), flush=True)


def fork(nccl: Nccl, file: Path) -> None:
    ring = Ring(nccl, file)
    for number in range(60):
        ring.reduce()
        if number % 20 == 10:
            pid = os.fork()
            if pid == 0:
                sys.exit(7)  # with all handlers of Python and of the libraries
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ring.destroy()


def leave(nccl: Nccl, file: Path) -> None:
    ring = Ring(nccl, file)
    for number in range(1_000_000):
        ring.reduce()
        if number == 10 and RANK == 1:
            print(f"left {time.monotonic()}", flush=True)
            return


def main() -> int:
    nccl = Nccl("libnccl.so.2")
    file = Path(sys.argv[2])
    try:
        if sys.argv[1] == "recreate":
            recreate(nccl, file, int(sys.argv[3]))
        else:
            {"fork": fork, "leave": leave}[sys.argv[1]](nccl, file)
    except NcclError as err:
        print(f"rank {RANK}: {err} at {time.monotonic()}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
