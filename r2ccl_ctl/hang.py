"""Why a job is stalled: which rank and which NIC the others wait for. Pure: looks in, findings out.

Four kinds of wait are known. no-path: nothing reaches a peer, or nothing that may carry a message.
unsent: a path has ended, and what it carried may not be sent again before the peer has confirmed
that. silent: a process is stopped or starved. late: a rank has not called the operation that the
others are in; it may itself wait within one that it called before.

Only this node's segments are seen, so a late rank of another node is not: Seen.coverage says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from r2ccl_ctl.rows import Comm, Nic, PathRow, Peer
from r2ccl_ctl.units import rfc3339, show_bytes, show_span

if TYPE_CHECKING:
    from r2ccl_ctl.control import Snapshot

NO_COLLECTIVES = ("none", "send", "recv")
SERVING = ("up", "ramping")  # paths
UNUSED = ("never-reached", "closed")  # paths that nobody tries, or that ended in order
WELL = ("healthy", "ramping", "unknown")  # NICs that are not to blame, if no fault is injected
LATE_NS = 3 * 10**9
PUBLISH_NS = 10**8  # as in net_plugin/control/commands.c: rows are at most so old
NAMED = 4  # NICs, paths or nodes in a sentence
LINES = 16  # NICs and paths with their causes
WORKING = ("init", "ready")  # communicators that somebody can wait in


@dataclass(frozen=True)
class Spot:
    """A NIC that a wait points at. `here`: it is the waiting process's own, and state and cause are
    the NIC's; else the path's that leads to it."""

    nic: str
    state: str
    cause: str
    here: bool
    via: str = ""  # the own NIC that the path leaves from
    fault: str = ""  # what is injected there
    held_s: float = 0  # damped: for how long it is held back yet

    @property
    def word(self) -> str:
        """Of a path that is up, and does not answer; of what is held back on purpose: that."""
        if self.state == "damped":
            rest = f" for another {show_span(self.held_s)}" if self.held_s > 0 else ""
            return f"held back{rest} (damped)"
        return "silent" if self.state in SERVING and not self.here else self.state


@dataclass(frozen=True)
class Wait:
    """One thing that is waited for. `rank`, `host`, `pid`: of whom. `since_mono_ns`: at the least;
    limit_ns: after that time it ends with an error; 0: never."""

    kind: str
    text: str
    host: str
    pid: int
    rank: int | None
    since_mono_ns: int
    limit_ns: int = 0
    spots: tuple[Spot, ...] = ()


# What one process waits for


def waits(snapshot: Snapshot, seen: Seen | None = None, comm: Comm | None = None) -> list[Wait]:
    """Why nothing moves, as far as the process knows it; nothing for one that has ended, which
    waits for nobody. With `seen` peers have ranks: those in `comm`, if one is given."""
    if not snapshot.process.running:
        return []
    by_peer: dict[int, list[PathRow]] = {}
    for path in snapshot.paths:
        by_peer.setdefault(path.peer, []).append(path)
    found = []
    for process_id, rows in by_process(snapshot.peers).items():
        rank = seen.rank(process_id, comm) if seen is not None else None
        rank = rows[0].rank if rank is None and comm is None else rank
        paths = [path for row in rows for path in by_peer.get(row.index, ())]
        if any(is_waited_for(row, snapshot.mono_ns) for row in rows):
            found.append(no_path(snapshot, rows, paths, rank))
        else:
            found += [unsent(snapshot, rows[0], p, rank) for p in paths if stays(p, snapshot)]
    return found


def stands(snapshot: Snapshot, seen: Seen | None = None, comm: Comm | None = None) -> str:
    """What it waits for and the NICs that this points at, in a line, or "". Their causes: `why`."""
    found = waits(snapshot, seen, comm)
    if not found:
        return ""
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    said = "; ".join(filter(None, (own_text(found), *far_texts(found))))
    return found[0].text + more + (f": {said}" if said else "")


def own_text(found: Iterable[Wait]) -> str:
    spots = {spot.nic: spot for wait in found for spot in wait.spots if spot.here}
    return listed(
        f"NIC {spot.nic} {spot.word}" + (", fault injected" if spot.fault else "")
        for spot in spots.values()
    )


def far_texts(found: Sequence[Wait]) -> list[str]:
    """ "paths to node1's 127.0.1.2 down, 127.0.2.2 suspect"."""
    hosts: dict[str, dict[str, str]] = {}
    for wait in found:
        for spot in wait.spots:
            if not spot.here:
                hosts.setdefault(wait.host, {}).setdefault(spot.nic or "NICs", spot.word)
    own = any(spot.here or not spot.via for wait in found for spot in wait.spots)
    unsent = any(wait.kind == "unsent" for wait in found)  # whose end HOST has to confirm
    first = ["the NICs here are healthy"] if hosts and not own and not unsent else []
    return first + [
        f"paths to {host or 'the peer'}'s "
        + listed(f"{nic} {state}" for nic, state in nics.items())
        for host, nics in list(hosts.items())[:2]
    ]


def listed(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def why(snapshots: Iterable[Snapshot]) -> list[str]:
    """A line for each NIC and path that the processes which wait point at, with its cause."""
    found: dict[str, None] = {}
    for snapshot in snapshots:
        for wait in waits(snapshot):
            for spot in wait.spots:
                name = f"{spot.via} -> {spot.nic}@{wait.host or '?'}"
                name = f"NIC {spot.nic}" if spot.here else f"path {name}"
                cause = "; ".join(filter(None, (spot.cause, injected(spot.fault))))
                if cause:
                    found[f"{snapshot.process.host}: {name} is {spot.word}: {cause}"] = None
    more = len(found) - LINES
    return list(found)[:LINES] + ([f"and {more} more NICs and paths"] if more > 0 else [])


def injected(fault: str) -> str:
    return f"fault injected: {fault}" if fault else ""


def by_process(peers: Iterable[Peer]) -> dict[str, list[Peer]]:
    """A process is two rows where it both sends and receives."""
    found: dict[str, list[Peer]] = {}
    for peer in peers:
        found.setdefault(peer.process_id, []).append(peer)
    return found


def is_waited_for(peer: Peer, now_ns: int) -> bool:
    waits = peer.waits_mono_ns != 0 and peer.waits_mono_ns <= now_ns
    return waits and peer.state not in ("gone", "closed")


def who(peer: Peer, rank: int | None) -> str:
    name = f"{peer.host}:{peer.pid}" if peer.host or peer.pid else f"peer {peer.process_id[:8]}"
    return name if rank is None else f"{name} (rank {rank})"


def no_path(
    snapshot: Snapshot, rows: Sequence[Peer], paths: Sequence[PathRow], rank: int | None
) -> Wait:
    """The NICs of those of its paths that serve nobody."""
    waiting = [row for row in rows if is_waited_for(row, snapshot.mono_ns)]
    first = min(waiting, key=lambda row: row.waits_mono_ns)
    limit = max(first.gives_up_mono_ns - first.waits_mono_ns, 0)
    indices = {row.index for row in waiting}
    device = {row.index for row in waiting if row.waits_for == "device-path"}
    # Those that are up serve others meanwhile, and sockets would not serve: neither is amiss.
    spots = blamed(
        snapshot,
        [
            p
            for p in paths
            if p.peer in indices
            and not (p.peer in device and (p.state in SERVING or p.via == "tcp"))
        ],
    )
    what = "no path that may carry device memory" if first.index in device else "no path"
    text = f"{what} to {who(first, rank)} for {span(first.waits_mono_ns, snapshot)}"
    text += f" of {show_span(limit / 1e9)}" if limit else ""
    causes = {row.cause for row in waiting if row.state == "suspect" and row.cause}
    text += "".join(f", {cause}" for cause in sorted(causes))
    return Wait(
        "no-path",
        text,
        first.host,
        first.pid,
        rank,
        first.waits_mono_ns,
        limit,
        tuple(spots),
    )


def blamed(snapshot: Snapshot, paths: Iterable[PathRow]) -> list[Spot]:
    """Of each path the own NIC if something is wrong with that, else the NIC that it leads to."""
    nics: dict[str, Nic] = {nic.name: nic for nic in snapshot.nics}
    found: dict[tuple[str, str], Spot] = {}
    for path in paths:
        nic = nics.get(path.nic)
        if nic is not None and ails(nic):
            found.setdefault((nic.name, ""), own_spot(snapshot, nic))
        else:
            found.setdefault((path.nic, path.remote_nic), far_spot(snapshot, path))
    return sorted(
        found.values(),
        key=lambda spot: (not spot.here, spot.state == "damped", spot.state in UNUSED),
    )


def ails(nic: Nic) -> bool:
    """One that ramps works."""
    return nic.state not in WELL or bool(nic.fault)


def own_spot(snapshot: Snapshot, nic: Nic) -> Spot:
    held = (nic.reuse_mono_ns - snapshot.mono_ns) / 1e9
    return Spot(nic.name, nic.state, nic.cause, True, fault=nic.fault, held_s=held)


def far_spot(snapshot: Snapshot, path: PathRow) -> Spot:
    held = (path.reuse_mono_ns - snapshot.mono_ns) / 1e9
    return Spot(path.remote_nic, path.state, path.cause, False, path.nic, held_s=held)


def stays(path: PathRow, snapshot: Snapshot) -> bool:
    """What it carried has been waiting for long. Where another path goes on that is no hang but a
    failover, until it takes that long: then the peer does not confirm that the path has ended, and
    its bytes may not be sent again."""
    if not path.inflight_bytes or path.state in SERVING:
        return False
    return snapshot.mono_ns - silent_since(path) > LATE_NS


def silent_since(path: PathRow) -> int:
    return max(path.heard_mono_ns, path.since_mono_ns)


def unsent(snapshot: Snapshot, peer: Peer, path: PathRow, rank: int | None) -> Wait:
    """The peer has to confirm, over whichever path: so its end comes first, and our own NIC after
    that, if something is wrong with it."""
    since = silent_since(path)
    spots = [far_spot(snapshot, path)]
    spots += [own_spot(snapshot, n) for n in snapshot.nics if n.name == path.nic and ails(n)]
    text = (
        f"{show_bytes(path.inflight_bytes)} to {who(peer, rank)} may not be sent again: "
        f"{peer.host or 'the peer'} has not confirmed the end of path {path.nic} -> "
        f"{path.remote_nic} for {span(since, snapshot)}"
    )
    return Wait("unsent", text, peer.host, peer.pid, rank, since, 0, tuple(spots))


def span(since_ns: int, snapshot: Snapshot) -> str:
    return show_span(max(snapshot.mono_ns - since_ns, 0) / 1e9)


# What the ranks of a communicator wait for

Ranks = list[tuple["Snapshot", Comm]]


class Seen:
    """The processes of this node at one look, each compared with the others. All running ones that
    may be read should be among them, also those that are not shown."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self.snapshots = list(snapshots)
        self.ranks: dict[str, Ranks] = {}
        self._calls: dict[str, list[tuple[int, int]]] = {}  # the newest: when, and which it is
        self._late: dict[str, list[Wait]] = {}
        self._known: dict[str, Snapshot] = {}
        self._stand: set[str] = set()  # the names of the processes that wait
        for snapshot in self.snapshots:
            for comm in snapshot.comms:
                self._calls.setdefault(comm.id, []).append((comm.op_mono_ns, place(comm)))
                if snapshot.process.running:
                    self.ranks.setdefault(comm.id, []).append((snapshot, comm))
            if snapshot.process.process_id:
                self._known[snapshot.process.process_id] = snapshot
            if waits(snapshot):
                self._stand.add(snapshot.process.name)

    def rank(self, process_id: str, comm: Comm | None) -> int | None:
        """Of a process: in the job, or in that communicator; None where that is not known."""
        snapshot = self._known.get(process_id)
        if snapshot is None:
            return None
        if comm is None:
            return snapshot.process.rank
        ranks = {other.rank for other in snapshot.comms if other.id == comm.id}
        return ranks.pop() if len(ranks) == 1 else None

    def behind(self, comm: Comm, snapshot: Snapshot) -> int:
        """Collectives that another rank here has called and this one has not. What one has called
        since this one last published its rows says nothing."""
        at_ns = snapshot.mono_ns - max(int(snapshot.process.silent_s * 1e9), PUBLISH_NS)
        there = (which for when, which in self._calls.get(comm.id, ()) if when <= at_ns)
        return max(max(there, default=0) - place(comm), 0)

    def late(self, comm_id: str) -> list[Wait]:
        """Of one communicator the ranks whose process or application the others wait for."""
        if comm_id not in self._late:
            ranks = self.ranks.get(comm_id, [])
            broken = any(self._stands(snapshot) for snapshot, _ in ranks)
            found = [
                silent(snapshot, comm) if snapshot.process.silent_s else
                None if self._stands(snapshot) else late(snapshot, comm, ranks, broken)
                for snapshot, comm in ranks
                if comm.state in WORKING
            ]  # fmt: skip
            self._late[comm_id] = [wait for wait in found if wait is not None]
        return self._late[comm_id]

    def _stands(self, snapshot: Snapshot) -> bool:
        return snapshot.process.name in self._stand

    def coverage(self, shown: Iterable[str]) -> list[str]:
        """For each of the communicators `shown` that is stalled, and of which not all ranks are
        seen here: that, and where to look on."""
        found = []
        for name in dict.fromkeys(shown):
            ranks = self.ranks.get(name, [])
            count, of = len({comm.rank for _, comm in ranks}), all_ranks(ranks)
            if not 0 < count < of or not self._halts(name):
                continue
            behind = self.late(name) or any(self.behind(comm, one) for one, comm in ranks)
            text = f"communicator {name[:8]}: {count} of {of} ranks are seen here"
            text += "" if behind else ", none of them behind"
            found.append(f"{text}; run this on {elsewhere(ranks)} too")
        return found

    def _halts(self, comm_id: str) -> bool:
        """Nothing new has been handed over for long, or somebody is known to wait."""
        ranks = self.ranks[comm_id]
        if any(comm.state not in WORKING for _, comm in ranks):
            return False
        if self.late(comm_id) or any(self._stands(snapshot) for snapshot, _ in ranks):
            return True
        newest = max(comm.op_mono_ns or comm.since_mono_ns for _, comm in ranks)
        return max(snapshot.mono_ns for snapshot, _ in ranks) - newest > LATE_NS


