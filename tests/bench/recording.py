"""What NCCL's profiler of the plugin costs: not asked, and while times of collectives are recorded.

Rung 3: AllReduce on the stand-in over loopback NICs. Not asked: beside runs in which NCCL takes no
profiler. Recording: turned on and off again and again in one job: both are of the same processes.
What the stand-in does itself for an event is NCCL's part, and here it is the stand-in's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from figures import Section, median, ratio_rows
from overhead import chance
from rig import BenchError, Options, perf, perf_spec

from r2ccl_ctl import launch, paths
from r2ccl_ctl.control import Command, Selection, list_processes, send_commands
from r2ccl_ctl.demo.feeds import Timeline

TITLE = "Times of collectives: what it costs to record them, and to be able to"
NONE = {"NCCL_PROFILER_PLUGIN": "none"}
ALLOWED = 1.01
SIZES = {8: 50, 256 << 10: 10, 16 << 20: 1}  # bytes -> AllReduces that are timed as one


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    turns = 2 if options.smoke else max(16, options.repetitions)
    for size, window in SIZES.items():
        name = f"all_reduce {size} B" if size < 1024 else f"all_reduce {size >> 10} KiB"
        iters = 20 if options.smoke else max(6, 10 * window)
        asked: tuple[list[float], list[float]] = ([], [])
        for turn in range(turns):
            options.say(f"{name}, off and without a profiler: turn {turn + 1} of {turns}")
            for which in ((0, 1), (1, 0))[turn % 2]:
                argv = ["--op", "all_reduce", "-b", str(size), "-n", str(iters), "-c", "0"]
                argv += ["-w", str(iters)]
                (found,) = perf(argv, nics=2, env=NONE if which else {})
                asked[which].append(found.seconds * 1e6)
        _row(section, f"{name}, not recorded", asked[0], asked[1], "no profiler", ALLOWED)
        options.say(f"{name}, recording on and off in one job")
        on, off, recorded = _switched(size, window, turns, 0.3 if options.smoke else 1.0)
        _row(section, f"{name}, recorded", on, off, "the same job, not recorded", None)
        section.details[f"{name}: recorded"] = recorded
    section.notes.append(
        f"2 nodes x 2 loopback NICs, medians of {turns} turns. In brackets: where 95 of 100 ratios "
        "lie when the turns are drawn anew; one that has 1 in it shows no difference."
    )


def _row(
    section: Section,
    name: str,
    values: Sequence[float],
    base: Sequence[float],
    base_name: str,
    target: float | None,
) -> None:
    low, high = chance(values, base)
    note = f"[{low:.3f}, {high:.3f}]"
    more = {"at_least": False, "note": note}
    section.rows.append(ratio_rows(name, values, base, "us", base_name, target, **more))


def _switched(
    size: int, window: int, turns: int, slot_s: float
) -> tuple[list[float], list[float], int]:
    """Medians of the times in us of each slot with and without; how many were recorded."""
    job_name = f"recording-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        lines, stop = Path(folder) / "lines", Path(folder) / "stop"
        words = f"--op all_reduce -b {size} --window {window} -c 0 --duration 600 --timeout 60"
        files = ["--timeline", str(lines), "--until", str(stop)]
        command = [str(paths.perf_path()), *words.split(), *files]
        spec = perf_spec(command, None, 2, 1, 2, False, {"R2CCL_JOB": job_name}, 600.0)
        with launch.start(spec, echo=False) as job:
            _wait_for(lambda: lines.exists() and lines.stat().st_size > 0, "the job runs")
            ranks = [p for p in list_processes() if Selection(job=job_name).wants(p)]
            slots: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
            for turn in range(2 * turns):
                on = turn % 2 == 1
                answers = send_commands([(p, Command("record", record=on)) for p in ranks])
                if len(ranks) != 2 or not all(answer.ok for answer in answers):
                    raise BenchError(f"recording: {[answer.text for answer in answers]}")
                began = time.monotonic_ns()
                time.sleep(slot_s)
                slots[on].append((began, time.monotonic_ns()))
            recorded = sum(sum(t.count) for t in ranks[0].snapshot().timings)
            stop.touch()
            if code := job.wait(60):
                raise BenchError(f"all_reduce ended with {code}: {job.ranks[0].output[-400:]}")
        windows = Timeline(lines).poll()
    if not recorded:
        raise BenchError("nothing was recorded")

    def medians(of: Sequence[tuple[int, int]]) -> list[float]:
        inside = [
            [w.seconds * 1e6 for w in windows if w.begin_ns > begin and w.end_ns < end]
            for begin, end in of
        ]
        return [median(slot) for slot in inside if slot]

    return medians(slots[True]), medians(slots[False]), recorded


def _wait_for(holds: object, what: str, seconds: float = 30.0) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise BenchError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
