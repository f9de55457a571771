"""ncclCommShrink under the shim, over the stand-in: a rank leaves in the middle of a plan, the
others meet over the old communicator's channel and plan for the new one.

Rung 3: five nodes on loopback; the last rank is not asked for the new communicator and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, Build
from plan_bed import comms, processes
from segment_bed import until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command
from r2ccl_ctl.job import Job, LaunchSpec
from r2ccl_ctl.launch import start

RANKS = 5
NIC = "127.0.1.2"

pytestmark = pytest.mark.slow


@contextmanager
def job(build: Build, name: str, folder: Path) -> Iterator[Job]:
    spec = LaunchSpec(
        argv=(sys.executable, str(ROOT / "tests/py/shrink_worker.py"), str(folder)),
        ranks=RANKS,
        emulate_nodes=RANKS,
        nics=2,
        job=name,
        env={
            "LD_PRELOAD": str(build.path / "libr2ccl.so"),
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            "R2CCL_PLAN": "on",
            "R2CCL_PLAN_HOLD": "1",
            "R2CCL_PLAN_WITHDRAW": "0",
        },
    )
    running = start(spec, echo=False)
    try:
        yield running
    finally:
        running.kill()


def plans(name: str, ranks: int) -> list[str]:
    """Of the communicator of so many ranks, at each of them."""
    return [comm.plan for comm in comms(name) if (comm.ranks, comm.nodes) == (ranks, ranks)]


def runs(name: str, ranks: int, plan: str) -> bool:
    """Of all of its ranks: a tree, or for "" NCCL's own choice."""
    found = plans(name, ranks)
    return len(found) == ranks and all(bool(plan) == bool(shown) for shown in found)


def command(name: str, verb: str, **options: object) -> None:
    answer = control.send_command(
        processes(name)[1],
        Command(verb, nic=NIC, **options),  # type: ignore[arg-type]
        timeout=10,
    )
    assert answer.ok, answer.text


def last_of(folder: Path, rank: int) -> int:
    return int((folder / str(rank)).read_text().splitlines()[-1].split()[1])


def end_at(folder: Path, name: str) -> None:
    """An operation that no rank has come to: each takes 10 ms, and none is ahead by two."""
    fresh = folder / f"{name}.new"
    fresh.write_text(str(last_of(folder, 0) + 100))
    fresh.rename(folder / name)


def digests(folder: Path, rank: int, ranks: int) -> list[str]:
    lines = (folder / str(rank)).read_text().splitlines()
    return [line for line in lines if line.startswith(f"{ranks} ")]


def test_shrink_under_a_plan(build: Build, tmp_path: Path) -> None:
    name = "shrinks"
    with job(build, name, tmp_path) as running:
        until(lambda: len(plans(name, RANKS)) == RANKS, "the ranks meet", 60)
        command(name, "fail-nic", fault="blackhole", direction="both")
        until(lambda: runs(name, RANKS, "tree"), "the plan is taken everywhere", 90)
        end_at(tmp_path, "shrink")
        until(lambda: runs(name, RANKS - 1, "tree"), "and among those that are left", 120)
        command(name, "recover-nic")
        until(lambda: runs(name, RANKS - 1, ""), "back to NCCL's own choice", 120)
        end_at(tmp_path, "stop")
        assert running.wait(240) == 0, "".join(rank.output for rank in running.ranks)
    for ranks in (RANKS, RANKS - 1):
        found = [digests(tmp_path, rank, ranks) for rank in range(ranks)]
        assert len(found[0]) > 20 and all(lines == found[0] for lines in found), ranks
        assert len({line.split()[2] for line in found[0]}) > 1, "another order adds up otherwise"
    assert not digests(tmp_path, RANKS - 1, RANKS - 1), "it has left"
