"""What raw TCP carries over the NICs of a lab: the bandwidth that a job's times are held against.

build/bench/rawsock between nodes, one stream per NIC, nothing else running. Rates are payload bytes
per second of one direction.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beds import LabBed, LabError

from r2ccl_ctl.lab.spec import tbf_burst

CREDIT_SHARE = 0.01  # of an iteration's bytes: what the shapers may have saved up before it
SECONDS, WARMUP_S, ITERS = 0.4, 0.2, 2
_ports = itertools.count(21000)


@dataclass(frozen=True)
class Raw:
    """single: of each NIC of a node by itself, one way. both: of all NICs of a node together, one
    way, while each node sends to the next one with all its NICs: as much goes the other way."""

    single: tuple[float, ...]
    both: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def middle(found: Sequence[Raw]) -> Raw:
    """The medians of several measurements."""
    nics = zip(*(one.single for one in found), strict=True)
    return Raw(tuple(statistics.median(rates) for rates in nics),
               statistics.median(one.both for one in found))


class _Pair:
    """Traffic of some NICs from one node to the next one."""

    def __init__(self, bed: LabBed, tool: Path, sender: int, nics: Sequence[int],
                 amounts: Sequence[str]) -> None:
        receiver = (sender + 1) % bed.nodes
        at = f"{bed.lab.address(f'n{receiver}', bed.oob)}:{next(_ports)}"

        def side(node: int, *argv: str) -> subprocess.Popen[str]:
            own = [word for nic in nics for word in
                   ("--nic", f"{bed.lab.address(f'n{node}', f'nic{nic}')}%nic{nic}")]
            return subprocess.Popen(bed.command(node, [str(tool), *argv, *own]), text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        self._procs = [side(receiver, "--listen", at), side(sender, "--dial", at, *amounts)]

    def rate(self) -> float:
        """Waits for the end. LabError: it failed."""
        texts = []
        try:
            texts = [proc.communicate(timeout=30)[0] for proc in self._procs]
        except subprocess.TimeoutExpired:
            raise LabError("raw TCP does not end within 30 s") from None
        finally:
            for proc in self._procs:
                proc.kill()
                proc.wait()
        if any(proc.returncode for proc in self._procs):
            raise LabError(f"raw TCP failed: {' '.join(texts).strip()[-500:]}")
        lines = [json.loads(line) for line in texts[1].splitlines() if line.startswith("{")]
        rates: list[float] = [line["bytes"] / line["seconds"] for line in lines]
        return statistics.median(rates)


def measure(bed: LabBed, tool: Path, rate: int) -> Raw:
    """Takes (NICs + 1) seconds. rate: of each NIC, bits per second."""
    wanted = max(rate / 8 * SECONDS, 2 * tbf_burst(rate) / CREDIT_SHARE)

    def amounts(nics: int) -> list[str]:
        return ["--bytes", str(int(wanted * nics)), "--iters", str(ITERS),
                "--warmup", str(int(rate / 8 * WARMUP_S * nics))]

    single = [_Pair(bed, tool, 0, [nic], amounts(1)).rate() for nic in range(bed.nics)]
    everything = range(bed.nics)
    pairs = [_Pair(bed, tool, sender, everything, amounts(bed.nics)) for sender in range(bed.nodes)]
    return Raw(tuple(single), statistics.mean(pair.rate() for pair in pairs))
