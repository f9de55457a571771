"""Peers and paths as rows for people."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from r2ccl_ctl.cli.common import add_row, ago, state, table
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.rows import Nic, PathRow, process_name
from r2ccl_ctl.units import show_bytes, show_rate, show_span

if TYPE_CHECKING:
    from rich.table import Table


def penalty(row: Nic | PathRow, now_ns: int | None = None) -> str:
    """Flap damping: the penalty, and how long a damped NIC or path is still left alone."""
    now = now_ns if now_ns is not None else time.monotonic_ns()
    left = (row.reuse_mono_ns - now) / 1e9 if row.state == "damped" else 0
    text = str(row.penalty) if row.penalty else "-"
    return f"{text}, reuse in {show_span(left)}" if left > 0 else text


def retransmits(row: Nic | PathRow) -> str:
    """Segments that the kernel has sent again, and their share: of a NIC that of the last second or
    more, of a path that of all."""
    if not row.retransmits:
        return "-"
    return f"{row.retransmits} ({row.loss_ppm / 10_000:.1f} %)"


def odd(path: PathRow, nics: Iterable[Nic]) -> bool:
    """Worth a look without --details: a path that carries less than its NIC may (docs/failures.md).
    Also one that does not carry, unless it ended in order or a better one serves."""
    if path.state == "up":
        own = next((nic.weight for nic in nics if nic.name == path.nic), 0)
        return path.direction != "rx" and 0 < path.weight < own
    return path.state != "closed" and not path.spare


def path_table(paths: Sequence[PathRow], now_ns: int | None = None) -> Table:
    """Rows fit into 120 columns as a rule, but for CAUSE: columns that would say the same of all
    are left out. WEIGHT is the sender's doing, so of what only arrives it is not shown."""
    columns: dict[str, Callable[[PathRow], object]] = {
        "PEER": lambda path: process_name(path.peer_host, path.peer_pid, path.peer_rank),
        "DIR": lambda path: path.direction if path.direction not in ("", "none") else "-",
        "NIC": lambda path: path.nic,
        "REMOTE NIC": lambda path: path.remote_nic,
        "VIA": lambda path: path.via,
        "STATE": lambda path: state(path.state, " (spare)" if path.spare else ""),
        ">WEIGHT": lambda path: "-" if path.direction == "rx" else path.weight,
        ">GEN": lambda path: path.generation,
        ">RATE": lambda path: show_rate(path.rate) or "-",
        ">RTT": lambda path: f"{path.rtt_us} us" if path.rtt_us else "-",
        ">IN FLIGHT": lambda path: show_bytes(path.inflight_bytes),
        ">REPLAYED": lambda path: show_bytes(path.replayed_bytes),
        ">RETRANS": lambda path: retransmits(path),
        ">FAILS": lambda path: path.failures,
        "SINCE": lambda path: ago(path.since_mono_ns, now_ns),
        "PENALTY": lambda path: penalty(path, now_ns),
        "CAUSE": lambda path: path.cause,
    }
    needed = {
        "VIA": any(path.via != "tcp" for path in paths),
        ">REPLAYED": any(path.replayed_bytes for path in paths),
        ">RETRANS": any(path.retransmits for path in paths),
        "PENALTY": any(path.penalty or path.state == "damped" for path in paths),
    }
    names = [name for name in columns if needed.get(name, True)]
    found = table(*names)
    for path in paths:
        add_row(found, *(columns[name](path) for name in names))
    return found


def peer_table(snapshot: Snapshot) -> Table:
    ranked = any(peer.rank is not None for peer in snapshot.peers)
    rest = ("STATE", "DIRECTION", ">CONNECTIONS", "PATHS", "HEARD", "CAUSE")
    found = table("PEER", ">PID", *([">RANK"] if ranked else []), *rest)
    for peer in snapshot.peers:
        states = Counter(path.state for path in snapshot.paths if path.peer == peer.index)
        add_row(
            found,
            peer.host,
            peer.pid,
            *(["-" if peer.rank is None else peer.rank] if ranked else []),
            state(peer.state),
            peer.direction,
            peer.connections,
            count_text(states) or "-",
            f"{ago(peer.heard_mono_ns)} ago" if peer.heard_mono_ns else "-",
            peer.cause,
        )
    return found


def count_text(counts: Counter[str]) -> str:
    """ "7 up, 1 down"."""
    return ", ".join(f"{number} {word}" for word, number in counts.most_common())
