#!/usr/bin/env python3
"""PyTorch DDP over emulated nodes: the same loss curve, bit for bit, with and without failures.

    run_ddp.py exact --nics 2 --scenarios one,row,replay,silent   # through failures, bit-identical
    run_ddp.py kill                                               # others get an error in seconds
    run_ddp.py stall --train stall=30 --train limit=10            # the watchdog ends the others
    run_ddp.py exact --nodes 4 --variants direct=preload:R2CCL_ALLREDUCE=direct
    run_ddp.py exact --program ctypes_app.py --variants dlopen    # NCCL by dlopen, as vLLM has it
    run_ddp.py exact --program jax_app.py --variants dlopen       # JAX; cupy_app.py: CuPy
    run_ddp.py exact --program megatron_train.py --variants preload --train tp=2   # Megatron-Core
    run_ddp.py exact --program megatron_lm.py --variants preload --train tp=2   # pretrain_gpt.py
    run_ddp.py exact --program megatron_lm.py --rate 4gbit --variants sockets --scenarios ''
    run_ddp.py exact --program vllm_app.py --variants dlopen --steps 60   # vLLM, tensor parallel
    run_ddp.py hang --variants sockets --watch 60                 # the baseline under the same

`exact` runs the loop twice without failures first; only when these agree does a comparison say
anything. `hang` takes one NIC away and reports what the transport does: it fails if the job goes
on, so that the row of the baseline stays true. step_ms: the usual step before, between and after
the failures. Exit code 1: a failed check; 2: usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transports
from beds import LabError, lab_bed
from faults import SCENARIOS, Event, FaultError, FaultThread, parse_schedule, scenario
from jobs import Bed, Ended, Job, Shape, gpu_count, largest_gap, shape_for
from journal_watch import run_watched
from run_nccl_tests import end_on_term, say, words

from r2ccl_ctl.lab import parse_rate

HERE = Path(__file__).resolve().parent
PROGRAMS = ("ddp_train.py", "megatron_train.py", "megatron_lm.py", "ctypes_app.py", "cupy_app.py",
            "jax_app.py", "vllm_app.py", "vllm_serve.py")
OPEN_NCCL = PROGRAMS[3:]  # by its name
OWN_PROCESSES = ("vllm_serve.py",)  # programs whose ranks leave NCCL to processes that they start
SETTLE_STEPS = 3
# One torchrun per rank, each a node of its own: it starts one worker, and gives it the variables.
TORCHRUN = ('exec "$0" -m torch.distributed.run --nnodes="$WORLD_SIZE" --node-rank="$RANK" '
            '--nproc-per-node=1 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"')


@dataclass
class Setup:
    bed: Bed
    shape: Shape
    python: str
    backend: str
    steps: int
    timeout: float
    train_args: list[str]
    extra_env: dict[str, str]
    program: Path = HERE / "ddp_train.py"
    torchrun: bool = False

    @property
    def ranks_call_nccl(self) -> bool:
        """Whether the processes that are started here are those whose journals count."""
        return not self.torchrun and self.program.name not in OWN_PROCESSES

    def job(self, variant: transports.Variant, steps: int,
            on_line: Callable[[float, str], None] | None = None) -> Job:
        env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if self.backend == "nccl":
            env |= transports.transport_env(variant, self.bed.nic_prefix, self.bed.oob)
            env.setdefault("NCCL_DEBUG", "WARN")
            if self.program.name in OPEN_NCCL:
                env["LD_LIBRARY_PATH"] = transports.library_path(transports.find_nccl())
        else:
            env["GLOO_SOCKET_IFNAME"] = self.bed.oob
        argv = [str(self.program), "--steps", str(steps), "--backend", self.backend,
                *self.train_args]
        argv = ["sh", "-c", TORCHRUN, self.python, *argv] if self.torchrun else [self.python, *argv]
        return Job(self.bed, self.shape, argv, env | self.extra_env, on_line)


@dataclass
class Curve:
    """What a run printed: the loss of every step (rank 0) and the digests of every rank."""

    losses: list[str] = field(default_factory=list)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def differences(self, other: Curve) -> list[str]:
        """Where two curves differ, at most ten entries; empty when they are bit-identical."""
        found = []
        if len(self.losses) != len(other.losses):
            found.append(f"{len(self.losses)} steps against {len(other.losses)}")
        for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=False)):
            if a != b:
                found.append(f"loss of step {i + 1}: {a} against {b}")
                break
        for key in sorted(self.digests.keys() | other.digests.keys()):
            if self.digests.get(key) != other.digests.get(key):
                found.append(f"digests of {key} differ")
        return found[:10]


def step_of(text: str) -> int | None:
    """The number of the step that a line reports, or None."""
    if '"event": "step"' not in text:
        return None
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError):
        return None


def read_curve(ended: Ended) -> Curve:
    """Collects the JSON lines of all ranks; other lines are passed over."""
    curve = Curve()
    texts = [t for _, t in ended.lines]
    for log in ended.logs:
        texts.extend(log.splitlines())
    for text in texts:
        if not text.startswith("{"):
            continue
        try:
            item = json.loads(text)
        except ValueError:
            continue
        event = item.get("event")
        if event == "step":
            curve.losses.append(item["loss"])
        elif event in ("report", "end"):
            key = f"rank {item['rank']} step {item.get('step', 'end')}"
            curve.digests[key] = (item["losses"], item["weights"])
        if event == "start":
            curve.start = item
        if event == "end" and item["rank"] == 0:
            curve.seconds = item["seconds"]
    return curve


def usual_steps(ends: Sequence[float], events: Sequence[float]) -> list[float | None]:
    """Median milliseconds of a step before, between and after the events. Left out: a step that
    spans an event, and three more. None where too few are left. Both are monotonic seconds."""
    found: list[float | None] = []
    for begin, end in itertools.pairwise([0.0, *events, float("inf")]):
        own = [t for t in ends if begin <= t < end]
        took = [b - a for a, b in itertools.pairwise(own)][SETTLE_STEPS:]
        found.append(round(statistics.median(took) * 1000, 1) if took else None)
    return found


def one_run(setup: Setup, variant: transports.Variant, label: str,
            events: Sequence[Event] = ()) -> tuple[dict[str, Any], Curve]:
    """One training run; with events, NICs fail in its middle."""
    thread = FaultThread(setup.bed, events)

    def on_line(_now: float, text: str) -> None:
        step = step_of(text)
        if step is not None:
            thread.progress(step / setup.steps)

    job = setup.job(variant, setup.steps, on_line)
    ours = bool(events) and variant.base in transports.OURS and setup.backend == "nccl"
    ended, complete, watch = run_watched(job, thread, setup.timeout, ours)
    curve = read_curve(ended)
    steps = [(t, x) for t, x in ended.lines if step_of(x) is not None]
    gaps = [round(largest_gap(steps, d.began, d.began + 1.0) * 1000, 1) for d in thread.done]
    usual = usual_steps([t for t, _ in steps], [d.began for d in thread.done])
    good = ended.ok and complete and len(curve.losses) == setup.steps
    result: dict[str, Any] = {
        "label": label, "variant": variant.name, "ok": good, "steps": len(curve.losses),
        "events": [d.to_json(ended.started) for d in thread.done], "events_complete": complete,
        "step_gap_ms": gaps, "step_ms": usual, "train_s": curve.seconds, **ended.summary(),
    }
    if ours:
        result["journal"] = watch.of(ended.pids if setup.ranks_call_nccl else None)
    say(f"ddp {label}: {'ok' if good else 'FAILED'} {len(curve.losses)}/{setup.steps} steps, "
        f"codes {ended.codes}, events {len(thread.done)}/{len(events)}, gaps_ms {gaps}, "
        f"step_ms {usual}, train {curve.seconds} s, in {ended.wall_s:.1f} s")
    if not good:
        say(ended.tail())
    return result, curve


def exact(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for name in opts.variants:
        variant = transports.parse_variant(name)
        first, truth = one_run(setup, variant, f"{name} fault-free 1")
        runs.append(first)
        sound = first["ok"]
        say(f"ddp {name}: {truth.start}")
        if opts.baselines > 1:
            again, second = one_run(setup, variant, f"{name} fault-free 2")
            same = truth.differences(second)
            again["differences"] = same
            again["ok"] = again["ok"] and not same
            sound = sound and again["ok"]
            runs.append(again)
            say(f"ddp {name}: two fault-free runs {'agree bitwise' if not same else same}")
        if not sound:
            continue
        for text in opts.scenarios:
            nics = setup.bed.nics
            events = parse_schedule(text) if ":" in text else scenario(text, nics)
            run, curve = one_run(setup, variant, f"{name} {text}", events)
            run["differences"] = truth.differences(curve)
            run["ok"] = run["ok"] and not run["differences"]
            say(f"ddp {name} {text}: "
                f"{'bit-identical' if not run['differences'] else run['differences']}")
            runs.append(run)
    return {"ok": bool(runs) and all(r["ok"] for r in runs), "runs": runs}


def wait_for_steps(job: Job, count: int, timeout: float) -> bool:
    """False: not within that time, or every rank ended first."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(proc.poll() is None for proc in job.procs):
        if sum(1 for _, text in job.lines if step_of(text) is not None) >= count:
            return True
        time.sleep(0.01)
    return False


