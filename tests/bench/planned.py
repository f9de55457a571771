"""How long from a lost NIC to a plan that all ranks follow, and where that time goes.

Rung 4: four nodes in a shaped lab, a rank each, AllReduce without pause under R2CCL_PLAN=auto. A
link goes down; the journals say when the node knew it, when rank 0 had planned, when all ranks were
connected, when they had agreed, and when each came to the operation that the plan begins with. A
job loses a NIC twice: the first time its ranks have no connections yet. Sizes: an operation takes
far less than the agreement, and about as long as the whole. The baseline is one operation with the
NIC lost: a plan cannot begin within one. What it cannot show: GPUs, whose operations are queued
ahead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from figures import Row, Section, median, payload_bound
from resume import Watch
from rig import BenchError, Options, lab_bed, perf_spec

from r2ccl_ctl import control, launch, paths
from r2ccl_ctl.job import Job
from r2ccl_ctl.journal import Event
from r2ccl_ctl.lab import Lab
from r2ccl_ctl.rows import Comm

TITLE = "From a lost NIC to a plan in force"
NODES, NICS, RATE, MTU = 4, 2, 100_000_000, 9000
KIB = 1 << 10
SIZES = (1024 * KIB, 8192 * KIB)
VICTIM, NIC = 1, "nic1"
TARGET_MS = 2000.0
GIVE_UP_S = 40.0
MS = 1e6
# What the journals say, in the order in which it happens.
STEPS = ("known to its node", "planned", "ranks connected", "agreed", "in force")


@dataclass
class Loss:
    """Nanoseconds of CLOCK_MONOTONIC."""

    at: int
    steps: dict[str, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def note(self, rank: int, event: Event) -> None:
        if event.mono_ns < self.at:
            return
        cause = event.cause
        if rank == VICTIM and event.event == "nic-down" and event.nic == NIC:
            self.steps.setdefault("known to its node", event.mono_ns)
        if event.event != "plan":
            return
        if rank == 0 and cause.startswith("direct: "):
            self.steps.setdefault("planned", event.mono_ns)
        if rank == 0 and "are connected" in cause:
            self.steps.setdefault("ranks connected", event.mono_ns)
        if rank == 0 and " is agreed" in cause:
            self.steps["agreed"] = event.mono_ns  # the first may only connect
        if " on: direct" in cause:
            self.taken.add(rank)
            self.steps["in force"] = event.mono_ns

    def done(self) -> bool:
        return len(self.taken) == NODES


def run(options: Options, section: Section) -> None:
    found: dict[tuple[int, str], list[Loss]] = {}
    jobs = 1 if options.smoke else max(1, options.repetitions)
    with lab_bed("planned", NICS, (RATE,) * NICS, nodes=NODES) as bed:
        assert bed.lab is not None
        for turn in range(jobs):
            for size in SIZES[:1] if options.smoke else SIZES:
                options.say(f"{size // KIB} KiB: job {turn + 1} of {jobs}")
                with _job(bed.lab, size) as watch:
                    for which in ("first loss", "second loss"):
                        found.setdefault((size, which), []).append(_lose(bed.lab, watch))
    for (size, which), losses in found.items():
        _rows(section, f"{size // KIB} KiB, {which}", size, losses)


@contextlib.contextmanager
def _job(lab: Lab, size: int) -> Iterator[Watch]:
    name = f"planned-{os.getpid()}"
    words = ["--op", "all_reduce", "-b", str(size), "-e", str(size), "--duration", "600", "-c", "0"]
    env = {
        "LD_PRELOAD": str(paths.native_dir() / "libr2ccl.so"),
        "R2CCL_PLAN": "auto",
        "R2CCL_PLAN_HOLD": "1",
        "R2CCL_JOB": name,
        "NCCL_PROTO": "Simple",
    }
    spec = perf_spec([str(paths.perf_path()), *words], lab, NODES, 1, NICS, False, env, 600)
    job = launch.start(spec, echo=False)
    try:
        _until(job, lambda: _running(name), "operations")
        watch = Watch(_processes(name))
        try:
            yield watch
        finally:
            watch.close()
    finally:
        job.kill()


def _processes(name: str) -> list[control.Process]:
    found = [process for process in control.list_processes() if process.job == name]
    return sorted(found, key=lambda process: process.rank or 0)


def _comms(name: str) -> list[Comm]:
    return [comm for process in _processes(name) for comm in process.snapshot().comms]


def _running(name: str) -> bool:
    comms = _comms(name)
    return len(comms) == NODES and all(c.nodes == NODES and c.operations > 3 for c in comms)


def _until(job: Job, ready: object, what: str) -> None:
    limit = time.monotonic() + GIVE_UP_S
    assert callable(ready)
    while not ready():
        if time.monotonic() > limit or not job.running:
            said = "".join(rank.output[-400:] for rank in job.ranks)
            raise BenchError(f"{what}: not within {GIVE_UP_S:g} s: {said.strip()}")
        time.sleep(0.02)


def _lose(lab: Lab, watch: Watch) -> Loss:
    time.sleep(2.0)  # the job runs as it does for hours
    for _ in watch.drain():
        pass
    loss = Loss(time.monotonic_ns())
    lab.fail_link(f"n{VICTIM}", NIC)
    limit = time.monotonic() + GIVE_UP_S
    while not loss.done():
        for rank, event in watch.drain():
            loss.note(rank, event)
        if time.monotonic() > limit:
            raise BenchError(f"no plan in force {GIVE_UP_S:g} s after a loss: {loss.steps}")
        time.sleep(0.005)
    lab.recover_link(f"n{VICTIM}", NIC)
    _back(watch, limit)
    return loss


def _back(watch: Watch, limit: float) -> None:
    """Until all ranks have left the plan."""
    left: set[int] = set()
    while len(left) < NODES:
        for rank, event in watch.drain():
            if event.event == "plan" and " on: NCCL's own choice" in event.cause:
                left.add(rank)
        if time.monotonic() > limit:
            raise BenchError(f"the plan stays {GIVE_UP_S:g} s after its NIC is back")
        time.sleep(0.02)


def _rows(section: Section, name: str, size: int, losses: list[Loss]) -> None:
    bound = 2 * (NODES - 1) / NODES * size / payload_bound(RATE, MTU) * 1e3
    before = [loss.at for loss in losses]
    for step in STEPS:
        has = [loss.steps[step] for loss in losses if step in loss.steps]
        if len(has) != len(losses):
            continue  # the second time ranks are connected
        section.rows.append(
            Row(
                f"{name}: {step}",
                median([(a - b.at) / MS for a, b in zip(has, losses, strict=True)]),
                "ms",
                baseline=bound if step == "in force" else None,
                baseline_name="an operation, ring" if step == "in force" else "",
                target=TARGET_MS if step == "in force" else None,
                judged="value",
                at_least=False,
                samples=len(losses),
                note=f"after what is before it {_spent(has, before):.0f} ms",
            )
        )
        before = has


def _spent(after: list[int], before: list[int]) -> float:
    return median([(a - b) / MS for a, b in zip(after, before, strict=True)])
