"""The R2CCL processes of several hosts, looked at at the same time."""

from __future__ import annotations

import math
import re
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from r2ccl_ctl import __version__
from r2ccl_ctl.control import Process, Selection, Snapshot
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.remote import AGENT, PEERS, Helper, NoAnswer, argv_for_peer, at_once
from r2ccl_ctl.rows import Comm, Nic, PathRow, Peer

AGAIN_S = 5.0  # after a host gave no answer
STOP_S = 0.5
HERE = (sys.executable, "-m", AGENT)
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class HostLook:
    """What one host answered. error: why it did not. problems: processes that cannot be read."""

    host: str
    snapshots: list[Snapshot] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    error: str = ""


class Member:
    """One of the hosts. Its helper lives from one look to the next; one that fails gets another."""

    def __init__(self, host: str, via: str, timeout: float, argv: Sequence[str] = ()) -> None:
        """argv: what starts the helper, if not `via`."""
        self.host, self.via, self.timeout, self.argv = host, via, timeout, argv
        self.helper: Helper | None = None
        self.error, self.again = "", 0.0
        self.shift_ns: int | None = None

    def look(self) -> HostLook:
        if self.helper is None and time.monotonic() < self.again:
            return HostLook(self.host, error=self.error)
        try:
            if self.helper is None:
                self.helper = Helper(self.host, self.via, argv=self.argv)
                self.shift_ns = None
            return self._restored(self.helper.ask(self.timeout, do="processes"))
        except NoAnswer as err:
            self.error, self.again = str(err), time.monotonic() + AGAIN_S
            self.stop()
            return HostLook(self.host, error=self.error)

    def _restored(self, answer: dict[str, Any]) -> HostLook:
        if answer["version"] != __version__:
            raise NoAnswer(
                f"it has R2CCL {answer['version']}, and here is {__version__}: install the same"
            )
        if self.shift_ns is None:  # once, since rates are differences of times
            self.shift_ns = time.monotonic_ns() - int(answer["mono_ns"])
        found = [restored(row, self.shift_ns) for row in answer["processes"]]
        return HostLook(self.host, found, list(answer["problems"]))

    def stop(self) -> None:
        if self.helper is not None:
            self.helper.stop(STOP_S)
            self.helper = None


class Hosts:
    """Several hosts. Use as a context manager."""

    def __init__(self, names: Sequence[str], via: str, timeout: float) -> None:
        self.members = [Member(name, via, timeout) for name in names]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        at_once(Member.stop, self.members)

    def look(self) -> list[HostLook]:
        """At all of them at once; the answers in their order. A host takes the time limit at most,
        and up to 7.5 s more where its helper's output ends: for its exit code and last words."""
        return once_each(at_once(Member.look, self.members))


class PeerHosts(Hosts):
    """This host, and all that the processes of its jobs name as hosts of their peers, on whichever
    host they are. A ring's rank knows two others: so each answer may name more hosts."""

    def __init__(self, job: str | None, via: str, timeout: float) -> None:
        super().__init__([], via, timeout)
        self.members.append(Member(socket.gethostname(), via, timeout, HERE))
        self.via, self.timeout, self.job = via, timeout, job
        self.jobs: set[str] = set()

    def look(self) -> list[HostLook]:
        looks: list[HostLook] = []
        while len(looks) < len(self.members):
            looks += at_once(Member.look, self.members[len(looks) :])
            self._follow(looks)
        return once_each(looks)

    def _follow(self, looks: Sequence[HostLook]) -> None:
        wanted = Selection(job=self.job)
        here = (one.process for one in looks[0].snapshots)
        self.jobs |= {process.job for process in here if wanted.wants(process)}
        if not self.jobs:
            who = f" with {wanted}" if str(wanted) else ""
            why = looks[0].error or f"no process{who} uses R2CCL here, so no peer is known"
            raise R2Error(f"--hosts peers: {why}; run it on a node of the job, or name the hosts")
        known = {member.host for member in self.members}
        known |= {one.process.host for look in looks for one in look.snapshots}
        for name in peer_names(looks, self.jobs):
            if name not in known:
                self.members.append(self._member(name))

    def _member(self, name: str) -> Member:
        """A peer's word is no option of ssh, and no list of hosts for srun."""
        if HOST_NAME.fullmatch(name):
            return Member(name, self.via, self.timeout, argv_for_peer(self.via, name))
        found = Member(name, self.via, self.timeout)
        found.error, found.again = "a peer gave this name, and it is no host name", math.inf
        return found


def peer_names(looks: Iterable[HostLook], jobs: set[str]) -> list[str]:
    """The hosts that processes of these jobs name, each once."""
    found = (
        peer.host
        for look in looks
        for one in look.snapshots
        if one.process.job in jobs
        for peer in one.peers
        if peer.host
    )
    return list(dict.fromkeys(found))


def hosts_of(names: Sequence[str], via: str, timeout: float, job: str | None) -> Hosts:
    """The hosts that --hosts and --hostfile name."""
    if PEERS not in names:
        return Hosts(names, via, timeout)
    if len(names) > 1:
        raise R2UsageError("--hosts peers finds the hosts by itself: leave out the other hosts")
    return PeerHosts(job, via, timeout)


def once_each(looks: Iterable[HostLook]) -> list[HostLook]:
    """Hosts that share /dev/shm, as containers may, show the same processes: the first has them."""
    known: set[tuple[str, str]] = set()
    found = []
    for look in looks:
        own = []
        for snapshot in look.snapshots:
            key = (snapshot.process.process_id, snapshot.process.name)
            if key not in known:
                known.add(key)
                own.append(snapshot)
        found.append(HostLook(look.host, own, look.problems, look.error))
    return found


def restored(row: dict[str, Any], shift_ns: int) -> Snapshot:
    """A snapshot that came as JSON; its monotonic times are this host's then."""
    row = shifted(row, shift_ns)
    process = Process.from_dict(row.pop("process"))
    kinds = (("nics", Nic), ("peers", Peer), ("paths", PathRow), ("comms", Comm))
    tables: dict[str, Any] = {name: [kind(**one) for one in row.pop(name)] for name, kind in kinds}
    return Snapshot(process=process, **row, **tables)


def shifted(value: Any, by_ns: int) -> Any:
    """The same with `by_ns` added to each time that is known."""
    if isinstance(value, list):
        return list(map(partial(shifted, by_ns=by_ns), value))
    if not isinstance(value, dict):
        return value
    return {
        name: one + by_ns if name.endswith("mono_ns") and one else shifted(one, by_ns)
        for name, one in value.items()
    }
