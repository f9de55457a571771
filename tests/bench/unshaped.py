"""Unshaped: the plugin beside raw TCP with the same buffers, and with as many threads and streams.

Rung 3 (loopback) and 4 (lab). Where cores are scarce the throughput says who got the cores; bytes
per CPU second of both sides together say what a byte costs. Each way to run the plugin is looked at
first: how many of its I/O threads work, and how many bulk sockets a path has. Raw TCP gets the same
number of both; where that is more than one, raw TCP with one of each is there as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import resume
from figures import Section
from rig import Bed, BenchError, Cores, Iteration, Options, lab_bed, plugin, plugin_sides, raw

from r2ccl_ctl.control import Process

MIB = 1 << 20
NICS = 2
TARGET_RATE, TARGET_CPU = 0.9, 0.75
POLL_US = "200"  # of the caller, which raw TCP does not have: its own cost stays out
LOOK_S, SETTLE_S = 1.0, 20.0
WORKS = 0.05  # of a core, for a thread to count: timers and heartbeats take less
TITLE = "Unshaped NICs: the plugin beside raw TCP, same buffers and threads"


@dataclass(frozen=True)
class Shape:
    """What moves the data of a side: threads, and streams per NIC."""

    threads: int
    streams: int

    def __str__(self) -> str:
        return f"raw TCP, {self.threads} threads, {self.streams} streams a NIC".replace(
            "1 threads", "1 thread"
        ).replace("1 streams", "1 stream")

    @property
    def options(self) -> list[str]:
        return ["--threads", str(self.threads), "--streams", str(self.streams)]

    @property
    def fits(self) -> bool:
        """Twice as many cores as threads of both sides, their callers' included."""
        return len(os.sched_getaffinity(0)) >= 2 * 2 * (self.threads + 1)


ONE = Shape(1, 1)


@dataclass(frozen=True)
class Variant:
    """How the plugin is run; `env` as pairs. judged: the target is for it."""

    name: str
    conns: int
    env: tuple[tuple[str, str], ...] = ()
    judged: bool = True

    @property
    def options(self) -> list[str]:
        return ["--poll-us", POLL_US, "--conns", str(self.conns)]


VARIANTS = (
    Variant("1 connection", 1),
    Variant(f"{NICS} connections", NICS),
    Variant("1 connection, R2CCL_SPIN=0", 1, (("R2CCL_SPIN", "0"),), judged=False),
    Variant(f"{NICS} connections, R2CCL_IO_THREADS=1", NICS, (("R2CCL_IO_THREADS", "1"),)),
    Variant(f"{NICS} connections, R2CCL_IO_THREADS=3", NICS, (("R2CCL_IO_THREADS", "3"),)),
)
SMOKE = (VARIANTS[1], VARIANTS[-1])


@contextlib.contextmanager
def _bed(where: str) -> Iterator[Bed]:
    if where == "loopback":
        yield Bed(NICS)
        return
    with lab_bed("free", NICS, (None,)) as bed:
        yield bed


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    section.notes.append(
        f"Where there are not twice as many cores as busy threads, the target is {TARGET_CPU} of "
        f"the bytes per CPU second, else {TARGET_RATE} of the throughput. The plugin's caller is a "
        "thread more, which sleeps when nothing moved, and helps its I/O threads."
    )
    for where in ("loopback", "lab"):
        with _bed(where) as bed:
            _measure(section, bed, where, options)


# ---- what the plugin uses


def _ticks(pid: int) -> dict[str, int]:
    """CPU time so far of a process's I/O threads."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith("r2ccl-io"):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[task.name] = int(fields[11]) + int(fields[12])
    return found


def streams_of(sockets: int, nics: int, paths: int) -> int:
    """Bulk sockets of a path, of a process with a listener per NIC and a control socket per path;
    0: not all of them are there."""
    each, left = divmod(sockets - nics, paths) if paths else (0, 1)
    return each - 1 if not left and each > 1 else 0


def _streams(process: Process) -> int:
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        gauges = process.snapshot().gauges
        if gauges["paths_up"] >= NICS:
            streams = streams_of(gauges["sockets"], NICS, gauges["paths_up"])
            if streams:
                return streams
        time.sleep(0.05)
    raise BenchError(f"sockets of each path are not there within {SETTLE_S:g} s: {gauges}")


def shape_of(bed: Bed, variant: Variant) -> Shape:
    """What the plugin uses when it is run so: the side that has more."""
    words = (*variant.options, "--seconds", "600")
    with plugin_sides(bed, *words, env=dict(variant.env)) as sides:
        processes = resume.processes(sides)
        streams = max(map(_streams, processes))
        pids = [sides.sender.pid, sides.receiver.pid]
        before = [_ticks(pid) for pid in pids]
        time.sleep(LOOK_S)
        after = [_ticks(pid) for pid in pids]
        sides.sender.send_signal(signal.SIGTERM)
        sides.finish()
    least = WORKS * LOOK_S * os.sysconf("SC_CLK_TCK")
    busy = [
        sum(now.get(task, 0) - then >= least for task, then in early.items())
        for early, now in zip(before, after, strict=True)
    ]
    return Shape(max(1, *busy), streams)


# ---- runs


@dataclass
class Runs:
    """Interleaved ones of a bed."""

    shapes: dict[Variant, Shape] = field(default_factory=dict)
    ours: dict[Variant, list[Iteration]] = field(default_factory=dict)
    base: dict[Shape, list[Iteration]] = field(default_factory=dict)


def _measure(section: Section, bed: Bed, where: str, options: Options) -> None:
    size = ["--bytes", str((32 if options.smoke else 1024) * MIB), "--iters", "2"]
    runs, cores = Runs(), Cores()
    for variant in SMOKE if options.smoke else VARIANTS:
        shape = runs.shapes[variant] = shape_of(bed, variant)
        options.say(f"{where}, {variant.name}: as {shape}")
    section.details[f"{where}: threads and streams"] = {
        variant.name: [shape.threads, shape.streams] for variant, shape in runs.shapes.items()
    }
    try:
        for turn in range(1 if options.smoke else options.repetitions):
            options.say(f"{where}: turn {turn + 1}")
            for shape in dict.fromkeys((ONE, *runs.shapes.values())):
                runs.base.setdefault(shape, []).extend(raw(bed, range(NICS), *size, *shape.options))
            for variant in runs.shapes:
                runs.ours.setdefault(variant, []).extend(
                    plugin(bed, *size, *variant.options, env=dict(variant.env))
                )
    finally:
        for variant, found in runs.ours.items():
            shape = runs.shapes[variant]
            _rows(section, f"{where}, {variant.name}", found, runs, shape, variant.judged)
            if shape != ONE:
                name = f"{where}, {variant.name}, beside one thread"
                _rows(section, name, found, runs, ONE, False)
    section.details[f"{where}: cores busy"] = round(cores.busy(), 3)


def _rows(
    section: Section, what: str, found: list[Iteration], runs: Runs, shape: Shape, judged: bool
) -> None:
    base = runs.base.get(shape, [])
    section.compare(
        f"{what}: throughput",
        [one.rate / 1e9 for one in found],
        [one.rate / 1e9 for one in base],
        "GB/s",
        str(shape),
        TARGET_RATE if shape.fits and judged else None,
    )
    section.compare(
        f"{what}: bytes per CPU second",
        [one.per_cpu / 1e9 for one in found],
        [one.per_cpu / 1e9 for one in base],
        "GB/CPU-s",
        str(shape),
        None if shape.fits or not judged else TARGET_CPU,
    )
