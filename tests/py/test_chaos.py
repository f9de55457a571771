"""What tests/stress/chaos.py leans on: an operator is answered while every path is silent, and
links come back on time however slow the driver is.

Rung 4: r2ccl_perf on the stand-in for NCCL, 3 nodes of 4 NICs in namespaces.
"""

from __future__ import annotations

import errno
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Build, missing
from failover_bed import PerfJob, Side, running_perf, until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import Lab, LabSpec, netns
from r2ccl_ctl.lab.state import Cut, LabState, Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stress"))

import chaos

on_lab = pytest.mark.lab

RATE = 500_000_000


@pytest.fixture(scope="module")
def lab(lab_rights: None) -> Iterator[Lab]:
    if not netns.has_admin():
        missing("lab", "these tests make namespaces themselves: CAP_SYS_ADMIN is missing")
    spec = LabSpec(name=f"o{os.getpid()}", nodes=chaos.NODES, nics=(chaos.NICS,), rates=(RATE,))
    with Lab.up(spec) as made:
        yield made


def silence(lab: Lab, *nodes: str) -> None:
    for node in nodes:
        for nic in lab.nics(node):
            lab.fail_link(node, nic, "silent")


def rails_of(lab: Lab, a: int, b: int) -> list[str]:
    state = Store(lab.name).load()
    assert state is not None
    found: list[str] = chaos.rails(state, a, b)
    return found


def all_share_rails(lab: Lab) -> bool:
    return all(rails_of(lab, a, b) for a, b in ((0, 1), (0, 2), (1, 2)))


def broken(lab: Lab) -> bool:
    state = Store(lab.name).load()
    assert state is not None
    return not all(nic.healthy for table in state.nics for nic in table.values())


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


@on_lab
def test_rails_come_back_without_the_driver(
    build: Build, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two nodes has one NIC left, of different rails, and the driver does nothing."""
    monkeypatch.setattr(chaos, "NO_RAIL_S", 1.0)
    with running_perf(build, "-b", "1M", "--duration", "80", lab=lab.name, per_node=1) as job:
        job.moving()
        monkey = chaos.Monkey(random.Random(1), job, lab)
        try:
            silence(lab, "n0", "n2")
            monkey.later(0.3, lambda: lab.recover_link("n0", "nic0"))
            monkey.later(0.6, lambda: lab.recover_link("n2", "nic2"))
            until("all nodes share rails", lambda: all_share_rails(lab), 30.0, monkey.done)
            assert broken(lab)
            job.moving()
        finally:
            monkey.mend()
        job.finish()
    assert any("no rail for long" in line for line in monkey.done), monkey.done


@on_lab
def test_links_are_mended_before_words_are_said(
    build: Build, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def say(self: chaos.Monkey, side: Side, command: Command) -> None:
        assert not broken(lab), command
        said.append((side.name, command.verb, command.nic))

    with running_perf(build, "-b", "1M", "--duration", "80", lab=lab.name, per_node=1) as job:
        job.moving()
        monkey = chaos.Monkey(random.Random(1), job, lab)
        monkeypatch.setattr(chaos.Monkey, "say", say)
        silence(lab, "n0", "n2")
        monkey.mend()
        job.finish()
    assert len(set(said)) == 2 * chaos.NODES * chaos.NICS


class Ended:
    """A job one of whose ranks has ended, which excuses what ranks do not answer, and only that."""

    def __init__(self) -> None:
        self.job = self
        self.ranks = [self, self]
        self.sides: list[Side] = []
        self.began = time.monotonic()
        self.running, self.code = True, 0

    def moving(self, operations: int = 1) -> None:
        raise AssertionError("a rank has ended")


class Idle(chaos.Monkey):
    """Has no ideas."""

    def step(self) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", [R2Error("no cable"), KeyError("no cable")], ids=["R2", "other"])
def test_a_keeper_that_fails_fails_the_round(wrong: Exception) -> None:
    """With its message, soon, and however often it is asked."""

    def fail() -> None:
        raise wrong

    job: Any = Ended()
    monkey = Idle(random.Random(1), job, None)
    monkey.later(0.0, fail)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="keeper has failed: .*no cable"):
        chaos.trouble(job, monkey, 60.0)
    assert time.monotonic() - began < 30
    with pytest.raises(AssertionError, match="no cable"):
        monkey.mend()


def test_a_keeper_that_fails_at_the_end_fails_the_round() -> None:
    job: Any = Ended()
    monkey = Idle(random.Random(1), job, None)
    monkey.keeper.wrong = R2Error("no cable")
    with pytest.raises(AssertionError, match="no cable"):
        chaos.trouble(job, monkey, 0.0)


def test_a_keeper_that_hangs_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos.Keeper, "END_S", 0.2)
    go = threading.Event()
    job: Any = Ended()
    monkey = Idle(random.Random(1), job, None)
    try:
        monkey.later(0.0, lambda: (go.wait(60), None)[1])
        until("the keeper is at it", lambda: not monkey.keeper.due, 60.0, [])
        with pytest.raises(AssertionError, match="has not ended within"):
            monkey.mend()
    finally:
        go.set()


def test_what_counts_as_a_rail() -> None:
    state = LabState.fresh(LabSpec(name="x", nodes=chaos.NODES, nics=(chaos.NICS,)))
    state.nics[0]["nic0"].link = "carrier"
    state.nics[1]["nic1"].loss_tx = 100.0
    state.nics[1]["nic2"].loss_rx = chaos.LOSS_MAX
    assert chaos.rails(state, 0, 1) == ["nic2", "nic3"]
    state.cuts = {Cut("nic3", 0, 1)}
    assert chaos.rails(state, 0, 1) == chaos.rails(state, 1, 0) == ["nic2"]
    assert chaos.rails(state, 1, 2) == ["nic0", "nic2", "nic3"]
    state.dead_rails = {"nic2"}
    assert chaos.rails(state, 0, 1) == []


def test_a_side_is_looked_for_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a process is to read every object of the machine: seconds where there are many."""
    looks = []
    find = control.find

    def counted(pid: int) -> Process:
        looks.append(pid)
        return find(pid)

    monkeypatch.setattr(control, "find", counted)
    with running_perf(build, "-b", "64K", "--duration", "60", ranks=2, nics=2) as job:
        job.moving()
        looks.clear()
        for side in job.sides:
            assert side.counter("messages_received") and side.events()
            assert control.send_command(side.segment, Command("ping"), timeout=20.0).ok
        assert not looks
        job.finish()
