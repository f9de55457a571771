"""What a rank of a test job needs to call NCCL by ctypes: its place, calls whose errors are raised,
and the unique id, which rank 0 leaves in a file."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FLOAT, SUM = 7, 0


class Id(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 128)]


class NcclError(Exception):
    pass


class Nccl:
    def __init__(self, library: str | None) -> None:
        """None: what the process has loaded already (a preloaded shim)."""
        self.nccl = ctypes.CDLL(library)

    def check(self, name: str, *arguments: object) -> None:
        code = getattr(self.nccl, name)(*arguments)
        if code != 0:
            raise NcclError(f"{name}: result {code}")

    def unique_id(self, file: Path) -> Id:
        """The same on all ranks; waits up to 30 s for rank 0."""
        unique = Id()
        if RANK == 0:
            self.check("ncclGetUniqueId", ctypes.byref(unique))
            fresh = file.with_suffix(".new")
            fresh.write_bytes(bytes(unique))
            fresh.rename(file)
            return unique
        end = time.monotonic() + 30
        while not file.exists():
            if time.monotonic() > end:
                raise NcclError(f"{file} does not appear")
            time.sleep(0.002)
        ctypes.memmove(ctypes.byref(unique), file.read_bytes(), 128)
        return unique

    def init(self, file: Path) -> ctypes.c_void_p:
        """A communicator of all ranks."""
        comm = ctypes.c_void_p()
        self.check("ncclCommInitRank", ctypes.byref(comm), RANKS, self.unique_id(file), RANK)
        return comm

    def sum(self, send: object, recv: object, words: int, comm: ctypes.c_void_p) -> None:
        """Of floats."""
        count = ctypes.c_size_t(words)
        self.check("ncclAllReduce", send, recv, count, FLOAT, SUM, comm, ctypes.c_void_p())
