"""What the processes of a node have found out about NICs, as rows for people and as dictionaries
for JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from r2ccl_ctl.cli.common import add_row, state, table
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.nodeseg import NodeRow, NodeSegment
from r2ccl_ctl.rows import PathRow
from r2ccl_ctl.units import rfc3339, show_span

if TYPE_CHECKING:
    from rich.table import Table

SERVING = ("up", "ramping")  # paths
WELL = ("healthy", "ramping")  # NICs
NAMED = 2  # NICs in a cell


@dataclass(frozen=True)
class Verdict:
    """A row of a node segment. `recovered`: the NIC that it calls failed has come back since.
    `towards`: the NICs at the other ends of the paths that failed."""

    segment: NodeSegment
    row: NodeRow
    recovered: bool
    towards: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "node": self.segment.host,
            "segment": self.segment.name,
            **vars(self.row),
            "time": rfc3339(self.row.real_ns),
            "recovered": self.recovered,
            "towards": list(self.towards),
        }


def node_verdicts(segments: Sequence[NodeSegment], looks: Sequence[Snapshot]) -> list[Verdict]:
    """What the processes of these nodes have found since the first of them started, newest
    first."""
    here: dict[str, list[Snapshot]] = {}
    for snapshot in looks:
        here.setdefault(snapshot.process.host, []).append(snapshot)
    return [
        Verdict(segment, row, recovered(row, here[segment.host]), towards(row, segment))
        for segment in segments
        if segment.host in here
        for row in segment.rows
        if row.real_ns >= min(look.process.created_real_ns for look in here[segment.host])
    ]


def recovered(row: NodeRow, looks: Sequence[Snapshot]) -> bool:
    """Nobody takes back what was said of another node's NIC, of the last one in service, or by a
    process that has ended since. A path that has come up since then has proven both its NICs."""
    if row.state != "failed":
        return False
    remote = "@" in row.name
    back = any(
        path.state in SERVING and path.since_real_ns > row.real_ns
        for look in looks
        for path in look.paths
        if (label(path) == row.name if remote else proves(path, row.name, look))
    )
    if remote:
        return back
    nics = [(look, nic) for look in looks for nic in look.nics if nic.name == row.name]
    # Whoever has started since has called it healthy from its start on, without a proof.
    back = back or any(
        look.process.created_real_ns < row.real_ns < nic.since_real_ns for look, nic in nics
    )
    return back and all(nic.state in WELL for _, nic in nics)


def label(path: PathRow) -> str:
    """The NIC at its other end, as verdicts name it (engine/locate/targets.c): cut to 31 bytes."""
    full = f"{path.remote_nic[:15]}@{path.peer_host}"
    return full.encode()[:31].decode(errors="ignore")


def proves(path: PathRow, nic: str, look: Snapshot) -> bool:
    """Within a node the kernel hands the bytes over, and no NIC is asked."""
    return path.nic == nic and path.peer_host != look.process.host


def towards(row: NodeRow, segment: NodeSegment) -> tuple[str, ...]:
    """By name, where a verdict about that NIC tells it, else by address; once, however many paths
    lead there."""
    names = {other.addr: other.name for other in segment.rows if "@" in other.name}
    return tuple(dict.fromkeys(names.get(addr, addr) for addr in row.others))


def node_table(found: Sequence[Verdict]) -> Table:
    """The lower part of r2ccl-ctl nics: the latest verdict on each NIC of a node's processes."""
    now = time.time_ns()
    shown = table("NODE", "NIC", "ADDRESS", "TOWARDS", "STATE", "AGE", ">BY PID", "VERDICT")
    for one in found:
        row, more = one.row, len(one.towards) - NAMED
        add_row(
            shown,
            one.segment.host,
            row.name,
            row.addr,
            (", ".join(one.towards[:NAMED]) + (f" and {more} more" if more > 0 else "")) or "-",
            state("recovered" if one.recovered else row.state),
            show_span((now - row.real_ns) / 1e9),
            row.pid,
            row.why or row.verdict,
        )
    return shown
