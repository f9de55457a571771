"""Communicators as rows for people, and as dictionaries for JSON; and why they stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from r2ccl_ctl.cli.common import add_row, ago, process_state, row_dict, state, table
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.rows import Comm
from r2ccl_ctl.units import show_bytes, show_span

if TYPE_CHECKING:
    from rich.table import Table


def seconds_text(comm: Comm) -> str:
    """The communicators that the shim made beside it, for plans: "2", "1+1 making"."""
    if not comm.seconds_making:
        return str(comm.seconds or "-")
    return f"{comm.seconds}+{comm.seconds_making} making"


def comm_dict(comm: Comm, snapshot: Snapshot) -> dict[str, Any]:
    """`op_age_s`: since the newest operation was handed to NCCL. `silent_s`: since the process was
    last heard, where that is long. `stands`: why nothing moves, where the process knows it."""
    now_ns = snapshot.mono_ns
    age = (now_ns - comm.op_mono_ns) / 1e9 if 0 < comm.op_mono_ns <= now_ns else None
    return {
        **row_dict(comm),
        "op_age_s": None if age is None else round(age, 3),
        "silent_s": round(snapshot.process.silent_s, 1),
        "stands": stands(snapshot),
    }


def stands(snapshot: Snapshot) -> str:
    """ "no path to node1:17 for 18s, gives up in 22s", of each peer that it waits for; or "",
    as for a process that has ended, which waits for nobody."""
    now_ns = snapshot.mono_ns
    if not snapshot.process.running:
        return ""
    found: dict[str, str] = {}
    for peer in snapshot.peers:
        if not 0 < peer.waits_mono_ns <= now_ns or peer.state in ("gone", "closed"):
            continue
        who = f"{peer.host}:{peer.pid}" if peer.host or peer.pid else f"peer {peer.process_id[:8]}"
        text = f"no path to {who} for {ago(peer.waits_mono_ns, now_ns)}"
        if peer.gives_up_mono_ns > now_ns:
            text += f", gives up in {show_span((peer.gives_up_mono_ns - now_ns) / 1e9)}"
        found.setdefault(peer.process_id, text)
    return "; ".join(found.values())


def most_operations(snapshots: Iterable[Snapshot]) -> dict[str, int]:
    """Communicator -> the collectives of the rank here that has handed over most."""
    found: dict[str, int] = {}
    for snapshot in snapshots:
        for comm in snapshot.comms:
            found[comm.id] = max(found.get(comm.id, 0), comm.operations)
    return found


def operation_text(comm: Comm, now_ns: int) -> str:
    """ "all-reduce of 4 MiB, 12 s ago"; "in" while a thread is inside NCCL with it."""
    if comm.op == "none":
        return "-"
    size = f" of {show_bytes(comm.op_bytes)}" if comm.op_bytes else ""
    since = ago(comm.op_mono_ns, now_ns)
    return f"in {comm.op}{size} for {since}" if comm.calling else f"{comm.op}{size}, {since} ago"


def comm_table(snapshots: Sequence[Snapshot], most: dict[str, int], *, titles: bool) -> Table:
    """Communicators. BEHIND: collectives that this rank has yet to hand over and another rank of
    the communicator here already has: in a hang, the others wait for it, as they do for one that is
    silent (stopped, starved or hung)."""
    found = table(
        *(("NODE", ">PID") if titles else ()),
        "COMM",
        "NAME",
        "RANK",
        ">NODES",
        "STATE",
        "PLAN",
        ">EPOCH",
        ">BESIDE",
        ">OPS",
        ">BEHIND",
        "NEWEST OPERATION",
        "CAUSE",
    )
    for snapshot in snapshots:
        process, standing = snapshot.process, stands(snapshot)
        for comm in snapshot.comms:
            title = (process.host, process.pid) if titles else ()
            rank = "-" if comm.rank is None else f"{comm.rank}/{comm.ranks or '?'}"
            behind = most.get(comm.id, comm.operations) - comm.operations
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
                seconds_text(comm),
                comm.operations,
                behind or "-",
                operation_text(comm, snapshot.mono_ns),
                f"stands: {standing}" if standing else comm.cause,
            )
    return found
