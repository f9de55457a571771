#!/usr/bin/env python3
"""AllReduce while nodes have lost NICs: NCCL's ring over R2CCL, and R2CCL's plans.

    run_allreduce.py                                # 4 nodes x 2 NICs of 4 Gbit/s, 64 to 512 MiB
    run_allreduce.py --nodes 8 --rate 2gbit         # 8 nodes on 4 GPUs (two nodes' ranks on each)
    run_allreduce.py --states one --nics 4 --rate 2gbit
    run_allreduce.py --ranks-per-node 2             # 4 nodes share 2 GPUs
    run_allreduce.py --direct                       # R2CCL_ALLREDUCE=direct, healthy or not
    run_allreduce.py --states half --env R2CCL_MODE=r2ccl-allreduce   # beside its formula
    run_allreduce.py --standin --rate 100mbit --min 4M --max 16M     # without a GPU

Nodes are network namespaces with veth NICs that tc shapes. They share GPUs where there are few. Two
jobs of r2ccl_perf per turn, all sizes in turn in each, every value of every operation checked:
NCCL_ALGO=Ring without plans, and only LD_PRELOAD and R2CCL_PLAN=auto. NICs are really taken away
under the running job. Prints what each change took, and a table beside the models (docs/shim.md).
Those are by the shapers' rate, less headers, and by what raw TCP carried over each NIC in the same
run (build/bench/rawsock). --json FILE has everything. Ends within --budget seconds.
Exit code 0: all ran and no value was wrong; 1: not; 2: usage, or something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import allreduce_figures
import raw_rates
import transports
from allreduce_figures import Change, State, Window
from beds import LabBed, LabError, lab_bed
from jobs import Ended, Job, Shape, gpu_count, shape_for
from raw_rates import Raw
from run_nccl_tests import end_on_term

from r2ccl_ctl import control
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import parse_rate
from r2ccl_ctl.rows import Comm

FAIL = "carrier"
POLL_S = 0.01
SETTLE_WINDOWS = 2  # the first two after a change: connections are made


class RunError(Exception):
    """A run that cannot go on; the text says why."""


@dataclass
class Setup:
    bed: LabBed
    shape: Shape
    opts: argparse.Namespace
    ends: float  # monotonic seconds: nothing is begun after it

    def env(self, plan: bool) -> dict[str, str]:
        ours = {"R2CCL_PLAN": "auto"} if plan else {"R2CCL_PLAN": "off", "NCCL_ALGO": "Ring"}
        if plan and self.opts.direct:
            ours = {"R2CCL_PLAN": "off", "R2CCL_ALLREDUCE": "direct"}
        env = transports.transport_env(transports.parse_variant("preload"), self.bed.nic_prefix,
                                       self.bed.oob)
        place = transports.ROOT / "build" / "hostnccl" if self.opts.standin else (
            transports.find_nccl())
        env["LD_LIBRARY_PATH"] = transports.library_path(place)
        if self.opts.standin:
            env |= {"HOSTNCCL_HARSH": "off", "NCCL_PROTO": "Simple"}
        env.setdefault("NCCL_DEBUG", "WARN")
        return env | ours | dict(pair.split("=", 1) for pair in self.opts.env)


@dataclass
class Found:
    """What the turns brought, by state and size."""

    rings: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    plans: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    raw: list[Raw] = field(default_factory=list)
    wrong: int = 0
    operations: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, plan: bool, state: str, times: dict[int, list[float]]) -> None:
        into = (self.plans if plan else self.rings).setdefault(state, {})
        for size, values in times.items():
            into.setdefault(size, []).extend(values)


def say(text: str) -> None:
    print(text, flush=True)


class Running:
    """One job, whose operations are read from its timeline while it runs."""

    def __init__(self, setup: Setup, plan: bool, folder: Path) -> None:
        opts = setup.opts
        self.timeline, self.until = folder / "timeline", folder / "until"
        argv = [str(transports.ROOT / "build" / "r2ccl_perf"), "--op", "all_reduce",
                "-b", opts.min, "-e", opts.max, "-f", str(opts.factor), "--duration", "3600",
                "--until", str(self.until), "--timeline", str(self.timeline), "--timeout", "60"]
        self.job = Job(setup.bed, setup.shape, argv, setup.env(plan))
        self._ends = setup.ends
        self.ended: Ended | None = None

    def windows(self) -> list[Window]:
        if not self.timeline.exists():
            return []
        lines = self.timeline.read_text(encoding="utf-8").split("\n")[:-1]
        return allreduce_figures.windows([json.loads(line) for line in lines])

    def comms(self) -> list[Comm]:
        """Of all ranks, in no order: their first communicator."""
        pids = set(self.job.pids)
        found = []
        for process in control.list_processes():
            if process.pid in pids:
                with contextlib.suppress(R2Error):
                    found += process.snapshot().comms[:1]
        return found

    def wait(self, what: str, ready: Callable[[], bool], seconds: float) -> bool:
        """False: not within that time. RunError: the job has ended, or time is up."""
        limit = time.monotonic() + seconds
        while not ready():
            now = time.monotonic()
            if any(proc.poll() is not None for proc in self.job.procs):
                raise RunError(f"a rank ended while waiting: {what}")
            if now > self._ends:
                raise RunError(f"time is up while waiting: {what}")
            if now > limit:
                return False
            time.sleep(POLL_S)
        return True

    def cycles(self, since: float, count: int, sizes: int) -> dict[int, list[float]]:
        """`count` operations of each size that began after `since`, the first two left out."""
        def times() -> dict[int, list[float]]:
            return allreduce_figures.by_size(self.windows(), since, SETTLE_WINDOWS)

        def enough() -> bool:
            found = times()
            return len(found) == sizes and all(len(v) >= count for v in found.values())

        if not self.wait("operations", enough, 300):
            raise RunError("operations do not end")
        return times()


@contextlib.contextmanager
def running(setup: Setup, plan: bool, found: Found) -> Iterator[Running]:
    """Started, and ended in order; what was wrong is counted."""
    with tempfile.TemporaryDirectory() as folder:
        run = Running(setup, plan, Path(folder))
        run.job.start()
        try:
            if not run.wait("the first operation", lambda: bool(run.windows()), 60):
                raise RunError("no operation within 60 s")
            yield run
            run.until.touch()
            run.ended = run.job.wait(30)
        except RunError as err:
            run.until.touch()
            run.ended = run.job.wait(2)
            found.problems.append(f"{err}\n{run.ended.tail()}")
        finally:
            if run.ended is None:
                run.ended = run.job.wait(0)
            windows = run.windows()
            found.operations += len(windows)
            found.wrong += sum(max(0, w.wrong) for w in windows)
        if not found.problems and not run.ended.ok:
            found.problems.append(f"codes {run.ended.codes}\n{run.ended.tail()}")


def sizes_of(opts: argparse.Namespace) -> int:
    size, count = as_bytes(opts.min), 1
    while size * opts.factor <= as_bytes(opts.max):
        size, count = size * opts.factor, count + 1
    return count


def as_bytes(text: str) -> int:
    return int(float(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1].upper()])


def change_to(setup: Setup, now: dict[int, int], wanted: dict[int, int]) -> None:
    """Takes NICs away and gives others back; the last ones of a node go first."""
    last = setup.bed.nics - 1
    for node in range(setup.bed.nodes):
        have, want = now.get(node, 0), wanted.get(node, 0)
        for nic in range(have, want):
            setup.bed.fail(node, last - nic, FAIL)
        for nic in range(want, have):
            setup.bed.recover(node, last - nic)


def ring_job(setup: Setup, order: Sequence[State], found: Found) -> None:
    lost: dict[int, int] = {}
    with running(setup, False, found) as run:
        try:
            for state in order:
                change_to(setup, lost, state.lost)
                lost = state.lost
                times = run.cycles(time.monotonic(), setup.opts.cycles, sizes_of(setup.opts))
                found.add(False, state.name, times)
                say(f"  ring, {state.name}: {words(times)}")
        finally:
            change_to(setup, lost, {})


def plan_job(setup: Setup, order: Sequence[State], found: Found) -> None:
    lost: dict[int, int] = {}
    with running(setup, True, found) as run:
        try:
            for state in order:
                change = watched_change(setup, run, lost, state)
                lost = state.lost
                since = time.monotonic()
                times = run.cycles(since, setup.opts.cycles, sizes_of(setup.opts))
                found.add(True, state.name, times)
                ended = {c.plan for c in run.comms()}
                if not state.lost and len(ended) == 1:
                    change.plan = min(ended)
                found.taken[state.name] = change.plan
                if setup.opts.direct and ended != {change.plan}:
                    found.problems.append(
                        f"{state.name}: '{change.plan}' did not stay: {ended}, "
                        f"{({c.cause for c in run.comms()})}")
                if change.taken:
                    before = found.rings.get(state.name, {})
                    change.stall = allreduce_figures.stalls(
                        run.windows(), change, usual(before), usual(times))
                    found.changes.append(change)
                say(f"  plans, {state.name}: {change.plan or 'stock'}; {words(times)}")
        finally:
            change_to(setup, lost, {})


def usual(times: dict[int, list[float]]) -> dict[int, float]:
    return {size: statistics.median(values) for size, values in times.items()}


def words(times: dict[int, list[float]]) -> str:
    return ", ".join(f"{size >> 20} MiB {statistics.median(v) * 1e3:.0f} ms"
                     for size, v in sorted(times.items()))


def watched_change(setup: Setup, run: Running, lost: dict[int, int], state: State) -> Change:
    """Takes the state's NICs away and waits until all ranks run a new plan; a state for which none
    comes within --patience stays with what runs."""
    comms = run.comms()  # what is seen only after the loss may already be its effect
    before = max((comm.epoch for comm in comms), default=0)
    causes = {comm.cause for comm in comms}
    change_to(setup, lost, state.lost)
    change = Change(state.name, time.monotonic())
    if not state.lost:
        return change

    def taken() -> bool:
        comms = run.comms()
        now = time.monotonic()
        if change.decided is None and {c.cause for c in comms} - causes:
            change.decided = now
        if change.made is None and comms and min(c.epoch for c in comms) > before:
            change.made = now
        new = [c for c in comms if c.plan and c.epoch > before]
        if len(new) < setup.shape.world or len({c.epoch for c in new}) > 1:
            return False
        change.taken, change.plan = now, new[0].plan
        return True

    if run.wait(f"a plan for {state.name}", taken, setup.opts.patience):
        comms = run.comms()
        change.cause = next((c.cause for c in comms if c.cause), "")
        change.wait_s = round(max(c.plan_wait_ns for c in comms) / 1e9, 3)
    return change


def measure_raw(setup: Setup, found: Found) -> None:
    """Raw TCP over the same NICs, before each turn's jobs."""
    tool = transports.ROOT / "build" / "bench" / "rawsock"
    if not tool.exists():
        say(f"  raw TCP: not measured, {tool} is missing: make {tool.relative_to(transports.ROOT)}")
        return
    try:
        raw = raw_rates.measure(setup.bed, tool, parse_rate(setup.opts.rate) or 0)
    except LabError as err:
        say(f"  raw TCP: not measured: {err}")
        return
    found.raw.append(raw)
    say(f"  raw TCP: {', '.join(gbits(rate) for rate in raw.single)} of single NICs, "
        f"{gbits(raw.both)} of a node each way, all nodes at once")


