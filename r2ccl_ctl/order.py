"""In which order processes are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from r2ccl_ctl.control import Process


def in_order(found: Sequence[Process]) -> list[Process]:
    """The oldest job first, of a job one rank after the other; without a job by their age."""
    begun: dict[str, int] = {}
    for process in found:
        first = begun.setdefault(process.job, process.created_real_ns)
        begun[process.job] = min(first, process.created_real_ns)

    def place(process: Process) -> tuple[int, str, int, int, str]:
        begin = begun[process.job] if process.job else process.created_real_ns
        rank = -1 if process.rank is None else process.rank
        return begin, process.job, rank, process.created_real_ns, process.name

    return sorted(found, key=place)
