"""Faults as people write them: blackhole, error, slow=100mbit, loss=1%."""

from __future__ import annotations

from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.units import parse_percent, parse_rate


def parse_kind(text: str) -> tuple[str, int, int]:
    """(kind, bytes per second of slow, parts per million of loss)."""
    kind, equals, value = text.partition("=")
    if kind in ("blackhole", "error") and not equals:
        return kind, 0, 0
    if kind == "slow" and value:
        return kind, parse_rate(value), 0
    if kind == "loss" and value:
        return kind, 0, parse_percent(value)
    raise R2UsageError(
        f"'{text}' is no kind of fault: give blackhole, error, slow=RATE (slow=100mbit) or "
        "loss=PCT (loss=1)"
    )
