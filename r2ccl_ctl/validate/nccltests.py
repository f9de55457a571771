"""What nccl-tests prints, read strictly: a line that is no whole result is an error. Pure.

Columns: size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s+(OK|FAILED)\s*")
_AVERAGE = re.compile(
    r"#\s*Avg bus bandwidth\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?:\s+(?:OK|FAILED))?\s*"
)
_BEGIN = re.compile(r"#.*\bminBytes \d")
_RESULT = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s")  # how a line of results begins
_LOG = re.compile(
    r"\S+:\d+:\d+ \[\d+\] NCCL |\S+:\d+ NCCL DIAG |\S+: Test |.*Test (NCCL|CUDA) failure"
)


@dataclass(frozen=True)
class Half:
    """Out of place, or in place. wrong None: not checked."""

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class Row:
    size: int
    halves: tuple[Half, Half]

    @property
    def wrong(self) -> int | None:
        """Of both halves; None when one was not checked."""
        counts = [half.wrong for half in self.halves]
        return None if None in counts else sum(n or 0 for n in counts)

    @property
    def seconds(self) -> float:
        return sum(half.time_us for half in self.halves) / 2e6


@dataclass
class Output:
    """One whole run. problems: why its word cannot be taken."""

    rows: list[Row] = field(default_factory=list)
    out_of_bounds: int | None = None
    busbw: float | None = None
    problems: list[str] = field(default_factory=list)


def parse_row(line: str) -> Row | None:
    """The result in a line; None where it is none; ValueError where it is a damaged one."""
    if not _RESULT.match(line):
        return None
    words = line.split()
    if len(words) != 13:
        raise ValueError(f"{len(words)} columns in place of 13")
    size, count, root = int(words[0]), int(words[1]), int(words[4])
    if size <= 0 or count <= 0 or root < -1:
        raise ValueError("a size, a count or a root that cannot be")
    return Row(size, (_half(words[5:9]), _half(words[9:13])))


def _half(words: list[str]) -> Half:
    time_us, algbw, busbw = (float(word) for word in words[:3])
    if not all(math.isfinite(v) and v >= 0 for v in (time_us, algbw, busbw)) or not time_us:
        raise ValueError("a time or bandwidth that cannot be")
    wrong = None if words[3] == "N/A" else float(words[3])
    if wrong is not None and not (wrong >= 0 and wrong == int(wrong)):
        raise ValueError(f"#wrong is {words[3]}")
    return Half(time_us, algbw, busbw, None if wrong is None else int(wrong))


def starts(lines: Iterable[str]) -> int:
    """How many programs say that they begin: ranks that MPI does not join are a job each."""
    return sum(1 for line in lines if _BEGIN.match(line))


def parse(lines: Iterable[str]) -> Output:
    """A whole run. The two lines at its end must be there, once each, and say the same."""
    out = Output()
    bounds: list[tuple[int, str]] = []
    averages: list[float] = []
    for number, line in enumerate(lines, 1):
        if match := _BOUNDS.fullmatch(line.rstrip()):
            bounds.append((int(match[1]), match[2]))
        elif match := _AVERAGE.fullmatch(line.rstrip()):
            averages.append(float(match[1]))
        elif line.lstrip().startswith("#") or not line.strip():
            continue
        elif _LOG.match(line):
            if "failure" in line:
                out.problems.append(line.strip()[:200])
        else:
            _take(out, number, line)
    if len(bounds) != 1:
        out.problems.append(f"'Out of bounds values' stands there {len(bounds)} times, not once")
    else:
        out.out_of_bounds = bounds[0][0]
        if (bounds[0][0] == 0) != (bounds[0][1] == "OK"):
            out.problems.append("'Out of bounds values' contradicts itself")
    if len(averages) != 1:
        out.problems.append(f"'Avg bus bandwidth' stands there {len(averages)} times, not once")
    else:
        out.busbw = averages[0]
    if not out.rows:
        out.problems.append("there is no line of results")
    return out


def _take(out: Output, number: int, line: str) -> None:
    try:
        row = parse_row(line)
    except ValueError as err:
        out.problems.append(f"line {number}: {err}: {line.strip()[:120]}")
        return
    if row is not None:
        out.rows.append(row)
    elif re.match(r"\s*\d", line):
        out.problems.append(f"line {number}: no whole line of results: {line.strip()[:120]}")
