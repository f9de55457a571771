#!/usr/bin/env python3
"""What the network costs a step: of tensor parallel inference, or of matrix products.

    run_steps.py --variants sockets,r2ccl,asleep=r2ccl:R2CCL_SPIN=0 --rate 4gbit
    run_steps.py --work beside --variants sockets,r2ccl,direct=preload:R2CCL_ALLREDUCE=direct

Two nodes, one rank each, the variants in turn.
--work decode: 16 AllReduces of ROWS x 1024 bfloat16 with matrix products between them, in one CUDA
graph, as vLLM decodes. It is timed back to back, 1 ms apart (a scheduler's pause), and with a
prompt's 16 AllReduces of 1 MiB before every fourth; these are timed, too.
--work beside: an AllReduce of 64 MiB on NCCL's stream while the application's stream multiplies
matrices. Each alone, then both at once: what the products lose, and what the AllReduce does.
Prints the median and the 90th percentile in ms; compare ratios of one run.
Exit code 0: all ran; 1: not; 2: usage, or something is missing. --backend gloo: no GPU, no graph.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import transports
from beds import LabBed, LabError, lab_bed
from jobs import Job, gpu_count, shape_for
from run_nccl_tests import end_on_term, say, words

from r2ccl_ctl.lab import parse_rate

DIM, REDUCES, PRODUCTS = 1024, 16, 3
ROWS = (1, 8, 32)
PROMPT_ROWS, PROMPT_EVERY = 512, 4
WARM = 20
STATES = ("back to back", "1 ms apart", "after prompts")
BESIDE_BYTES, BESIDE_DIM, BESIDE_PRODUCTS, BESIDE_STEPS = 64 << 20, 8192, 30, 15
BESIDE_STATES = ("products alone", "AllReduce alone", "products at once", "AllReduce at once")
ROWS_OF = {"decode": len(ROWS) * len(STATES), "beside": len(BESIDE_STATES)}


class Rank:
    """One of two; `step(rows)` is a graph where there is a GPU."""

    def __init__(self, backend: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.cuda = backend == "nccl"
        if self.cuda:
            self.torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = "cuda" if self.cuda else "cpu"
        self.torch.distributed.init_process_group(backend)
        self.weight = self._ones(DIM) * 0.001
        self.prompt_data = self._ones(PROMPT_ROWS)

    def _ones(self, rows: int) -> Any:
        return self.torch.ones(rows, DIM, device=self.device, dtype=self.torch.bfloat16)

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def step(self, rows: int) -> Callable[[], Any]:
        x = self._ones(rows)

        def body() -> None:
            for _ in range(REDUCES):
                y = x
                for _ in range(PRODUCTS):
                    y = y @ self.weight
                self.torch.distributed.all_reduce(y)

        body()
        if not self.cuda:
            return body
        self.sync()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="relaxed"):
            body()
        replay: Callable[[], Any] = graph.replay
        return replay

    def prompt(self) -> None:
        for _ in range(REDUCES):
            self.torch.distributed.all_reduce(self.prompt_data)
        self.sync()

    def beside(self, products: bool, reduces: bool) -> tuple[float, float]:
        """What the products, and the AllReduce, took from the beginning of both, ms."""
        began, multiplied, ended = (self.torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.sync()
        began.record()
        if reduces:
            work = self.torch.distributed.all_reduce(self.summed, async_op=True)
        for _ in range(BESIDE_PRODUCTS if products else 0):
            self.torch.mm(self.square, self.square, out=self.product)
        multiplied.record()
        if reduces:
            work.wait()  # the stream waits, not this thread
        ended.record()
        self.sync()
        return began.elapsed_time(multiplied), began.elapsed_time(ended)

    def all_beside(self) -> Iterator[dict[str, Any]]:
        """Rows of --work beside. Each AllReduce begins at once on both ranks."""
        self.summed = self.torch.zeros(BESIDE_BYTES // 4, device=self.device)
        self.square = self.torch.zeros(BESIDE_DIM, BESIDE_DIM, device=self.device,
                                       dtype=self.torch.bfloat16)
        self.product = self.torch.empty_like(self.square)
        took: dict[str, list[float]] = {state: [] for state in BESIDE_STATES}
        for k in range(BESIDE_STEPS + 3):
            alone, sums = self.beside(True, False)[0], self.beside(False, True)[1]
            both = self.beside(True, True)
            if k >= 3:  # the first choose kernels and connect
                for state, ms in zip(BESIDE_STATES, (alone, sums, *both), strict=True):
                    took[state].append(ms)
        for state in BESIDE_STATES:
            yield {"rows": 0, "state": state, "ms": middle(took[state])}

    def times(self, step: Callable[[], Any], count: int, state: str) -> list[float]:
        """Median and 90th percentile of `count` steps, ms; of the prompts before them, if any."""
        took: list[float] = []
        prompts: list[float] = []
        for k in range(count):
            if state == STATES[2] and k % PROMPT_EVERY == 0:
                began = time.perf_counter()
                self.prompt()
                prompts.append((time.perf_counter() - began) * 1e3)
            if state != STATES[0]:
                time.sleep(0.001)
            began = time.perf_counter()
            step()
            self.sync()
            took.append((time.perf_counter() - began) * 1e3)
        return middle(took) + middle(prompts)

    def all_decode(self, count: int) -> Iterator[dict[str, Any]]:
        """Rows of --work decode."""
        for rows in ROWS:
            step = self.step(rows)
            for _ in range(WARM):
                step()
            self.sync()
            for state in STATES:
                yield {"rows": rows, "state": state, "ms": self.times(step, count, state)}


def middle(of: list[float]) -> list[float]:
    """Median and 90th percentile; nothing of nothing."""
    return [round(value, 3) for value in
            (statistics.median(of), sorted(of)[len(of) * 9 // 10])] if of else []


def be_a_rank(backend: str, work: str, count: int) -> None:
    rank = Rank(backend)
    for row in rank.all_beside() if work == "beside" else rank.all_decode(count):
        if os.environ["RANK"] == "0":
            print(json.dumps(row), flush=True)
    rank.torch.distributed.barrier()
    rank.sync()
    os._exit(0)  # a graph that holds NCCL's communicator keeps PyTorch from destroying it


def run(bed: LabBed, opts: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    variant = transports.parse_variant(name)
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": bed.oob}
    gpus = gpu_count() if opts.backend == "nccl" else 0
    if gpus:
        env |= transports.transport_env(variant, bed.nic_prefix, bed.oob)
    argv = [opts.python, __file__, "--inside", "--backend", opts.backend, "--work", opts.work,
            "--steps", str(opts.steps)]
    job = Job(bed, shape_for(bed.nodes, 1, gpus), argv, env)
    job.start()
    ended = job.wait(opts.timeout)
    rows = [json.loads(text) for _, text in ended.lines if text.startswith('{"rows"')]
    if not ended.ok or len(rows) < ROWS_OF[opts.work]:
        say(f"{opts.work} {variant.name}: FAILED, codes {ended.codes}\n{ended.tail()}")
        return []
    for row in rows:
        say(f"| {variant.name} | {row['rows']} | {row['state']} | {row['ms'][0]}, {row['ms'][1]} |"
            + (f" prompts {row['ms'][2]}, {row['ms'][3]} |" if len(row["ms"]) > 2 else ""))
    return [row | {"variant": variant.name} for row in rows]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", choices=sorted(ROWS_OF), default="decode")
    p.add_argument("--variants", type=words, default=["sockets", "r2ccl"],
                   help=f"of {','.join(transports.VARIANTS)}, or NAME=BASE:KEY=VALUE")
    p.add_argument("--nics", type=int, default=2, help="NICs per node")
    p.add_argument("--rate", default="4gbit", help="of each NIC, or none")
    p.add_argument("--steps", type=int, default=150, help="of each state of decode")
    p.add_argument("--turns", type=int, default=1, help="how often each variant runs")
    p.add_argument("--timeout", type=float, default=60.0, help="seconds for one job")
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl",
                   help="gloo on CPUs only tries the script itself")
    p.add_argument("--python", default=os.environ.get("GPU_PYTHON", sys.executable))
    p.add_argument("--json", default=None, metavar="FILE")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    if opts.work == "beside" and opts.backend == "gloo":
        print("run_steps: --work beside needs a GPU: --backend gloo cannot", file=sys.stderr)
        return 2
    if opts.inside:
        be_a_rank(opts.backend, opts.work, opts.steps)
    end_on_term()
    found: list[list[dict[str, Any]]] = []
    try:
        if opts.backend == "nccl" and gpu_count() == 0:
            raise ValueError("no NVIDIA GPU on this machine (no /dev/nvidia0)")
        with lab_bed(2, opts.nics, rate=parse_rate(opts.rate)) as bed:
            say("| transport | rows | state | ms: median, p90 |\n|---|---|---|---|")
            found = [run(bed, opts, name) for _ in range(opts.turns) for name in opts.variants]
    except (transports.TransportError, LabError, ValueError) as err:
        print(f"run_steps: {err}", file=sys.stderr)
        return 2
    if opts.json:
        Path(opts.json).write_text(json.dumps({"schema": 1, "rows": sum(found, [])}, indent=1))
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
