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
