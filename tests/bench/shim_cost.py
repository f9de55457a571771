"""What the shim adds to a collective that it does not replace: calls of ncclAllReduce on an NCCL
that does nothing, one operation at a time, inside and outside a group, pinned to a core; with the
shim preloaded, and without it as the baseline. With one rank, which has nobody to meet, and with
two processes that have met, so that the agreement is on (R2CCL_TELL_ERRORS, R2CCL_PLAN).

Rung 3. It says nothing about what a collective itself costs, nor about one under a plan.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

from figures import Row, Section, median
from rig import BenchError, Options, clean_env

from r2ccl_ctl import paths

TITLE = "Cost of the shim on a collective that it does not replace"
CALLS = 1_000_000
TARGETS = {"median": 500.0, "p99": 2000.0}
LIMIT_S = 120.0
LARGE = 4 << 20  # floats: 16 MiB, which a plan could run on; NCCL that does nothing reads none


@dataclass(frozen=True)
class Way:
    """tells: ranks tell each other of errors, which is proved at the end of each run."""

    name: str
    ranks: int = 1
    floats: int = 4
    shim: bool = True
    env: dict[str, str] = field(default_factory=dict)
    tells: bool = False


PLAIN = (Way("plain", shim=False), Way("plain, large", floats=LARGE, shim=False))
WAYS = (
    Way("the shim"),
    Way("the shim, 2 ranks that have met", ranks=2, tells=True),
    Way("the shim, 2 ranks, R2CCL_TELL_ERRORS=0", ranks=2, env={"R2CCL_TELL_ERRORS": "0"}),
    Way("the shim, 2 ranks, R2CCL_PLAN=auto, 16 MiB", ranks=2, floats=LARGE, tells=True,
        env={"R2CCL_PLAN": "auto"}),
    Way("the shim with R2CCL_MODE=0", env={"R2CCL_MODE": "0"}),
)  # fmt: skip


def run(options: Options, section: Section) -> None:
    """Interleaved repetitions of all."""
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in (*PLAIN, *WAYS)}
    for turn in range(1 if options.smoke else options.repetitions):
        options.say(f"turn {turn + 1}")
        for way in (*PLAIN, *WAYS):
            found[way.name].append(_measure(1000 if options.smoke else CALLS, way))
    for way in WAYS:
        plain = next(p for p in PLAIN if p.floats == way.floats)
        for case, where in (("single", "outside a group"), ("group", "in a group")):
            for what, target in TARGETS.items():
                ours, theirs = (
                    median([float(one[case][what]) for one in found[one_way.name]])
                    for one_way in (way, plain)
                )
                section.rows.append(
                    Row(
                        f"{way.name}, one operation {where}: {what} added",
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


def _measure(calls: int, way: Way) -> dict[str, Any]:
    tool = paths.native_dir() / "tests/shim/cost"
    command = [str(tool), str(calls), str(way.ranks), str(way.floats)]
    env = {"NCCL_SOCKET_IFNAME": "lo", **way.env}
    if way.shim:
        env["LD_PRELOAD"] = str(paths.shim_path())
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
    if bool(row["told"]) != way.tells:
        raise BenchError(f"{way.name}: an error of the other rank was told: {row['told']}")
    return row
