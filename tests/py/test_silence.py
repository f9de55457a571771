"""Silence of an application is never a failure (invariant "silence is not failure"): stopped ranks,
stopped observers, a machine without a core to spare.

Rung 3: loopback NICs, r2ccl_perf on the stand-in for NCCL. What the kernel answers for a stopped
process is the real thing; that other kernels and NICs do so too it cannot prove.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Build
from failover_bed import PerfJob, running_perf

NODES: dict[str, Any] = {"emulate_nodes": 2, "per_node": 1, "nics": 2}
# What a failure, or the suspicion of one, leaves in a journal.
TROUBLE = (
    *("path-down", "path-suspect", "nic-down", "nic-suspect", "replay", "no-path"),
    *("peer-suspect", "peer-gone", "connection-failed"),
)


def no_trouble(job: PerfJob) -> None:
    """So far, on either side, before the job ends."""
    found = job.named(*TROUBLE)
    assert not found, f"{[(e.event, e.nic, e.cause) for e in found]}: {job}"
    for side in job.sides:
        counters = side.snapshot().counters
        assert not counters["failovers"] and not counters["replayed_bytes"], str(job)


def stop(job: PerfJob, rank: int, seconds: float) -> None:
    job.sides[rank].signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        job.sides[rank].signal(signal.SIGCONT)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(6.0, marks=pytest.mark.slow), pytest.param(50.0, marks=pytest.mark.soak)],
)
def test_stopped_in_a_collective(build: Build, seconds: float, verify: int) -> None:
    """Stopped between two steps of an AllReduce, longer than any heartbeat's patience: one rank
    or, in verify mode, the other."""
    env = {"R2CCL_VERIFY": verify}
    argv = [str(build.perf), "-b", "2M", "--duration", str(seconds + 40)]
    argv += ["--timeout", "90", "-c", "1", "--check-every"]
    with running_perf(build, env=env, argv=argv, timeout=150.0, **NODES) as job:
        job.moving()
        stop(job, 1 - verify, seconds)
        job.moving()
        no_trouble(job)
        job.finish(90.0)


def test_observer_that_was_stopped(build: Build, seed: int) -> None:
    """Both sides are stopped again and again, for as long as heartbeats may stay unanswered, more
    or less: who wakes late must not judge what it finds."""
    rnd = random.Random(seed)
    with running_perf(build, **NODES) as job:
        job.moving()
        until = time.monotonic() + 6
        while time.monotonic() < until:
            stop(job, rnd.randrange(2), rnd.choice([0.05, 0.2, 0.31, 0.45, 0.9, 1.5]))
            time.sleep(rnd.choice([0.0, 0.01, 0.1, 0.3]))
        job.moving()
        no_trouble(job)
        job.finish()


def test_all_stopped_at_once(build: Build) -> None:
    """As a machine that is suspended, or a container that is frozen."""
    with running_perf(build, **NODES) as job:
        job.moving()
        for _ in range(3):
            for side in job.sides:
                side.signal(signal.SIGSTOP)
            time.sleep(1.2)
            for side in reversed(job.sides):
                side.signal(signal.SIGCONT)
                time.sleep(0.05)
            job.moving()
        no_trouble(job)
        job.finish()


@contextlib.contextmanager
def busy_machine(loops: int) -> Iterator[None]:
    """Processes that take every core, at a better priority than ours."""
    done = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in range(loops)
    ]
    try:
        yield
    finally:
        for process in done:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_no_core_to_spare(build: Build) -> None:
    """Four busy loops for each core, and the job at the lowest priority."""
    cores = len(os.sched_getaffinity(0))
    argv = ["nice", "-n", "19", str(build.perf), "-b", "1M", "--duration", "60"]
    argv += ["--timeout", "60", "-c", "1"]
    with running_perf(build, argv=argv, **NODES) as job:
        job.moving()
        with busy_machine(4 * cores):
            time.sleep(4.0)
            no_trouble(job)
        job.moving()
        no_trouble(job)
        job.finish(90.0)
