"""How long a small message takes from one polling thread to another, beside one TCP connection that
the same two threads read and write without an engine (tests/bench/hop.c).

Rung 3, two processes on a loopback NIC, the polling thread of each on a processor of its own.
With one I/O thread, as few cores have, and with three, as a process has that may use eight; where
there are fewer processors than that, I/O threads that poll or are woken take them from the two.
And a large message that comes alone with six, whole and cut for four lanes (R2CCL_CHUNK=128K).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from figures import Section
from rig import Bed, Options, Sides, clean_env, program

TITLE = "One way of a message between two threads that poll, beside raw TCP, and whole beside cut"
SIZES = (8, 4096)
THREADS = (1, 3)
LARGE, MANY = 512 << 10, 6
LIMIT_S = 60.0


@dataclass(frozen=True)
class Found:
    """us: one way. cpus: processors' worth of CPU time of one of the two processes."""

    us: float
    cpus: float


def measure(size: int, iters: int, threads: int, **env: str) -> Found:
    """threads: of the engine; 0: raw TCP."""
    bed = Bed(1)
    tool, at = program("hop"), bed.meeting()
    more = [] if threads else ["--raw"]
    receiver = [tool, "--listen", at, *more]
    sender = [tool, "--dial", at, *more, "--size", str(size), "--iters", str(iters)]
    envs = [
        clean_env(
            R2CCL_NICS=bed.r2ccl_nics(node),
            R2CCL_JOB=f"bench-{os.getpid()}",
            R2CCL_IO_THREADS=str(max(threads, 1)),
            **env,
        )
        for node in (0, 1)
    ]
    with Sides(bed, receiver, sender, (envs[0], envs[1]), LIMIT_S) as sides:
        sides.finish()
        assert sides.sender.stdout is not None
        row = json.loads(sides.sender.stdout.read())
    return Found(row["us"], row["cpus"])


def times(found: list[Found]) -> list[float]:
    """Microseconds."""
    return [one.us for one in found]


def cpus(found: list[Found]) -> list[float]:
    """Processors."""
    return [one.cpus for one in found]


def run(options: Options, section: Section) -> None:
    """Interleaved repetitions; what was found stays when a later part fails or is cut off."""
    iters = 500 if options.smoke else 20000
    section.notes.append(
        f"{iters} messages each way (of 512 KiB a tenth), {len(os.sched_getaffinity(0))} "
        "processors. CPU time: of one of the two processes, in processors; its own thread polls, "
        "which takes one."
    )
    turns = range(1 if options.smoke else options.repetitions)
    for size in SIZES:
        found: dict[int, list[Found]] = {threads: [] for threads in (0, *THREADS)}
        for turn in turns:
            options.say(f"{size} B: turn {turn + 1}")
            for threads, results in found.items():
                results.append(measure(size, iters, threads))
        for threads in THREADS:
            name = f"{size} B, {threads} I/O thread{'s' if threads > 1 else ''}"
            for what, unit, of in (("one way", "us", times), ("CPU time", "CPUs", cpus)):
                ours, raw = of(found[threads]), of(found[0])
                section.compare(f"{name}: {what}", ours, raw, unit, "raw TCP", None, at_least=False)
    cut: list[Found] = []
    whole: list[Found] = []
    for turn in turns:
        options.say(f"512 KiB: turn {turn + 1}")
        cut.append(measure(LARGE, iters // 10, MANY, R2CCL_CHUNK="128K"))
        whole.append(measure(LARGE, iters // 10, MANY))
    for what, unit, of in (("one way", "us", times), ("CPU time", "CPUs", cpus)):
        section.compare(
            f"512 KiB, {MANY} I/O threads: {what}",
            of(whole),
            of(cut),
            unit,
            "cut",
            None,
            at_least=False,
        )
