"""One rank of a job whose AllReduces are R2CCL's own where they can be: plain ones in turn with
calls of one kind that NCCL keeps. Every value is checked.

    left_out_worker.py FOLDER KIND

KIND: grouped, pair, premul, configured, unknown, captured, nonblocking, unequal, limit, parted or
several.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nccl_rank import FLOAT, RANK, RANKS, SUM, Nccl

COUNT, TURNS = 1 << 18, 4
LIMIT = 1 << 16  # from here on it is R2CCL's
HOST, IN_PROGRESS = 1, 7
UNKNOWN, INVALID = 99, 4  # a type of ncclDataType_t, ncclInvalidArgument
CAPTURED = ctypes.c_void_p(0xCA)  # tests/shim/fakecuda.c
Data = ctypes.c_float * COUNT


class Config(ctypes.Structure):
    """The first fields of ncclConfig_t."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


class Work:
    def __init__(self, folder: Path, kind: str) -> None:
        self.nccl = Nccl(None)
        self.comm = (
            self._nonblocking(folder) if kind == "nonblocking" else self.nccl.init(folder / "id")
        )
        self.calls: dict[str, Callable[[], float]] = {
            "grouped": self.grouped,
            "pair": self.pair,
            "premul": self.premul,
            "configured": self.configured,
            "unknown": self.unknown,
            "captured": lambda: self.reduce(SUM, CAPTURED),
            "nonblocking": self.plain,
        }

    def _nonblocking(self, folder: Path) -> ctypes.c_void_p:
        comm, config = ctypes.c_void_p(), Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
        unique = self.nccl.unique_id(folder / "id")
        code = self.nccl.nccl.ncclCommInitRankConfig(
            ctypes.byref(comm), RANKS, unique, RANK, ctypes.byref(config)
        )
        state = ctypes.c_int(code)
        while state.value == IN_PROGRESS:
            self.nccl.check("ncclCommGetAsyncError", comm, ctypes.byref(state))
            time.sleep(0.001)
        assert state.value == 0, state.value
        return comm

    def reduce(
        self, op: int, stream: ctypes.c_void_p, data: ctypes.Array[ctypes.c_float] | None = None
    ) -> float:
        if data is None:
            data = Data(*([1.0 + RANK] * COUNT))
        self.nccl.check(
            "ncclAllReduce", data, data, ctypes.c_size_t(COUNT), FLOAT, op, self.comm, stream
        )
        assert data[0] == data[COUNT - 1]
        return float(data[COUNT - 1])

    def plain(self) -> float:
        return self.reduce(SUM, ctypes.c_void_p())

    def grouped(self) -> float:
        data = Data(*([1.0 + RANK] * COUNT))
        self.nccl.check("ncclGroupStart")
        self.reduce(SUM, ctypes.c_void_p(), data)
        self.nccl.check("ncclGroupEnd")
        return float(data[0])

    def pair(self) -> float:
        two = [Data(*([1.0 + RANK] * COUNT)) for _ in range(2)]
        self.nccl.check("ncclGroupStart")
        for data in two:
            self.reduce(SUM, ctypes.c_void_p(), data)
        self.nccl.check("ncclGroupEnd")
        assert two[0][7] == two[1][COUNT - 1]
        return float(two[1][0])

    def premul(self) -> float:
        op, factor = ctypes.c_int(), ctypes.c_float(1.0)
        self.nccl.check(
            "ncclRedOpCreatePreMulSum",
            ctypes.byref(op),
            ctypes.byref(factor),
            FLOAT,
            HOST,
            self.comm,
        )
        result = self.reduce(op.value, ctypes.c_void_p())
        self.nccl.check("ncclRedOpDestroy", op, self.comm)
        return result

    def configured(self) -> float:
        data = Data(*([1.0 + RANK] * COUNT))
        words = (data, data, ctypes.c_size_t(COUNT), FLOAT, SUM, self.comm, ctypes.c_void_p())
        self.nccl.check("ncclAllReduceConfig", *words, None)
        return float(data[COUNT - 1])

    def unknown(self) -> float:
        """The stand-in refuses the type; a later NCCL may know it."""
        data, code = Data(), self.nccl.nccl.ncclAllReduce
        count = ctypes.c_size_t(COUNT)
        assert code(data, data, count, UNKNOWN, SUM, self.comm, ctypes.c_void_p()) == INVALID
        return self.plain()


