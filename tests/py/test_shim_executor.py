"""R2CCL_PLAN=on over the stand-in: plans are made, taken and given back in the middle of traffic.

Rung 3: four nodes on loopback, all values checked after each iteration. Tree is forced through the
plugin's tuner, which the stand-in asks as NCCL does. What is shown is that all ranks change
communicators at the same operation and nothing is lost, not that a plan is faster.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from conftest import Build
from plan_bed import RANKS, comms, floats, preloaded, processes
from segment_bed import until

from r2ccl_ctl import control, journal
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.job import Job
from r2ccl_ctl.rows import Comm

NIC = "127.0.1.2"

pytestmark = pytest.mark.slow


# Operations without a pause between them would use the whole machine.
PACE = {"HOSTNCCL_RING_DELAY_MS": "20", "HOSTNCCL_TREE_DELAY_MS": "20"}


def job(build: Build, name: str, *, seconds: int = 120, **env: str) -> AbstractContextManager[Job]:
    plans = {"R2CCL_PLAN": "on", "R2CCL_PLAN_HOLD": "1", "R2CCL_PLAN_WITHDRAW": "0", **PACE, **env}
    return preloaded(build, name, ("--duration", str(seconds), "--check-every"), plans)


def of_pid(pid: int) -> list[Comm]:
    found = [process for process in control.list_processes() if process.pid == pid]
    return [comm for process in found for comm in process.snapshot().comms]


def makes(pid: int) -> bool:
    return any(comm.seconds_making for comm in of_pid(pid))


def command(name: str, rank: int, verb: str, **options: object) -> None:
    answer = control.send_command(
        processes(name)[rank],
        Command(verb, **options),  # type: ignore[arg-type]
        timeout=10,
    )
    assert answer.ok, answer.text


def meet(name: str) -> None:
    until(lambda: [comm.nodes for comm in comms(name)] == [RANKS] * RANKS, "the ranks meet", 60)


def lose(name: str, rank: int = 1) -> None:
    command(name, rank, "fail-nic", nic=f"127.0.1.{rank + 1}", fault="blackhole", direction="both")


def everywhere(name: str, plan: str) -> bool:
    found = comms(name)
    return len(found) == RANKS and all(comm.plan.startswith(plan) for comm in found)


def runs(name: str) -> bool:
    return everywhere(name, "tree") and all(comm.planned > 5 for comm in comms(name))


def stock(name: str) -> bool:
    found = comms(name)
    return len(found) == RANKS and all(comm.plan == "" and comm.epoch > 2 for comm in found)


def said(process: Process) -> list[str]:
    return [event.cause for event in journal.Cursor(process).events()]


def failed(name: str) -> bool:
    nics = processes(name)[1].snapshot().nics
    return any(nic.name == NIC and nic.state not in ("up", "ramping") for nic in nics)


def one_epoch(name: str) -> int:
    """Of all ranks. A proposal that came too late for a rank has used one up, so only its order is
    known."""
    (epoch,) = {comm.epoch for comm in comms(name)}
    return epoch


def goes_on(name: str) -> None:
    before = [comm.operations for comm in comms(name)]
    until(
        lambda: all(c.operations > b + 10 for c, b in zip(comms(name), before, strict=True)),
        "traffic goes on",
        60,
    )


def test_there_and_back(build: Build) -> None:
    name = "exec-back"
    with job(build, name) as running:
        meet(name)
        lose(name)
        until(lambda: runs(name), "the plan is taken everywhere", 60)
        assert one_epoch(name) >= 2, "make, then switch"
        assert {comm.seconds for comm in comms(name)} == {1}
        taken = {line for process in processes(name) for line in said(process) if "from op" in line}
        assert len(taken) == 1, "the same plan from the same operation on"
        reason = " ".join(said(processes(name)[0])).replace(" ... ... ", " ")
        assert re.search(r"tree, 1 order: 1 of \d nodes degraded.* bound [0-9.]+ ms\)", reason)
        shown = comms(name)[0].cause
        assert shown.endswith(" ...") and shown.removesuffix("...") in reason, shown
        command(name, 1, "recover-nic", nic=NIC)
        until(lambda: stock(name), "back to stock when the NIC works again", 90)
        goes_on(name)
        assert running.running


def test_off_and_on_again(build: Build) -> None:
    """One rank's operator says off; the communicator is kept for the next time."""
    name = "exec-off"
    with job(build, name) as running:
        meet(name)
        lose(name)
        until(lambda: runs(name), "the plan is taken everywhere", 60)
        command(name, 2, "plan", plan=False)
        until(lambda: stock(name), "back to stock", 60)
        goes_on(name)
        assert stock(name)
        assert {comm.seconds for comm in comms(name)} == {1}, "kept"
        makings, before = [comm.make_ns for comm in comms(name)], one_epoch(name)
        command(name, 2, "plan", plan=True)
        until(lambda: everywhere(name, "tree"), "taken again", 60)
        assert one_epoch(name) > before
        assert [comm.make_ns for comm in comms(name)] == makings, "without another making"
        goes_on(name)
        assert running.running


