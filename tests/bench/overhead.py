"""What health costs a healthy job: bandwidth and latency beside a run with health switched off.

Rung 3: AllReduce on the stand-in over loopback NICs, the two settings in turn within one run. Off:
heartbeats a minute and more apart, and no watch for grey failures. Unshaped loopback is the harsh
case: there is no wire to wait for, every cycle spent shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from figures import Row, Section, median
from rig import Options, perf

OFF = {"R2CCL_HEARTBEAT": "60s", "R2CCL_HEARTBEAT_IDLE": "600s", "R2CCL_GREY": "0"}
ALLOWED = 0.01
MIB = 1 << 20
TITLE = "Overhead of health on a healthy job, against health switched off"


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails."""
    turns = 2 if options.smoke else max(8, options.repetitions)
    large = 4 * MIB if options.smoke else 64 * MIB
    _pair(section, options, f"all_reduce {large // MIB} MiB", large, turns, iters=4)
    _pair(section, options, "all_reduce 8 B", 8, turns, iters=50 if options.smoke else 500)
    section.notes.append(
        f"2 nodes x 2 loopback NICs, {turns} interleaved runs each, medians; the spread of the "
        "runs says how small a difference can be seen."
    )


def _pair(section: Section, options: Options, name: str, size: int, turns: int, iters: int) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        options.say(f"{name}: turn {turn + 1}")
        # Alternate who goes first: a machine that warms up or gets busy favours neither.
        for health in (True, False) if turn % 2 else (False, True):
            times[health].append(_seconds(size, iters, {} if health else OFF))
    on, off = median(times[True]), median(times[False])
    bandwidth = size >= MIB
    value, base = (size / on / 1e9, size / off / 1e9) if bandwidth else (on * 1e6, off * 1e6)
    section.rows.append(
        Row(
            f"{name}, default settings",
            value,
            "GB/s" if bandwidth else "us",
            baseline=base,
            baseline_name="health switched off",
            target=1 - ALLOWED if bandwidth else 1 + ALLOWED,
            at_least=bandwidth,
            samples=turns,
            spread=(max(times[True]) - min(times[True])) / on,
        )
    )


def _seconds(size: int, iters: int, env: Mapping[str, str]) -> float:
    argv = ["--op", "all_reduce", "-b", str(size), "-n", str(iters), "-c", "0"]
    return perf(argv, nics=2, env=env)[0].seconds
