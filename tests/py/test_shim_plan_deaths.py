"""Ranks that die, and jobs that end, while a plan is being made: the others come to an error and
through an abort, at whatever step it was.

Rung 3. A plan is made in about 300 ms: told after a loss, planned, connected, agreed, in force. The
pauses fall into its middle. Each step has its C test: vote, leader, agree_failures, direct_ranks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import Build
from plan_bed import RANKS, end_at, floats, lose, plans, processes, runs
from segment_bed import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pause_ms", [110, 200])
def test_a_rank_is_killed_while_a_plan_is_made(build: Build, tmp_path: Path, pause_ms: int) -> None:
    """Rank 0 leads; it dies in the second run. What is left of a communicator ends by an abort."""
    name, victim = f"plan-death-{pause_ms}", pause_ms // 10 % 2 * 3
    with floats(build, name, tmp_path / "out") as running:
        until(lambda: len(plans(name, RANKS)) == 2 * RANKS, "the ranks meet", 60)
        lose(name)
        time.sleep(pause_ms / 1000)
        os.kill(processes(name)[victim].pid, signal.SIGKILL)
        until(lambda: not running.running, "the others end", 40)
        said = [rank.output for rank in running.ranks if rank.code != 137]
    assert len(said) == RANKS - 1
    for text in said:
        took = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        assert took["abort"] < 10, text
        assert took["left"] == 0, text


def test_a_rank_stops_while_a_plan_is_made(build: Build, tmp_path: Path) -> None:
    """A stopped process is no failure: the others wait, and the plan comes."""
    name = "plan-stop"
    with floats(build, name, tmp_path / "out") as running:
        until(lambda: len(plans(name, RANKS)) == 2 * RANKS, "the ranks meet", 60)
        lose(name)
        time.sleep(0.12)
        pid = processes(name)[0].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)
        until(
            lambda: all(plan.startswith("direct") for plan in plans(name, RANKS)),
            "direct in both",
            60,
        )
        end_at(tmp_path / "out", "stop")
        assert running.wait(60) == 0


def test_a_job_ends_while_a_plan_is_made(build: Build, tmp_path: Path) -> None:
    """All ranks destroy their communicators, a few operations after a loss."""
    name, out = "plan-end", tmp_path / "out"
    with floats(build, name, out) as running:
        until(lambda: len(plans(name, RANKS)) == 2 * RANKS, "the ranks meet", 60)
        lose(name)
        end_at(out, "stop", 11)
        assert running.wait(60) == 0, "".join(rank.output for rank in running.ranks)


def test_two_communicators_take_their_plans(build: Build, tmp_path: Path) -> None:
    """Each has its own; ranks are in another order in the second one."""
    name, out = "plan-two", tmp_path / "out"
    with floats(build, name, out) as running:
        until(lambda: len(plans(name, RANKS)) == 2 * RANKS, "the ranks meet", 60)
        lose(name)
        until(
            lambda: [plan.split(",")[0] for plan in plans(name, RANKS)] == ["direct"] * 2 * RANKS,
            "direct in both",
            60,
        )
        end_at(out, "stop")
        assert running.wait(60) == 0
    assert not runs(name, RANKS, "direct"), "the processes are gone"
    lines = [sorted((out / str(rank)).read_text().splitlines()) for rank in range(RANKS)]
    assert all(rank == lines[0] for rank in lines), "the same bits on all ranks"
