"""The journals of all ranks as one trace that Perfetto and chrome://tracing show. Pure.

A failover is a span: from the injected fault or the first sign at any rank until traffic went on,
with its stages inside: detected (a rank lost the path), told (the peer lost it too), fenced,
replayed, resumed. Counters: bytes per second of NICs, operations and bandwidth of communicators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r2ccl_ctl.control import Process
from r2ccl_ctl.journal import Event

STAGES = ("detected", "told", "fenced", "replayed", "resumed")
LINKED_NS = 1_000_000_000  # a fault and the losses that it causes
JOB_TRACK = 0


@dataclass
class Failover:
    """What became of the paths of one NIC that one process lost at one time. Times in ns; 0 unless
    it happened. remote: it is the peer's NIC."""

    nic: str
    process: Process
    peer: str
    begin_ns: int
    cause: str
    stages: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    @property
    def host(self) -> str:
        return self.process.host

    @property
    def end_ns(self) -> int:
        return max(self.stages.values(), default=self.begin_ns)


@dataclass(frozen=True)
class Sample:
    """A counter of a host at one time: what it is called, and its value."""

    ns: int
    host: str
    name: str
    unit: str
    value: float


def failovers(events: Sequence[Event]) -> list[Failover]:
    """In the order of time, one for each process, peer and lost path."""
    ordered = sorted(events, key=lambda e: e.mono_ns)
    faults = [e for e in ordered if e.event == "fault-injected"]
    found: dict[tuple[str, str, int, str, str], Failover] = {}
    for e in ordered:
        pair = (e.process.name, e.peer_host, e.peer_pid)
        key = (*pair, e.nic, e.remote_nic)
        if e.event == "path-down":
            begin = _cause(faults, e)
            one = Failover(e.nic, e.process, f"{e.peer_host}:{e.peer_pid}", begin, e.cause)
            one.stages["detected"] = e.mono_ns
            found[key] = one
            if (told := _told(ordered, e)) is not None:
                one.stages["told"] = told
        elif e.event in ("fenced", "replay") and key in found:
            found[key].stages.setdefault("fenced" if e.event == "fenced" else "replayed", e.mono_ns)
            found[key].bytes += e.bytes if e.event == "replay" else 0
        elif e.event == "resume":
            for other, one in found.items():
                waits = "replayed" in one.stages and "resumed" not in one.stages
                if other[:3] == pair and waits:
                    one.stages["resumed"] = e.mono_ns
        # A path that is lost again begins a new span; the earlier one is complete.
        if e.event == "path-up" and key in found:
            earlier = (*pair, f"{e.nic}#{e.mono_ns}", e.remote_nic)
            found[earlier] = found.pop(key)
    return sorted(found.values(), key=lambda one: (one.begin_ns, one.host, one.process.pid))


def _cause(faults: Iterable[Event], down: Event) -> int:
    """When the fault that led to this loss was injected, or the loss itself."""
    near = [
        f.mono_ns
        for f in faults
        if f.nic in (down.nic, down.remote_nic) and 0 <= down.mono_ns - f.mono_ns < LINKED_NS
    ]
    return max(near, default=down.mono_ns)


def _told(ordered: Sequence[Event], down: Event) -> int | None:
    """When the process at the other end lost the same path, if it was the later one."""
    for e in ordered:
        if (
            e.event == "path-down"
            and (e.process.host, e.process.pid) == (down.peer_host, down.peer_pid)
            and (e.nic, e.remote_nic) == (down.remote_nic, down.nic)
            and down.mono_ns <= e.mono_ns < down.mono_ns + LINKED_NS
        ):
            return e.mono_ns
    return None


class Rows:
    """Which row each process has: its number is its pid, or the next one that is free on its host.
    In containers of one host several processes have the same pid."""

    def __init__(self, events: Iterable[Event]) -> None:
        found = {(e.process.host, e.process.name): e.process for e in events}
        self.of: dict[tuple[str, str], int] = {}
        self.processes: dict[tuple[str, int], Process] = {}
        for (host, name), process in sorted(found.items(), key=lambda one: (one[1].pid, one[0])):
            row = process.pid
            while (host, row) in self.processes:
                row += 1
            self.of[host, name] = row
            self.processes[host, row] = process

    def __getitem__(self, process: Process) -> int:
        return self.of[process.host, process.name]


