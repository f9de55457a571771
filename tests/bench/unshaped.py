"""Unshaped: the plugin beside raw TCP with the same buffers, threads and streams.

Rung 3 (loopback) and 4 (lab). Where cores are scarce the throughput says who got the cores; bytes
per CPU second of both sides together say what a byte costs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from figures import Section
from rig import Bed, Cores, Iteration, Options, lab_bed, plugin, raw

MIB = 1 << 20
NICS = 2
BUSY_THREADS = 4  # an I/O thread and a caller on each side
TARGET_RATE, TARGET_CPU = 0.9, 0.75
POLL_US = "200"  # of the caller, which raw TCP does not have: its own cost stays out
TITLE = "Unshaped NICs: the plugin beside raw TCP, same buffers and threads"


@dataclass(frozen=True)
class Variant:
    """How the plugin is run; `env` as pairs. judged: the target is for it."""

    name: str
    conns: int
    env: tuple[tuple[str, str], ...] = ()
    judged: bool = True


VARIANTS = (
    Variant("1 connection", 1),
    Variant(f"{NICS} connections", NICS),
    Variant("1 connection, R2CCL_SPIN=0", 1, (("R2CCL_SPIN", "0"),), judged=False),
)


@contextlib.contextmanager
def _bed(where: str) -> Iterator[Bed]:
    if where == "loopback":
        yield Bed(NICS)
        return
    with lab_bed("free", NICS, (None,)) as bed:
        yield bed


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    enough = len(os.sched_getaffinity(0)) >= 2 * BUSY_THREADS
    if not enough:
        section.notes.append(
            f"Fewer cores than twice the {BUSY_THREADS} busy threads: the target is "
            f"{TARGET_CPU} of the bytes per CPU second, not a throughput."
        )
    for where in ("loopback", "lab"):
        with _bed(where) as bed:
            _measure(section, bed, where, enough, options)


def _measure(section: Section, bed: Bed, where: str, enough: bool, options: Options) -> None:
    size = ["--bytes", str((32 if options.smoke else 1024) * MIB), "--iters", "2"]
    base: list[Iteration] = []
    ours: dict[Variant, list[Iteration]] = {variant: [] for variant in VARIANTS}
    cores = Cores()
    try:
        for turn in range(1 if options.smoke else options.repetitions):
            options.say(f"{where}: turn {turn + 1}")
            base += raw(bed, range(NICS), *size)
            for variant, found in ours.items():
                more = ["--poll-us", POLL_US, "--conns", str(variant.conns)]
                found += plugin(bed, *size, *more, env=dict(variant.env))
    finally:
        for variant, found in ours.items():
            _rows(section, f"{where}, {variant.name}", found, base, enough, variant.judged)
    section.details[f"{where}: cores busy"] = round(cores.busy(), 3)


def _rows(
    section: Section,
    what: str,
    found: list[Iteration],
    base: list[Iteration],
    enough: bool,
    judged: bool,
) -> None:
    section.compare(
        f"{what}: throughput",
        [one.rate / 1e9 for one in found],
        [one.rate / 1e9 for one in base],
        "GB/s",
        "raw TCP",
        TARGET_RATE if enough and judged else None,
    )
    section.compare(
        f"{what}: bytes per CPU second",
        [one.per_cpu / 1e9 for one in found],
        [one.per_cpu / 1e9 for one in base],
        "GB/CPU-s",
        "raw TCP",
        None if enough or not judged else TARGET_CPU,
    )
