"""Links of virtual NICs flap, come back and are drained under a job: every value stays right, and
the journal tells the order.

Rung 4: real link events, r2ccl_perf on the stand-in for NCCL. It cannot prove what a physical NIC
or switch does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
from conftest import Build
from failover_bed import PerfJob, Side, running_perf, until
from pyroute2 import IPRoute

from r2ccl_ctl import control, drain
from r2ccl_ctl.control import Command
from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

RATE = 1_000_000_000


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    """2 nodes x 3 NICs on rails of their own."""
    with Lab.up(LabSpec(name=f"h{os.getpid()}", rates=(RATE,), nics=(3,))) as made:
        yield made


def state(side: Side, nic: str) -> str:
    found = control.find_nic(side.snapshot().nics, nic)
    assert found is not None
    return found.state


def told(job: PerfJob, side: Side, nic: str) -> list[str]:
    names = ("nic-down", "nic-probing", "nic-ramping", "nic-up", "nic-damped")
    return [e.event for e in side.named(*names) if e.nic == nic]


def test_link_back_in_order(build: Build, lab: Lab) -> None:
    """Down, probing, ramping, up: as the journal of the NIC's node has it."""
    env = {"R2CCL_RAMP": "300ms"}
    with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
        job.moving()
        side = job.sides[0]
        lab.fail_link("n0", "nic1")
        until("down", lambda: "nic-down" in told(job, side, "nic1"))
        job.moving()
        lab.recover_link("n0", "nic1")
        until(f"up: {job}", lambda: "nic-up" in told(job, side, "nic1"))
        assert told(job, side, "nic1") == ["nic-down", "nic-probing", "nic-ramping", "nic-up"]
        job.finish()


@pytest.mark.parametrize("node", [0, 1])
def test_drain_then_pull(build: Build, lab: Lab, node: int) -> None:
    """Drained, the cable pulled and put back, given back: nothing is replayed, no path fails."""
    env = {"R2CCL_RAMP": "300ms"}
    with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
        job.moving()
        side = job.sides[node]
        answer = control.send_command(side.segment, Command("drain-nic", nic="nic2"), timeout=10.0)
        assert answer.ok, answer
        (found,) = drain.wait([(side.segment, "nic2")], 20.0)
        assert found.done, f"{found} {job}"
        lab.fail_link(f"n{node}", "nic2")
        job.moving()
        assert not job.named("replay", "path-down"), str(job)
        lab.recover_link(f"n{node}", "nic2")
        job.moving()
        assert state(side, "nic2") == "drained"
        answer = control.send_command(
            side.segment, Command("undrain-nic", nic="nic2"), timeout=10.0
        )
        assert answer.ok, answer
        until(f"back: {job}", lambda: state(side, "nic2") == "healthy", 15.0)
        job.finish()
        assert not job.named("replay"), str(job)


def test_drain_of_the_only_way(build: Build, lab: Lab) -> None:
    """Two NICs of n1 have lost their links. Those of n0 are healthy, and only one reaches n1."""
    with running_perf(build, lab=lab.name, per_node=1) as job:
        job.moving()
        side = job.sides[0]
        drain_nic0 = Command("drain-nic", nic="nic0")
        for nic in ("nic1", "nic2"):
            lab.fail_link("n1", nic)
        until(
            f"down: {job}",
            lambda: all(state(job.sides[1], n) == "failed" for n in ("nic1", "nic2")),
        )
        job.moving()
        answer = control.send_command(side.segment, drain_nic0, timeout=10.0)
        assert not answer.ok and "no other one has a path to n1 pid" in answer.text, (
            f"{answer} {job}"
        )
        job.moving()
        lab.recover_link("n1", "nic1")
        until(f"back: {job}", lambda: state(job.sides[1], "nic1") == "healthy", 15.0)
        assert control.send_command(side.segment, drain_nic0, timeout=10.0).ok
        job.moving()
        job.finish()


def set_address(lab: Lab, node: str, nic: str, there: bool) -> None:
    address = lab.address(node, nic)

    def work() -> None:
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=nic)[0]
            ip.addr("add" if there else "del", index=index, address=address, prefixlen=24)

    lab.call_in(node, work)


def test_address_goes_and_comes(build: Build, lab: Lab) -> None:
    """A NIC that loses its address while its carrier stays has failed; with the address it is
    back."""
    env = {"R2CCL_RAMP": "300ms"}
    with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
        job.moving()
        side = job.sides[0]
        set_address(lab, "n0", "nic1", False)
        until(f"noticed: {job}", lambda: state(side, "nic1") == "failed")
        down = [e.cause for e in side.named("nic-down")]
        assert down == ["its address is gone"], str(job)
        job.moving()
        time.sleep(1.2)  # the link is looked at again meanwhile: that is not enough
        assert state(side, "nic1") == "failed"
        set_address(lab, "n0", "nic1", True)
        until(f"back: {job}", lambda: state(side, "nic1") == "healthy", 15.0)
        job.finish()