def gbits(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3f} Gbit/s"


def turns(setup: Setup, found: Found) -> None:
    opts = setup.opts
    order = allreduce_figures.states(opts.states, opts.nodes, opts.nics)
    for turn in range(opts.turns):
        begun = time.monotonic()
        if turn and begun + (begun - setup.ends + opts.budget) / turn > setup.ends:
            say(f"turn {turn + 1}: left out, no time left")
            return
        say(f"turn {turn + 1}")
        measure_raw(setup, found)
        ring_job(setup, order, found)
        if not found.problems:
            plan_job(setup, order, found)
        if found.problems:
            return  # what there is is shown


def words_list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nodes", type=int, default=4)
    p.add_argument("--nics", type=int, default=2, help="NICs per node")
    p.add_argument("--ranks-per-node", type=int, default=1)
    p.add_argument("--rate", default="4gbit", help="of each NIC")
    p.add_argument("--min", default="64M")
    p.add_argument("--max", default="512M")
    p.add_argument("--factor", type=int, default=2, help="between sizes")
    p.add_argument("--cycles", type=int, default=10, help="operations of each size and state")
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--states", type=words_list, default=["healthy", "half", "two"],
                   help="of healthy,one,pair,mixed,half,two,three, in this order within a job")
    p.add_argument("--patience", type=float, default=40.0, help="seconds for a plan to come")
    p.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    p.add_argument("--standin", action="store_true", help="the stand-in for NCCL, without GPUs")
    p.add_argument("--direct", action="store_true",
                   help="R2CCL_ALLREDUCE=direct in place of plans")
    p.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    p.add_argument("--json", default=None, metavar="FILE")
    opts = p.parse_args(argv)
    for pair in opts.env:
        if "=" not in pair:
            p.error(f"--env '{pair}': write KEY=VALUE")
    for name in ("min", "max"):
        if getattr(opts, name)[-1:].upper() not in ("K", "M", "G"):
            p.error(f"--{name} '{getattr(opts, name)}': a number with K, M or G")
    if opts.factor < 2:
        p.error(f"--factor {opts.factor}: 2 or more")
    return opts