def unequal(folder: Path) -> None:
    """The upper half of the ranks gives one element more."""
    nccl, count = Nccl(None), COUNT + (RANK >= RANKS // 2)
    comm, data = nccl.init(folder / "id"), (ctypes.c_float * (COUNT + 1))()
    code = nccl.nccl.ncclAllReduce(
        data, data, ctypes.c_size_t(count), FLOAT, SUM, comm, ctypes.c_void_p()
    )
    print(f"result {code}", flush=True)
    nccl.check("ncclCommAbort", comm)


def fails(kind: str, folder: Path) -> None:
    """The last rank's second call is NCCL's alone: of one element less ("limit"), or in a group
    ("parted")."""
    nccl, failed = Nccl(None), ctypes.c_int()
    comm, data, last = nccl.init(folder / "id"), Data(), RANK == RANKS - 1
    count = LIMIT - 1 if kind == "limit" and last else LIMIT
    words = (data, data, ctypes.c_size_t(count), FLOAT, SUM, comm, ctypes.c_void_p())

    def second() -> None:
        if kind == "parted" and last:
            nccl.nccl.ncclGroupStart()
        nccl.nccl.ncclAllReduce(*words)
        if kind == "parted" and last:
            nccl.nccl.ncclGroupEnd()

    nccl.sum(data, data, COUNT, comm)
    call = threading.Thread(target=second)
    call.start()
    while call.is_alive() and not failed.value:
        nccl.check("ncclCommGetAsyncError", comm, ctypes.byref(failed))
        time.sleep(0.01)
    nccl.check("ncclCommGetAsyncError", comm, ctypes.byref(failed))
    print(f"result {failed.value}", flush=True)
    nccl.check("ncclCommAbort", comm)
    call.join(10)


def several(folder: Path) -> None:
    """A process that has two ranks: it calls for both in one group."""
    nccl, ranks = Nccl(None), 2 * RANKS
    unique, comms = nccl.unique_id(folder / "id"), [ctypes.c_void_p() for _ in range(2)]
    data = [Data(*([1.0] * COUNT)) for _ in comms]
    nccl.check("ncclGroupStart")
    for i, comm in enumerate(comms):
        nccl.check("ncclCommInitRank", ctypes.byref(comm), ranks, unique, 2 * RANK + i)
    nccl.check("ncclGroupEnd")
    for turn in range(TURNS):
        nccl.check("ncclGroupStart")
        for mine, comm in zip(data, comms, strict=True):
            nccl.sum(mine, mine, COUNT, comm)
        nccl.check("ncclGroupEnd")
        assert all(mine[0] == mine[COUNT - 1] == ranks ** (turn + 1) for mine in data)
    print(f"rank {RANK} is through", flush=True)
    for comm in comms:
        nccl.check("ncclCommDestroy", comm)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    if kind in ("limit", "parted"):
        fails(kind, folder)
        return
    if kind in ("unequal", "several"):
        {"unequal": unequal, "several": several}[kind](folder)
        return
    work = Work(folder, kind)
    want = RANKS * (RANKS + 1) / 2
    for turn in range(TURNS):
        assert work.plain() == want, turn
        assert work.calls[kind]() == want, turn
    print(f"rank {RANK} is through", flush=True)
    work.nccl.check("ncclCommFinalize", work.comm)
    work.nccl.check("ncclCommDestroy", work.comm)


if __name__ == "__main__":
    main()
