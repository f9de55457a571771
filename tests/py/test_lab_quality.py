"""NICs that work badly from the start are named: one at a tenth of the others', and packet loss on
all NICs of a node. Rung 4: the kernel's shaper and random drops between network namespaces. It
cannot prove how much a real switch loses.
"""

from __future__ import annotations

import os
import re

import pytest
from conftest import Build
from failover_bed import PerfJob, running_perf, until

from r2ccl_ctl import exporter
from r2ccl_ctl.control import Selection
from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

RATE = 400_000_000


def warned(job: PerfJob, text: str) -> set[str]:
    return {e.nic for e in job.named("warning") if text in e.cause}


def test_a_nic_at_a_tenth_from_the_start(build: Build, lab_admin: None) -> None:
    spec = LabSpec(name=f"q{os.getpid()}", nics=(3,), rates=(RATE, RATE, RATE // 10))
    with (
        Lab.up(spec) as lab,
        running_perf(build, "-b", "4M", "--duration", 80, lab=lab.name, per_node=1) as job,
    ):
        says = "of what its siblings carry"
        until("nic2 is named", lambda: "nic2" in warned(job, says), 40.0, job)
        job.moving()
        assert warned(job, says) == {"nic2"}, str(job)
        side = next(s for s in job.sides if s.named("warning"))

        def causes() -> dict[str, str]:
            return {nic.name: nic.cause for nic in side.snapshot().nics}

        until("its row says so", lambda: says in causes()["nic2"], 10.0, job)
        cause = causes()
        found = re.fullmatch(r"carries (\d+) % of what its siblings carry", cause.pop("nic2"))
        assert found and 2 <= int(found[1]) < 25, str(job)
        assert set(cause.values()) == {""}, str(job)
        job.finish()
    lines = [
        line
        for rank in job.job.ranks
        for line in rank.output.splitlines()
        if "NIC nic2: carries" in line
    ]
    assert 1 <= len(lines) <= 2, str(job)  # one for each process


def test_all_nics_of_a_node_lose_packets(build: Build, lab_admin: None) -> None:
    with Lab.up(LabSpec(name=f"q{os.getpid()}", nics=(2,), rates=(RATE,))) as lab:
        for nic in ("nic0", "nic1"):
            lab.fail_link("n0", nic, "silent", loss=30.0)
        with running_perf(build, "-b", "1M", "--duration", 80, lab=lab.name, per_node=1) as job:
            says = "of its segments are sent again"
            until("both NICs are named", lambda: len(warned(job, says)) == 2, 60.0, job)
            snapshots = [s.snapshot() for s in job.sides]
            named = [{e.nic for e in s.named("warning") if says in e.cause} for s in job.sides]
            for snapshot, names in zip(snapshots, named, strict=True):
                for row in snapshot.nics:
                    share = row.retransmits / max(row.tx_segments, 1)
                    assert row.name not in names or (row.retransmits >= 10 and share > 0.05), str(
                        job
                    )
            rows = [path for s in snapshots for path in s.paths]
            assert any(path.retransmits and path.loss_ppm > 50_000 for path in rows), str(job)
            page = exporter.page(Selection(job=job.job.name)).decode()
            found = re.findall(r"r2ccl_nic_retransmitted_segments_total\{.*\} (\S+)", page)
            assert len(found) == 4 and max(map(float, found)) > 10, page