def silent(snapshot: Snapshot, comm: Comm) -> Wait:
    process = snapshot.process
    text = f"stopped or starved: silent for {show_span(process.silent_s)}"
    since = snapshot.mono_ns - int(process.silent_s * 1e9)
    return Wait("silent", text, process.host, process.pid, comm.rank, since)


def late(snapshot: Snapshot, comm: Comm, ranks: Ranks, broken: bool) -> Wait | None:
    """The others have been for long in an operation that this rank has not called, nor anything
    else meanwhile: its application is busy, or it waits within what it called before.
    `broken`: one of the ranks has no path, which may be what keeps this one."""
    since = awaited_since(comm, ranks)
    if comm.calling or not since:
        return None
    if snapshot.mono_ns - max(since, comm.op_mono_ns) < LATE_NS:
        return None
    text = f"has not called #{place(comm) + 1}{operation(comm, ranks)} for "
    text += span(since, snapshot) + within(snapshot, comm)
    text += "" if broken else f"; {blameless(ranks)}"
    return Wait("late", text, snapshot.process.host, snapshot.process.pid, comm.rank, since)


def place(comm: Comm) -> int:
    """The newest collective that it has called, which is handed over when the call returns."""
    return comm.operations + (comm.calling and comm.op not in NO_COLLECTIVES)


