#!/usr/bin/env python3
"""What users of `vllm serve` see while a NIC fails: over R2CCL, NCCL's sockets, after a restart.

    serving_figures.py --json s.json                 # 2 nodes, tensor parallel; about 330 s
    serving_figures.py --parallel pp --loads 2,6,12
    serving_figures.py --variants r2ccl --budget 170
    serving_figures.py --turns 3 --variants sockets,r2ccl,again=r2ccl:R2CCL_LOG=warn

Nodes are network namespaces whose NICs tc shapes; one rank each, on one GPU by MPS where there are
fewer; a Llama of random weights. An open-loop client (open_loop.py) in node 0 asks at three loads:
TTFT and TPOT of healthy NICs. Then, at the second load, the NIC of node 0 that carries most loses
its carrier for good. R2CCL serves on: figures of those requests, with the NIC lost, and with it
back. Sockets hang: they are watched for --hang seconds, killed, and started anew over the NICs that
are left; the time to the first token is measured.
"through the loss" has the requests that were in flight then, or came within 3 s after it.
With --turns no NIC fails. One server for each variant, all up at once in labs of their own, are
asked in turn. So what the machine does meanwhile meets all of them.
Times are milliseconds: compare ratios only. Exit code 0: R2CCL answered everything; 1: not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import open_loop
import transports
from beds import LabError, lab_bed
from jobs import Bed, Ended, Job, gpu_count, gpu_free_again, shape_for
from journal_watch import JournalWatch
from open_loop import Asked
from run_ddp import Setup
from run_nccl_tests import end_on_term, say, words

from r2ccl_ctl.lab import parse_rate

HERE = Path(__file__).resolve().parent
NEAR_S = 3.0
MARGIN_S = 12.0  # to end the servers and the lab


class FiguresError(Exception):
    """A run that cannot go on; the text says why."""


@dataclass
class Row:
    variant: str
    state: str
    load: float
    figures: dict[str, Any]


@dataclass
class Found:
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Run:
    setup: Setup
    opts: argparse.Namespace
    found: Found
    ends: float  # monotonic seconds: nothing is begun that would end after it

    def room(self, what: str, seconds: float) -> bool:
        left = self.ends - time.monotonic()
        if left < seconds:
            self.found.left_out.append(f"{what}: {seconds:.0f} s needed, {left:.0f} s left")
        return left >= seconds

    def add(self, variant: str, state: str, load: float, asked: Sequence[Asked],
            until: float) -> None:
        row = Row(variant, state, load, open_loop.summary(asked, until))
        self.found.rows.append(row)
        say(line(row))
        why = {one.error for one in asked if one.error}
        if why:
            say(f"  errors: {sorted(why)[:2]}")


class Server:
    """`vllm serve` on all nodes."""

    def __init__(self, run: Run, variant: transports.Variant, env: dict[str, str],
                 until: Path) -> None:
        self._run, self.name = run, variant.name
        own = run.setup.extra_env | {"GLOO_SOCKET_IFNAME": run.setup.bed.oob} | env
        setup = Setup(**(vars(run.setup) | {"extra_env": own}))
        setup.train_args = [*setup.train_args, "--until", str(until)]
        self._until, self._number = until, 0
        self.begun = time.monotonic()
        self.job: Job = setup.job(variant, 0)
        self.job.start()
        self.start = self._wait()

    def _wait(self) -> dict[str, Any]:
        limit = min(self._run.opts.start, self._run.ends - time.monotonic())
        while time.monotonic() - self.begun < limit:
            for _, text in self.job.lines:
                if '"event": "start"' in text:
                    return dict(json.loads(text), seconds=round(time.monotonic() - self.begun, 1))
            if any(proc.poll() is not None for proc in self.job.procs):
                break
            time.sleep(0.05)
        raise FiguresError(f"{self.name}: not up after {time.monotonic() - self.begun:.0f} s\n"
                           f"{self.job.wait(0).tail()}")

    def ask(self, load: float, seconds: float, drain: float = 10.0) -> tuple[list[Asked], float]:
        """What the client met, and when it ended."""
        opts, self._number = self._run.opts, self._number + 1
        argv = [sys.executable, str(HERE / "open_loop.py"), "--port", str(self.start["port"]),
                "--rate", str(load), "--seconds", str(seconds), "--drain", str(drain),
                "--tokens", str(opts.tokens), "--answer", str(opts.answer),
                "--seed", str(opts.seed + self._number)]
        try:
            said = subprocess.run(self._run.setup.bed.command(0, argv), capture_output=True,
                                  timeout=seconds + drain + 20, check=True, text=True).stdout
        except subprocess.CalledProcessError as err:
            raise FiguresError(f"the client ended with {err.returncode}: "
                               f"{err.stderr[-500:]}") from None
        except subprocess.TimeoutExpired:
            raise FiguresError(f"the client did not end in {seconds + drain + 20:.0f} s") from None
        got = json.loads(said)
        return [Asked(**one) for one in got["asked"]], got["until"]

    def phase(self, state: str, load: float, seconds: float) -> list[Asked]:
        asked, until = self.ask(load, seconds)
        self._run.add(self.name, state, load, asked, until)
        return asked

    def end(self, told: bool) -> Ended:
        """In order if told, else all ranks are killed at once."""
        if told:
            self._until.touch()
        return self.job.wait(20.0 if told else 0.0)


@contextmanager
def server(run: Run, variant: transports.Variant,
           env: dict[str, str] | None = None) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        one = Server(run, variant, env or {}, Path(folder) / "until")
        try:
            say(f"{one.name}: up after {one.start['seconds']} s, vLLM {one.start['vllm']}")
            yield one
        finally:
            one.job.kill()


def carried(bed: Bed) -> list[int]:
    """Bytes that each NIC of node 0 has sent."""
    text = subprocess.run(bed.command(0, ["cat", "/proc/self/net/dev"]), capture_output=True,
                          text=True, timeout=10, check=True).stdout
    sent = {parts[0].strip(): int(parts[1].split()[8]) for parts in
            (one.split(":", 1) for one in text.splitlines() if ":" in one)}
    return [sent.get(f"{bed.nic_prefix}{nic}", 0) for nic in range(bed.nics)]


def healthy(run: Run, one: Server) -> int:
    """All loads, after one that is not counted. Returns the NIC that carried most."""
    opts = run.opts
    one.ask(opts.loads[-1], opts.warm, 20.0)
    before = carried(run.setup.bed)
    for load in opts.loads:
        if run.room(f"{one.name}, healthy, {load:g}/s", opts.seconds + 5):
            one.phase("healthy", load, opts.seconds)
    sent = [b - a for a, b in zip(before, carried(run.setup.bed), strict=True)]
    run.found.notes[f"{one.name} bytes"] = sent
    return sent.index(max(sent))


def through_loss(run: Run, one: Server, nic: int, seconds: float, drain: float) -> float:
    """One load while that NIC is lost after a third of it. Returns when."""
    load, at = run.opts.loads[1], [0.0]

    def lose() -> None:
        at[0] = time.monotonic()
        run.setup.bed.fail(0, nic, "carrier")

    timer = threading.Timer(seconds / 3, lose)
    timer.start()
    try:
        asked, until = one.ask(load, seconds, drain)
    finally:
        timer.join()
    near = [a for a in asked
            if a.due < at[0] + NEAR_S and (not a.whole or a.tokens[-1] > at[0])]
    run.add(one.name, "through the loss", load, near, until)
    later = [a for a in asked if a.due >= at[0] + NEAR_S]
    run.found.notes[f"{one.name} later"] = open_loop.summary(later, until)
    return at[0]


def ours(run: Run, variant: transports.Variant) -> None:
    opts = run.opts
    with JournalWatch(variant.base in transports.OURS) as watch, server(run, variant) as one:
        nic = healthy(run, one)
        if not run.room(f"{one.name}, the loss", opts.seconds + 10):
            return
        try:
            through_loss(run, one, nic, opts.seconds, 10.0)
            if run.room(f"{one.name}, after the loss", opts.seconds + 5):
                one.phase("NIC lost", opts.loads[1], opts.seconds)
        finally:
            run.setup.bed.recover(0, nic)
        if run.room(f"{one.name}, NIC back", opts.seconds + 5):
            time.sleep(1)
            one.phase("NIC back", opts.loads[1], opts.seconds)
        ended = one.end(True)
    lost = sum(all(w in str(e.get("event", "")) for w in ("path", "down")) for e in watch.of(None))
    run.found.notes[f"{one.name} paths seen to go down"] = lost
    unanswered = sum(row.figures["unanswered"] for row in run.found.rows
                     if row.variant == variant.name)
    if unanswered or (variant.base in transports.OURS and not lost):
        run.found.problems.append(f"{variant.name}: {unanswered} requests without a whole answer, "
                                  f"{lost} paths seen to go down\n{ended.tail(800)}")


def restart(run: Run, variant: transports.Variant, nic: int, lost_at: float,
            killed: float) -> None:
    """What a user does: the same server anew, over the NICs that are left."""
    opts, bed = run.opts, run.setup.bed
    left = ",".join(f"{bed.nic_prefix}{n}" for n in range(bed.nics) if n != nic)
    with server(run, variant, {"NCCL_SOCKET_IFNAME": f"={left}"}) as one:
        asked, _ = one.ask(10.0, 1.0, 20.0)
        first = min((a.tokens[0] for a in asked if a.tokens), default=None)
        if first is None:
            raise FiguresError(f"no token after the restart: {[a.error for a in asked]}")
        run.found.notes[f"{variant.name} restart"] = {
            "kill_to_first_token_s": round(first - killed, 1),
            "loss_to_first_token_s": round(first - lost_at, 1)}
        say(f"{variant.name}: {first - killed:.1f} s from the kill to the first token, "
            f"{first - lost_at:.1f} s from the loss")
        if run.room(f"{variant.name}, restarted", opts.warm + opts.seconds + 5):
            one.ask(opts.loads[-1], opts.warm, 20.0)
            one.phase("restarted, NIC lost", opts.loads[1], opts.seconds)


def theirs(run: Run, variant: transports.Variant) -> None:
    opts = run.opts
    with server(run, variant) as one:
        nic = healthy(run, one)
        if not run.room(f"{variant.name}, the loss", opts.hang + 20):
            return
        seconds = opts.hang * 0.75  # of which the NIC is lost for two thirds
        lost_at = through_loss(run, one, nic, seconds, opts.hang - seconds * 2 / 3)
        killed = time.monotonic()
        one.end(False)
    waited = gpu_free_again()  # of MPS, not of a restart: not charged
    killed, lost_at = killed + waited, lost_at + waited
    run.found.notes[f"{variant.name} GPU free again after"] = round(waited, 1)
    try:
        if run.room(f"{variant.name}, restart", one.start["seconds"] + 10):
            restart(run, variant, nic, lost_at, killed)
    finally:
        run.setup.bed.recover(0, nic)


def by_turns(run: Run, beds: Sequence[Bed], gpus: int) -> None:
    """A server of each variant in a lab of its own; the same loads to each, in turn."""
    opts = run.opts

    def begin(bed: Bed, name: str) -> Server | None:
        own = replace(run, setup=setup_of(bed, opts, gpus))
        try:
            return Server(own, transports.parse_variant(name), {}, Path(folder) / "until")
        except FiguresError as err:
            run.found.problems.append(str(err))
            return None

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        with ThreadPoolExecutor(len(beds)) as pool:
            servers = [one for one in pool.map(begin, beds, opts.variants) if one]
        for one in servers:
            stack.callback(one.job.kill)
            say(f"{one.name}: up after {one.start['seconds']} s, vLLM {one.start['vllm']}")
        for one in servers:
            one.ask(opts.loads[-1], opts.warm, 20.0)
        for turn in range(1, opts.turns + 1):
            for load in opts.loads:
                for one in servers:
                    if run.room(f"{one.name}, turn {turn}, {load:g}/s", opts.seconds + 5):
                        one.phase(f"turn {turn}", load, opts.seconds)


def line(row: Row) -> str:
    f = row.figures

    def cell(name: str) -> str:
        return "none" if f[name] is None else f"{f[name]:.1f}"

    return (f"| {row.variant} | {row.state} | {row.load:g} | {f['requests']} | {f['unanswered']} | "
            + " | ".join(cell(n) for n in
                         ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "gap_max")) + " |")


def table(found: Found) -> list[str]:
    return ["| variant | state | requests/s | requests | unanswered | TTFT p50 | p99 | TPOT p50 | "
            "p99 | longest wait for a token |", "|---" * 10 + "|", *map(line, found.rows)]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", type=words, default=["r2ccl", "sockets"],
                   help=f"of {','.join(transports.VARIANTS)}, or NAME=BASE:KEY=VALUE")
    p.add_argument("--parallel", choices=("tp", "pp"), default="tp", help="over the nodes")
    p.add_argument("--loads", type=numbers, default=[5.0, 15.0, 30.0], help="requests a second")
    p.add_argument("--turns", type=int, default=0, help="healthy only, all variants in turn")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--seconds", type=float, default=10.0, help="of each load")
    p.add_argument("--warm", type=float, default=4.0, help="seconds of load that are not counted")
    p.add_argument("--hang", type=float, default=15.0, help="seconds without the NIC before a kill")
    p.add_argument("--start", type=float, default=120.0, help="seconds for a server to be up")
    p.add_argument("--tokens", type=int, default=512, help="of a prompt")
    p.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--graph", type=int, default=1, help="0: without CUDA graphs")
    p.add_argument("--nics", type=int, default=2, help="NICs per node")
    p.add_argument("--rate", default="4gbit", help="of each NIC")
    p.add_argument("--budget", type=float, default=330.0, help="seconds for everything")
    p.add_argument("--python", default=os.environ.get("GPU_PYTHON", sys.executable))
    p.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    p.add_argument("--json", default=None, metavar="FILE")
    opts = p.parse_args(argv)
    if len(opts.loads) < 2:
        p.error(f"--loads {','.join(map(str, opts.loads))}: name two or more")
    for pair in opts.env:
        if "=" not in pair:
            p.error(f"--env '{pair}': write KEY=VALUE")
    return opts


def setup_of(bed: Bed, opts: argparse.Namespace, gpus: int) -> Setup:
    args = ["--batch", "64", "--tokens", str(opts.tokens), "--answer", str(opts.answer),
            "--layers", str(opts.layers), "--dim", str(opts.dim), "--graph", str(opts.graph),
            *(["--pp", "2"] if opts.parallel == "pp" else [])]
    return Setup(bed, shape_for(2, 1, gpus), opts.python, "nccl", 0, opts.budget, args,
                 dict(pair.split("=", 1) for pair in opts.env), HERE / "vllm_serve.py")


def run_all(beds: Sequence[Bed], opts: argparse.Namespace, gpus: int, found: Found) -> None:
    """What goes wrong with one variant is written down, and the next one runs."""
    ends = time.monotonic() + opts.budget - MARGIN_S
    run = Run(setup_of(beds[0], opts, gpus), opts, found, ends)
    if opts.turns:
        by_turns(run, beds, gpus)
        return
    for name in opts.variants:
        variant = transports.parse_variant(name)
        if not run.room(name, 60):
            continue
        try:
            (ours if variant.base in transports.OURS else theirs)(run, variant)
        except FiguresError as err:
            found.problems.append(f"{name}: {err}")


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    end_on_term()
    found, begun = Found(), time.monotonic()
    try:
        gpus = gpu_count()
        if gpus == 0:
            raise ValueError("no NVIDIA GPU on this machine (no /dev/nvidia0)")
        with ExitStack() as labs:
            run_all([labs.enter_context(lab_bed(2, opts.nics, rate=parse_rate(opts.rate), number=k))
                     for k in range(len(opts.variants) if opts.turns else 1)], opts, gpus, found)
    except (transports.TransportError, LabError, ValueError) as err:
        print(f"serving_figures: {err}", file=sys.stderr)
        return 2
    say("\n".join(table(found)))
    say("\n".join([f"{k}: {v}" for k, v in found.notes.items()]
                  + [f"left out: {text}" for text in found.left_out]
                  + [f"PROBLEM: {text}" for text in found.problems]))
    good = bool(found.rows) and not found.problems
    if opts.json:
        Path(opts.json).write_text(json.dumps({
            "schema": 1, "ok": good, "parallel": opts.parallel, "nics": opts.nics,
            "rate": opts.rate, "gpus": gpus, "rows": [vars(row) for row in found.rows],
            "notes": found.notes, "left_out": found.left_out, "problems": found.problems,
        }, indent=1) + "\n", encoding="utf-8")
    say(f"serving_figures: {'ok' if good else 'FAILED'} after {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
