"""Processes, NICs, paths and events as rows for people, and as dictionaries for JSON."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from r2ccl_ctl import hang, hostnics, verdict
from r2ccl_ctl.cli.comm_view import comm_dict, comm_table
from r2ccl_ctl.cli.common import add_row, ago, process_state, row_dict, state, table
from r2ccl_ctl.cli.path_view import count_text, odd, path_table, peer_table
from r2ccl_ctl.cli.path_view import penalty as penalty
from r2ccl_ctl.cli.path_view import retransmits as retransmits
from r2ccl_ctl.control import SCHEMA, Process, Snapshot
from r2ccl_ctl.gpus import Gpu, near_text, nearest
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.hostnics import HostNic
from r2ccl_ctl.journal import Event
from r2ccl_ctl.rows import Nic, process_name
from r2ccl_ctl.segment import VERSIONS
from r2ccl_ctl.units import rfc3339, show_bytes, show_rate

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

SHOWN_COUNTERS = (
    "failovers",
    "replayed_chunks",
    "replayed_bytes",
    "tail_resent_bytes",
    "duplicate_chunks",
    "stale_chunks",
    "crc_errors",
    "no_path_waits",
    "connections_failed",
    "handshakes_rejected",
    "journal_dropped",
    "rows_refused",
    "locate_rounds",
    "verdicts",
)


@dataclass
class Rates:
    """Bytes per second and NIC, from one look to the next."""

    _last: dict[tuple[str, str, int], tuple[int, int, int]] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Nothing has been seen yet."""
        return not self._last

    def update(self, snapshot: Snapshot) -> dict[int, tuple[float, float]]:
        """NIC index -> (tx, rx); nothing at the first look."""
        found = {}
        for nic in snapshot.nics:
            key = (snapshot.process.host, snapshot.process.name, nic.index)
            before = self._last.get(key)
            self._last[key] = (snapshot.mono_ns, nic.tx_bytes, nic.rx_bytes)
            if before is None:
                continue
            seconds = max(snapshot.mono_ns - before[0], 1) / 1e9
            found[nic.index] = (
                max(nic.tx_bytes - before[1], 0) / seconds,
                max(nic.rx_bytes - before[2], 0) / seconds,
            )
        return found


def rank_text(process: Process) -> str:
    if process.rank is None:
        return ""
    return f"{process.rank}/{process.ranks}" if process.ranks else str(process.rank)


def process_table(processes: Iterable[Process]) -> Table:
    """r2ccl-ctl ps."""
    found = table(
        "NODE", ">PID", "JOB", "RANK", "STATE", "MODE", "NCCL", ">COMMS", "STARTED", "COMMAND"
    )
    for process in processes:
        add_row(
            found,
            process.host,
            process.pid,
            process.job or "-",
            rank_text(process) or "-",
            process_state(process),
            process.mode or "-",
            process.nccl_version or "-",
            process.comms or "-",
            re.sub(r"\.\d+", "", rfc3339(process.created_real_ns)) or "-",
            process.problem or process.command,
        )
    return found


def process_dict(process: Process) -> dict[str, Any]:
    return {
        "node": process.host,
        "pid": process.pid,
        "local_pid": process.local_pid,
        "state": process.state,
        "silent_s": round(process.silent_s, 1),
        "job": process.job,
        "rank": process.rank,
        "ranks": process.ranks,
        "mode": process.mode,
        "verify": process.verify,
        "nccl_version": process.nccl_version,
        "net_api": process.net_api,
        "plugin_version": process.plugin_version,
        "process_id": process.process_id,
        "comm": process.comm,
        "comms": process.comms,
        "uid": process.uid,
        "command": process.command,
        "warning": process.warning,
        "problem": process.problem,
        "layout": process.layout,
        "layouts_read": list(VERSIONS),
        "segment": process.name,
        "started": rfc3339(process.created_real_ns),
        "alive": rfc3339(process.alive_real_ns),
        "ended": rfc3339(process.ended_real_ns),
    }


def nic_dict(nic: Nic, rates: dict[int, tuple[float, float]]) -> dict[str, Any]:
    found = dict(vars(nic))
    tx, rx = rates.get(nic.index, (nic.tx_rate, nic.rx_rate))
    found["tx_rate"], found["rx_rate"] = int(tx), int(rx)
    found["since"] = rfc3339(nic.since_real_ns)
    return found


