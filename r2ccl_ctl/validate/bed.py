"""The hosts of a validation: helpers on real nodes, or in the nodes of a lab made for it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.interrupts import undisturbed
from r2ccl_ctl.lab import Lab, LabError, LabSpec, known_labs, nsexec, parse_rates, remove
from r2ccl_ctl.remote import Helper, NoAnswer, at_once, attempt, python_path

AGENT = "r2ccl_ctl.validate.agent"
LOOK_S, ANSWER_S = 90.0, 20.0
PINGS = 7


class HostError(R2Error):
    """A host gave no answer, or could not do what was asked."""


@dataclass
class Host:
    """One host. offset_ns: what its clock has to be moved by to be ours; error_ns: at most so far
    from the truth."""

    name: str
    helper: Helper
    address: str
    host_id: str = ""
    nics: str = ""
    socket_ifname: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    offset_ns: int = 0
    error_ns: int = 0
    asked: int = 0

    def ask(self, do: str, timeout: float = ANSWER_S, **more: Any) -> dict[str, Any]:
        self.asked += 1
        try:
            reply = self.helper.ask(timeout, do=do, number=self.asked, **more)
            while reply["number"] != self.asked:  # of a question that Ctrl-C broke off
                reply = self.helper.receive(timeout)
        except NoAnswer as err:
            hint = ""
            if self.asked == 1 and self.helper.via:
                hint = f"; try `{attempt(self.helper.via, self.name)}`"
            raise HostError(f"{self.name}: the helper gave no answer: {err}{hint}") from err
        if reply.get("error"):
            raise HostError(f"{self.name}: {reply['error']}")
        return reply

    def measure_clock(self) -> None:
        """As NTP does it: of several questions the one that was answered soonest."""
        found = []
        for _ in range(PINGS):
            before = time.monotonic_ns()
            there = int(self.ask("clock")["mono_ns"])
            after = time.monotonic_ns()
            found.append((after - before, (before + after) // 2 - there))
        span, self.offset_ns = min(found)
        self.error_ns = span // 2


@dataclass
class Bed:
    """Hosts that answer. kind: lab, or the program that reaches them."""

    kind: str
    hosts: list[Host]
    lab: Lab | None = None

    def all(self, do: str, timeout: float = ANSWER_S, **more: Any) -> list[dict[str, Any]]:
        """The same question to every host at once."""
        return at_once(lambda host: host.ask(do, timeout, **more), self.hosts)

    def look(self) -> None:
        for host, facts in zip(self.hosts, self.all("look", LOOK_S), strict=True):
            host.facts = facts
            host.measure_clock()


@contextlib.contextmanager
def of_hosts(names: Sequence[str], via: str) -> Iterator[Bed]:
    """Real nodes. A host may be user@name."""
    bed = Bed(via.split()[0] if via.split() else via, [])
    try:
        for name in names:
            helper = Helper(name, via, module=AGENT)
            bed.hosts.append(Host(name, helper, name.rpartition("@")[2]))
        bed.look()
        yield bed
    finally:
        with undisturbed():
            _end(bed)


def sweep() -> None:
    """Take down the labs of validations that are gone."""
    for name in known_labs():
        match = re.fullmatch(r"validate-(\d+)", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(LabError):
                remove(name)


@contextlib.contextmanager
def of_lab(nodes: int, nics: int, rate: str) -> Iterator[Bed]:
    """A lab of our own: it is gone at the end. One that was killed is taken down by the next."""
    sweep()
    spec = LabSpec(nodes=nodes, nics=(nics,), rates=parse_rates(rate),
                   name=f"validate-{os.getpid()}")  # fmt: skip
    try:
        lab = Lab.up(spec)
    except LabError as err:
        raise R2Error(
            f"the default bed is a lab, and it cannot be made: {err}. Name two real nodes with "
            "--hosts, or run this where network namespaces can be made"
        ) from err
    bed = Bed("lab", [], lab)
    try:
        env = {**os.environ, "PYTHONPATH": python_path(os.environ)}
        for node in lab.nodes:
            names = ",".join(lab.nics(node))
            argv = nsexec.argv_for(lab.plan(node), [sys.executable, "-m", AGENT])
            helper = Helper(node, "", argv=argv, env={**env, "R2CCL_NICS": names})
            bed.hosts.append(
                Host(node, helper, lab.address("n0", "mgmt0"), f"{lab.name}-{node}", names, "mgmt0")
            )
        bed.look()
        yield bed
    finally:
        with undisturbed():
            _end(bed)
            lab.down()


def _end(bed: Bed) -> None:
    """Helpers end with their stdin, and their ranks with them."""
    at_once(lambda host: host.helper.stop(), bed.hosts)
