"""Streams whose segments are lost become fewer: real TCP over a link of the lab that loses some.

Rung 4. How the number is chosen is tested in test_lanes.c; that it helps where senders meet at a
narrow port, tests/gpu/run_allreduce.py measures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from conftest import Build
from failover_bed import running_perf, until

from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture
def lab(lab_admin: None) -> Iterator[Lab]:
    with Lab.up(LabSpec(name=f"l{os.getpid()}", nics=(1,), rates=(100_000_000,))) as up:
        yield up


@pytest.mark.parametrize("lanes", [0, 4], ids=["adapts", "fixed"])
def test_fewer_streams_where_segments_are_lost(build: Build, lab: Lab, lanes: int) -> None:
    env: dict[str, str | int] = {"R2CCL_IO_THREADS": 4, "R2CCL_LANES": lanes}
    env |= {"R2CCL_LOG": "info", "NCCL_DEBUG": "INFO"}
    argv = [str(build.perf), "-b", "1M", "--duration", "30", "--timeout", "60", "-c", "1"]
    with running_perf(
        build, env=env, argv=[*argv, "--check-every"], lab=lab.name, per_node=1
    ) as job:
        job.moving(40)
        lab.fail_link("n0", "nic0", "silent", loss=2.0)

        def said() -> set[str]:
            text = "".join(rank.output for rank in job.job.ranks)
            return set(re.findall(r"(\d) of 4 streams carry, since segments are", text))

        if lanes:
            job.moving(120)
            assert not said()
        else:
            until("one stream", lambda: "1" in said(), 25, show=job)
        job.finish(60.0)
