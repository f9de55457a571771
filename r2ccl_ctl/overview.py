"""Jobs on one screen: their processes in rows, the worst first. Pure: looks in, rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r2ccl_ctl import hang, verdict
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.hang import Seen

Rates = dict[int, tuple[float, float]]  # NIC index -> bytes per second sent, received


@dataclass(frozen=True)
class Row:
    """A process. tx, rx: bytes per second over all its NICs. code: the place in verdict.WORDS."""

    snapshot: Snapshot
    tx: float
    rx: float
    behind: int
    reasons: tuple[verdict.Reason, ...]

    @property
    def code(self) -> int:
        return verdict.worst(self.reasons)

    @property
    def failures(self) -> int:
        return sum(nic.failures for nic in self.snapshot.nics)

    @property
    def place(self) -> tuple[Any, ...]:
        process = self.snapshot.process
        rank = process.rank if process.rank is not None else 1 << 30
        return rank, process.host, process.pid


@dataclass(frozen=True)
class Job:
    """The processes of one job. Several jobs without a name are one."""

    name: str
    rows: list[Row]

    @property
    def code(self) -> int:
        return verdict.worst(reason for row in self.rows for reason in row.reasons)

    @property
    def nodes(self) -> int:
        return len({row.snapshot.process.host for row in self.rows})


WORST_FIRST = (verdict.DANGER, verdict.DEGRADED, verdict.UNKNOWN, verdict.HEALTHY)

SORTS: dict[str, Callable[[Row], Any]] = {
    "worst": lambda row: WORST_FIRST.index(row.code),
    "rank": lambda row: 0,
    "node": lambda row: row.snapshot.process.host,
    "tx": lambda row: -row.tx,
    "rx": lambda row: -row.rx,
    "failures": lambda row: -row.failures,
    "replayed": lambda row: -row.snapshot.counters["replayed_bytes"],
}


def row(snapshot: Snapshot, rates: Rates, seen: Seen) -> Row:
    sums = [rates.get(nic.index, (nic.tx_rate, nic.rx_rate)) for nic in snapshot.nics]
    reasons = verdict.judge(snapshot, hang.stands(snapshot, seen))
    return Row(
        snapshot,
        tx=sum(tx for tx, _ in sums),
        rx=sum(rx for _, rx in sums),
        behind=max((seen.behind(comm, snapshot) for comm in snapshot.comms), default=0),
        reasons=tuple(sorted(reasons, key=lambda reason: WORST_FIRST.index(reason.code))),
    )


def jobs(
    looks: Sequence[tuple[Snapshot, Rates]],
    seen: Seen,
    *,
    sort: str = "worst",
    unwell: bool = False,
) -> list[Job]:
    """The worst job first. unwell: only processes that are not healthy."""
    found: dict[str, list[Row]] = {}
    for snapshot, rates in looks:
        one = row(snapshot, rates, seen)
        if not unwell or one.code != verdict.HEALTHY:
            found.setdefault(snapshot.process.job, []).append(one)
    key = SORTS[sort]
    all_jobs = [
        Job(name, sorted(rows, key=lambda one: (key(one), one.place)))
        for name, rows in found.items()
    ]
    return sorted(all_jobs, key=lambda job: (WORST_FIRST.index(job.code), job.name))
