"""How fast one core adds up the contributions to an AllReduce, beside memcpy (tests/bench/adds.c).

GB/s counts what is read and what is written in a second of CPU time: n contributions and a result,
or one of each for memcpy. Pieces of 256 KiB. cached: the same pieces again; cold: from 32 MiB for
each contribution.
"""

from __future__ import annotations

import json
import subprocess

from figures import Section
from rig import BenchError, Options, program

TITLE = "Contributions added on one core, beside memcpy"
LIMIT_S = 120.0


def run(options: Options, section: Section) -> None:
    """One row a case, each of the best of five turns."""
    turns = range(1 if options.smoke else options.repetitions)
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in turns:
        options.say(f"turn {turn + 1}")
        done = subprocess.run(
            [program("adds"), "--ms", "5" if options.smoke else "200"],
            stdout=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"adds ended with exit code {done.returncode}")
        for line in done.stdout.splitlines():
            row = json.loads(line)
            found.setdefault(row["name"], []).append((row["gbs"], row["memcpy_gbs"]))
    for name, pairs in found.items():
        ours, copied = [a for a, _ in pairs], [b for _, b in pairs]
        section.compare(name, ours, copied, "GB/s", "memcpy", None)