def kill(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """Kills the last rank in the middle; every other one must be told so in time.

    How long PyTorch then takes to end its process (dumps, watchdogs) is its own affair."""
    runs = []
    for name in opts.variants:
        job = setup.job(transports.parse_variant(name), 10**6)
        job.start()
        ready = wait_for_steps(job, 20, setup.timeout)
        killed = job.kill_rank(setup.shape.world - 1)
        told: list[float | None] = [None] * (setup.shape.world - 1)

        def all_told(job: Job = job, told: list[float | None] = told,
                     killed: float = killed) -> bool:
            for rank, when in enumerate(told):
                if when is None and job.wrote(rank, b"ncclRemoteError"):
                    told[rank] = round(time.monotonic() - killed, 3)
            return None not in told

        ended = job.wait(opts.within + 5, all_told)
        good = ready and all(t is not None and t <= opts.within for t in told)
        runs.append({"variant": name, "ok": good, "others_told_after_s": told, **ended.summary()})
        say(f"ddp kill {name}: {'ok' if good else 'FAILED'}: the other ranks were told "
            f"{told} s after, codes {ended.codes}")
        if not good:
            say(ended.tail())
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


def stall(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """The last rank stops calling NCCL: PyTorch's watchdog must abort the others' communicators and
    end them, as it does without R2CCL. Give --train limit=SECONDS, the process group's time-out.
    PyTorch writes dumps first and waits a minute for them: that is switched off and shortened."""
    setup.extra_env = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                       "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"} | setup.extra_env
    runs = []
    for name in opts.variants:
        job = setup.job(transports.parse_variant(name), 10**6)
        job.start()
        ready = wait_for_steps(job, 20, setup.timeout)
        began = time.monotonic()

        def others(job: Job = job) -> bool:
            return all(proc.poll() is not None for proc in job.procs[:-1])

        ended = job.wait(opts.watch, others)
        took = [None if t is None else round(t - began, 1) for t in ended.ended_at[:-1]]
        good = ready and all(code not in (None, 0) for code in ended.codes[:-1])
        runs.append({"variant": name, "ok": good, "others_ended_after_s": took, **ended.summary()})
        say(f"ddp stall {name}: {'ok' if good else 'FAILED'}: the other ranks ended after {took} s "
            f"with codes {ended.codes[:-1]}")
        if not good:
            say(ended.tail())
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


def hang(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """Takes one NIC away from a transport without failover and watches what happens."""
    runs = []
    for name in opts.variants:
        job = setup.job(transports.parse_variant(name), 10**6)
        job.start()
        ready = wait_for_steps(job, 20, setup.timeout)
        setup.bed.fail(0, setup.bed.nics - 1, "carrier")
        failed = time.monotonic()
        ended = job.wait(opts.watch)
        setup.bed.recover(0, setup.bed.nics - 1)
        later = [t for t, x in ended.lines if step_of(x) is not None and t > failed + 1.0]
        if not ready:
            verdict = "never started"
        elif later:
            verdict = "went on"
        else:
            verdict = "hung" if ended.timed_out else "ended with an error"
        runs.append({"variant": name, "ok": ready and not later, "verdict": verdict,
                     "watched_s": opts.watch, "steps_later_than_1s": len(later),
                     **ended.summary()})
        say(f"ddp hang {name}: {verdict} (watched {opts.watch:g} s after n0's last NIC lost its "
            f"carrier; codes {ended.codes})")
        if not ready:
            say(ended.tail())
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


COMMANDS: dict[str, Callable[[Setup, argparse.Namespace], dict[str, Any]]] = {
    "exact": exact, "kill": kill, "hang": hang, "stall": stall,
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=sorted(COMMANDS))
    p.add_argument("--variants", type=words, default=["r2ccl"],
                   help=f"of {','.join(transports.VARIANTS)}, or NAME=BASE:KEY=VALUE")
    p.add_argument("--scenarios", type=words, default=["one", "row", "replay", "silent"],
                   help=f"of {','.join(SCENARIOS)}, or events AT:ACTION:nX:nicY,...")
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--nics", type=int, default=2)
    p.add_argument("--ranks-per-node", type=int, default=0, help="default: GPUs / nodes")
    p.add_argument("--lab-variant", default="rail-only")
    p.add_argument("--rate", default="none", help="of each NIC, such as 4gbit; default: unshaped")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--baselines", type=int, choices=(1, 2), default=2,
                   help="exact: runs without failures; 1 where a program is known to repeat itself")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds for one run")
    p.add_argument("--within", type=float, default=5.0, help="kill: seconds for the others")
    p.add_argument("--watch", type=float, default=60.0, help="hang, stall: seconds to watch")
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl",
                   help="gloo on CPUs only tries the scripts themselves")
    p.add_argument("--python", default=os.environ.get("GPU_PYTHON", sys.executable),
                   help="the interpreter that has PyTorch")
    p.add_argument("--program", choices=PROGRAMS, default=PROGRAMS[0])
    p.add_argument("--torchrun", action="store_true",
                   help="start each rank by a torchrun of its own (one rank per node)")
    p.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    p.add_argument("--train", action="append", default=[], metavar="OPTION=VALUE",
                   help="an option of the program, such as layers=2")
    p.add_argument("--json", default=None, metavar="FILE")
    return p