def snapshot_dict(
    snapshot: Snapshot, rates: dict[int, tuple[float, float]], seen: Seen
) -> dict[str, Any]:
    rank, found = snapshot.process.rank, hang.waits(snapshot, seen)
    standing = hang.stands(snapshot, seen)
    reasons = verdict.judge(snapshot, standing)
    return {
        **process_dict(snapshot.process),
        "verdict": verdict.WORDS[verdict.worst(reasons)].lower(),
        "reasons": [reason.text for reason in reasons],
        "time": rfc3339(snapshot.real_ns),
        "mono_ns": snapshot.mono_ns,
        "missing_signals": snapshot.missing,
        "nics": [nic_dict(nic, rates) for nic in snapshot.nics],
        "peers": [row_dict(peer) for peer in snapshot.peers],
        "paths": [row_dict(path) for path in snapshot.paths],
        "stands": standing,
        "waits": [entry for wait in found for entry in hang.wait_dicts(wait, snapshot, rank)],
        "communicators": [comm_dict(comm, snapshot, seen) for comm in snapshot.comms],
        "counters": snapshot.counters,
        "gauges": snapshot.gauges,
    }


def document(key: str, rows: Sequence[Any]) -> dict[str, Any]:
    """The outermost object of every JSON document."""
    return {"schema": SCHEMA, "time": rfc3339(time.time_ns()), key: list(rows)}


NIC_COLUMNS = (
    "NIC",
    "STATE",
    "LINK",
    ">WEIGHT",
    ">SPEED",
    ">TX",
    ">RX",
    ">TX BYTES",
    ">RX BYTES",
    ">RETRANS",
    ">FAILS",
    "SINCE",
    "PENALTY",
    "FAULT",
    "CAUSE",
)


def fault_text(fault: str) -> str:
    """ "slow 20 Mbit/s tx" for the segment's "slow 2500000 B/s tx", "loss 1 %" for its "loss 10000
    ppm": as fail-nic takes them."""
    rate = re.sub(r"\b(\d{1,18}) B/s", lambda found: show_rate(int(found[1])), fault)
    return re.sub(r"\b(\d{1,7}) ppm\b", lambda found: f"{int(found[1]) / 10_000:g} %", rate)


def nic_columns(snapshots: Iterable[Snapshot]) -> tuple[str, ...]:
    """Retransmissions have a column where there are any."""
    resent = any(nic.retransmits for snapshot in snapshots for nic in snapshot.nics)
    return tuple(name for name in NIC_COLUMNS if resent or name != ">RETRANS")


def nic_cells(
    nic: Nic,
    rates: dict[int, tuple[float, float]],
    columns: Sequence[str],
    now_ns: int | None = None,
) -> list[object]:
    tx, rx = rates.get(nic.index, (nic.tx_rate, nic.rx_rate))
    cells = (
        nic.name,
        state(nic.state),
        state(nic.link),
        nic.weight,
        show_rate(nic.speed_mbps * 125000),
        show_rate(tx) or "-",
        show_rate(rx) or "-",
        show_bytes(nic.tx_bytes),
        show_bytes(nic.rx_bytes),
        retransmits(nic),
        nic.failures,
        ago(nic.since_mono_ns, now_ns),
        penalty(nic, now_ns),
        fault_text(nic.fault) or "-",
        nic.cause,
    )
    return [c for name, c in zip(NIC_COLUMNS, cells, strict=True) if name in columns]


def nic_table(
    snapshots: Sequence[tuple[Snapshot, dict[int, tuple[float, float]]]], gpus: Sequence[Gpu] = ()
) -> Table:
    """r2ccl-ctl nics: the NICs of all processes. Which GPUs are near them only where there are
    GPUs; ranks where pids tell nothing."""
    columns = nic_columns(snapshot for snapshot, _ in snapshots)
    ranked = any(snapshot.process.pid == 1 for snapshot, _ in snapshots)  # containers
    titles = ["NODE", ">PID", *([">RANK"] if ranked else [])]
    found = table(*titles, *columns[:1], *(["GPUS"] if gpus else []), *columns[1:])
    for snapshot, rates in snapshots:
        for nic in snapshot.nics:
            name, *cells = nic_cells(nic, rates, columns)
            near = [near_text(nearest(nic, gpus)) or "-"] if gpus else []
            who: list[object] = [snapshot.process.host, snapshot.process.pid]
            who += [rank_text(snapshot.process) or "-"] if ranked else []
            add_row(found, *who, name, *near, *cells)
    return found


def has_rdma(*snapshots: Snapshot) -> bool:
    return any(nic.rdma_device for snapshot in snapshots for nic in snapshot.nics)


