"""A list of NICs of which one node lacks one, as after a NIC has died and the job is started anew.
Rung 4: the nodes of a lab, r2ccl_perf on the stand-in for NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from conftest import Build
from failover_bed import running_perf, until

from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

RATE = 1_000_000_000


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    with Lab.up(LabSpec(name=f"l{os.getpid()}", rates=(RATE,), nics=(3,))) as made:
        yield made


def test_one_nic_of_the_list_is_missing(build: Build, lab: Lab) -> None:
    """The node uses the others, says so once, and the job's values are right."""
    flush = lab.popen("n1", ["ip", "addr", "flush", "dev", "nic1"])
    assert flush.wait(10) == 0
    env = {"R2CCL_NICS": "nic0,nic1,nic2", "R2CCL_LOG": "warn", "NCCL_DEBUG": "NONE"}
    with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
        job.moving()
        until("it is said", lambda: bool(job.sides[1].snapshot().process.warning), 30.0, job)
        here, there = (side.snapshot() for side in job.sides)
        assert [nic.name for nic in here.nics] == ["nic0", "nic1", "nic2"]
        assert [nic.name for nic in there.nics] == ["nic0", "nic2"]
        assert all(nic.tx_bytes for nic in there.nics), str(job)
        assert "nic1 has no usable address" in there.process.warning and not here.process.warning
        job.finish()
        lines = [line for rank in job.job.ranks for line in rank.output.splitlines()]
        said = [line for line in lines if "R2CCL_NICS: nic1 has no usable address" in line]
        assert len(said) == 1 and "uses the other 2" in said[0], str(job)
