#!/usr/bin/env python3
"""What NIC failures cost a training: step times of a small GPT over NCCL's sockets and R2CCL.

    run_training.py --json t.json                          # DDP: at most 6 minutes
    run_training.py --parallel fsdp --jobs 2x2:balance+sockets --json t.json
    run_training.py --parallel megatron --jobs 2x4:balance+migrate+sockets,4x2:balance+direct
    run_training.py --backend gloo --dim 64 --jobs 2x2:balance     # on CPUs: only tries the scripts

Nodes are network namespaces whose veth NICs tc shapes, one rank each; they share GPUs where there
are fewer. The bed 4x2 is 4 nodes of 2 NICs. Jobs run in the order of --jobs, one per mode: sockets
of any variant of transports.py, or a mode of R2CCL. The first job of a bed chooses how many
micro-batches a step has, so that communication takes each of --shares of a healthy step; it travels
after the backward pass, so nothing hides it. With R2CCL the last node then loses a NIC, on beds of
4 NICs a second one, and on the first bed a NIC flaps. With NCCL's own transports, which hang, the
job is killed there and started again from its checkpoint, over the NICs that are left. Prints
tables, --json FILE has everything. Ends within --budget seconds. FASTSOCKET=FILE: that plugin.
Exit code 0: all that ran was right; 1: not; 2: usage, or something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import training_figures as figures
import transports
from beds import LabBed, LabError, lab_bed
from jobs import Ended, Job, gpu_count, gpu_free_again, shape_for
from run_nccl_tests import end_on_term, say
from training_figures import Cell

from r2ccl_ctl import control
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import parse_rate

HERE = Path(__file__).resolve().parent
MODES = {
    "balance": transports.Variant("balance", "preload", {"R2CCL_MODE": "balance"}),
    "migrate": transports.Variant("migrate", "preload", {"R2CCL_MODE": "migrate"}),
    "direct": transports.Variant("direct", "preload", {"R2CCL_ALLREDUCE": "direct"}),
    "auto": transports.Variant("auto", "preload", {"R2CCL_PLAN": "auto"}),
}
SETTLE_S = {"direct": 5.0, "auto": 5.0}  # a plan comes; else the NICs' shares settle
OTHERS_SETTLE_S = 1.5
SETTLE_STEPS = 3  # after the number of micro-batches has changed
FLAP_S = 0.2  # down, then up
HANG_S = 4.0  # without a step, before a kill
CELL_S = 2.5  # steps of a cell, between LEAST and --steps of them
LEAST = 10
COMPUTE_STEPS = 5
POLL_S = 0.01


def mode_of(name: str) -> transports.Variant:
    return MODES.get(name) or transports.parse_variant(name)


class RunError(Exception):
    """A job that cannot go on; the text says why."""


class TimeUp(Exception):
    """--budget is used up."""


@dataclass
class Found:
    cells: list[Cell] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Setup:
    bed: LabBed
    opts: argparse.Namespace
    ends: float  # monotonic seconds
    first: bool  # the bed that the most is asked of
    micro: dict[int, int] = field(default_factory=dict)  # by share in percent
    compute: dict[int, float] = field(default_factory=dict)  # seconds of a step, likewise

    @property
    def shares(self) -> list[int]:
        shares: list[int] = self.opts.shares
        return shares


class Running:
    """One job, led by its control file; its steps are read from rank 0 as they come."""

    def __init__(
        self, setup: Setup, mode: str, folder: Path, micro: int, without: int | None = None
    ) -> None:
        opts = setup.opts
        self.ends = setup.ends
        self.start: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.saved: list[float] = []
        self.ended: Ended | None = None
        self.control = folder / "micro"
        self.lead(micro)
        argv = [opts.python, str(HERE / "gpt_train.py"), "--control", str(self.control)]
        argv += ["--backend", opts.backend, "--parallel", opts.parallel, "--dim", str(opts.dim)]
        variant = mode_of(mode)
        if variant.base not in transports.OURS and opts.parallel == "ddp" and setup.first:
            argv += ["--checkpoint", str(folder / "checkpoint")]
        env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if opts.backend == "nccl":
            env |= transports.transport_env(variant, setup.bed.nic_prefix, setup.bed.oob)
            env.setdefault("NCCL_DEBUG", "WARN")
            if without is not None:
                left = (f"nic{nic}" for nic in range(setup.bed.nics) if nic != without)
                env["NCCL_SOCKET_IFNAME"] = "=" + ",".join(left)
        else:
            env["GLOO_SOCKET_IFNAME"] = setup.bed.oob
        gpus = gpu_count() if opts.backend == "nccl" else 0
        self.job = Job(setup.bed, shape_for(setup.bed.nodes, 1, gpus), argv, env, self._line)
        self.job.start()

    def _line(self, now: float, text: str) -> None:
        if not text.startswith('{"event"'):
            return
        item = json.loads(text)
        if item["event"] == "start":
            self.start = item
        elif item["event"] == "saved":
            self.saved.append(item["seconds"])
        elif item["event"] == "step":
            self.steps.append(item | {"at": now})

    def lead(self, micro: int) -> int:
        part = self.control.with_suffix(".part")
        part.write_text(str(micro), encoding="utf-8")
        part.rename(self.control)
        return micro

    def wait(self, what: str, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        limit = time.monotonic() + seconds
        while not ready():
            now = time.monotonic()
            if any(proc.poll() is not None for proc in self.job.procs):
                raise RunError(f"a rank ended while waiting for {what}")
            if now > self.ends:
                raise TimeUp(what)
            if now > limit:
                raise RunError(f"{what} did not come within {seconds:g} s")
            time.sleep(POLL_S)

    def idle(self, seconds: float) -> None:
        """Until then, or until a rank ends."""
        limit = min(time.monotonic() + seconds, self.ends)
        while time.monotonic() < limit and all(proc.poll() is None for proc in self.job.procs):
            time.sleep(POLL_S)

    def collect(self, micro: int, count: int, skip: int = SETTLE_STEPS) -> list[float]:
        """Seconds of `count` steps; a negative `micro` is of steps that do not communicate."""
        begun = len(self.steps)
        self.lead(micro)

        def found() -> list[float]:
            return [s["seconds"] for s in self.steps[begun:] if s["micro"] == micro][skip:]

        self.wait(f"{count} steps of {micro} micro-batches", lambda: len(found()) >= count)
        return found()[:count]

    def plans(self) -> set[str]:
        """What the ranks' communicators run."""
        names = set()
        for process in control.list_processes():
            if process.pid in set(self.job.pids):
                with contextlib.suppress(R2Error):
                    names |= {comm.plan for comm in process.snapshot().comms[:1]}
        return names

    def stop(self, seconds: float = 0.0) -> Ended:
        """Kills what has not ended within that time."""
        if self.ended is None:
            self.ended = self.job.wait(seconds)
        return self.ended

    def end(self) -> None:
        self.lead(0)
        if not self.stop(15).ok:
            raise RunError("the job did not end in order")


