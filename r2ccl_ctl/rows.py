"""The rows of a control segment's tables, as the rest of the tool knows them."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.segment import layout


@dataclass(frozen=True)
class Nic:
    """A NIC as one process sees it. `since_*`: of the state; `rate` in bytes per second."""

    index: int
    name: str
    addr: str
    ifname: str
    pci_path: str
    state: str
    link: str
    weight: int
    speed_mbps: int
    numa: int | None
    cause: str
    fault: str
    penalty: int
    reuse_mono_ns: int
    draining: int
    since_real_ns: int
    since_mono_ns: int
    tx_bytes: int
    rx_bytes: int
    tx_chunks: int
    rx_chunks: int
    tx_rate: int
    rx_rate: int
    inflight_bytes: int
    failures: int
    recoveries: int
    errors: int
    replayed_bytes: int
    tx_segments: int = 0
    retransmits: int = 0
    loss_ppm: int = 0
    rdma_device: str = ""
    rdma_port: int = 0
    rdma_state: str = ""
    rdma_phys: str = ""
    rdma_link: str = ""
    rdma_gbps: int = 0
    queue_pairs: int = 0
    rdma_lid: int = 0
    gid: str = ""


@dataclass(frozen=True)
class Peer:
    """A process at the other end. `rank`: in its job. `direction`: tx, rx or both, of the open
    connections."""

    index: int
    process_id: str
    host: str
    pid: int
    state: str
    direction: str
    connections: int
    cause: str
    since_real_ns: int
    since_mono_ns: int
    heard_mono_ns: int
    waits_mono_ns: int = 0
    gives_up_mono_ns: int = 0
    waits_for: str = "path"
    rank: int | None = None

    def __str__(self) -> str:
        return process_name(self.host, self.pid, self.rank)


@dataclass(frozen=True)
class PathRow:
    """A path: a local NIC to one NIC of a peer. `rate` in bytes per second. `retransmits`: segments
    that the kernel has sent again; loss_ppm: their share of all. `direction`: that of its peer row.
    `spare`: a better pair of NICs serves meanwhile; only the sending side knows."""

    index: int
    peer: int
    peer_host: str
    peer_pid: int
    nic: str
    remote_nic: str
    state: str
    generation: int
    weight: int
    streams: int
    cause: str
    since_real_ns: int
    since_mono_ns: int
    tx_bytes: int
    rx_bytes: int
    inflight_bytes: int
    rate: int
    rtt_us: int
    failures: int
    replayed_bytes: int
    heard_mono_ns: int
    via: str = "tcp"
    penalty: int = 0
    reuse_mono_ns: int = 0
    direction: str = ""
    spare: bool = False
    retransmits: int = 0
    loss_ppm: int = 0
    peer_rank: int | None = None


@dataclass(frozen=True)
class Comm:
    """A communicator, as the shim counts. `id` is the same on all its ranks; `operations` are the
    collectives that were handed to NCCL, so the rank that the others wait for has fewer. `op` is
    the newest operation; `calling`: a thread is inside NCCL with it. bus_bytes: of the collectives,
    as nccl-tests counts bus bandwidth. None: not known."""

    index: int
    id: str
    parent: str
    name: str
    state: str
    rank: int | None
    ranks: int | None
    nodes: int | None
    local_ranks: int | None
    device: int | None
    plan: str
    epoch: int
    operations: int
    p2p: int
    op: str
    op_bytes: int
    op_mono_ns: int
    calling: bool
    cause: str
    since_real_ns: int
    since_mono_ns: int
    planned: int
    plan_wait_ns: int
    plan_messages: int = 0
    plan_proposals: int = 0
    plan_agreed: int = 0
    plan_events: int = 0
    plan_rounds: int = 0
    bus_bytes: int = 0


@dataclass(frozen=True)
class Timing:
    """Times of one kind of collective (`op`) of a communicator, of sizes up to `up_to` bytes.
    `comm`: NCCL's own id of it. `count[i]`: how many took at most `spans()[i]` seconds and longer
    than the one before; the last: all others. bus_bytes: as nccl-tests counts bus bandwidth."""

    index: int
    comm: str
    rank: int
    ranks: int
    op: str
    up_to: int
    bus_bytes: int
    ns: int
    longest_ns: int
    count: list[int]

    def quantile(self, share: float) -> float:
        """Seconds that this share of them stays below, if they lie evenly in their bucket."""
        wanted, below, low = share * sum(self.count), 0, 0.0
        longest = self.longest_ns / 1e9
        for high, count in zip([*spans(), longest], self.count, strict=True):
            if count and below + count >= wanted:
                high = min(high, longest)
                return low + (high - low) * max(wanted - below, 0) / count if high > low else high
            below += count
            low = high
        return longest


def spans() -> list[float]:
    """Upper ends of the buckets of Timing.count but the last, in seconds."""
    names = layout().constants
    first, count = names["R2_SEG_SPAN_US"], names["R2_SEG_SPANS"]
    return [(first << i) / 1e6 for i in range(count - 1)]


def timing(index: int, row: dict[str, Any]) -> Timing:
    return Timing(
        index=index,
        comm=f"{row['comm']:016x}",
        op=word("r2_seg_collective", "R2_SEG_COLL_", row["op"]),
        **take(row, "rank ranks up_to bus_bytes ns longest_ns count"),
    )


def process_name(host: str, pid: int, rank: int | None) -> str:
    """ "node1:4711". In containers all processes may have pid 1, so the rank is named then."""
    return f"{host}:{pid}" + (f" rank {rank}" if pid == 1 and rank is not None else "")


def word(enum: str, prefix: str, number: int) -> str:
    """The word for an enum's value; a number that this tool does not know stays one."""
    return layout().enum(enum, prefix).get(number, f"unknown-{number}")


