"""Links of virtual NICs fail under a job: every value stays right, and the journal says why.

Rung 4: real link events, real stalls, real kernels on both sides, r2ccl_perf on the stand-in for
NCCL. It cannot prove what a physical NIC or switch does, nor how fast a GPU job goes on (rung 6).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from conftest import Build
from failover_bed import PerfJob, Side, running_perf, until

from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

RATE = 1_000_000_000
NAME = f"f{os.getpid()}"


def make(suffix: str, **more: object) -> Lab:
    return Lab.up(LabSpec(name=f"{NAME}{suffix}", rates=(RATE,), **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(lab_admin: None) -> Iterator[Lab]:
    """2 nodes x 4 NICs on rails of their own."""
    with make("q", nics=(4,)) as lab:
        yield lab


@pytest.fixture
def quad(shared: Lab) -> Iterator[Lab]:
    yield shared
    shared.recover_all()


def blamed(job: PerfJob, nic: str) -> str:
    """Why a path of this NIC went down, as the journals have it; fails if none did."""
    until(f"a path of {nic} goes down: {job}", lambda: bool(causes(job, nic)), 8.0)
    return "; ".join(causes(job, nic))


def causes(job: PerfJob, nic: str) -> list[str]:
    return [e.cause for e in job.named("path-down", "nic-down") if nic in (e.nic, e.remote_nic)]


def ups(side: Side, nic: str) -> int:
    return len([e for e in side.named("path-up") if e.nic == nic])


def sent(side: Side, nic: str) -> int:
    return sum(row.tx_bytes for row in side.snapshot().nics if row.name == nic)


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize("mode", ["carrier", "admin"])
def test_link_down(build: Build, quad: Lab, mode: str, node: str) -> None:
    """A link goes down, of rank 0's or of the other side, and comes back before the end."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        quad.fail_link(node, "nic1", mode)
        assert blamed(job, "nic1")
        owner = job.sides[quad.node_index(node)]
        until("the NIC's own node says so", lambda: bool(owner.named("nic-down")))
        job.moving()
        before = ups(owner, "nic1")
        quad.recover_link(node, "nic1")
        until(f"a path of it is back: {job}", lambda: ups(owner, "nic1") > before)
        job.finish()
        assert any(e.nic == "nic1" for e in owner.named("nic-down")), str(job)


@pytest.mark.parametrize("direction", ["tx", "rx", "both"])
def test_black_hole(build: Build, quad: Lab, direction: str) -> None:
    """The carrier stays and packets vanish, one way or both."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        quad.fail_link("n0", "nic2", "silent", direction=direction)
        assert blamed(job, "nic2")
        job.moving()
        assert not [e for e in job.named("path-down") if e.nic != "nic2"], str(job)
        job.finish()


@pytest.mark.parametrize("mode", ["carrier", "silent"])
def test_callers_stand_in_for_several_threads(build: Build, quad: Lab, mode: str) -> None:
    """Behind NICs of 1 Gbit/s the I/O threads sleep and the caller does what they would (decision
    37): a failure is known, and worked around, all the same."""
    words, env = ("-b", "32M", "--duration", 80), {"R2CCL_IO_THREADS": 3}
    with running_perf(build, *words, lab=quad.name, per_node=1, env=env) as job:
        job.moving()
        quad.fail_link("n0", "nic1", mode)
        assert blamed(job, "nic1")
        job.moving()
        before = ups(job.sides[0], "nic1")
        quad.recover_link("n0", "nic1")
        until(f"a path of it is back: {job}", lambda: ups(job.sides[0], "nic1") > before)
        job.moving()
        job.finish()


def test_next_one_dies_during_the_replay(build: Build, quad: Lab) -> None:
    """Three of four NICs die at once or while the bytes of the one before are sent again."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        quad.fail_link("n0", "nic0")
        quad.fail_link("n1", "nic1")
        until(f"a replay begins: {job}", lambda: bool(job.named("replay")), 8.0)
        quad.fail_link("n0", "nic2", "silent")
        assert blamed(job, "nic2")
        job.moving()
        job.finish()


