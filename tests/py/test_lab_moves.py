"""NICs whose address changes, or whose interface is taken away and made anew, under a job: they are
taken back without a new process, and every value stays right.

Rung 4: real addresses and interfaces, r2ccl_perf on the stand-in for NCCL. It cannot prove what a
physical NIC's driver does while it is loaded again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial

import pytest
from conftest import Build
from failover_bed import PerfJob, Side, running_perf, until
from pyroute2 import IPRoute

from r2ccl_ctl import control
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import Lab, LabSpec
from r2ccl_ctl.rows import Nic

pytestmark = pytest.mark.lab

RATE = 1_000_000_000
RAMP = {"R2CCL_RAMP": "300ms"}


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    """2 nodes x 3 NICs on rails of their own."""
    with Lab.up(LabSpec(name=f"m{os.getpid()}", rates=(RATE,), nics=(3,), ipv6=True)) as made:
        yield made


def row(side: Side, nic: str) -> Nic:
    found = control.find_nic(side.snapshot().nics, nic)
    assert found is not None
    return found


def healthy(side: Side, nic: str) -> bool:
    return row(side, nic).state == "healthy"


def has_event(side: Side, name: str) -> bool:
    return bool(side.named(name))


def address(lab: Lab, node: str, nic: str, *changes: tuple[str, str, int]) -> None:
    """Add and delete addresses of a NIC, in this order: ("add" or "del", address, prefix)."""

    def work() -> None:
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=nic)[0]
            for verb, text, prefix in changes:
                more = {"flags": 0x02} if ":" in text else {}  # IFA_F_NODAD
                ip.addr(verb, index=index, address=text, prefixlen=prefix, **more)

    lab.call_in(node, work)


def carries(job: PerfJob, side: Side, nic: str) -> None:
    """The NIC sends and receives bytes of the job again: paths in both directions are back."""

    def moved() -> tuple[int, int]:
        paths = [p for p in side.snapshot().paths if p.nic == nic]
        return sum(p.tx_bytes for p in paths), sum(p.rx_bytes for p in paths)

    tx, rx = moved()
    much = 4 * 1024 * 1024
    until(
        f"{nic} carries both ways again: {job}",
        lambda: moved()[0] > tx + much and moved()[1] > rx + much,
    )


def back(job: PerfJob, side: Side, nic: str, cause: str, within: float = 8.0) -> None:
    """The journal says why, and the NIC is in use again."""
    until(
        f"{cause}: {job}",
        lambda: any(e.nic == nic and cause in e.cause for e in side.named("nic-probing")),
        within,
    )
    until(f"{nic} is back: {job}", lambda: row(side, nic).state == "healthy", within)
    carries(job, side, nic)


@pytest.mark.parametrize(("node", "order"), [("n0", "delete-first"), ("n1", "add-first")])
def test_another_address(build: Build, lab: Lab, node: str, order: str) -> None:
    """A NIC is renumbered: heard of, agreed on, proven and used, seconds later; and back."""
    old, new = lab.address(node, "nic1"), "10.2.0.77"
    with running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job:
        job.moving()
        side = job.sides[lab.node_index(node)]
        # With the old one's prefix it would be a secondary address, and go with it.
        changes = [("del", old, 24), ("add", new, 25)]
        address(lab, node, "nic1", *(changes if order == "delete-first" else changes[::-1]))
        back(job, side, "nic1", f"its address is {new} now, was {old}")
        assert row(side, "nic1").addr == new
        address(lab, node, "nic1", ("del", new, 25), ("add", old, 24))
        back(job, side, "nic1", f"its address is {old} now, was {new}")
        job.finish()


def test_another_family(build: Build, lab: Lab) -> None:
    """Both ends of a rail lose their IPv4 address and go on with the IPv6 one that they have."""
    olds = [lab.address(node, "nic2") for node in ("n0", "n1")]
    with running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job:
        job.moving()
        for node, old in zip(("n0", "n1"), olds, strict=True):
            address(lab, node, "nic2", ("del", old, 24))
        for index, old in enumerate(olds):
            new = lab.spec.nic_address6(index, 2)
            back(job, job.sides[index], "nic2", f"its address is {new} now, was {old}")
        job.finish()
    for node, old in zip(("n0", "n1"), olds, strict=True):
        address(lab, node, "nic2", ("add", old, 24))


def test_interface_made_anew(build: Build, lab: Lab) -> None:
    """The interface goes in the middle of a collective, and one of the same name comes."""
    with running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job:
        job.moving()
        side = job.sides[1]
        lab.pull_nic("n1", "nic1")
        until(f"noticed: {job}", lambda: row(side, "nic1").state == "failed")
        assert side.named("nic-down"), str(job)
        job.moving()
        time.sleep(1.2)
        assert row(side, "nic1").state == "failed", str(job)
        lab.plug_nic("n1", "nic1")
        back(job, side, "nic1", "its interface was made anew")
        job.finish()


def test_all_made_anew(build: Build, lab: Lab) -> None:
    """Every interface of a node is made anew, one after the other, without a moment's rest: with no
    path left the peer finds it where it was, and nobody takes the process for gone."""
    with running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job:
        job.moving()
        for nic in lab.nics("n0"):
            lab.pull_nic("n0", nic)
        time.sleep(0.5)
        for nic in lab.nics("n0"):
            lab.plug_nic("n0", nic)
        for nic in lab.nics("n0"):
            back(job, job.sides[0], nic, "its interface was made anew")
        job.finish()


@contextlib.contextmanager
def renumbered(
    lab: Lab, number: int, *places: tuple[str, str]
) -> Iterator[list[tuple[str, str, str, str]]]:
    """(node, NIC, address that it has, address that it is to have); all as it was at the end, for
    the other tests and another try of this one."""
    rows = [
        (node, nic, lab.address(node, nic), f"10.{lab.nics(node).index(nic) + 1}.0.{number + at}")
        for at, (node, nic) in enumerate(places)
    ]
    try:
        yield rows
    finally:
        for node, nic, old, new in rows:
            for change in (("del", old, 24), ("del", new, 24), ("add", old, 24)):
                with contextlib.suppress(R2Error):
                    address(lab, node, nic, change)


def test_two_of_three_renumbered(build: Build, lab: Lab) -> None:
    """Two NICs of a node get other addresses in the same moment: the paths of both fall silent, the
    third one's answer, so they fail, and what it carries tells the peer where the two are now."""
    with (
        renumbered(lab, 90, ("n1", "nic0"), ("n1", "nic2")) as rows,
        running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job,
    ):
        job.moving()
        for node, nic, old, new in rows:
            address(lab, node, nic, ("del", old, 24), ("add", new, 24))
        for _, nic, old, new in rows:
            back(job, job.sides[1], nic, f"its address is {new} now, was {old}")
        for side in job.sides:
            assert not side.named("no-path", "peer-suspect", "peer-gone"), str(job)
            assert healthy(side, "nic1"), str(job)
            assert not [e for e in side.named("nic-down", "path-down") if e.nic == "nic1"], str(job)
        job.finish()


