#!/usr/bin/env python3
"""What the health machinery does under real NCCL: one job of r2ccl_perf that checks every value, in
whose middle NICs fail, slow down, lose, are drained and weighted, ranks and cores are taken away,
and whose processes' journals are judged after each step.

Three nodes of one rank, so that a third one can say which NIC is at fault. A step passes if the
journal says what it has to, the job moves on, and in the end no value was wrong.
Environment: as for run_nccl_tests.py, without nccl-tests.

Exit code 0: all steps passed; 1: one failed; 2: something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nccl_output
import transports
from beds import LabBed, LabError, lab_bed
from jobs import Job, gpu_count, shape_for
from journal_watch import JournalWatch

from r2ccl_ctl import control
from r2ccl_ctl.control import Command
from r2ccl_ctl.errors import R2Error

Event = dict[str, Any]
NODES = 3
# What a failure, or the suspicion of one, leaves in a journal.
TROUBLE = ("path-down", "path-suspect", "nic-down", "nic-suspect", "replay", "no-path",
           "peer-suspect", "peer-gone", "connection-failed")
WITHIN_S = 5.0  # until a journal says what a step expects
BACK = 1.6  # times that, until all is as it was
CALM_S = 1.0  # between steps


@dataclass
class Running:
    """The job under test. ranks: a process of each, by node."""

    bed: LabBed
    pids: list[int]
    watch: JournalWatch
    within: float  # seconds until a journal has to say what a step expects

    def tell(self, node: int, command: Command) -> None:
        answer = control.send_command(control.find(self.pids[node]), command, timeout=10.0)
        if not answer.ok:
            raise R2Error(f"{command}: {answer}")

    def since(self, mono: float, node: int | None = None) -> list[Event]:
        """Events of the job's processes (of one node's) from then on."""
        pids = self.pids if node is None else [self.pids[node]]
        return [e for e in self.watch.of(pids) if e["mono_ns"] / 1e9 >= mono]


@dataclass(frozen=True)
class Step:
    """do and undo a fault; meanwhile, after `hold` seconds at least, `expect` (journal events since
    the fault, by node) has to find nothing to complain of."""

    name: str
    do: Callable[[Running], None]
    undo: Callable[[Running], None]
    expect: Callable[[list[list[Event]]], str]
    hold: float = 2.0
    back: str = ""  # event that says that all is well again, on node 0


@dataclass
class Passed:
    name: str
    problem: str
    took_s: float
    said_after_s: float | None
    events: list[str] = field(default_factory=list)


def quiet(seen: list[list[Event]]) -> str:
    found = [f"{e['event']} {e.get('nic', '')}: {e.get('cause', '')}"
             for events in seen for e in events if e["event"] in TROUBLE]
    return f"took something for a failure: {found[:3]}" if found else ""


def verdict(local: str, remote: str) -> Callable[[list[list[Event]]], str]:
    """Node 0 blames as `local` begins, the others as `remote`; each has an opinion."""

    def judge(seen: list[list[Event]]) -> str:
        for node, events in enumerate(seen):
            want = local if node == 0 else remote
            causes = [e.get("cause", "") for e in events if e["event"] == "verdict"]
            if not causes:
                return f"no verdict at node {node}"
            if not all(cause.startswith(want) for cause in causes):
                return f"node {node} says {causes}, not '{want}'"
        return ""

    return judge


def said(event: str, nic: str, cause: str = "",
         calm: Sequence[str] = ()) -> Callable[[list[list[Event]]], str]:
    """Node 0 has such an event of that NIC whose cause has that word, and nobody one of `calm`."""

    def judge(seen: list[list[Event]]) -> str:
        loud = [e["event"] for events in seen for e in events if e["event"] in calm]
        if loud:
            return f"{loud[0]} although nothing failed"
        if any(e["event"] == event and e.get("nic") == nic and cause in e.get("cause", "")
               for e in seen[0]):
            return ""
        return f"no event '{event}' of {nic} {cause}"

    return judge


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Twice as many programs that compute as there are cores."""
    burn = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait(timeout=10)


