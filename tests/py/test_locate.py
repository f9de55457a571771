"""Localisation under a job: the verdict, who gives it, and what a node's processes show of it.

Rung 4: real link events, real silence, ranks of r2ccl_perf on the stand-in for NCCL. How often the
verdict is right over many faults is a matter for tests/bench/locate.py. It cannot show what a
physical NIC or switch does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TOOL, Build, RunBounded
from failover_bed import PerfJob, Side, running_perf, until

from r2ccl_ctl import nodeseg
from r2ccl_ctl.journal import Event
from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

NODES = 3
PER_NODE = 2
NAME = f"v{os.getpid()}"


@pytest.fixture(scope="module")
def shared(lab_admin: None) -> Iterator[Lab]:
    """3 nodes x 4 slow NICs: many ranks, little to do for the processors."""
    spec = LabSpec(name=NAME, nodes=NODES, nics=(4,), rates=(100_000_000,))
    with Lab.up(spec) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    yield shared
    shared.recover_all()


def verdicts(side: Side, nic: str = "") -> list[Event]:
    return [e for e in side.named("verdict") if nic in ("", e.nic, e.remote_nic)]


def wait_verdicts(job: PerfJob, nic: str, sides: list[Side]) -> None:
    until(f"verdicts: {job}", lambda: all(verdicts(side, nic) for side in sides), 8.0)


def wait_between(job: PerfJob, nic: str, sides: list[Side]) -> None:
    """Every one of them has found that it is what lies between the NICs."""

    def found(side: Side) -> bool:
        return any(e.cause.startswith("link or switch") for e in verdicts(side, nic))

    until(f"link or switch at {nic}: {job}", lambda: all(found(side) for side in sides), 8.0)


def nic_state(side: Side, nic: str) -> tuple[str, str]:
    found = next(n for n in side.snapshot().nics if n.name == nic)
    return found.state, found.cause


# Dozens of ranks on few cores: nobody polls, and who waits sleeps for milliseconds.
LIGHT = {
    "R2CCL_IO_THREADS": "1",
    "R2CCL_SPIN": "1ns",
    "HOSTNCCL_HARSH": "off",
    "HOSTNCCL_SPIN_US": "0",
    "HOSTNCCL_NAP_US": "5000",
}


@pytest.mark.parametrize("direction", ["tx", "rx"])
def test_one_direction(build: Build, lab: Lab, direction: str) -> None:
    """One direction of a NIC is black: its own node blames it and takes it out for all peers; the
    others blame it too. When it works again it comes back by itself."""
    with running_perf(build, "-b", "128K", "--duration", 80, lab=lab.name, per_node=1) as job:
        job.moving()
        lab.fail_link("n1", "nic2", "silent", direction=direction)
        wait_verdicts(job, "nic2", job.sides)
        owner, others = job.sides[1], [job.sides[0], job.sides[2]]
        assert all(e.cause.startswith("local NIC") for e in verdicts(owner)), str(job)
        for side in others:
            assert all(e.cause.startswith("remote NIC") for e in verdicts(side)), str(job)
        until("the NIC is out", lambda: nic_state(owner, "nic2")[0] == "failed")
        assert nic_state(owner, "nic2")[1].startswith("local NIC"), str(job)
        for side in others:
            assert not side.named("nic-down"), str(job)
        lab.recover_link("n1", "nic2")
        until("the NIC is back", lambda: nic_state(owner, "nic2")[0] == "healthy", 10.0)
        job.moving()
        job.finish()


def test_pair_and_rail(build: Build, lab: Lab) -> None:
    """A pair that lost each other, and a rail that lost its switch: no NIC is blamed."""
    with running_perf(build, "-b", "128K", "--duration", 80, lab=lab.name, per_node=1) as job:
        job.moving()
        lab.cut_pair("n0", "n2", "nic1")
        wait_between(job, "nic1", [job.sides[0], job.sides[2]])
        lab.fail_rail("nic3")
        wait_between(job, "nic3", job.sides)
        found = [e.cause for side in job.sides for e in verdicts(side)]
        lab.recover_all()
        assert not [cause for cause in found if "NIC:" in cause], f"{found}: {job}"
        assert not job.named("nic-down"), str(job)
        assert all(nic_state(side, "nic1")[0] != "failed" for side in job.sides), str(job)
        job.finish()


@pytest.mark.slow
def test_found_by_each_process(build: Build, lab: Lab, run_bounded: RunBounded) -> None:
    """Several processes a node that all talk to other nodes, one broken NIC: each process of its
    node finds that by itself, and `nics` shows it once."""
    words = ("--op", "alltoall", "-b", "144K", "--duration", 80)  # at most: `finish` ends it
    with running_perf(
        build, *words, lab=lab.name, per_node=PER_NODE, env=LIGHT, timeout=200.0
    ) as job:
        job.moving(2)
        lab.fail_link("n1", "nic1", "silent")
        own = job.sides[PER_NODE : 2 * PER_NODE]
        until(
            "every process of n1 knows",
            lambda: all(nic_state(side, "nic1")[0] == "failed" for side in own),
            10.0,
            job,
        )
        causes = [(side.name, e.remote_nic, e.cause) for side in own for e in verdicts(side)]
        blamed = {name for name, _, cause in causes if cause.startswith("local NIC")}
        assert blamed == {side.name for side in own}, f"{causes}: {job}"  # each of them says it
        others = [c for c in causes if not c[2].startswith(("local NIC", "transient"))]
        assert not others, f"{others} of {causes}: {job}"
        shown = json.loads(run_bounded([TOOL, "nics", "--json"]).stdout)["node_verdicts"]
        here = {str(Path(f"/proc/{side.pid}/ns/net").stat().st_ino) for side in job.sides}
        shown = [row for row in shown if row["segment"].split(".")[2] in here]  # tests run beside
        rows = [row for row in shown if row["node"] == "n1" and row["name"] == "nic1"]
        assert [row["state"] for row in rows] == ["failed"], json.dumps(shown)[:4000]
        assert rows[0]["verdict"] == "local NIC"
        assert "local NIC" in run_bounded([TOOL, "nics"]).stdout
        names = {row["segment"] for row in shown}
        assert len(names) == len({row["node"] for row in shown}), "nodes do not share a segment"
        lab.recover_all()
        job.finish(140.0)


def test_without_node_segment(build: Build, lab: Lab) -> None:
    """The node segment is removed under a running job: nothing breaks, verdicts are given."""
    with running_perf(build, "-b", "128K", "--duration", 80, lab=lab.name, per_node=1) as job:
        job.moving()
        for segment in nodeseg.list_segments():
            if segment.host == "n0" and segment.used:
                segment.path.unlink()
        lab.fail_link("n0", "nic0", "silent")
        wait_verdicts(job, "nic0", job.sides)
        lab.recover_all()
        job.finish()


def test_switched_off(build: Build, lab: Lab) -> None:
    env = {"R2CCL_LOCATE": "0"}
    with running_perf(
        build, "-b", "128K", "--duration", 80, lab=lab.name, per_node=1, env=env
    ) as job:
        job.moving()
        lab.fail_link("n0", "nic0", "silent")
        until("the path fails", lambda: bool(job.named("path-down")), 8.0)
        job.moving()
        assert not job.named("verdict"), str(job)
        lab.recover_all()
        job.finish()
