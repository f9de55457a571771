"""How a job is, in one word, for monitoring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.rows import Peer

# As monitoring plugins count: the exit code is the place in this list.
WORDS = ("HEALTHY", "DEGRADED", "DANGER", "UNKNOWN")
HEALTHY, DEGRADED, DANGER, UNKNOWN = range(4)
SERVING = ("up", "ramping")
ENDED = ("closed", "never-reached")


@dataclass(frozen=True)
class Reason:
    """Why a job is not healthy. code: the place in WORDS. who: the process, if it is about one.
    node: of that process."""

    code: int
    text: str
    who: str = ""
    node: str = ""

    def __str__(self) -> str:
        return f"{self.who}: {self.text}" if self.who else self.text


def judge(snapshot: Snapshot, standing: str) -> list[Reason]:
    """What is wrong with one process; `standing`: why it makes no progress, or ""."""
    process = snapshot.process
    by = (process.title, process.host)
    if process.silent_s or not process.running:
        return [Reason(UNKNOWN, "does not answer", *by)]
    found = [Reason(DANGER, f"waits: {standing}", *by)] if standing else []
    for nic in snapshot.nics:
        if nic.state != "healthy" or nic.link == "down":
            word = nic.state if nic.state != "healthy" else "without a link"
            cause = f" ({nic.cause})" if nic.cause else ""
            found.append(Reason(DEGRADED, f"NIC {nic.name} is {word}{cause}", *by))
    return found + [r for peer in snapshot.peers for r in _of_peer(snapshot, peer)]


def _of_peer(snapshot: Snapshot, peer: Peer) -> list[Reason]:
    """Paths to one peer: the last one is the danger."""
    if not peer.connections:
        return []
    paths = [p for p in snapshot.paths if p.peer == peer.index and not p.spare]
    serving = [p for p in paths if p.state in SERVING]
    lost = [p for p in paths if p.state not in (*SERVING, *ENDED, "connecting")]
    if not lost:
        return []
    code = DANGER if len(serving) <= 1 else DEGRADED
    way = "from" if peer.direction == "rx" else "to"
    text = f"paths {way} {peer}: {len(serving)} left, {len(lost)} lost"
    return [Reason(code, text, snapshot.process.title, snapshot.process.host)]


def line(reasons: Iterable[Reason], most: int) -> str:
    """The first reasons, the gravest first. What several processes of a node say, such as the
    state of a NIC, stands once, before what one says."""
    groups: dict[tuple[int, str, str], list[Reason]] = {}
    known = list(reasons)
    code = worst(known)
    for one in known:
        groups.setdefault((one.code, one.node, one.text), []).append(one)
    first = sorted(groups.values(), key=lambda group: (group[0].code != code, -len(group)))
    texts = [
        str(group[0])
        if len(group) == 1
        else f"{group[0].node}: {group[0].text}, {len(group)} processes"
        for group in first[:most]
    ]
    return "; ".join(texts + ([f"and {len(first) - most} more"] if len(first) > most else []))


def worst(reasons: Iterable[Reason]) -> int:
    """What is wrong for certain counts before what is not known."""
    codes = {reason.code for reason in reasons}
    return next((code for code in (DANGER, DEGRADED, UNKNOWN) if code in codes), HEALTHY)
