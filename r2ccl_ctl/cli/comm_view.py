"""Communicators as rows for people, and as dictionaries for JSON; and why they are stalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from r2ccl_ctl import hang
from r2ccl_ctl.cli.common import add_row, ago, process_state, row_dict, state, table
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.hang import Seen, Wait
from r2ccl_ctl.rows import Comm
from r2ccl_ctl.units import show_bytes

if TYPE_CHECKING:
    from rich.table import Table


def comm_dict(comm: Comm, snapshot: Snapshot, seen: Seen) -> dict[str, Any]:
    """`op_age_s`: since the newest operation was handed to NCCL. `silent_s`: since the process was
    last heard, where that is long. `stands`: why nothing moves, where the process knows it.
    `waits`: the same by NIC, and the ranks of the communicator that are late or silent."""
    now_ns = snapshot.mono_ns
    known = comm.op_mono_ns and comm.op_mono_ns <= now_ns
    age = (now_ns - comm.op_mono_ns) / 1e9 if known else None
    found = [*hang.waits(snapshot, seen, comm), *seen.late(comm.id)]
    return {
        **row_dict(comm),
        "op_age_s": None if age is None else round(age, 3),
        "silent_s": round(snapshot.process.silent_s, 1),
        "behind": seen.behind(comm, snapshot),
        "ranks_seen": len({other.rank for _, other in seen.ranks.get(comm.id, ())}),
        "stands": hang.stands(snapshot, seen, comm),
        "waits": [entry for wait in found for entry in hang.wait_dicts(wait, snapshot, comm.rank)],
    }


def cause_text(comm: Comm, snapshot: Snapshot, seen: Seen) -> str:
    """Why it is stalled, or why the others wait for it; else the cause of its state."""
    standing = hang.stands(snapshot, seen, comm)
    own = [wait.text for wait in seen.late(comm.id) if is_of(wait, comm, snapshot)]
    parts = [f"stalled: {standing}" if standing else "", *own]
    return "; ".join(filter(None, parts)) or comm.cause


def is_of(wait: Wait, comm: Comm, snapshot: Snapshot) -> bool:
    process = snapshot.process
    return (wait.rank, wait.host, wait.pid) == (comm.rank, process.host, process.pid)


def operation_text(comm: Comm, now_ns: int) -> str:
    """ "all-reduce of 4 MiB, 12 s ago"; "in" while a thread is inside NCCL with it."""
    if comm.op == "none":
        return "-"
    size = f" of {show_bytes(comm.op_bytes)}" if comm.op_bytes else ""
    since = ago(comm.op_mono_ns, now_ns)
    return f"in {comm.op}{size} for {since}" if comm.calling else f"{comm.op}{size}, {since} ago"


def comm_table(snapshots: Sequence[Snapshot], seen: Seen, *, titles: bool) -> Table:
    """Communicators. BEHIND: collectives that this rank has yet to call and another rank of the
    communicator here already has: in a hang, the others wait for it, as they do for one that is
    silent (stopped, starved or hung). CAUSE says more of both, and of a rank without a path."""
    found = table(
        *(("NODE", ">PID") if titles else ()),
        "COMM",
        "NAME",
        "RANK",
        ">NODES",
        "STATE",
        "PLAN",
        ">EPOCH",
        ">OPS",
        ">BEHIND",
        "NEWEST OPERATION",
        "CAUSE",
    )
    for snapshot in snapshots:
        process = snapshot.process
        for comm in snapshot.comms:
            title = (process.host, process.pid) if titles else ()
            rank = "-" if comm.rank is None else f"{comm.rank}/{comm.ranks or '?'}"
            add_row(
                found,
                *title,
                comm.id[:8],
                comm.name or "-",
                rank,
                comm.nodes or "-",
                process_state(process) if process.silent_s else state(comm.state),
                comm.plan or "stock",
                comm.epoch or "-",
                comm.operations,
                seen.behind(comm, snapshot) or "-",
                operation_text(comm, snapshot.mono_ns),
                cause_text(comm, snapshot, seen),
            )
    return found
