"""What a benchmark says: rows with a value, its baseline of the same run, and their ratio.

Pure: no clock, no process. A row without `target` informs; one with a target is met or missed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "r2ccl-bench/1"
# Bytes of a TCP segment that are no payload: Ethernet 14, IPv4 20, TCP 20 and 12 of timestamps.
WIRE_HEADERS = 66
IP_TCP_HEADERS = 52
# Rounding and clocks; more than this beyond the bound is a wrong measurement.
BOUND_SLACK = 1.002


class MeasurementWrong(Exception):
    """A result that cannot be: faster than the wire, or without the bytes it claims."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def payload_bound(bits_per_second: float, mtu: int) -> float:
    """Bytes per second of TCP payload that a shaped NIC can carry at most."""
    return bits_per_second / 8 * (mtu - IP_TCP_HEADERS) / (mtu - IP_TCP_HEADERS + WIRE_HEADERS)


def check_bound(what: str, bytes_moved: int, seconds: float, bound: float, credit: int) -> None:
    """Raise MeasurementWrong where bytes came faster than the shapers let them through.

    bound: bytes per second of all NICs; credit: bytes that their buckets may have saved up.
    """
    least = (bytes_moved - credit) / (bound * BOUND_SLACK)
    if seconds < least:
        raise MeasurementWrong(
            f"{what}: {bytes_moved} bytes in {seconds:.4f} s, the shapers need {least:.4f} s at "
            "least: the measurement is wrong, or the NICs are not shaped"
        )


@dataclass
class Row:
    """One figure. ratio: value over baseline, None where there is no baseline to divide by.

    target: what `judged` ("ratio" or "value") must reach (at_least) or must not exceed.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    target: float | None = None
    judged: str = "ratio"
    at_least: bool = True
    samples: int = 1
    spread: float | None = None
    note: str = ""
    ratio: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.baseline is not None:
            self.ratio = self.value / self.baseline if self.baseline else math.nan

    @property
    def met(self) -> bool | None:
        """None where there is nothing to meet."""
        measured = self.ratio if self.judged == "ratio" else self.value
        if self.target is None or measured is None:
            return None
        return measured >= self.target if self.at_least else measured <= self.target

    def problems(self) -> list[str]:
        """Why this row cannot be a figure at all."""
        numbers = {"value": self.value, "baseline": self.baseline, "ratio": self.ratio}
        bad = [k for k, v in numbers.items() if v is not None and not math.isfinite(v)]
        return [f"{self.name}: {k} is not a number" for k in bad]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass
class Section:
    """What one benchmark found. errors: why it could not, or what was wrong; skipped: why not;

    load: the machine's load average before and after. others: the share of all cores that other
    programs used meanwhile.
    """

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)
    others: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def compare(
        self,
        name: str,
        values: Sequence[float],
        baselines: Sequence[float],
        unit: str,
        baseline_name: str,
        target: float | None,
        **more: Any,
    ) -> None:
        """A row of `ratio_rows`, once there is something of both."""
        if values and baselines:
            row = ratio_rows(name, values, baselines, unit, baseline_name, target, **more)
            self.rows.append(row)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}


def ratio_rows(
    name: str,
    values: Sequence[float],
    baselines: Sequence[float],
    unit: str,
    baseline_name: str,
    target: float | None,
    **more: Any,
) -> Row:
    """The medians of interleaved repetitions, side by side; the spread is that of the values."""
    middle = median(values)
    spread = (max(values) - min(values)) / middle if middle else math.nan
    return Row(
        name,
        middle,
        unit,
        baseline=median(baselines),
        baseline_name=baseline_name,
        target=target,
        samples=len(values),
        spread=spread,
        **more,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value and abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


HEADINGS = ("what", "value", "unit", "baseline", "of", "ratio", "target", "", "note")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, as text in the order of HEADINGS."""
    target = ""
    if row.target is not None:
        sign = "\N{GREATER-THAN OR EQUAL TO}" if row.at_least else "\N{LESS-THAN OR EQUAL TO}"
        what = "" if row.judged == "ratio" else f" {row.unit}"
        target = f"{sign} {row.target:g}{what}"
    verdict = {True: "met", False: "missed", None: ""}[row.met]
    return (
        row.name,
        _number(row.value),
        row.unit,
        _number(row.baseline),
        row.baseline_name,
        _number(row.ratio),
        target,
        verdict,
        row.note,
    )


def text_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    lines = [HEADINGS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in (1, 3, 5) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