def busy_step() -> Step:
    stack = contextlib.ExitStack()
    return Step("cores-busy", lambda _: stack.enter_context(busy_cores()), lambda _: stack.close(),
                quiet, hold=4.0)


def stop_step(node: int, seconds: float) -> Step:
    return Step(f"stopped-rank-{node}", lambda run: os.kill(run.pids[node], signal.SIGSTOP),
                lambda run: os.kill(run.pids[node], signal.SIGCONT), quiet, hold=seconds)


def told(name: str, command: Command, undo: Command, expect: Callable[[list[list[Event]]], str],
         back: str = "") -> Step:
    return Step(name, lambda run: run.tell(0, command), lambda run: run.tell(0, undo), expect,
                back=back)


def link(nic: int, kind: str) -> Step:
    return Step(kind, lambda run: run.bed.fail(0, nic, kind), lambda run: run.bed.recover(0, nic),
                verdict("local NIC", "remote NIC"), back="nic-up")


def cut(nic: int) -> Step:
    def between(run: Running, away: bool) -> None:
        run.bed.lab.cut_pair("n0", "n1", f"nic{nic}", cut=away)

    def judge(seen: list[list[Event]]) -> str:
        causes = [e.get("cause", "") for events in seen[:2] for e in events
                  if e["event"] == "verdict"]
        if not causes:
            return "no verdict"
        bad = [c for c in causes if not c.startswith(("link or switch", "transient"))]
        return f"says {bad}, not 'link or switch between'" if bad else ""

    return Step("pair-cut", lambda run: between(run, True), lambda run: between(run, False), judge,
                back="path-up")


def steps(nics: int) -> list[Step]:
    """Each NIC fails as seldom as the number of NICs allows: one that fails often is damped."""
    first, last = "nic0", f"nic{nics - 1}"
    recover = Command("recover-nic", nic=first)
    kinds = ("carrier", "silent", "silent-rx", "silent-tx")
    return [
        busy_step(),
        stop_step(NODES - 1, 4.0),
        stop_step(0, 2.0),
        told("drained", Command("drain-nic", nic=last), Command("undrain-nic", nic=last),
             said("nic-drained", last, calm=("replay", "nic-down", "no-path", "peer-gone"))),
        told("weight-0", Command("set-weight", nic=last, weight=0),
             Command("set-weight", nic=last, weight=100), said("weight", last, calm=TROUBLE)),
        told("slow", Command("fail-nic", first, "slow", "both", rate=10_000_000), recover,
             said("weight", first, "slow", calm=("no-path", "peer-gone", "connection-failed"))),
        told("lossy", Command("fail-nic", first, "loss", "both", loss_ppm=50_000), recover,
             said("fault-injected", first, calm=("no-path", "peer-gone", "connection-failed"))),
        *(link((i + 1) % nics, kind) for i, kind in enumerate(kinds)),
        cut(nics - 1),
    ]


def by_node(run: Running, since: float) -> list[list[Event]]:
    return [run.since(since, node) for node in range(NODES)]


def expected(run: Running, step: Step, began: float) -> tuple[str, list[list[Event]]]:
    """What the step complains of, and the events it went by."""
    time.sleep(step.hold)
    while True:
        seen = by_node(run, began)
        problem = step.expect(seen)
        if not problem or time.monotonic() > began + step.hold + run.within:
            return problem, seen
        time.sleep(0.1)


def is_back(run: Running, event: str, undone: float) -> bool:
    while time.monotonic() < undone + BACK * run.within:
        if any(e["event"] == event for e in run.since(undone, 0)):
            return True
        time.sleep(0.1)
    return False


