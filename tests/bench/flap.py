"""What a flapping NIC costs the others, and how soon a NIC that works again is fully used.

Rung 4: AllReduce on the stand-in over a shaped lab, real link events. The baseline of a flap is the
same run with the NIC down for good: what is left to use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grey
from figures import Row, Section, median, percentile, ratio_rows
from rig import BenchError, Options, lab_bed

from r2ccl_ctl.demo.feeds import Timeline, Window
from r2ccl_ctl.journal import Cursor
from r2ccl_ctl.lab import Lab

HALF_S = 0.1  # down for so long, then up for so long
KEPT = 0.95
FOUND_MS = 1000.0
FULL_MS = 5000.0
AWAY_S = 2.0
FLAP_TITLE = "A NIC that flaps every 200 ms: what AllReduce keeps of what the others carry"
RAMP_TITLE = "A NIC that works again: found, and at full weight"


@dataclass(frozen=True)
class Plan:
    """Seconds, and runs of the way back."""

    flaps: float
    down: float
    runs: int


FULL = Plan(60.0, 6.0, 4)
SMOKE = Plan(2.0, 2.5, 1)


def _sizes(options: Options) -> grey.Plan:
    return grey.SMOKE if options.smoke else grey.FULL


def run_flap(options: Options, section: Section) -> None:
    """Fill in the section."""
    plan, size = SMOKE if options.smoke else FULL, _sizes(options)
    seconds = size.before + plan.flaps + plan.down + 2
    options.say(f"a NIC flaps for {plan.flaps:g} s")
    with lab_bed("flap", grey.NICS, (size.rate,)) as bed, ExitStack() as stack:
        assert bed.lab is not None
        job, timeline = stack.enter_context(grey._job(bed, size, seconds, True))
        watch = grey._watch(job, stack)
        time.sleep(size.before)
        flaps, began = _flap(bed.lab, plan.flaps), time.monotonic_ns()
        bed.lab.fail_link("n0", grey.VICTIM)
        down = time.monotonic_ns()
        code = job.wait(seconds + 60)
        if code != 0:
            raise BenchError(f"all_reduce ended with {code}: {job.ranks[0].output[-400:]}")
        windows = Timeline(timeline).poll()
        damped = [e for c in watch for e in c.events() if e.event == "nic-damped"]
    if any(window.wrong > 0 for window in windows):
        raise BenchError("wrong values")
    begin = began - int(plan.flaps * 1e9)
    during = _rates(windows, lambda w: w.begin_ns >= begin and w.end_ns <= began)
    after = _rates(windows, lambda w: w.begin_ns >= down + 10**9)
    section.rows.append(
        ratio_rows(
            f"all_reduce while one of {grey.NICS} NICs flaps",
            [sum(during) / len(during)],
            [median(after)],
            "GB/s",
            "the NIC down for good",
            KEPT,
        )
    )
    section.details["flaps"] = flaps
    section.details["times damped"] = len(damped)
    section.notes.append(
        f"2 nodes x {grey.NICS} NICs of {size.rate / grey.GBIT:g} Gbit/s, {plan.flaps:g} s of "
        "flaps (mean of all windows, the damping's beginning included)."
    )


def _flap(lab: Lab, seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        lab.fail_link("n0", grey.VICTIM)
        time.sleep(HALF_S)
        lab.recover_link("n0", grey.VICTIM)
        time.sleep(HALF_S)
        count += 1
    return count


def _rates(windows: Sequence[Window], wanted: Callable[[Window], bool]) -> list[float]:
    found = [window.algbw_gbs for window in windows if wanted(window)]
    if not found:
        raise BenchError(f"{len(windows)} windows are too few")
    return found


def run_ramp(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    plan, size = SMOKE if options.smoke else FULL, _sizes(options)
    for mode, words in (("carrier", "link up again"), ("silent", "packets pass again")):
        found: list[float] = []
        full: list[float] = []
        options.say(f"{words}: {plan.runs} runs")
        seconds = size.before + plan.runs * (AWAY_S + 7) + 10
        try:
            with lab_bed("ramp", grey.NICS, (size.rate,)) as bed, ExitStack() as stack:
                assert bed.lab is not None
                job, _ = stack.enter_context(
                    grey._job(bed, size, seconds, True, {"R2CCL_DAMP": "0"})
                )
                watch = grey._watch(job, stack)
                time.sleep(size.before)
                for _ in range(plan.runs):
                    _back(bed.lab, mode, watch, found, full)
                job.kill(grace=0.1)
        finally:
            _found(section, words, found, full)
    section.notes.append(
        f"{AWAY_S:g} s away, then mended. Found: a path of the NIC has carried test chunks; at "
        "full weight: the NIC's ramp is over, on its own node."
    )


def _found(section: Section, words: str, found: list[float], full: list[float]) -> None:
    for name, values, limit in (("found", found, FOUND_MS), ("at full weight", full, FULL_MS)):
        for word, share in (("median", 0.5), ("max", 1.0)) if values else ():
            section.rows.append(
                Row(
                    f"{words}: {name}, {word}",
                    percentile(values, share),
                    "ms",
                    target=limit if word == "median" else None,
                    judged="value",
                    at_least=False,
                    samples=len(values),
                )
            )


def _back(
    lab: Lab, mode: str, watch: Sequence[Cursor], found: list[float], full: list[float]
) -> None:
    lab.fail_link("n0", grey.VICTIM, mode)
    time.sleep(AWAY_S)
    for cursor in watch:
        cursor.events()
    at = time.monotonic_ns()
    lab.recover_link("n0", grey.VICTIM)
    seen: dict[str, float] = {}
    while "nic-up" not in seen:
        if time.monotonic_ns() - at > 15 * 10**9:
            raise BenchError(f"not back within 15 s: {seen}")
        for event in watch[0].events():
            if event.nic == grey.VICTIM and event.mono_ns >= at:
                seen.setdefault(event.event, (event.mono_ns - at) / 1e6)
        time.sleep(0.005)
    found.append(seen.get("path-up", seen["nic-up"]))
    full.append(seen["nic-up"])