@contextlib.contextmanager
def running(
    setup: Setup, mode: str, folder: Path, found: Found, micro: int = 1, without: int | None = None
) -> Iterator[Running]:
    """A job that has made its first step; always ended. RunError says what the ranks printed."""
    run = Running(setup, mode, folder, micro, without)
    try:
        run.wait("the first step", lambda: bool(run.steps), 90)
        yield run
    except RunError as err:
        ended = run.stop()
        raise RunError(f"{mode}: {err}, codes {ended.codes}\n{ended.tail(1500)}") from err
    finally:
        run.stop()
        if not run.start.get("from_step"):
            found.curves.append(
                {"nodes": setup.bed.nodes, "nics": setup.bed.nics, "mode": mode}
                | figures.curve(run.steps, run.start.get("tokens", 0) * setup.bed.nodes)
            )


def calibrate(setup: Setup, run: Running) -> None:
    """Chooses the micro-batches of a step for each share, from what one and eight take."""
    if not setup.micro:
        one = statistics.median(run.collect(-1, COMPUTE_STEPS))
        eight = statistics.median(run.collect(-8, COMPUTE_STEPS))
        travel = statistics.median(run.collect(1, LEAST)) - one
        setup.micro = {s: figures.micro_for(s / 100, travel, one, eight) for s in setup.shares}
        say(
            f"  1 micro-batch {one * 1e3:.1f} ms, 8 {eight * 1e3:.1f} ms, communication "
            f"{travel * 1e3:.1f} ms: micro-batches by share {setup.micro}"
        )
        for share, micro in setup.micro.items():
            setup.compute[share] = statistics.median(run.collect(-micro, COMPUTE_STEPS, 1))