def awaited_since(comm: Comm, ranks: Ranks) -> int:
    """When the others were at this rank's next operation, at the latest; 0: they are not."""
    ahead = [other.op_mono_ns for _, other in ranks if place(other) > place(comm)]
    return min(ahead, default=0)


def operation(comm: Comm, ranks: Ranks) -> str:
    """Which one that is, where another rank is in it."""
    for _, other in ranks:
        if place(other) == place(comm) + 1 and other.op not in NO_COLLECTIVES:
            size = f" of {show_bytes(other.op_bytes)}" if other.op_bytes else ""
            return f" ({other.op}{size})"
    return ""


def all_ranks(ranks: Ranks) -> int:
    return max((comm.ranks or 0 for _, comm in ranks), default=0)


def within(snapshot: Snapshot, comm: Comm) -> str:
    """Where the rank is meanwhile, as far as that can be seen: an operation of this communicator
    or of another one has requests under way, or a thread is inside NCCL with another one."""
    others = [other for other in snapshot.comms if other.id != comm.id and other.state in WORKING]
    for other in others:
        if other.calling:
            return f", and is inside {other.op} of communicator {other.id[:8]}"
    if not snapshot.gauges.get("requests_in_flight", 0):
        return ""
    also = " or one of another communicator" if others else ""
    return f", and waits within an operation before that{also}"