def document(
    events: Sequence[Event], samples: Sequence[Sample] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The trace, in the JSON that Perfetto reads. Times in microseconds from the first of all."""
    times = [e.mono_ns for e in events] + [s.ns for s in samples]
    start = min(times, default=0)
    hosts = {
        name: i + 1
        for i, name in enumerate(
            sorted({e.process.host for e in events} | {s.host for s in samples})
        )
    }
    rows = [_name("process_name", pid, 0, f"host {host}") for host, pid in hosts.items()]
    of = Rows(events)
    titles = {
        key: f"rank {process.rank}" if process.rank is not None else f"pid {process.pid}"
        for key, process in sorted(of.processes.items())
    }
    for (host, row), title in titles.items():
        rows.append(_name("thread_name", hosts[host], row, title))
    rows += [_instant(e, hosts, of, start) for e in events]
    for number, one in enumerate(failovers(events)):
        row = of[one.process]
        rows += _spans(one, number, hosts, row, start, titles[one.host, row])
    rows += [
        {
            "name": s.name,
            "ph": "C",
            "pid": hosts[s.host],
            "tid": JOB_TRACK,
            "ts": (s.ns - start) / 1e3,
            "args": {s.unit: round(s.value, 3)},
        }
        for s in samples
    ]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": rows,
        "otherData": {"schema": 1, "start_mono_ns": start, "notes": list(notes)},
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _instant(e: Event, hosts: Mapping[str, int], of: Rows, start: int) -> dict[str, Any]:
    known = {
        "nic": e.nic,
        "remote_nic": e.remote_nic,
        "peer": e.peer_host,
        "cause": e.cause,
        "bytes": e.bytes,
        "generation": e.generation,
    }
    return {
        "name": f"{e.event} {e.nic}".strip(),
        "cat": e.event,
        "ph": "i",
        "s": "t",
        "pid": hosts[e.process.host],
        "tid": of[e.process],
        "ts": (e.mono_ns - start) / 1e3,
        "args": {name: value for name, value in known.items() if value},
    }


def _spans(
    one: Failover, number: int, hosts: Mapping[str, int], row: int, start: int, whose: str
) -> list[dict[str, Any]]:
    """Asynchronous spans: those of several paths overlap. A stage lasts from the one before it."""
    local = {"local": hex(number)}  # a number for all would put them beside the hosts, not below
    base = {"cat": "failover", "id2": local, "pid": hosts[one.host], "tid": row}
    title = f"{whose}: failover {one.nic} to {one.peer}"
    args = {"cause": one.cause, "replayed_bytes": one.bytes, "peer": one.peer}
    rows = [{**base, "name": title, "ph": "b", "ts": (one.begin_ns - start) / 1e3, "args": args}]
    at = one.begin_ns
    for word, ns in sorted(one.stages.items(), key=lambda pair: (pair[1], STAGES.index(pair[0]))):
        rows.append({**base, "name": word, "ph": "b", "ts": (at - start) / 1e3, "args": {}})
        rows.append({**base, "name": word, "ph": "e", "ts": (ns - start) / 1e3, "args": {}})
        at = ns
    return [*rows, {**base, "name": title, "ph": "e", "ts": (one.end_ns - start) / 1e3, "args": {}}]


def rates(
    host: str,
    rows: Sequence[tuple[int, Mapping[str, float]]],
    unit: str,
    label: str,
    factor: float = 1.0,
) -> list[Sample]:
    """Counters that only grow, as rates per second."""
    found = []
    for (before_ns, before), (ns, now) in zip(rows, rows[1:], strict=False):
        span = (ns - before_ns) / 1e9
        if span <= 0:
            continue
        for name, value in now.items():
            if name in before:
                grown = max(0.0, value - before[name]) * factor / span
                found.append(Sample(ns, host, f"{label} {name}", unit, grown))
    return found
