"""What health costs a healthy job: bandwidth and latency beside a run with health switched off.

Rung 3: AllReduce on the stand-in over loopback NICs, the settings in turn within one run. Off:
heartbeats a minute and more apart, and no watch for grey failures; each of the two alone as well.
Unshaped loopback is the harsh case: there is no wire to wait for, every cycle spent shows. It also
is the noisy one where ranks and kernel share few cores: single runs differ by more than what is
looked for, so the range that chance leaves the ratio is printed beside it. What chance has little
part in is counted besides: the engine's instructions for a message (instructions.py), heartbeats
off in both, as callgrind's slow clock would multiply them.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence

import instructions
from figures import Row, Section, median, percentile
from rig import Options, Perf, perf

BEATS_OFF = {"R2CCL_HEARTBEAT": "60s"}
GREY_OFF = {"R2CCL_GREY": "0"}
BASE = "health switched off"
SETTINGS: dict[str, Mapping[str, str]] = {
    "default settings": {},
    "R2CCL_GREY=0": GREY_OFF,
    "heartbeats a minute apart": BEATS_OFF,
    BASE: BEATS_OFF | GREY_OFF,
}
ALLOWED = 0.01
DRAWS = 2000  # of resampled runs
# How often threads look in vain is chance.
POLLING = ("io/io.c", "io/iolend.c", "io/pause.c", "io/standin.c")
MIB = 1 << 20
TITLE = "Overhead of health on a healthy job, against health switched off"


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    turns = 2 if options.smoke else max(16, options.repetitions)
    large = 4 * MIB if options.smoke else 64 * MIB
    _compare(section, options, f"all_reduce {large // MIB} MiB", large, turns, 6, list(SETTINGS))
    few, iters = (2, 50) if options.smoke else (max(8, options.repetitions), 500)
    _compare(section, options, "all_reduce 8 B", 8, few, iters, ["default settings", BASE])
    _count(section, options)
    section.notes.append(
        f"2 nodes x 2 loopback NICs, {turns} interleaved runs of each setting ({few} for 8 B), "
        "medians. In brackets: where 95 of 100 ratios lie when the runs are drawn anew from "
        "those that were made; one that has 1 in it shows no difference."
    )


def _count(section: Section, options: Options) -> None:
    if shutil.which("valgrind") is None:
        section.notes.append("No valgrind: instructions were not counted.")
        return
    kinds, turns = (instructions.SMOKE, 1) if options.smoke else (instructions.KINDS, 5)
    for kind, size, short, long in kinds:
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns):
            options.say(f"instructions, {kind}: turn {turn + 1} of {turns}")
            for on, counts in found.items():
                env = instructions.environment("tcp", **BEATS_OFF, **({} if on else GREY_OFF))
                files = instructions.per_message(env, size, short, long)
                ours = sum(n for name, n in files.items() if not name.endswith(POLLING))
                counts.append(float(ours))
        _row(
            section,
            f"message of {kind}, both sides, default settings but heartbeats",
            "instructions",
            found[True],
            found[False],
        )


def _compare(
    section: Section,
    options: Options,
    name: str,
    size: int,
    turns: int,
    iters: int,
    names: list[str],
) -> None:
    found: dict[str, list[Perf]] = {each: [] for each in names}
    try:
        for turn in range(turns):
            options.say(f"{name}: turn {turn + 1} of {turns}")
            # Who goes first changes: a machine that warms up or gets busy favours nobody.
            for i in range(len(names)):
                each = names[(turn + i) % len(names)]
                found[each].append(_one(size, iters, SETTINGS[each]))
    finally:
        for each in names[:-1]:
            if size >= MIB:
                _row(section, f"{name}, {each}", "GB/s", _speeds(found[each]), _speeds(found[BASE]))
            else:
                _row(section, f"{name}, {each}", "us", _times(found[each]), _times(found[BASE]))
            if size >= MIB:
                value, base = _cpu(found[each]), _cpu(found[BASE])
                _row(section, f"{name}, {each}: CPU seconds per GB", "s/GB", value, base)


def _speeds(runs: Sequence[Perf]) -> list[float]:
    return [one.size / one.seconds / 1e9 for one in runs]


def _times(runs: Sequence[Perf]) -> list[float]:
    return [one.seconds * 1e6 for one in runs]


def _cpu(runs: Sequence[Perf]) -> list[float]:
    return [one.cpu / one.size * 1e9 for one in runs]


def _row(
    section: Section, name: str, unit: str, values: Sequence[float], base: Sequence[float]
) -> None:
    if not values or not base:
        return
    higher = unit == "GB/s"
    low, high = chance(values, base)
    section.rows.append(
        Row(
            name,
            median(values),
            unit,
            baseline=median(base),
            baseline_name=BASE,
            target=_target(name, unit),
            at_least=higher,
            samples=len(values),
            spread=(max(values) - min(values)) / median(values),
            note=f"[{low:.3f}, {high:.3f}]",
        )
    )


def _target(name: str, unit: str) -> float | None:
    """Of time and bandwidth: the engine's instructions are a small part of a message's cost."""
    if "default" not in name or unit == "instructions":
        return None
    return 1 - ALLOWED if unit == "GB/s" else 1 + ALLOWED


def chance(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Where 95 of 100 ratios of medians lie (bootstrap; the same draws for the same runs)."""
    rng = random.Random(1)
    ratios = [
        median(rng.choices(values, k=len(values))) / median(rng.choices(base, k=len(base)))
        for _ in range(DRAWS)
    ]
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def _one(size: int, iters: int, env: Mapping[str, str]) -> Perf:
    argv = ["--op", "all_reduce", "-b", str(size), "-n", str(iters), "-c", "0"]
    return perf(argv, nics=2, env=env)[0]