def test_a_nic_that_never_reaches_anybody(build: Build, lab: Lab) -> None:
    """Everything on the wire of nic1 is lost from the start: rows, journal and stderr say so on
    both nodes, also where NCCL hides warnings, and take it back when it comes up."""
    word = "has reached no peer yet: the job is not protected by it"

    def shown(side: Side) -> tuple[str, str]:
        found = control.find_nic(side.snapshot().nics, "nic1")
        assert found is not None
        return found.state, found.cause

    def warnings(side: Side) -> list[str]:
        return [e.cause for e in side.named("warning") if e.nic == "nic1"]

    lab.fail_link("n1", "nic1", "silent")
    env = {"R2CCL_LOG": "warn", "NCCL_DEBUG": "NONE"}
    with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
        job.moving()
        until("said", lambda: all(shown(s) == ("healthy", word) for s in job.sides), 60.0, job)
        for side in job.sides:
            assert warnings(side) == [word], str(job)
        lab.recover_link("n1", "nic1")
        until("taken back", lambda: all(shown(s)[1] != word for s in job.sides), 60.0, job)
        job.finish()
        for side, rank in zip(job.sides, job.job.ranks, strict=True):
            assert warnings(side) == [word, "reaches a peer now"], str(job)
            lines = [line for line in rank.output.splitlines() if "not protected" in line]
            assert len(lines) == 1 and "nic1" in lines[0] and "R2CCL_NICS" in lines[0], str(job)


@contextlib.contextmanager
def one_way(build: Build, lab: Lab, nics: str) -> Iterator[tuple[Side, Side]]:
    """A process of n0 sends to one of n1, which sends nothing."""
    where = f"{lab.address('n0', 'mgmt0')}:7411"
    words = ["--size", "64K", "--count", "100000000", "--stall", "60"]
    sides = {"n0": "--listen", "n1": "--dial"}
    with contextlib.ExitStack() as stack:
        pids = []
        for node, how in sides.items():
            env = {**os.environ, "R2CCL_NICS": nics, "R2CCL_LOG": "warn"}
            child = lab.popen(node, [str(build.path / "stress/pair"), *words, how, where], env=env)
            stack.callback(child.wait, 20)
            stack.callback(child.kill)
            pids.append(child.pid)
        sender, receiver = Side("sender", pids[0]), Side("receiver", pids[1])
        stack.callback(sender.close)
        stack.callback(receiver.close)
        moving(receiver)
        yield sender, receiver


def moving(receiver: Side, count: int = 16) -> None:
    goal = receiver.counter("messages_received") + count
    until("messages move", lambda: receiver.counter("messages_received") >= goal, 30.0)


def test_the_management_network(build: Build, lab: Lab) -> None:
    """mgmt0 has weight 0: it carries no message while another NIC does, and when all those are
    silent, it carries the words about them, and the job."""

    def spare(side: Side) -> int:
        return sum(p.tx_bytes + p.rx_bytes for p in side.snapshot().paths if p.nic == "mgmt0")

    def states(side: Side) -> dict[str, str]:
        return {p.nic: p.state for p in side.snapshot().paths if p.nic == p.remote_nic}

    def weighs(side: Side) -> bool:
        return any(p.weight for p in side.snapshot().paths if p.nic == "mgmt0")

    def assert_idle() -> None:
        """Once what was under way has arrived, and was counted."""
        time.sleep(0.5)
        before = [spare(side) for side in sides]
        moving(receiver, 1000)
        assert [spare(side) for side in sides] == before

    with one_way(build, lab, "nic0,nic1,mgmt0") as sides:
        sender, receiver = sides
        until("mgmt0 is up", lambda: states(sender).get("mgmt0") == "up", 30.0)
        for side in sides:
            command = Command("set-weight", nic="mgmt0", weight=0)
            answer = control.send_command(side.segment, command, timeout=10.0)
            assert answer.ok, answer
        until("both weigh it so", lambda: not any(weighs(side) for side in sides), 10.0)
        assert_idle()
        before = spare(receiver)
        for nic in ("nic0", "nic1"):
            lab.fail_link("n1", nic, "silent")
        until("both are known to be lost", lambda: not alive(states(sender)), 30.0)
        moving(receiver)
        until("mgmt0 carries", lambda: spare(receiver) > before, 30.0)
        answer = control.send_command(
            receiver.segment, Command("drain-nic", nic="nic0"), timeout=10.0
        )
        assert answer.ok, answer
        until("the word has come", lambda: states(sender)["nic0"] == "drained", 30.0)
        lab.recover_link("n1", "nic1")
        until("nic1 is back", lambda: states(sender)["nic1"] in ("up", "ramping"), 30.0)
        until("mgmt0 is a spare again", lambda: not any(weighs(side) for side in sides), 10.0)
        assert_idle()


def alive(states: dict[str, str]) -> list[str]:
    return [n for n, state in states.items() if n != "mgmt0" and state in ("up", "ramping")]