def blameless(ranks: Ranks) -> str:
    """That no NIC is at fault, or those of these ranks that may be: a NIC that is not well, a path
    that is up and slow or lossy (its weight is below its NIC's)."""
    doubtful = listed(dict.fromkeys(word for snapshot, _ in ranks for word in doubts(snapshot)))
    if doubtful:
        return f"not well: {doubtful}"
    whole = len({comm.rank for _, comm in ranks}) >= all_ranks(ranks) > 0
    return "no NIC is at fault" if whole else "no NIC of the ranks seen here is at fault"


def doubts(snapshot: Snapshot) -> Iterable[str]:
    host = snapshot.process.host
    nics = {nic.name: nic for nic in snapshot.nics}
    for nic in snapshot.nics:
        if ails(nic) and (nic.state != "drained" or nic.fault):
            fault = f", {injected(nic.fault)}" if nic.fault else ""
            yield f"{host}'s NIC {nic.name} {own_spot(snapshot, nic).word}{fault}"
    for path in snapshot.paths:
        own = nics.get(path.nic)
        if not own or ails(own) or own.state == "ramping" or path.state != "up":
            continue
        if 0 < path.weight < own.weight:  # 0: a spare
            way = f"{path.nic} -> {path.remote_nic}@{path.peer_host or '?'}"
            yield f"{host}'s path {way} at {path.weight} % of its share"


