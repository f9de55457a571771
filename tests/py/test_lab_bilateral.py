"""Whoever learns first tells the other: one side blind, both sides at one instant, words that cross
on paths that are dying. Every value stays right, both sides agree in the end, and all comes back.

Rung 4: real link events, r2ccl_perf on the stand-in for NCCL. Words lost and repeated one by one:
rung 2 (`engine_nicnews`, `engine_locate` words_reordered).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from conftest import Build
from failover_bed import PerfJob, Side, running_perf, until

from r2ccl_ctl import control
from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

ENV = {"R2CCL_RAMP": "300ms", "R2CCL_DAMP": "0"}


@pytest.fixture(scope="module")
def shared(lab_admin: None) -> Iterator[Lab]:
    """2 nodes x 3 NICs on rails of their own."""
    with Lab.up(LabSpec(name=f"b{os.getpid()}", rates=(1_000_000_000,), nics=(3,))) as made:
        yield made


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    yield shared
    shared.recover_all()


def state(side: Side, nic: str) -> str:
    found = control.find_nic(side.snapshot().nics, nic)
    assert found is not None
    return found.state


def downs(side: Side, nic: str) -> list[str]:
    return [e.cause for e in side.named("path-down") if nic in (e.nic, e.remote_nic)]


def all_back(job: PerfJob, *nics: tuple[int, str]) -> None:
    until(
        f"back: {job}",
        lambda: all(state(job.sides[i], nic) == "healthy" for i, nic in nics),
        10.0,
    )
    job.moving()


def test_one_side_blind(build: Build, lab: Lab) -> None:
    """Only n0 sees its link go: n1, with carrier, learns it by word, not from heartbeats."""
    with running_perf(build, lab=lab.name, per_node=1, env=ENV) as job:
        job.moving()
        lab.fail_link("n0", "nic1")
        blind = job.sides[1]
        until(f"n1 knows: {job}", lambda: bool(downs(blind, "nic1")))
        assert all("the peer's word" in cause for cause in downs(blind, "nic1")), str(job)
        # Rows follow events within 100 ms.
        until(f"n0's row: {job}", lambda: state(job.sides[0], "nic1") == "failed")
        assert state(blind, "nic1") != "failed"
        lab.recover_link("n0", "nic1")
        all_back(job, (0, "nic1"))
        job.finish()


@pytest.mark.parametrize("far", ["nic1", "nic2"], ids=["same-rail", "crossing"])
def test_both_at_once(build: Build, lab: Lab, far: str) -> None:
    """Both sides lose a NIC at one instant; on different rails each one's word may be on the very
    path that the other is losing. What was said on a dead path is said again on the living one."""
    with running_perf(build, lab=lab.name, per_node=1, env=ENV) as job:
        job.moving()
        for _ in range(2):
            lab.fail_link("n0", "nic1")
            lab.fail_link("n1", far)
            until(
                f"each knows its own: {job}",
                lambda: (
                    state(job.sides[0], "nic1") == "failed" and state(job.sides[1], far) == "failed"
                ),
            )
            job.moving()
            lab.recover_link("n1", far)
            lab.recover_link("n0", "nic1")
            all_back(job, (0, "nic1"), (1, far))
        for side in job.sides:
            assert downs(side, "nic1") and downs(side, far), str(job)
        job.finish()