def rdma_table(snapshots: Sequence[Snapshot], *, titles: bool) -> Table:
    """The RDMA ports behind the NICs, in ibstat's words."""
    found = table(
        *(("NODE", ">PID") if titles else ()),
        "NIC",
        "CA",
        ">PORT",
        "STATE",
        "PHYSICAL STATE",
        ">RATE",
        ">BASE LID",
        "LINK LAYER",
        "GID",
        ">QUEUE PAIRS",
    )
    for snapshot in snapshots:
        for nic in snapshot.nics:
            if not nic.rdma_device:
                continue
            title = (snapshot.process.host, snapshot.process.pid) if titles else ()
            add_row(
                found,
                *title,
                nic.name,
                nic.rdma_device,
                nic.rdma_port,
                nic.rdma_state,
                nic.rdma_phys,
                nic.rdma_gbps or "-",
                nic.rdma_lid or "-",
                nic.rdma_link,
                nic.gid,
                nic.queue_pairs,
            )
    return found


def title(snapshot: Snapshot) -> Text:
    from rich.text import Text

    process = snapshot.process
    parts = [process.host, f"pid {process.pid}"]
    parts += [f"job {process.job}"] if process.job else []
    parts += [f"rank {rank_text(process)}"] if process.rank is not None else []
    parts += [f"mode {process.mode}"] if process.mode else []
    parts += ["verify"] if process.verify else []
    parts += [f"NCCL {process.nccl_version}"] if process.nccl_version else []
    text = Text("  ".join(parts), style="bold")
    if not process.running or process.silent_s:
        text.append("  ")
        text.append_text(process_state(process))
    return text


def counter_text(name: str, value: int) -> str:
    """ "tail resent 14.8 MiB", "failovers 1"."""
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    return f"{name.replace('_', ' ')} {value}"


def summary(snapshot: Snapshot, seen: Seen | None = None) -> list[str]:
    """The lines below the NICs."""
    counters, gauges = snapshot.counters, snapshot.gauges
    paths = Counter(path.state for path in snapshot.paths)
    lines = [
        f"peers {len({peer.process_id for peer in snapshot.peers})}, "
        f"paths {count_text(paths) or 'none'}, connections {gauges['connections_open']}, "
        f"requests in flight {gauges['requests_in_flight']}",
        f"sent {show_bytes(counters['bytes_sent'])}, received "
        f"{show_bytes(counters['bytes_received'])}, replayed "
        f"{show_bytes(counters['replayed_bytes'])}, sockets {gauges['sockets']}, threads "
        f"{gauges['threads']}, memory {show_bytes(gauges['memory_bytes'])}",
    ]
    notable = [counter_text(name, counters[name]) for name in SHOWN_COUNTERS if counters[name]]
    if notable:
        lines.append(", ".join(notable))
    standing = hang.stands(snapshot, seen)
    if standing:
        lines.append(f"stalled: {standing}")
    if snapshot.missing:
        lines.append(f"signals that this process lacks: {', '.join(snapshot.missing)}")
    if snapshot.process.warning:
        lines.append(f"warning: {snapshot.process.warning}")
    return lines


