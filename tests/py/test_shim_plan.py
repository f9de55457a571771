"""R2CCL_PLAN=shadow on the stand-in: four nodes on loopback, one loses half of its NICs.

Rung 3. It says what the planner would do and that nothing else changes; whether the plan would be
faster, only GPUs or a shaped lab can tell.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from conftest import Build
from plan_bed import RANKS, comms, preloaded, processes
from segment_bed import until

from r2ccl_ctl import control, journal
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.job import Job


def job(build: Build, name: str, **env: str) -> AbstractContextManager[Job]:
    return preloaded(build, name, ("--duration", "60"), env)


def threads(process: Process) -> list[str]:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/comm")
    return [task.read_text(encoding="utf-8").strip() for task in tasks]


@pytest.mark.slow
def test_shadow_says_what_it_would_do(build: Build) -> None:
    name = "shim-shadow"
    with job(build, name, R2CCL_PLAN="shadow"):
        until(
            lambda: [comm.nodes for comm in comms(name)] == [RANKS] * RANKS,
            "the ranks have met",
            40,
        )
        assert {comm.local_ranks for comm in comms(name)} == {1}
        assert {comm.plan for comm in comms(name)} == {""}
        victim = processes(name)[1]
        answer = control.send_command(
            victim,
            Command("fail-nic", nic="127.0.1.2", fault="blackhole", direction="both"),
            timeout=5,
        )
        assert answer.ok, answer.text
        until(lambda: comms(name)[0].plan.startswith("shadow: direct"), "a plan", 30)
        seen = comms(name)
        assert "1 of 4 nodes degraded, node 1 keeps 50 %" in seen[0].cause
        assert {comm.plan for comm in seen[1:]} == {""}, "only the leader plans"
        assert {comm.epoch for comm in seen} == {0}, "nothing was agreed"
        lines = [event.cause for event in journal.Cursor(processes(name)[0]).events()]
        assert any("node 1 keeps 50 %" in line for line in lines)
        assert any(line.startswith("... ") and "bound" in line for line in lines), "all of it"
        before = comms(name)[0].operations
        until(lambda: comms(name)[0].operations > before + 5, "traffic", 20)


@pytest.mark.parametrize("tell", ["0", "256"], ids=["alone", "told"])
def test_without_plans_nothing_watches(build: Build, tell: str) -> None:
    """Without plans nobody looks at NICs; ranks that are not told of errors do not meet at all."""
    name = f"shim-no-plan-{tell}"
    with job(build, name, R2CCL_TELL_ERRORS=tell, R2CCL_PLAN="off"):
        until(
            lambda: len(comms(name)) == RANKS and all(c.operations > 3 for c in comms(name)),
            "traffic",
            40,
        )
        time.sleep(0.5)
        names = {word for process in processes(name) for word in threads(process)}
        assert not [word for word in names if word.startswith("r2ccl-plan")]
        assert ("r2-agree" in names) == (tell != "0")
        assert {comm.nodes for comm in comms(name)} == {None if tell == "0" else RANKS}
