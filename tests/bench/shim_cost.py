"""What the shim adds to a collective that it does not replace: calls of ncclAllReduce on an NCCL
that does nothing, one operation at a time, inside and outside a group, pinned to a core; with the
shim preloaded, and without it as the baseline.

Rung 3. It says nothing about what a collective itself costs.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from figures import Row, Section, median
from rig import BenchError, Options, clean_env

from r2ccl_ctl import paths

TITLE = "Cost of the shim on a collective that it does not replace"
CALLS = 1_000_000
TARGETS = {"median": 500.0, "p99": 2000.0}
LIMIT_S = 120.0


def run(options: Options, section: Section) -> None:
    """Interleaved repetitions of all three, in the order plain, shim, off."""
    shim = str(paths.shim_path())
    ways = {
        "plain": {},
        "shim": {"LD_PRELOAD": shim},
        "off": {"LD_PRELOAD": shim, "R2CCL_MODE": "0"},
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for turn in range(1 if options.smoke else options.repetitions):
        options.say(f"turn {turn + 1}")
        for way, env in ways.items():
            found[way].append(_measure(1000 if options.smoke else CALLS, env))
    for way, name in (("shim", "the shim"), ("off", "the shim with R2CCL_MODE=0")):
        for case, where in (("single", "outside a group"), ("group", "in a group")):
            for what, target in TARGETS.items():
                ours, theirs = (
                    median([float(one[case][what]) for one in found[one_way]])
                    for one_way in (way, "plain")
                )
                section.rows.append(
                    Row(
                        f"{name}, one operation {where}: {what} added",
                        max(ours - theirs, 0.0),
                        "ns",
                        target=target,
                        judged="value",
                        at_least=False,
                        note=f"{ours:.0f} ns instead of {theirs:.0f} ns",
                    )
                )
    section.notes.append(
        f"{CALLS} calls each, NCCL that does nothing, the clock's own cost in both"
    )


def _measure(calls: int, env: dict[str, str]) -> dict[str, Any]:
    command = [str(paths.native_dir() / "tests/shim/cost"), str(calls)]
    try:
        finished = subprocess.run(
            command,
            env=clean_env(**env),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as err:
        raise BenchError(f"{' '.join(command)}: {err}") from err
    row: dict[str, Any] = json.loads(finished.stdout)
    return row
