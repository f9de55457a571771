"""R2CCL_PLAN=auto and R2CCL_MODE=optimal on the stand-in: four nodes on loopback, one loses
one NIC of two.

Rung 3, every value checked after each iteration. What is shown is that all ranks take a plan and
leave it alike, and what it costs before. Also what is said where there is none; not how fast it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Build
from plan_bed import NIC, RANKS, comms, lose, meets, plan_show, preloaded, processes, regain, runs
from segment_bed import until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command

pytestmark = pytest.mark.slow

WORDS = ("--duration", "90", "--check-every")
AUTO = {"R2CCL_PLAN": "auto", "R2CCL_PLAN_HOLD": "1"}
OPTIMAL = {"R2CCL_MODE": "optimal", "R2CCL_PLAN_HOLD": "1"}


def carriers(name: str) -> int:
    """Threads that carry AllReduce out."""
    tasks = [
        task
        for process in processes(name)
        for task in Path(f"/proc/{process.pid}/task").glob("*/comm")
    ]
    return sum(task.read_text().strip() == "r2ccl-direct" for task in tasks)


def test_auto_takes_a_plan_and_leaves_it(build: Build) -> None:
    """It may be slower here, and is given up then; NCCL's own choice is back when the NIC is."""
    name = "auto"
    with preloaded(build, name, WORDS, AUTO) as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        until(lambda: all(c.operations > 50 for c in comms(name)), "operations", 60)
        assert carriers(name) == 0, "healthy: no thread, no connection"
        assert {c.epoch for c in comms(name)} == {0}
        lose(name)
        until(lambda: all(c.planned > 0 for c in comms(name)), "direct runs on all ranks", 60)
        assert carriers(name) == RANKS
        regain(name)
        until(lambda: runs(name, RANKS, ""), "NCCL's own choice on all ranks", 60)
        assert running.running


@pytest.mark.parametrize(
    ("mode", "plan", "shown"),
    [("4", "direct", "direct, weighted"), ("3", "r2ccl-allreduce", "r2ccl-allreduce")],
)
def test_a_mode_keeps_its_schedule(build: Build, mode: str, plan: str, shown: str) -> None:
    name = f"mode-{mode}"
    env = {**OPTIMAL, "R2CCL_MODE": mode}
    with preloaded(build, name, WORDS, env) as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        for turn in range(2):
            lose(name)
            until(lambda: runs(name, RANKS, plan), f"{plan} on all ranks, turn {turn}", 60)
            assert {c.plan for c in comms(name)} == {shown}
            assert any("1 of 4 nodes degraded" in c.cause for c in comms(name))
            regain(name)
            until(lambda: runs(name, RANKS, ""), f"back on all ranks, turn {turn}", 60)
        assert running.running


def test_an_operator_says_off(build: Build) -> None:
    name = "plan-off"
    with preloaded(build, name, WORDS, OPTIMAL) as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        lose(name)
        until(lambda: runs(name, RANKS, "direct"), "direct on all ranks", 60)
        for on, plan in ((False, ""), (True, "direct")):
            answer = control.send_command(processes(name)[2], Command("plan", plan=on), timeout=10)
            assert answer.ok, answer.text
            until(lambda plan=plan: runs(name, RANKS, plan), f"plan {on}", 60)  # type: ignore[misc]
        assert running.running


def test_nodes_with_two_ranks(build: Build) -> None:
    """A NIC that one process of a node has lost counts as the node's."""
    name = "auto-pairs"
    lost = Command("fail-nic", nic=NIC, fault="blackhole", direction="both")
    with preloaded(build, name, WORDS, OPTIMAL, ranks=6, nodes=3) as running:
        until(lambda: [c.nodes for c in comms(name)] == [3] * 6, "the ranks meet", 60)
        victim = next(p for p in processes(name) if NIC in {n.name for n in p.snapshot().nics})
        assert control.send_command(victim, lost, timeout=10).ok
        until(lambda: all(c.planned > 3 for c in comms(name)), "direct on all ranks", 60)
        assert {c.plan for c in comms(name)} == {"direct, weighted"}
        assert running.running


def test_a_rank_that_cannot(build: Build) -> None:
    """All stay with NCCL's own choice, and each says why."""
    name = "auto-refused"
    shim = str(build.path / "libr2ccl.so")
    fake = str(build.path / "tests/fakecuda/libcuda.so.1")
    env = {**OPTIMAL, "LD_PRELOAD": f"{shim} {fake}", "R2_FAKECUDA_FULL": "1"}
    with preloaded(build, name, WORDS, env) as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        lose(name)
        until(lambda: all("rank 0: " in c.cause for c in comms(name)), "all say why", 60)
        assert {c.planned for c in comms(name)} == {0}
        assert running.running


def test_two_nodes(build: Build) -> None:
    name = "auto-two"
    with preloaded(build, name, WORDS, AUTO, ranks=2) as running:
        until(lambda: len(comms(name)) == 2, "its communicator", 60)
        until(lambda: all("on two nodes" in c.cause for c in comms(name)), "the reason", 60)
        assert plan_show(name).count("on two nodes NCCL's ring is at the bound") == 2
        assert running.running


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"R2CCL_MODE": "balance"}, "no plans, R2CCL_MODE or R2CCL_PLAN says off: "),
        ({"R2CCL_PLAN": "auto", "LD_PRELOAD": ""}, "(started without the shim, or none made yet)"),
    ],
)
def test_plan_show_says_why_there_is_none(build: Build, env: dict[str, str], said: str) -> None:
    name = f"plan-show-{len(env)}"
    with preloaded(build, name, WORDS, env, ranks=2) as running:
        until(lambda: len(processes(name)) == 2, "the processes", 60)
        until(lambda: plan_show(name).count(said) == 1, said, 60)
        assert running.running


@pytest.mark.parametrize(("name", "value"), [("R2CCL_PLAN", "shadow"), ("R2CC_MODE", "3")])
def test_a_mode_that_cannot_be_had(build: Build, name: str, value: str) -> None:
    """One line of each rank says so."""
    said = "no plans, which R2CCL_PLAN or R2CCL_MODE asks for: on two nodes"
    with preloaded(
        build, f"no-mode-{value}", ("-e", "2M", "-n", "20"), {name: value}, 2
    ) as running:
        assert running.wait(60) == 0
        for rank in running.ranks:
            assert rank.output.count(said) == 1, rank.output


def test_a_mode_without_plans(build: Build) -> None:
    """The settings are those of all ranks: one says so."""
    env = {"R2CCL_MODE": "4", "R2CCL_PLAN": "off"}
    with preloaded(build, "no-plans", ("-e", "2M", "-n", "2"), env, 3) as running:
        assert running.wait(60) == 0
        said = [
            rank.output.count("takes no schedule with R2CCL_PLAN=off") for rank in running.ranks
        ]
        assert sum(said) == 1, said