def train_args(pairs: Sequence[str]) -> list[str]:
    args = []
    for pair in pairs:
        name, eq, value = pair.partition("=")
        if not eq:
            raise ValueError(f"--train '{pair}': write OPTION=VALUE")
        args += [f"--{name}", value]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    opts = parser().parse_args(argv)
    end_on_term()
    try:
        gpus = gpu_count() if opts.backend == "nccl" else 0
        if opts.backend == "nccl" and gpus == 0:
            raise ValueError("no NVIDIA GPU on this machine (no /dev/nvidia0)")
        per_node = opts.ranks_per_node or max(1, gpus // opts.nodes)
        with lab_bed(opts.nodes, opts.nics, opts.lab_variant, parse_rate(opts.rate)) as bed:
            setup = Setup(bed, shape_for(opts.nodes, per_node, gpus), opts.python, opts.backend,
                          opts.steps, opts.timeout, train_args(opts.train),
                          dict(pair.split("=", 1) for pair in opts.env),
                          HERE / opts.program, opts.torchrun)
            result = COMMANDS[opts.command](setup, opts)
    except (FaultError, transports.TransportError, LabError, ValueError) as err:
        print(f"run_ddp: {err}", file=sys.stderr)
        return 2
    result |= {"schema": 1, "command": opts.command, "nodes": opts.nodes, "nics": opts.nics,
               "gpus": gpus, "ranks_per_node": per_node, "steps": opts.steps}
    if opts.json:
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n")
    say(f"run_ddp {opts.command}: {'ok' if result['ok'] else 'FAILED'}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