def report(opts: argparse.Namespace, rate: int, found: Found) -> dict[str, Any]:
    order = allreduce_figures.states(opts.states, opts.nodes, opts.nics)
    raw = raw_rates.middle(found.raw) if found.raw else None
    bed = allreduce_figures.Bed(opts.nodes, opts.nics, rate, raw.single if raw else (),
                                raw.both if raw else 0.0, opts.ranks_per_node)
    rows = allreduce_figures.table(bed, order, found.rings, found.plans, found.taken)
    changes = [change.to_json() for change in found.changes]
    say("\n".join(allreduce_figures.markdown(rows, changes)))
    say(f"{found.operations} operations, wrong values: {found.wrong}")
    for problem in found.problems:
        say(f"PROBLEM: {problem}")
    return {
        "schema": 1, "nodes": opts.nodes, "per_node": opts.ranks_per_node, "nics": opts.nics,
        "rate": rate, "rows": rows,
        "raw": raw.to_json() if raw else None,
        "changes": changes, "operations": found.operations, "wrong": found.wrong,
        "problems": found.problems, "cores": len(os.sched_getaffinity(0)),
        "standin": opts.standin, "gpus": 0 if opts.standin else gpu_count(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    end_on_term()
    begun, found = time.monotonic(), Found()
    try:
        rate = parse_rate(opts.rate)
        if rate is None:
            raise RunError("--rate none: without a rate there is nothing to compare with")
        allreduce_figures.states(opts.states, opts.nodes, opts.nics)
        gpus = 0 if opts.standin else gpu_count()
        if not opts.standin and gpus == 0:
            raise RunError("no NVIDIA GPU on this machine (no /dev/nvidia0): use --standin")
        with lab_bed(opts.nodes, opts.nics, rate=rate) as bed:
            shape = shape_for(opts.nodes, opts.ranks_per_node, gpus)
            turns(Setup(bed, shape, opts, begun + opts.budget - 10), found)
    except (RunError, transports.TransportError, LabError, ValueError) as err:
        print(f"run_allreduce: {err}", file=sys.stderr)
        return 2
    result = report(opts, rate, found)
    good = not found.problems and found.wrong == 0 and bool(found.plans)
    result["ok"] = good
    if opts.json:
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"run_allreduce: {'ok' if good else 'FAILED'} after {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
