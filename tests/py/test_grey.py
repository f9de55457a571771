"""A NIC that becomes slow under a job is found, said so, relieved, and taken back; no byte suffers.

Rung 3 (faults injected below the engine) and rung 4 (the lab's shaper: real queues, real TCP). How
fast all that is stands in `make bench BENCH_ARGS="--only grey"`; the limits here are generous.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Build
from failover_bed import PerfJob, Side, loopback, running_pair, running_perf, until

from r2ccl_ctl.journal import Event
from r2ccl_ctl.lab import Lab, LabSpec

RATE = 200_000_000
NICS = 3
WITHIN_S = 15.0
LOSS_PERCENT = 3.0
TRIES = 5


def weights(sides: list[Side], nic: str, since: int) -> list[Event]:
    found = [event for side in sides for event in side.named("weight") if event.nic == nic]
    return [event for event in found[since:] if event.nic == nic]


@pytest.mark.parametrize("verify", [0, 1])
def test_slow_nic_on_loopback(build: Build, tmp_path: Path, verify: int) -> None:
    """One of three NICs falls to a tenth and recovers: the journal says so, all bytes are right."""
    words = ("--size", "1M", "--conns", 3, "--stall", 20)
    nics = [f"127.0.{n}.1" for n in range(1, NICS + 1)]
    begin = tmp_path / "begin"  # no NIC was ever faster than what it is limited to
    env: dict[str, str | int] = {"R2CCL_VERIFY": verify, "PAIR_BEGIN": str(begin)}
    with running_pair(build.path, *words, nics=loopback(NICS), **env) as pair:
        for nic in nics:
            pair.tx.fail(nic, "slow", "tx", rate=10_000_000)
        begin.touch()
        pair.moving(60)
        pair.tx.fail(nics[1], "slow", "tx", rate=1_000_000)
        until(
            f"the slow NIC is named: {pair}",
            lambda: any("slow" in e.cause for e in weights([pair.tx], nics[1], 0)),
            WITHIN_S,
        )
        seen = len(weights([pair.tx], nics[1], 0))
        pair.tx.fail(nics[1], "slow", "tx", rate=10_000_000)
        until(
            f"it is well again: {pair}",
            lambda: any("again" in e.cause for e in weights([pair.tx], nics[1], seen)),
            WITHIN_S,
        )
        for nic in nics:
            pair.tx.recover(nic)
        pair.moving(20)
        assert not pair.tx.named("path-down", "replay"), str(pair)


def test_limit_that_came_for_good(build: Build, tmp_path: Path) -> None:
    """A NIC was faster than its siblings and is limited to what they have: it is not slow for that.
    What counts as slow then is measured by the new limit."""
    words = ("--size", "1M", "--conns", 3, "--stall", 20)
    nics = [f"127.0.{n}.1" for n in range(1, NICS + 1)]
    begin = tmp_path / "begin"
    env: dict[str, str | int] = {"PAIR_BEGIN": str(begin)}
    with running_pair(build.path, *words, nics=loopback(NICS), **env) as pair:
        for nic in nics:
            rate = 300_000_000 if nic == nics[1] else 10_000_000
            pair.tx.fail(nic, "slow", "tx", rate=rate)
        begin.touch()
        pair.moving(1000)
        pair.tx.fail(nics[1], "slow", "tx", rate=10_000_000)
        pair.moving(200)  # 7 s: every half-life halves what it is held to

        def slow() -> list[str]:
            return [e.cause for e in weights([pair.tx], nics[1], 0)][-1:]

        assert not any("slow" in cause for cause in slow()), f"{slow()}: {pair}"
        pair.tx.fail(nics[1], "slow", "tx", rate=1_000_000)
        until(
            f"the slow NIC is named: {pair}",
            lambda: any("slow" in cause for cause in slow()),
            WITHIN_S,
        )
        best = re.search(r"of its best \((\d+) MB/s\)", slow()[0])
        assert best and int(best[1]) <= 30, slow()
        for nic in nics:
            pair.tx.recover(nic)
        pair.moving(20)
        assert not pair.tx.named("path-down", "replay"), str(pair)


def test_switched_off(build: Build) -> None:
    words = ("--size", "1M", "--conns", 3, "--stall", 20)
    with running_pair(build.path, *words, nics=loopback(2), R2CCL_GREY=0) as pair:
        for nic, rate in (("127.0.1.1", 50_000_000), ("127.0.2.1", 2_000_000)):
            pair.tx.fail(nic, "slow", "tx", rate=rate)
        pair.moving(60)
        assert not pair.tx.named("weight"), str(pair)
        assert not pair.tx.counter("tail_resent_bytes")


@pytest.fixture
def lab(lab_admin: None) -> Iterator[Lab]:
    with Lab.up(LabSpec(name=f"g{os.getpid()}", nics=(NICS,), rates=(RATE,))) as up:
        yield up


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize("verify", [0, 1])
def test_slow_nic_in_the_lab(build: Build, lab: Lab, verify: int) -> None:
    """Collectives over shaped NICs, one of them slowed for seconds, twice, every value checked;
    chunks that it holds back go over others as well, and nothing is lost or doubled by that."""
    env = {"R2CCL_VERIFY": verify}
    argv = [str(build.perf), "-b", "4M", "--duration", "20", "--timeout", "60", "-c", "1"]
    with running_perf(
        build, env=env, argv=[*argv, "--check-every"], lab=lab.name, per_node=1
    ) as job:
        job.moving(100)
        for node in ("n0", "n1"):
            lab.set_rate(node, "nic1", RATE // 10)
            until("the slow NIC is named", lambda: _slow(job), WITHIN_S, show=job)
            job.moving(40)
            lab.set_rate(node, "nic1", RATE)
            until("it is well again", lambda: not _slow(job), WITHIN_S, show=job)
        assert not job.named("path-down", "replay"), str(job)
        job.finish(90.0)


@pytest.mark.lab
@pytest.mark.slow
def test_lossy_nic_in_the_lab(build: Build, lab: Lab) -> None:
    """A NIC that loses packets is named as lossy, which takes less than a second unless cores are
    short: once in some tries at least. Its siblings are not."""
    took: list[float] = []
    with running_perf(build, "-b", "2M", "--duration", 80, lab=lab.name, per_node=1) as job:
        job.moving(100)
        while len(took) < TRIES and min(took, default=1.0) >= 1.0:
            took.append(_lose_some(job, lab, f"n{len(took) % 2}", f"nic{len(took) % NICS}"))
        assert not job.named("path-down", "replay"), str(job)
        job.finish(90.0)
    assert min(took) < 1.0, took


def _lose_some(job: PerfJob, lab: Lab, node: str, nic: str) -> float:
    """Seconds until it was named; it is well again afterwards."""
    since = time.monotonic_ns()
    lab.fail_link(node, nic, "silent", loss=LOSS_PERCENT)
    until("it is named", lambda: bool(_lossy(job, nic, since)), WITHIN_S, show=job)
    took = (_lossy(job, nic, since)[0].mono_ns - since) / 1e9
    lab.recover_link(node, nic)
    until("it is well again", lambda: _well(job, nic), WITHIN_S, show=job)
    others = {e.nic for e in job.named("weight") if e.mono_ns > since and _blamed(e)}
    assert others == {nic}, str(job)
    return took


def _blamed(event: Event) -> bool:
    return event.cause.startswith(("slow:", "lossy:"))


def _lossy(job: PerfJob, nic: str, since: int) -> list[Event]:
    found = [e for e in job.named("weight") if e.nic == nic and e.mono_ns > since]
    return [e for e in found if e.cause.startswith("lossy:")]


def _well(job: PerfJob, nic: str) -> bool:
    """No side's last word about the NIC is that it is slow or lossy."""
    said = [weights([side], nic, 0) for side in job.sides]
    return not any(_blamed(events[-1]) for events in said if events)


@contextlib.contextmanager
def _busy_machine() -> Iterator[None]:
    """One program more than there are cores that never sleeps."""
    count = len(os.sched_getaffinity(0)) + 1
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait(20)


@pytest.mark.lab
@pytest.mark.slow
def test_busy_machine_is_no_slow_nic(build: Build, lab: Lab) -> None:
    """No fault, but threads that wait for a core all the time: no NIC is called slow or lossy."""
    argv = [str(build.perf), "-b", "4M", "--duration", "15", "--timeout", "60", "-c", "1"]
    with (
        running_perf(build, argv=[*argv, "--check-every"], lab=lab.name, per_node=1) as job,
        _busy_machine(),
    ):
        job.moving(100)
        job.finish(90.0)
        assert not job.named("weight"), str(job)


def _slow(job: PerfJob) -> bool:
    """Some side's last word about the NIC is that it is slow: its own bytes, or the other side's
    acknowledgements in their queue, can be what makes it so."""
    said = [weights([side], "nic1", 0) for side in job.sides]
    return any("slow" in events[-1].cause for events in said if events)