def nic(index: int, row: dict[str, Any]) -> Nic:
    n = row["n"]
    return Nic(
        index=index,
        state=word("r2_seg_nic_state", "R2_SEG_NIC_", row["state"]),
        link=word("r2_seg_link", "R2_SEG_LINK_", row["link"]),
        numa=row["numa"] if row["numa"] >= 0 else None,
        **take(
            row,
            "name addr ifname pci_path weight speed_mbps cause fault penalty "
            "reuse_mono_ns draining since_real_ns since_mono_ns",
        ),
        **take(
            n,
            "tx_bytes rx_bytes tx_chunks rx_chunks tx_rate rx_rate inflight_bytes failures "
            "recoveries errors replayed_bytes tx_segments retransmits loss_ppm",
        ),
        **rdma(row),
    )


def with_inflight(nics: list[Nic], paths: list[PathRow]) -> list[Nic]:
    """NICs have in flight what their paths have: no other count of it is kept."""
    found = Counter[str]()
    for path in paths:
        found[path.nic] += path.inflight_bytes
    return [replace(nic, inflight_bytes=found[nic.name]) for nic in nics]


# ibstat's words.
PORT_STATES = ("", "Down", "Initializing", "Armed", "Active")
PHYSICAL_STATES = (
    "No state change",
    "Sleep",
    "Polling",
    "Disabled",
    "PortConfigurationTraining",
    "LinkUp",
    "LinkErrorRecovery",
    "Phy Test",
)
LINK_LAYERS = ("", "InfiniBand", "Ethernet")


def rdma(row: dict[str, Any]) -> dict[str, Any]:
    """The RDMA port behind a NIC; nothing if there is none."""
    if not row["rdma_device"]:
        return {}
    return {
        "rdma_state": known(PORT_STATES, row["rdma_state"]),
        "rdma_phys": known(PHYSICAL_STATES, row["rdma_phys"]),
        "rdma_link": known(LINK_LAYERS, row["rdma_link"]),
        "gid": str(ipaddress.IPv6Address(bytes.fromhex(row["gid"]))),
        **take(row, "rdma_device rdma_port rdma_gbps queue_pairs rdma_lid"),
    }


def known(words: tuple[str, ...], number: int) -> str:
    return words[number] if number < len(words) else f"unknown-{number}"


def find_nic(nics: Iterable[Nic], name: str) -> Nic | None:
    """The NIC with this name, else the one with this interface or address. R2UsageError where
    several have this interface."""
    nics = list(nics)
    found = [nic for nic in nics if nic.name == name]
    found = found or [nic for nic in nics if name and name in (nic.ifname, nic.addr)]
    if len(found) > 1:
        names = ", ".join(nic.name for nic in found)
        raise R2UsageError(f"'{name}' is the interface of several NICs: give one of {names}")
    return found[0] if found else None


def peer(index: int, row: dict[str, Any]) -> Peer:
    return Peer(
        index=index,
        state=word("r2_seg_peer_state", "R2_SEG_PEER_", row["state"]),
        direction=word("r2_seg_direction", "R2_SEG_DIR_", row["direction"]),
        waits_for=word("r2_seg_waits_for", "R2_SEG_WAITS_FOR_", row["waits_for"]),
        rank=row["rank"] - 1 if row["rank"] else None,
        **take(
            row,
            "process_id host pid connections cause since_real_ns since_mono_ns heard_mono_ns "
            "waits_mono_ns gives_up_mono_ns",
        ),
    )


def comm(index: int, row: dict[str, Any]) -> Comm:
    return Comm(
        index=index,
        id=f"{row['id']:016x}",
        parent=f"{row['parent']:016x}" if row["parent"] else "",
        state=word("r2_seg_comm_state", "R2_SEG_COMM_", row["state"]),
        op=word("r2_seg_collective", "R2_SEG_COLL_", row["op"]),
        rank=row["rank"] if row["rank"] >= 0 else None,
        device=row["device"] if row["device"] >= 0 else None,
        ranks=row["ranks"] or None,
        nodes=row["nodes"] or None,
        local_ranks=row["local_ranks"] or None,
        calling=bool(row["calling"]),
        **take(
            row,
            "name plan epoch operations p2p op_bytes op_mono_ns cause since_real_ns since_mono_ns "
            "planned plan_wait_ns plan_messages "
            "plan_proposals plan_agreed plan_events plan_rounds bus_bytes",
        ),
    )


def path(index: int, row: dict[str, Any], nics: dict[int, str], peers: dict[int, Peer]) -> PathRow:
    other = peers.get(row["peer"])
    return PathRow(
        index=index,
        peer_host=other.host if other else "",
        peer_pid=other.pid if other else 0,
        peer_rank=other.rank if other else None,
        direction=other.direction if other else "",
        spare=bool(row["spare"]),
        nic=nics.get(row["nic"], ""),
        state=word("r2_seg_path_state", "R2_SEG_PATH_", row["state"]),
        via=word("r2_seg_via", "R2_SEG_VIA_", row["via"]),
        **take(
            row,
            "peer remote_nic generation weight streams cause since_real_ns since_mono_ns "
            "penalty reuse_mono_ns retransmits loss_ppm",
        ),
        **take(
            row["n"],
            "tx_bytes rx_bytes inflight_bytes rate rtt_us failures replayed_bytes heard_mono_ns",
        ),
    )


def take(row: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: row[name] for name in names.split()}


def version(number: int) -> str:
    """NCCL's version number as text: 22809 is 2.28.9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else ""
