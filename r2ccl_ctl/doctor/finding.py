"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# From harmless to grave. ok: as it should be; note: worth knowing; warning: the job runs, but
# slower or less safely; error: the job fails, or runs without R2CCL.
SEVERITIES = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """node: "" for the host where it was found. remedy: what to do, "" for nothing."""

    severity: str
    check: str
    evidence: str
    remedy: str = ""
    node: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def exit_code(found: Iterable[Finding]) -> int:
    """0: no problem; 1: warnings; 2: errors; 3: something could not be looked at."""
    codes = {"warning": 1, "error": 2}
    known = list(found)
    if any(one.check == "unknown" for one in known):
        return 3
    return max((codes.get(one.severity, 0) for one in known), default=0)


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: -SEVERITIES.index(one.severity))