def test_second_loss_is_not_held(build: Build) -> None:
    """The tree for node 1's loss has node 2 at an inner place: when that is degraded too, it is
    worse than the ring, and the hold does not count. Stock runs until the next is made."""
    name = "exec-second"
    with job(build, name, R2CCL_PLAN_HOLD="60") as running:
        meet(name)
        lose(name)
        until(lambda: runs(name), "the plan is taken everywhere", 60)
        epoch = comms(name)[0].epoch
        lose(name, 2)
        until(
            lambda: everywhere(name, "tree") and {c.epoch for c in comms(name)} == {epoch + 2},
            "the plan for both",
            45,
        )
        lines = [line for line in said(processes(name)[0]) if "from operation" in line]
        assert "NCCL's own choice" in lines[-2] and "tree" in lines[-1], lines
        goes_on(name)
        assert running.running


def test_killed_under_the_plan(build: Build) -> None:
    """A rank dies: its peers end with an error, as without plans, and do not hang."""
    name = "exec-kill"
    with job(build, name) as running:
        meet(name)
        lose(name)
        until(lambda: runs(name), "the plan is taken everywhere", 60)
        os.kill(processes(name)[3].pid, signal.SIGKILL)
        until(lambda: not running.running, "the job ends", 60)


@pytest.mark.parametrize("net_api", ["12", "10", "8"])
def test_tree_by_the_tuner(build: Build, tmp_path: Path, net_api: str) -> None:
    """API v10 and older: NCCL makes communicators on threads of their own; tuner v4, v3."""
    name = f"exec-tree-{net_api}"
    env = {
        "R2CCL_PLAN_FORCE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p"),
        "HOSTNCCL_NET_VERSION": net_api,
    }
    with job(build, name, seconds=120, **env) as running:
        meet(name)
        lose(name)
        until(lambda: runs(name), "the plan is taken everywhere", 60)
        goes_on(name)
        assert running.running
        pids = [process.pid for process in processes(name)]
    logs = [(tmp_path / f"nccl.{pid}").read_text(encoding="utf-8") for pid in pids]
    for log in logs:
        assert f"TUNER/Plugin: Using R2CCL (v{ {'12': 5, '10': 4, '8': 3}[net_api] })" in log
        assert re.findall(r"Algo (\w+)", log) == ["Ring", "Tree"]
    # Each process's place in its first and its second communicator; node 1 is the degraded one.
    places = [[int(rank) for rank in re.findall(r"Trees \[0\] \S+->(\d+)->", log)] for log in logs]
    assert [place[0] for place in places] == list(range(RANKS))
    assert {place[1] for place in places} == set(range(RANKS))
    assert places[1][1] in (0, RANKS - 1), "an end of the tree"


def test_stopped_while_it_is_agreed(build: Build) -> None:
    """A rank stands still when the plan comes: the others wait for it in their collectives, as they
    always do, and go on with it; the plan comes later."""
    name = "exec-stop"
    with job(build, name) as running:
        meet(name)
        lose(name)
        until(lambda: "degraded" in comms(name)[0].cause, "the leader has a plan", 60)
        victim = processes(name)[3].pid
        os.kill(victim, signal.SIGSTOP)
        time.sleep(7)  # longer than the leader waits for promises
        os.kill(victim, signal.SIGCONT)
        until(lambda: runs(name), "the plan is taken everywhere", 90)
        assert running.running