def measure(setup: Setup, run: Running, mode: str, state: str, lost: int, found: Found) -> None:
    """A cell for each share."""
    for share in setup.shares:
        if state == "flap" and share != setup.shares[-1 if len(setup.shares) < 2 else 1]:
            continue
        micro = setup.micro[share]
        count = max(LEAST, min(setup.opts.steps, int(CELL_S / setup.compute[share])))
        cell = Cell(
            setup.bed.nodes,
            setup.bed.nics,
            mode,
            state,
            lost,
            share,
            micro,
            setup.compute[share],
            run.start["tokens"],
            run.collect(micro, count),
        )
        if mode in SETTLE_S or state == "flap":
            cell.plan = ",".join(sorted(run.plans()))
        found.cells.append(cell)
        say(f"  {mode}, {state}, {share} %: {cell.words()}")


def lose(setup: Setup, run: Running, mode: str, nic: int, found: Found) -> None:
    """Takes a NIC of the last node; notes how long the next step took to end."""
    usual = statistics.median(run.collect(setup.micro[setup.shares[0]], LEAST))
    before, began = len(run.steps), time.monotonic()
    setup.bed.fail(setup.bed.nodes - 1, nic, "carrier")
    run.wait("a step after the loss", lambda: len(run.steps) > before + 1)
    until = began + SETTLE_S.get(mode, OTHERS_SETTLE_S)
    run.wait("the NICs to settle", lambda: time.monotonic() > until)
    after = run.steps[before:]
    found.stalls.append(
        {
            "nodes": setup.bed.nodes,
            "nics": setup.bed.nics,
            "mode": mode,
            "usual_s": round(usual, 4),
            "slowest_s": round(max(s["seconds"] for s in after), 4),
            "next_step_s": round(next(s["at"] for s in after if s["at"] > began) - began, 4),
        }
    )