def test_flaps_that_nobody_sees(build: Build, quad: Lab) -> None:
    """Black holes shorter than three heartbeats: whether or not one is noticed, the job goes on
    through each, and the NIC carries at the end."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        for hole in (0.02, 0.05, 0.1, 0.15) * 2:
            quad.fail_link("n1", "nic1", "silent")
            time.sleep(hole)
            quad.recover_link("n1", "nic1")
            job.moving()
        before = sent(job.sides[1], "nic1")
        until(f"nic1 carries again: {job}", lambda: sent(job.sides[1], "nic1") > before)
        job.finish()


@pytest.mark.parametrize("mode", ["carrier", "admin", "silent"])
def test_all_away_then_one_back(build: Build, quad: Lab, mode: str) -> None:
    """With no path left the job waits, and goes on over the one that comes back."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        for nic in quad.nics("n0"):
            quad.fail_link("n0", nic, mode)
        time.sleep(2.0)
        before = [side.counter("messages_received") for side in job.sides]
        time.sleep(0.3)
        assert [side.counter("messages_received") for side in job.sides] == before, str(job)
        quad.recover_link("n0", "nic2")
        job.moving()
        job.finish()
        assert job.named("no-path") or job.named("peer-suspect"), str(job)


def test_none_comes_back(build: Build, quad: Lab) -> None:
    """With no path for R2CCL_NO_PATH_TIMEOUT the communicator ends with ncclRemoteError."""
    env: dict[str, str | int] = {"R2CCL_NO_PATH_TIMEOUT": "2s", "NCCL_DEBUG": "WARN"}
    with running_perf(build, lab=quad.name, per_node=1, seconds=30, env=env) as job:
        job.moving()
        for nic in quad.nics("n0"):
            quad.fail_link("n0", nic)
        gone = time.monotonic()
        assert job.end(25) == 2, str(job)
        assert 1.5 < time.monotonic() - gone < 15, str(job)
        said = "".join(rank.output for rank in job.job.ranks)
        assert "remote" in said.lower(), str(job)


def test_nics_down_from_the_start(build: Build, quad: Lab) -> None:
    """One NIC without carrier, one set down on the other side: the job starts over the rest, and
    takes the first one in when it comes back."""
    quad.fail_link("n0", "nic0")
    quad.fail_link("n1", "nic2", "admin")
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        quad.recover_link("n0", "nic0")
        until(
            f"nic0 comes into use: {job}",
            lambda: any(e.nic == "nic0" for e in job.named("path-up")),
            6.0,
        )
        job.finish()


@pytest.mark.parametrize("mode", ["carrier", "silent"])
def test_communicator_made_during_an_outage(build: Build, quad: Lab, mode: str) -> None:
    """No NIC of n1 works while the communicator is made; one comes back 2 s later."""
    for nic in quad.nics("n1"):
        quad.fail_link("n1", nic, mode)
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.ready()
        time.sleep(2.0)
        assert job.job.running, str(job)
        quad.recover_link("n1", "nic1")
        job.moving()
        job.finish()


def test_packet_loss(build: Build, quad: Lab) -> None:
    """A NIC that loses packets slows itself down, nothing else: no byte is wrong."""
    with running_perf(build, lab=quad.name, per_node=1) as job:
        job.moving()
        quad.fail_link("n0", "nic3", "silent", loss=3)
        time.sleep(2.5)
        job.finish()


@pytest.mark.parametrize("variant", ["rail-only", "routed", "one-subnet"])
def test_variants(build: Build, lab_admin: None, variant: str) -> None:
    """How the NICs reach each other changes nothing: a black hole, a link down, all away and one
    back, in one job."""
    with (
        make("v", variant=variant) as lab,
        running_perf(build, lab=lab.name, per_node=1) as job,
    ):
        job.moving()
        lab.fail_link("n0", "nic1", "silent", direction="tx")
        assert blamed(job, "nic1")
        job.moving()
        lab.fail_link("n1", "nic0", "admin")
        time.sleep(1.0)
        lab.recover_all()
        job.moving()
        job.finish()