def elsewhere(ranks: Ranks) -> str:
    """The nodes of the peers, as far as these ranks have any."""
    here = {snapshot.process.host for snapshot, _ in ranks}
    there = {
        peer.host
        for snapshot, _ in ranks
        for peer in snapshot.peers
        if peer.host and peer.state not in ("gone", "closed")
    } - here
    if not there:
        return "the other nodes"
    nodes = max((comm.nodes or 0 for _, comm in ranks), default=0)
    others = len(there) > NAMED or nodes > len(here) + len(there)
    return ", ".join(sorted(there)[:NAMED]) + (" and the other nodes" if others else "")


# JSON


def wait_dicts(wait: Wait, snapshot: Snapshot, rank: int | None) -> list[dict[str, Any]]:
    """An entry for each NIC that it points at, or one without. rank, host, pid: whose NIC it is, or
    who is late or silent; `rank`: the waiting process's own. peer: whom no path leads to, or who
    does not confirm a path's end."""
    process = snapshot.process
    since = snapshot.real_ns - (snapshot.mono_ns - wait.since_mono_ns)
    same: dict[str, Any] = {
        "kind": wait.kind,
        "since": rfc3339(since),
        "for_s": round((snapshot.mono_ns - wait.since_mono_ns) / 1e9, 1),
        "of_s": round(wait.limit_ns / 1e9, 1) or None,
        "text": wait.text,
    }
    there: dict[str, Any] = {"rank": wait.rank, "host": wait.host, "pid": wait.pid}
    peer = there if wait.kind in ("no-path", "unsent") else None
    here = {"rank": rank, "host": process.host, "pid": process.pid}
    if not wait.spots:
        return [{**same, **there, "nic": "", "state": "", "cause": "", "fault": "", "peer": peer}]
    return [
        {
            **same,
            **(here if spot.here else there),
            "nic": spot.nic,
            "state": spot.state,
            "cause": spot.cause,
            "fault": spot.fault,
            "peer": peer,
        }
        for spot in wait.spots
    ]
