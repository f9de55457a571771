"""From the ranks' journals to what became of a failed NIC. Pure: data in, data out.

All times are CLOCK_MONOTONIC, which the ranks of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from r2ccl_ctl.journal import Event

Pair = tuple[str, str, int]  # a process, and the host and pid of its peer


@dataclass(frozen=True)
class Outcome:
    """What the journals prove about one action.

    began_ns: the earliest rank had the fault, or lost it. settled_ns: all of it was over; None
    while anything is `missing`. detect_ms, failover_ms: the longest until a rank knew, and from
    there until its traffic went on. resume_ms: from began_ns to settled_ns. paths: how many went
    down or came back.
    """

    began_ns: int | None = None
    settled_ns: int | None = None
    detect_ms: float | None = None
    failover_ms: float | None = None
    replayed_bytes: int = 0
    paths: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def resume_ms(self) -> float | None:
        if self.began_ns is None or self.settled_ns is None:
            return None
        return (self.settled_ns - self.began_ns) / 1e6


def pair(event: Event) -> Pair:
    return event.process.name, event.peer_host, event.peer_pid


def touches(event: Event, nic: str) -> bool:
    """True for an event of a path that begins or ends at this NIC."""
    return nic in (event.nic, event.remote_nic)


def _of_paths(events: Iterable[Event], word: str, nic: str, since_ns: int) -> list[Event]:
    return [e for e in events if e.event == word and e.mono_ns >= since_ns and touches(e, nic)]


def judge_failure(events: Sequence[Event], nic: str, kind: str, since_ns: int) -> Outcome:
    """What the journals say about a NIC that was failed at or after since_ns.

    Traffic of a sender to a peer counts as resumed at the first `resume` after the `replay` of the
    failed path: the first acknowledgement on another path since the bytes that the failed one had
    lost were queued again.
    """
    injected = [
        e.mono_ns
        for e in events
        if e.event == "fault-injected"
        and e.nic == nic
        and e.mono_ns >= since_ns
        and e.cause.startswith(kind)
    ]
    if not injected:
        return Outcome(missing=[f"no rank's journal shows the fault on {nic}"])
    began = min(injected)
    down = _of_paths(events, "path-down", nic, began)
    replays = _of_paths(events, "replay", nic, began)
    replayed = sum(e.bytes for e in replays)
    if not down or not replays:
        what = "no rank noticed: no path of it went down" if not down else "nothing was replayed"
        return Outcome(began, replayed_bytes=replayed, paths=len(down), missing=[f"{nic}: {what}"])
    first_down: dict[Pair, int] = {}
    for e in down:
        first_down[pair(e)] = min(e.mono_ns, first_down.get(pair(e), e.mono_ns))
    resumed: list[tuple[int, int]] = []
    missing = []
    for who in sorted({pair(e) for e in replays}):
        queued = min(e.mono_ns for e in replays if pair(e) == who)
        goes_on = [
            e.mono_ns
            for e in events
            if e.event == "resume"
            and pair(e) == who
            and e.mono_ns >= queued
            and not touches(e, nic)
        ]
        if goes_on:
            resumed.append((first_down.get(who, queued), min(goes_on)))
        else:
            missing.append(f"{nic}: the traffic of {_who(replays, who)} did not resume")
    return Outcome(
        began_ns=began,
        settled_ns=None if missing else max(end for _, end in resumed),
        detect_ms=(max(first_down.values()) - began) / 1e6,
        failover_ms=max(((end - start) / 1e6 for start, end in resumed), default=None),
        replayed_bytes=replayed,
        paths=len(down),
        missing=missing,
    )


def judge_recovery(events: Sequence[Event], nic: str, failed_ns: int, since_ns: int) -> Outcome:
    """What the journals say about a NIC that failed at failed_ns and was given back at or after
    since_ns: every pair of processes that had lost a path of it must have one again."""
    cleared = [
        e.mono_ns
        for e in events
        if e.event == "fault-cleared" and e.nic == nic and e.mono_ns >= since_ns
    ]
    if not cleared:
        return Outcome(missing=[f"no rank's journal shows the end of the fault on {nic}"])
    began = min(cleared)
    down = [e for e in _of_paths(events, "path-down", nic, failed_ns) if e.mono_ns < began]
    ups = _of_paths(events, "path-up", nic, began)
    back: dict[Pair, int] = {}
    for e in ups:
        back[pair(e)] = min(e.mono_ns, back.get(pair(e), e.mono_ns))
    missing = [
        f"{nic}: {_who(down, who)} has no path of it again"
        for who in sorted({pair(e) for e in down})
        if who not in back
    ]
    return Outcome(
        began_ns=began,
        settled_ns=None if missing else max(back.values(), default=began),
        replayed_bytes=sum(e.bytes for e in _of_paths(events, "replay", nic, began)),
        paths=len(ups),
        missing=missing,
    )


def _who(events: Iterable[Event], who: Pair) -> str:
    process = next(e.process for e in events if pair(e) == who)
    rank = f"rank {process.rank}" if process.rank is not None else f"pid {process.pid}"
    return f"{rank} ({process.host}) to {who[1]} pid {who[2]}"


def innocent_downs(events: Iterable[Event], nics: Iterable[str]) -> int:
    """How many paths went down that touch none of these NICs."""
    named = list(nics)
    return sum(e.event == "path-down" and not any(touches(e, nic) for nic in named) for e in events)
