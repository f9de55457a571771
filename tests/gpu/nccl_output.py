"""Reads what nccl-tests prints: result lines, the verdict at the end, and NCCL's own log lines.

Pure text in, data out. The columns are those of nccl-tests 2.x and of r2ccl_perf, which prints
the same ones: size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Half:
    """One of the two measurements of a line: out of place or in place."""

    time_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None


@dataclass(frozen=True)
class Row:
    """One line of results; in_place is None where the program prints one half only."""

    size: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Half
    in_place: Half | None

    @property
    def halves(self) -> list[Half]:
        return [h for h in (self.out_of_place, self.in_place) if h is not None]

    @property
    def wrong(self) -> int:
        return sum(h.wrong or 0 for h in self.halves)

    @property
    def checked(self) -> bool:
        """True when at least one half of this line was verified."""
        return any(h.wrong is not None for h in self.halves)


@dataclass
class Output:
    """Everything read from one run."""

    rows: list[Row] = field(default_factory=list)
    out_of_bounds: int | None = None
    avg_busbw_gbs: float | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "wrong": self.wrong,
            "out_of_bounds": self.out_of_bounds,
            "avg_busbw_gbs": self.avg_busbw_gbs,
            "errors": self.errors,
        }


_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")
_AVG = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([0-9.eE+-]+|-?nan|inf)")
_ERROR = re.compile(r"Test (?:NCCL|CUDA) failure|Test failure|NCCL WARN|minimpi:|Segmentation")


def _half(words: list[str]) -> Half:
    wrong = None if words[3] == "N/A" else int(float(words[3]))
    return Half(float(words[0]), float(words[1]), float(words[2]), wrong)


def parse_row(line: str) -> Row | None:
    """The result in a line, or None when the line is something else."""
    words = line.split()
    if len(words) not in (9, 13, 15) or not words[0].isdigit() or not words[1].isdigit():
        return None
    try:
        return Row(
            size=int(words[0]),
            count=int(words[1]),
            dtype=words[2],
            redop=words[3],
            root=int(words[4]),
            out_of_place=_half(words[5:9]),
            # r2ccl_perf writes N/A where an operation has no such half
            in_place=_half(words[9:13]) if len(words) >= 13 and words[9] != "N/A" else None,
        )
    except ValueError:
        return None


def parse_output(lines: Iterable[str]) -> Output:
    """All results of one run, from the lines that rank 0 printed."""
    out = Output()
    for line in lines:
        row = parse_row(line)
        if row is not None:
            out.rows.append(row)
        elif match := _OUT_OF_BOUNDS.search(line):
            out.out_of_bounds = int(match[1])
        elif match := _AVG.search(line):
            out.avg_busbw_gbs = float(match[1])
        elif _ERROR.search(line):
            out.errors.append(line.strip()[:300])
    return out


@dataclass
class NcclFacts:
    """What NCCL said about itself with NCCL_DEBUG=INFO."""

    version: str | None = None
    plugin_lines: list[str] = field(default_factory=list)
    plugin_api: str | None = None
    network: str | None = None
    nnodes: int | None = None
    channels_via: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_VERSION = re.compile(r"NCCL version (\S+)")
_NNODES = re.compile(r"nNodes (\d+)")
_USING = re.compile(r"Using network (\S+)")
_API = re.compile(r"\bv(\d+)\b")
_SYMBOL = re.compile(r"ncclNetPlugin_v(\d+)|ncclNet_v(\d+)")
_VIA = re.compile(r"Channel \d+(?:/\d+)? : .* via (\S+)")


def parse_debug(lines: Iterable[str]) -> NcclFacts:
    """NCCL's version, the plugin symbol it took, nNodes, and how channels travel."""
    facts = NcclFacts()
    for line in lines:
        if (match := _VERSION.search(line)) and facts.version is None:
            facts.version = match[1]
        if match := _NNODES.search(line):
            facts.nnodes = int(match[1])
        if match := _USING.search(line):
            facts.network = match[1]
        if match := _VIA.search(line):
            facts.channels_via[match[1]] = facts.channels_via.get(match[1], 0) + 1
        if "NET/Plugin" in line or "net plugin" in line.lower():
            _note_plugin(facts, line)
    return facts


def _note_plugin(facts: NcclFacts, line: str) -> None:
    text = line.split("NCCL INFO", 1)[-1].strip()[:300]
    if text not in facts.plugin_lines:
        facts.plugin_lines.append(text)
    if "Loaded" in text and (match := _API.search(text)):
        facts.plugin_api = f"v{match[1]}"
    elif facts.plugin_api is None and "Failed" not in text and (match := _SYMBOL.search(text)):
        facts.plugin_api = f"v{match[1] or match[2]}"