def take(run: Running, step: Step) -> Passed:
    began = time.monotonic()
    seen: list[list[Event]] = []
    try:
        step.do(run)
        try:
            problem, seen = expected(run, step, began)
        finally:
            undone = time.monotonic()
            step.undo(run)
        if not problem and step.back and not is_back(run, step.back, undone):
            problem = f"no '{step.back}' within {BACK * run.within:g} s of the repair"
        time.sleep(CALM_S)
        if not problem and step.expect is quiet:  # what was noticed late
            problem = quiet(by_node(run, began))
    except (R2Error, LabError, OSError) as err:
        problem = f"{type(err).__name__}: {err}"
    verdicts = [e["mono_ns"] / 1e9 - began for events in seen for e in events
                if e["event"] == "verdict"]
    words = [f"n{node} {e['event']} {e.get('nic', '')} {e.get('cause', '')}"
             for node, events in enumerate(seen) for e in events]
    return Passed(step.name, problem, round(time.monotonic() - began, 3),
                  round(min(verdicts), 3) if verdicts else None, words[:60])


def run_steps(run: Running, wanted: Sequence[Step], results: list[Passed], over: Path) -> None:
    try:
        time.sleep(2.0)  # the job moves
        for step in wanted:
            results.append(take(run, step))
            last = results[-1]
            print(f"health {last.name}: {'ok' if not last.problem else 'FAILED: ' + last.problem} "
                  f"in {last.took_s:.1f} s"
                  + (f", verdict after {last.said_after_s} s" if last.said_after_s else ""),
                  flush=True)
    finally:
        over.touch()


def run(opts: argparse.Namespace, bed: LabBed, gpus: int) -> dict[str, Any]:
    variant = transports.parse_variant(opts.variant)
    env = transports.transport_env(variant, bed.nic_prefix, bed.oob)
    env["LD_LIBRARY_PATH"] = transports.library_path(transports.find_nccl())
    wanted = [s for s in steps(opts.nics) if not opts.steps or s.name in opts.steps.split(",")]
    results: list[Passed] = []
    lines = 0

    def on_line(_now: float, _text: str) -> None:
        nonlocal lines
        lines += 1

    with tempfile.TemporaryDirectory() as place, JournalWatch() as watch:
        over = Path(place) / "over"
        argv = [opts.program, *opts.args.split(), "--duration", str(opts.timeout),
                "--until", str(over)]
        job = Job(bed, shape_for(NODES, 1, gpus), argv, env, on_line)
        job.start()
        began = time.monotonic()
        while not watch.sees(job.pids) and time.monotonic() < began + 30:
            time.sleep(0.05)
        running = Running(bed, job.pids, watch, opts.within)
        thread = threading.Thread(target=run_steps, args=(running, wanted, results, over),
                                  daemon=True)
        thread.start()
        ended = job.wait(opts.timeout + 20)
        thread.join(timeout=30)
    out = nccl_output.parse_output(t for _, t in ended.lines)
    good = (ended.ok and out.out_of_bounds == 0 and len(results) == len(wanted) and lines > 50
            and not any(r.problem for r in results))
    print(f"run_health: {'ok' if good else 'FAILED'}: {len(results)} of {len(wanted)} steps, "
          f"wrong={out.out_of_bounds} lines={lines} codes={ended.codes}", flush=True)
    if not good:
        print(ended.tail(), flush=True)
    return {"schema": 1, "ok": good, "wrong": out.out_of_bounds,
            "steps": [vars(r) for r in results], **ended.summary()}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--variant", default="r2ccl")
    p.add_argument("--nics", type=int, default=4)
    p.add_argument("--steps", default="", help="names, comma between; default: all")
    p.add_argument("--program", default=str(transports.ROOT / "build" / "r2ccl_perf"))
    p.add_argument("--args", default="--op all_reduce -b 8M -c 1")
    p.add_argument("--timeout", type=float, default=150.0, help="seconds for all steps")
    p.add_argument("--within", type=float, default=WITHIN_S,
                   help="seconds until a journal has to say it; a busy machine takes longer")
    p.add_argument("--json", default="")
    opts = p.parse_args(argv)
    names = [s.name for s in steps(opts.nics)]
    for name in filter(None, opts.steps.split(",")):
        if name not in names:
            p.error(f"step '{name}': choose from {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with lab_bed(NODES, opts.nics) as bed:
            result = run(opts, bed, gpu_count())
    except (transports.TransportError, LabError, ValueError) as err:
        print(f"run_health: {err}", file=sys.stderr)
        return 2
    if opts.json:
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