def nics_view(
    looks: Sequence[tuple[Snapshot, dict[int, tuple[float, float]]]], gpus: Sequence[Gpu] = ()
) -> Group:
    """r2ccl-ctl nics: all NICs, what RDMA there is behind them, and which processes are stalled."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [nic_table(looks, gpus)]
    snapshots = [snapshot for snapshot, _ in looks]
    if has_rdma(*snapshots):
        parts += [Text(), rdma_table(snapshots, titles=True)]
    if any(len(snapshot.nics) > 1 for snapshot in snapshots):
        parts += [Text(), spill_table(snapshots)]
    seen = Seen(snapshots)
    lines = [line for snapshot in snapshots for line in standing_lines(snapshot, seen)]
    return Group(*parts, *([Text(), *lines] if lines else []))


def spill_table(snapshots: Sequence[Snapshot]) -> Table:
    """In which order other NICs take over, nearest first. Processes of a node that have the same
    NICs share the rows."""
    found = table("NODE", "HOME NIC", *(f"THEN {word.upper()}" for word in hostnics.NEARNESS))
    known: set[tuple[object, ...]] = set()
    for snapshot in snapshots:
        nics = snapshot.nics
        key = (snapshot.process.host, *((nic.name, nic.pci_path, nic.weight > 0) for nic in nics))
        if key in known:
            continue
        known.add(key)
        for row in spill_rows(nics):
            add_row(found, snapshot.process.host, *row)
    return found


def spill_rows(nics: Sequence[Nic | HostNic]) -> list[list[str]]:
    """For each NIC its name, and those that take over from it, by how near they are."""
    rows = []
    for home, nic in enumerate(nics):
        by_name = {other.name: other for other in nics}
        others = [by_name[name] for name in hostnics.spill_names(nics, home)]
        near = [(hostnics.why_near(nic, other), other.name) for other in others]
        cells = (", ".join(n for w, n in near if w == word) for word in hostnics.NEARNESS)
        rows.append([nic.name, *(cell or "-" for cell in cells)])
    return rows


def standing_lines(snapshot: Snapshot, seen: Seen | None = None) -> list[Text]:
    """What the rows of its NICs do not tell: that they are old, since their process is silent, and
    why it is stalled."""
    from rich.text import Text

    process, standing = snapshot.process, hang.stands(snapshot, seen)
    found = [Text.assemble(process.title, ": ", process_state(process))] if process.silent_s else []
    return found + ([Text(f"{process.title}: stalled: {standing}")] if standing else [])


def status_view(
    snapshots: Sequence[tuple[Snapshot, dict[int, tuple[float, float]]]],
    seen: Seen,
    *,
    details: bool,
) -> RenderableType:
    """r2ccl-ctl status. Without details only the paths that are odd are listed."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for snapshot, rates in snapshots:
        if parts:
            parts.append(Text(""))
        parts.append(title(snapshot))
        columns = nic_columns([snapshot])
        nics = table(*columns)
        for nic in snapshot.nics:
            add_row(nics, *nic_cells(nic, rates, columns, snapshot.mono_ns))
        parts.append(Padding(nics, (0, 0, 0, 2), expand=False))
        if has_rdma(snapshot):
            parts.append(Padding(rdma_table([snapshot], titles=False), (0, 0, 0, 2), expand=False))
        parts += [
            Padding(Text(line), (0, 0, 0, 2), expand=False) for line in summary(snapshot, seen)
        ]
        if snapshot.comms:
            comms = comm_table([snapshot], seen, titles=False)
            parts.append(Padding(comms, (0, 0, 0, 2), expand=False))
        paths = [path for path in snapshot.paths if details or odd(path, snapshot.nics)]
        if details and snapshot.peers:
            parts.append(Padding(peer_table(snapshot), (0, 0, 0, 2), expand=False))
        if paths:
            parts.append(Padding(path_table(paths, snapshot.mono_ns), (0, 0, 0, 2), expand=False))
    notes = seen.coverage(comm.id for snapshot, _ in snapshots for comm in snapshot.comms)
    return Group(*parts, *([Text(), *map(Text, notes)] if notes else []))


def event_dict(event: Event) -> dict[str, Any]:
    process = event.process
    return {
        "schema": SCHEMA,
        "time": rfc3339(event.real_ns),
        "node": process.host,
        "pid": process.pid,
        "job": process.job,
        "rank": process.rank,
        **event.as_dict(),
    }


def event_line(event: Event, *, titled: bool) -> Text:
    """One line: when, who, what, where, how much, why."""
    from rich.text import Text

    text = Text()
    if event.lost:
        text.append(f"... {event.lost} events were overwritten before they could be read\n")
    text.append(rfc3339(event.real_ns) + "  ")
    if titled:
        process = event.process
        text.append(process_name(process.host, process.pid, process.rank) + "  ")
    text.append(f"{event.event:<18}", style=EVENT_STYLES.get(event.event, ""))
    parts = []
    if event.nic and event.remote_nic:
        parts.append(f"{event.nic} -> {event.remote_nic}")
    elif event.nic or event.remote_nic:
        parts.append(event.nic or event.remote_nic)
    if event.peer_host or event.peer_pid:
        parts.append(f"peer {event.peer_host}:{event.peer_pid}")
    if event.generation:
        parts.append(f"generation {event.generation}")
    if event.bytes:
        parts.append(show_bytes(event.bytes))
    if event.duration_us:
        parts.append(f"{event.duration_us / 1000:.1f} ms")
    if event.cause:
        parts.append(event.cause)
    text.append(", ".join(parts))
    text.rstrip()
    return text


EVENT_STYLES = {
    "nic-down": "red",
    "path-down": "red",
    "peer-gone": "red",
    "no-path": "red",
    "error": "red",
    "crc-error": "red",
    "connection-failed": "red",
    "fault-injected": "magenta",
    "fault-cleared": "magenta",
    "operator": "magenta",
    "nic-up": "green",
    "path-up": "green",
    "resume": "green",
    "warning": "yellow",
}
