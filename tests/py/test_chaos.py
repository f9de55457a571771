"""An operator is answered while every path is silent; what tests/stress/chaos.py calls growth.

Rung 4: r2ccl_perf on the stand-in for NCCL, 3 nodes of 4 NICs in namespaces. Rung 1 for the growth.
"""

from __future__ import annotations

import errno
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Build
from failover_bed import PerfJob, running_perf, until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command
from r2ccl_ctl.lab import Lab, LabSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stress"))

import chaos
import held

on_lab = pytest.mark.lab

RATE = 500_000_000


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    spec = LabSpec(name=f"o{os.getpid()}", nodes=chaos.NODES, nics=(chaos.NICS,), rates=(RATE,))
    with Lab.up(spec) as made:
        yield made


def silence(lab: Lab, *nodes: str) -> None:
    for node in nodes:
        for nic in lab.nics(node):
            lab.fail_link(node, nic, "silent")


def parted(job: PerfJob) -> bool:
    return all(side.named("peer-suspect") for side in job.sides)


@on_lab
def test_operator_is_answered_while_every_path_is_silent(build: Build, lab: Lab) -> None:
    took = []
    with running_perf(build, "-b", "1M", "--duration", "80", lab=lab.name, per_node=1) as job:
        job.moving()
        silence(lab, "n0", "n2")
        until("no rank hears another", lambda: parted(job), 30.0, job)
        for side in job.sides:
            for nic in side.snapshot().nics[:1]:
                for command in (
                    Command("drain-nic", nic=nic.name),
                    Command("undrain-nic", nic=nic.name),
                    Command("set-weight", nic=nic.name, weight=50),
                    Command("set-weight", nic=nic.name, weight=100),
                ):
                    began = time.monotonic()
                    answer = control.send_command(side.segment, command, timeout=20.0)
                    took.append(time.monotonic() - began)
                    assert answer.ok or answer.code == -errno.EBUSY, (command, answer)
        lab.recover_all()
        job.finish()
    # The median: one look in 20 ms on an idle machine; a machine that stands still is no failure.
    assert statistics.median(took) < 0.5, sorted(took)


def looks_of(fds: list[int], mib: list[int]) -> list[list[held.Held]]:
    """Of two ranks; the other one always holds the same."""
    return [[held.Held(f, 9, m), held.Held(90, 9, 50)] for f, m in zip(fds, mib, strict=True)]


def test_what_is_granted_to_plans_and_gpus() -> None:
    """Growth that neither explains is told; so is what goes beyond the grant."""
    start, alone = [held.Held(50, 10, 60)], held.granted(plans=False, cuda=False)
    grown = [held.Held(50, 10 + held.THREADS_OVER_START + 1, 60 + held.MIB_OVER_START + 1)]
    assert [line.split(":")[0] for line in held.over(grown, start, alone)] == ["threads", "mib"]
    assert held.over(grown, start, held.granted(plans=True, cuda=False)) == []
    cuda = held.over(grown, start, held.granted(plans=False, cuda=True))
    assert [line.split(":")[0] for line in cuda] == ["threads"]
    leak = [held.Held(50, 10 + 5 * held.THREADS_PER_PLAN, 60)]
    assert held.over(leak, start, held.granted(plans=True, cuda=True))
    several = [held.Held(50, 16, 60)]  # ranks of a node: NCCL's threads of their communicator
    assert held.over(several, start, held.granted(plans=True, cuda=False))
    assert held.over(several, start, held.granted(plans=True, cuda=False, per_node=2)) == []


def test_second_half_of_a_round() -> None:
    """A rank that goes on growing is told from one that has what it needs after a while."""
    quiet = looks_of([50, 140, 130, 150, 120, 155], [40, 90, 80, 95, 85, 99])
    assert held.second_half(quiet)[0] == held.Held(15, 0, 9)
    assert held.second_half(quiet)[1] == held.Held(0, 0, 0)
    assert held.still_growing(quiet, 540.0) == []
    steps = range(900)
    leaks = looks_of([50 + i // 8 for i in steps], [40 + i // 9 for i in steps])
    (fds, mib) = held.still_growing(leaks, 540.0)
    assert fds.startswith("fds: 56 more") and mib.startswith("mib: 50 more")
    assert held.still_growing(leaks, 12.0) == []
    assert held.second_half([]) == held.second_half(leaks[:1]) == []