@contextlib.contextmanager
def flapping(bed: LabBed, nic: int) -> Iterator[None]:
    stop = threading.Event()

    def flap() -> None:
        while not stop.is_set():
            bed.fail(bed.nodes - 1, nic, "carrier")
            stop.wait(FLAP_S)
            bed.recover(bed.nodes - 1, nic)
            stop.wait(FLAP_S)

    thread = threading.Thread(target=flap, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def our_job(setup: Setup, mode: str, found: Found) -> None:
    """Healthy, then with one NIC lost, of four two, and on the first bed with one that flaps."""
    bed, gone = setup.bed, []
    with tempfile.TemporaryDirectory() as folder, running(setup, mode, Path(folder), found) as run:
        try:
            calibrate(setup, run)
            measure(setup, run, mode, "healthy", 0, found)
            for lost in range(1, 2 if setup.opts.brief else bed.nics // 2 + 1):
                gone.append(bed.nics - lost)
                lose(setup, run, mode, gone[-1], found)
                measure(setup, run, mode, f"{lost} of {bed.nics} lost", lost, found)
            if setup.first:
                with flapping(bed, gone.pop()):
                    measure(setup, run, mode, "flap", 1, found)
            run.end()
        finally:
            for nic in gone:
                bed.recover(bed.nodes - 1, nic)


def other_job(setup: Setup, mode: str, found: Found) -> None:
    """Healthy; on the first bed it then loses a NIC, is killed, and started again without it."""
    bed, nic = setup.bed, setup.bed.nics - 1
    with tempfile.TemporaryDirectory() as folder:
        with running(setup, mode, Path(folder), found) as run:
            calibrate(setup, run)
            measure(setup, run, mode, "healthy", 0, found)
            if not run.saved:
                run.end()
                return
            micro = run.lead(setup.micro[setup.shares[0]])
            before = len(run.steps)
            bed.fail(bed.nodes - 1, nic, "carrier")
            run.idle(HANG_S)
            after, done = len(run.steps) - before, run.steps[-1]["step"]
            run.stop()
        say(f"  GPU free again after {gpu_free_again():.1f} s: the restart counts from then on")
        killed = time.monotonic()
        try:
            with running(setup, mode, Path(folder), found, micro, nic) as again:
                again.wait("the steps that were lost", lambda: again.steps[-1]["step"] > done)
                found.restarts.append(
                    {
                        "nodes": bed.nodes,
                        "nics": bed.nics,
                        "mode": mode,
                        "steps_after_loss": after,
                        "first_step_s": round(again.steps[0]["at"] - killed, 3),
                        "steps_lost": done - again.start["from_step"],
                        "caught_up_s": round(again.steps[-1]["at"] - killed, 3),
                        "checkpoint_s": run.saved[-1],
                    }
                )
                measure(setup, again, mode, f"restarted, 1 of {bed.nics} lost", 1, found)
                again.end()
        finally:
            bed.recover(bed.nodes - 1, nic)


def all_beds(opts: argparse.Namespace, rate: int, found: Found) -> None:
    began = time.monotonic()
    known: dict[str, Setup] = {}
    for name, modes in opts.jobs:
        nodes, nics = figures.bed_of(name)
        with lab_bed(nodes, nics, rate=rate // nics) as bed:
            ends, first = began + opts.budget - 5, name == opts.jobs[0][0]
            setup = known.setdefault(name, Setup(bed, opts, ends, first and not opts.brief))
            setup.bed = bed
            for mode in modes:
                say(f"{name}, {mode} [{time.monotonic() - began:.0f} s]")
                ours = mode_of(mode).base in transports.OURS
                try:
                    (our_job if ours else other_job)(setup, mode, found)
                except RunError as err:
                    found.problems.append(f"{name}, {err}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--jobs",
        default="2x4:balance+sockets+migrate,2x2:balance+sockets,4x2:balance+direct+auto+sockets",
        help=f"NODESxNICS:MODE+MODE,... of {', '.join(MODES)}, or a variant of transports.py",
    )
    p.add_argument(
        "--shares",
        default="60,30",
        help="of communication in a step, in percent",
    )
    p.add_argument("--rate", default="8gbit", help="of a node, shared by its NICs")
    p.add_argument("--brief", action="store_true", help="one NIC lost, none flaps; no restart")
    p.add_argument("--steps", type=int, default=30, help="at most, of a cell")
    p.add_argument("--parallel", choices=("ddp", "fsdp", "megatron"), default="ddp")
    p.add_argument("--dim", type=int, default=512, help="width of the model")
    p.add_argument("--budget", type=float, default=360.0, help="seconds for everything")
    p.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="gloo on CPUs only tries the scripts themselves",
    )
    p.add_argument(
        "--python",
        default=os.environ.get("GPU_PYTHON", sys.executable),
        help="the interpreter that has PyTorch",
    )
    p.add_argument("--json", default=None, metavar="FILE")
    opts = p.parse_args(argv)
    try:
        opts.shares = figures.shares_of(opts.shares)
        opts.jobs = figures.jobs_of(opts.jobs)
        for _, modes in opts.jobs:
            for mode in modes:
                mode_of(mode)
    except (ValueError, transports.TransportError) as err:
        p.error(str(err))
    return opts


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    end_on_term()
    found, began = Found(), time.monotonic()
    try:
        rate = parse_rate(opts.rate)
        if rate is None:
            raise ValueError("--rate none: without a rate the cores are the limit, not the NICs")
        gpus = gpu_count() if opts.backend == "nccl" else 0
        if opts.backend == "nccl" and gpus == 0:
            raise ValueError("no NVIDIA GPU on this machine (no /dev/nvidia0)")
        all_beds(opts, rate, found)
    except TimeUp as err:
        say(f"the time is up, while waiting for {err}: the rest is left out")
    except (transports.TransportError, LabError, ValueError) as err:
        if not found.cells:
            print(f"run_training: {err}", file=sys.stderr)
            return 2
        found.problems.append(str(err))
    result = {
        "schema": 1,
        "ok": not found.problems and bool(found.cells),
        "parallel": opts.parallel,
        "backend": opts.backend,
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "node_rate": rate,
        "rows": figures.rows(found.cells),
        "stalls": found.stalls,
        "restarts": found.restarts,
        "curves": found.curves,
        "problems": found.problems,
    }
    say("\n".join(figures.markdown(result)))
    for problem in found.problems:
        say(f"PROBLEM: {problem}")
    if opts.json:
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(
        f"run_training: {'ok' if result['ok'] else 'FAILED'} after {time.monotonic() - began:.0f} s"
    )
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