def test_killed_while_it_is_made(build: Build) -> None:
    """The rank dies between the plan and the switch: the job ends, with an error."""
    name = "exec-die"
    with job(build, name) as running:
        meet(name)
        lose(name)
        until(lambda: any(comm.epoch for comm in comms(name)), "the making is agreed", 60)
        os.kill(processes(name)[3].pid, signal.SIGKILL)
        until(lambda: not running.running, "the job ends", 60)


def test_killed_inside_a_making(build: Build, tmp_path: Path) -> None:
    """All ranks are inside the making of the plan's communicators, where NCCL does not return, when
    rank 3 dies. Who is left gets an error from its collectives and aborts without waiting for what
    is being made; once NCCL gives up, no thread stays behind in it."""
    name, gate, folder = "exec-inside", tmp_path / "gate", tmp_path / "run"
    env = {"HOSTNCCL_BOOTSTRAP_TIMEOUT": "20", "HOSTNCCL_GATE": str(gate)}
    with floats(build, name, folder, 5, 90, env) as running:
        until(lambda: len(comms(name)) == 2 * RANKS and comms(name)[0].nodes == RANKS, "meet", 60)
        pids = [process.pid for process in processes(name)]
        gate.touch()
        lose(name)
        until(lambda: all(map(makes, pids)), "all make it", 60)
        os.kill(pids[3], signal.SIGKILL)
        done = [folder / f"aborted.{rank}" for rank in (0, 1, 2)]
        until(lambda: all(file.exists() for file in done), "all have aborted", 60)
        assert gate.exists(), "nothing was made meanwhile"
        gate.unlink()
        until(lambda: all(running.ranks[r].code is not None for r in (0, 1, 2)), "they end", 60)
    for rank in (0, 1, 2):
        assert running.ranks[rank].code == 2, running.ranks[rank].output
        lines = running.ranks[rank].output.splitlines()
        took = json.loads(next(line for line in lines if line.startswith("{")))
        assert took["abort"] < 4 and took["left"] == 0, took


def test_slower_than_stock_is_withdrawn(build: Build) -> None:
    """The tree is slower, by much more than what the machine does otherwise: the plan is taken back
    after 20 operations, and not taken again in the same state of the nodes."""
    name = "exec-slow"
    with job(build, name, R2CCL_PLAN_WITHDRAW="1", HOSTNCCL_TREE_DELAY_MS="250") as running:
        meet(name)
        lose(name)
        until(lambda: everywhere(name, "tree"), "the plan is taken everywhere", 90)
        until(lambda: stock(name), "back to stock", 90)
        lines = [line for line in said(processes(name)[0]) if line.startswith("withdrawn: ")]
        assert len(lines) == 1
        took = re.match(r"withdrawn: ([\d.]+) ms, stock ([\d.]+) ms \(20 operations", lines[0])
        assert took and float(took[1]) > max(250, float(took[2])), lines
        assert {comm.cause for comm in comms(name)} == {lines[0]}, "plan show says why"
        assert all(20 <= comm.planned < 200 for comm in comms(name))
        # The same loss once more would have the same plan.
        command(name, 1, "recover-nic", nic=NIC)
        until(lambda: not failed(name), "the NIC works again", 60)
        lose(name)
        until(lambda: "not taken: it was slower" in comms(name)[0].cause, "not again", 60)
        assert stock(name)
        goes_on(name)
        assert running.running


def test_as_fast_as_promised_is_kept(build: Build) -> None:
    """The other side: where stock is the slower one, a plan that is measured stays."""
    name = "exec-fast"
    with job(build, name, R2CCL_PLAN_WITHDRAW="1", HOSTNCCL_RING_DELAY_MS="250") as running:
        meet(name)
        lose(name)
        until(lambda: all(c.planned > 60 for c in comms(name)), "the plan is taken and stays", 90)
        assert everywhere(name, "tree")
        assert not [line for line in said(processes(name)[0]) if line.startswith("withdrawn: ")]
        assert running.running