def test_both_ends_of_a_rail(build: Build, lab: Lab) -> None:
    """Both ends of a rail get other addresses in the same moment: each hears of the other's over
    the other rails."""
    with (
        renumbered(lab, 95, ("n0", "nic1"), ("n1", "nic1")) as rows,
        running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job,
    ):
        job.moving()
        for node, nic, old, new in rows:
            address(lab, node, nic, ("del", old, 24), ("add", new, 24))
        for (_, nic, old, new), side in zip(rows, job.sides, strict=True):
            back(job, side, nic, f"its address is {new} now, was {old}")
        for side in job.sides:
            assert not side.named("no-path", "peer-gone"), str(job)
        job.finish()


def test_both_sides_renumbered(build: Build, lab: Lab) -> None:
    """All NICs of both nodes move at once: neither can hear of the other's addresses, and nobody
    takes the other's process for gone. One side at its old addresses again, and the job goes on."""
    places = [(node, nic) for node in ("n0", "n1") for nic in lab.nics(node)]
    with (
        renumbered(lab, 100, *places) as rows,
        running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job,
    ):
        job.moving()
        for node, nic, old, _ in rows:
            address(lab, node, nic, ("del", old, 24))
        for side in job.sides:
            until(f"no path is left: {job}", partial(has_event, side, "no-path"), 30.0)
        ups = [len(side.named("path-up")) for side in job.sides]
        for node, nic, _, new in rows:
            address(lab, node, nic, ("add", new, 24))
        time.sleep(3.0)
        assert [len(side.named("path-up")) for side in job.sides] == ups, str(job)
        assert not job.named("peer-gone"), str(job)
        for node, nic, old, new in rows:
            if node == "n1":
                address(lab, node, nic, ("del", new, 24), ("add", old, 24))
        for _, nic, _, _ in rows[: len(rows) // 2]:
            for side in job.sides:
                until(f"{nic} is back: {job}", partial(healthy, side, nic), 20.0)
                carries(job, side, nic)
        job.finish()


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_all_renumbered(build: Build, lab: Lab, node: str) -> None:
    """Every NIC of a node gets another address while no path is left over which the peer could hear
    of it: the process that is waited for calls the one that connects."""
    nics = lab.nics(node)
    olds = [lab.address(node, nic) for nic in nics]
    news = [f"10.{rail + 1}.0.88" for rail in range(len(nics))]
    try:
        with running_perf(build, lab=lab.name, per_node=1, env=RAMP) as job:
            job.moving()
            there = "n1" if node == "n0" else "n0"
            side, other = (job.sides[lab.node_index(n)] for n in (node, there))
            for nic, old in zip(nics, olds, strict=True):
                address(lab, node, nic, ("del", old, 24))
            until(f"no path is left: {job}", lambda: bool(other.named("no-path")), 30.0)
            for nic, new in zip(nics, news, strict=True):
                address(lab, node, nic, ("add", new, 24))
            for nic in nics:
                until(f"{nic} is back: {job}", partial(healthy, side, nic))
                carries(job, side, nic)
            job.finish()
    finally:  # the other tests, and another try of this one
        for nic, old, new in zip(nics, olds, news, strict=True):
            for change in (("del", old, 24), ("del", new, 24), ("add", old, 24)):
                with contextlib.suppress(R2Error):
                    address(lab, node, nic, change)
