"""What the ranks of a job under random failures hold: descriptors, threads, memory; and how much
more of that is too much."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from failover_bed import PerfJob, Side

from r2ccl_ctl.errors import R2Error

SETTLE_S = 10.0  # what a lost NIC has left behind (attempts, fences) is gone after so long
FDS_OVER_START = 16  # beside the sockets of paths that are up: two or three attempts
THREADS_OVER_START = 2
MIB_OVER_START = 96  # resident: what a path's buffers and the stand-in's copies may come to
MIB_OF_CUDA = 192  # what its libraries take after the first collectives
# What a communicator holds that carries AllReduce out itself, its paths apart: of descriptors those
# of the communicator of a node's ranks, which listens and connects.
THREADS_PER_PLAN, FDS_PER_PLAN, MIB_PER_PLAN = 1, 4, 96
THREADS_OF_NODE = 3  # NCCL's, of the communicator of a node's ranks, if they are several
LONG_S = 300.0  # in half of that every pair of NICs has had to stand in
FDS_OVER_FIRST_HALF, MIB_OVER_FIRST_HALF = 54, 48


class Held(NamedTuple):
    """What a process holds. fds: those that no path accounts for."""

    fds: int
    threads: int
    mib: int

    @classmethod
    def of(cls, side: Side, peers: int) -> Held:
        now = side.snapshot()
        base = Path(f"/proc/{side.pid}")
        pages = int((base / "statm").read_text().split()[1])
        sockets = of_paths(
            now.gauges["paths_up"], (path.streams for path in now.paths), peers, len(now.nics)
        )
        return cls(
            len(list((base / "fd").iterdir())) - sockets,
            len(list((base / "task").iterdir())),
            pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        )

    def over(self, start: Held, granted: Held) -> list[str]:
        """What is more than a job may grow by, and than is granted, a line each."""
        usual = (FDS_OVER_START, THREADS_OVER_START, MIB_OVER_START)
        rows = zip(self._fields, start, self, usual, granted, strict=True)
        return [
            f"{what}: {was}, then {now}" for what, was, now, a, b in rows if now > was + a + b
        ]


def of_paths(up: int, streams: Iterable[int], peers: int, nics: int) -> int:
    """Sockets of a process's paths that are up: one for words and one for each lane. Every other
    rank may have a path each way between any two NICs, plans or not; what is beyond is a leak."""
    lanes = max(streams, default=0)  # what is told of one path may be old, and less
    return min(up, 2 * peers * nics**2) * (1 + lanes)


def look(job: PerfJob) -> list[Held]:
    """What every rank holds; nothing once one of them has ended."""
    try:
        return [Held.of(side, len(job.sides) - 1) for side in job.sides]
    except (OSError, R2Error):
        return []


def at_start(job: PerfJob) -> list[Held]:
    """What every rank holds once its first paths are up: rows are a tenth of a second old."""
    end, before = time.monotonic() + SETTLE_S, look(job)
    while True:
        time.sleep(0.3)
        now = look(job)
        if time.monotonic() > end or [h.fds for h in now] == [h.fds for h in before]:
            return now
        before = now


def granted(plans: bool, cuda: bool, per_node: int = 1) -> Held:
    """What a rank may hold beyond a job's growth that has plans, or uses GPUs."""
    more = 1 if plans else 0
    mib = MIB_PER_PLAN * more + (MIB_OF_CUDA if cuda else 0)
    threads = THREADS_PER_PLAN + (THREADS_OF_NODE if per_node > 1 else 0)
    return Held(FDS_PER_PLAN * more, threads * more, mib)


def over(now: list[Held], start: list[Held], more: Held) -> list[str]:
    """What any rank holds more than it may, a line each."""
    pairs = zip(now, start, strict=False)  # none now: a rank has ended
    return [line for held, first in pairs for line in held.over(first, more)]


def peak(looks: list[list[Held]]) -> list[Held]:
    """The most of each that a rank held in any of the looks, rank by rank."""
    return [Held(*map(max, zip(*rank, strict=True))) for rank in zip(*looks, strict=True)]


def second_half(looks: list[list[Held]]) -> list[Held]:
    """What every rank held at most in the second half of the looks, less the same in the first."""
    half = len(looks) // 2
    pairs = zip(peak(looks[:half]), peak(looks[half:]), strict=True) if half else ()
    return [
        Held(*(now - was for was, now in zip(first, second, strict=True)))
        for first, second in pairs
    ]


def still_growing(looks: list[list[Held]], seconds: float) -> list[str]:
    """What some rank held more in the second half of a long round than it may, a line each."""
    limit = Held(FDS_OVER_FIRST_HALF, THREADS_OVER_START, MIB_OVER_FIRST_HALF)
    return [
        f"{what}: {more} more in the second half than in the first"
        for held in (second_half(looks) if seconds >= LONG_S else [])
        for what, more, may in zip(Held._fields, held, limit, strict=True)
        if more > may
    ]


def settled(job: PerfJob, start: list[Held], more: Held) -> list[Held]:
    """What every rank holds once that is no more than at the start and a bit, or after a while."""
    end = time.monotonic() + SETTLE_S
    while True:
        now = look(job)
        if time.monotonic() > end or not over(now, start, more):
            return now
        time.sleep(0.1)


def highest(held: list[Held]) -> Held | None:
    """Of all ranks; None: nobody looked."""
    return peak([[one] for one in held])[0] if held else None
