"""Which NICs reach each other, and what is said where they do not: silence on the last common rail,
unlike address families, packets that are too large for the way, one subnet for several NICs.

Rung 4: real addresses, bridges and silence between network namespaces. It cannot prove what a
physical switch does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Build, missing
from failover_bed import PerfJob, Side, running_perf, until

from r2ccl_ctl.lab import Lab, LabSpec, netns

pytestmark = pytest.mark.lab

RATE = 1_000_000_000


@pytest.fixture(scope="module")
def lab(lab_rights: None) -> Iterator[Lab]:
    """2 nodes x 2 NICs on rails of their own."""
    if not netns.has_admin():
        missing("lab", "these tests make namespaces themselves: CAP_SYS_ADMIN is missing")
    with Lab.up(LabSpec(name=f"r{os.getpid()}", rates=(RATE,), ipv6=True)) as made:
        yield made


class Two:
    """A process of n0 that sends to one of n1, each with NICs of its own choice."""

    def __init__(self, build: Build, lab: Lab, nics: tuple[str, str], env: dict[str, str]) -> None:
        where = f"{lab.address('n0', 'mgmt0')}:7411"
        words = ["--size", "64K", "--until-told", "--stall", "60"]
        self.logs = [tempfile.TemporaryFile() for _ in nics]
        self.children = []
        for node, how, named, log in zip(
            ("n0", "n1"), ("--listen", "--dial"), nics, self.logs, strict=True
        ):
            child = lab.popen(
                node,
                [str(build.path / "stress/pair"), *words, how, where],
                env={**os.environ, "R2CCL_NICS": named, "R2CCL_LOG": "warn", **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self.children.append(child)
        names = ("sender", "receiver")
        self.sides = [Side(n, c.pid) for n, c in zip(names, self.children, strict=True)]

    def text(self, index: int) -> str:
        size = os.fstat(self.logs[index].fileno()).st_size
        return os.pread(self.logs[index].fileno(), size, 0).decode(errors="replace")

    def __str__(self) -> str:
        return "\n".join(f"--- n{i}\n{self.text(i)}" for i in range(2))

    def moving(self, count: int = 16) -> None:
        side = self.sides[1]
        goal = side.counter("messages_received") + count
        until("messages move", lambda: side.counter("messages_received") >= goal, 30.0, self)

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(20)
        for side in self.sides:
            side.close()


@contextlib.contextmanager
def two(build: Build, lab: Lab, *nics: str, **env: str) -> Iterator[Two]:
    made = Two(build, lab, (nics[0], nics[1]), env)
    try:
        yield made
    finally:
        made.close()


def sysctl(lab: Lab, node: str, name: str, value: str) -> None:
    lab.call_in(node, lambda: Path("/proc/sys/net", name).write_text(value))


def told(job: PerfJob, nic: str) -> list[str]:
    names = ("nic-down", "nic-probing", "nic-ramping", "nic-up", "nic-healthy")
    return [f"{e.event}: {e.cause}" for e in job.named(*names) if e.nic == nic]


def ups(job: PerfJob, nic: str) -> list[str]:
    return [e.cause for e in job.named("path-up") if e.nic == nic]


def test_dead_nic_is_not_back_when_the_last_rail_goes(build: Build, lab: Lab) -> None:
    """nic1 is dead, then nic0 falls silent as well: nobody answers any more, which says nothing for
    nic1. Once both work again, the job goes on."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "500ms"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until(
            f"nic1 is lost: {job}",
            lambda: any(t.startswith(("nic-down", "nic-probing")) for t in told(job, "nic1")),
        )
        time.sleep(3.0)  # longer than a NIC is looked at before it counts as not needed
        before = told(job, "nic1")
        lab.fail_link("n1", "nic0", "silent")
        time.sleep(4.0)
        after = told(job, "nic1")[len(before) :]
        assert not [t for t in after if t.startswith(("nic-ramping", "nic-up"))], f"{after} {job}"
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until(f"back: {job}", lambda: "nic-up" in " ".join(told(job, "nic1")[len(before) :]), 20.0)
        job.moving()
        job.finish()


def test_ramp_does_not_end_in_silence(build: Build, lab: Lab) -> None:
    """nic1 is on its way back when all NICs fall silent: it does not count as back."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "2s"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until("nic1 is lost", lambda: "nic-probing" in " ".join(told(job, "nic1")), 10.0, job)
        lab.recover_link("n1", "nic1")
        until("nic1 ramps", lambda: "nic-ramping" in " ".join(told(job, "nic1")), 10.0, job)
        for nic in ("nic0", "nic1"):
            lab.fail_link("n1", nic, "silent")
        time.sleep(4.0)
        assert "nic-up" not in " ".join(told(job, "nic1")), str(job)
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until("nic1 is back", lambda: "nic-up" in " ".join(told(job, "nic1")), 20.0, job)
        job.finish()


def test_refusal_by_another_nic_ends_nobody(build: Build, lab: Lab) -> None:
    """n0 uses nic0, n1 only nic1, and n1's kernel answers at nic0 for nic1's address: refused, and
    the process lives. The user is told who does not reach whom."""
    for node in ("n0", "n1"):
        sysctl(lab, node, "ipv4/conf/all/arp_ignore", "0")
        sysctl(lab, node, "ipv4/conf/nic0/arp_ignore", "0")
    try:
        with two(build, lab, "nic0", "nic1") as job:
            word = f"nic0 to {lab.address('n1', 'nic1')}:"
            until("it is said", lambda: word in job.text(0), 10.0, job)
            assert "no NIC here reaches a peer process" in job.text(0)
            assert "nobody listens there" in job.text(0)
            time.sleep(2.0)
            assert [c.poll() for c in job.children] == [None, None], str(job)
            assert not job.sides[0].named("peer-gone"), str(job)
            peers = job.sides[0].snapshot().peers
            assert [p.cause for p in peers if p.cause] == ["no NIC here reaches it"], str(job)
    finally:
        for node in ("n0", "n1"):
            sysctl(lab, node, "ipv4/conf/all/arp_ignore", "1")
            sysctl(lab, node, "ipv4/conf/nic0/arp_ignore", "1")
