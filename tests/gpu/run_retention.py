#!/usr/bin/env python3
"""What collectives keep after one of a node's NICs is lost: 1 of 2, 1 of 4, 1 of 8.

    run_retention.py                                    # nccl-tests, 2 nodes, 8 MiB to 512 MiB
    run_retention.py --nics 8,4,2 --rate 1gbit,2gbit,4gbit --budget 350 --json r.json
    run_retention.py --standin --rate 50mbit --min 2M --max 2M      # without a GPU

Nodes are network namespaces with veth NICs that tc shapes. For each operation and number of NICs a
healthy job and one whose last node loses its last NIC take turns. The NIC goes while nccl-tests
warms up, with the stand-in when the first size, smaller than --min, is done; that size does not
count. Prints bytes over time of both, the share that is kept, and the part of what is left,
(k-1)/k, that this is. NCCL_TESTS names the folder of nccl-tests (README.md here).
Ends within --budget seconds: what does not fit is left out, the last repetitions first.
Exit code 0: what ran was right, no value wrong; 1: not; 2: usage, or something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nccl_output
import transports
from beds import LabBed, LabError, lab_bed
from jobs import Job, Shape, gpu_count, shape_for
from run_nccl_tests import OPS, end_on_term

from r2ccl_ctl.lab import parse_rate

PAPER = (0.85, 0.89)  # of the healthy rate, one NIC of eight lost: its authors' figure
MORE_THAN_LEFT = 1.05  # more than the NICs that are left can carry
WARM_S = 0.3  # after nccl-tests' heading: it warms up, its connections are made
LEAST_USED = 0.9  # of the NICs' rate, by the healthy job; more than all is an error of measurement


@dataclass
class Cell:
    """Times in us of one operation and size on k NICs: bandwidths are printed with few digits."""

    op: str
    nics: int
    size: int
    healthy: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def to_json(self, rate: float, nodes: int) -> dict[str, Any]:
        """rate: bytes per second of a NIC. used: what the healthy job took of its NICs."""
        healthy, lost = statistics.median(self.healthy), statistics.median(self.lost)
        share = healthy / lost
        each = {"all_reduce": 2 * (nodes - 1) / nodes, "sendrecv": 1, "broadcast": 1}
        wire = self.size * each.get(self.op, (nodes - 1) / nodes)
        return {
            "op": self.op,
            "nics": self.nics,
            "size": self.size,
            "rate": round(rate * 8),
            "runs": len(self.lost),
            "healthy_gbs": self.size / healthy / 1e3,
            "lost_gbs": self.size / lost / 1e3,
            "used": round(wire / healthy * 1e6 / (self.nics * rate), 3),
            "share": round(share, 3),
            "of_left": round(share * self.nics / (self.nics - 1), 3),
        }


Cells = dict[tuple[str, int, int], Cell]


def add(
    cells: Cells, op: str, nics: int, lost: bool, least: int, rows: Iterable[nccl_output.Row]
) -> None:
    """Rows of sizes below `least` were before the loss, or in it."""
    for row in rows:
        if row.size >= least:
            cell = cells.setdefault((op, nics, row.size), Cell(op, nics, row.size))
            (cell.lost if lost else cell.healthy).append(row.out_of_place.time_us)


def summary(cells: Cells, rates: dict[int, int], nodes: int) -> list[dict[str, Any]]:
    """Of the cells that have both. rates: bits per second of a NIC where there are k of them."""
    return [
        cell.to_json(rates[cell.nics] / 8, nodes)
        for _, cell in sorted(cells.items())
        if cell.healthy and cell.lost
    ]


def figure(row: dict[str, Any]) -> bool:
    """Whether the NICs were what limited the job; else its row says nothing of them."""
    return bool(row["of_left"] <= MORE_THAN_LEFT and LEAST_USED <= row["used"] <= MORE_THAN_LEFT)


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| operation | NICs | MiB | healthy GB/s | one lost | share | of what is left |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        note = ""
        if not figure(row):
            note = " (no figure: not the NICs' rate)"
        elif row["nics"] == 8:
            met = "met" if row["share"] >= PAPER[0] else "missed"
            note = f" (paper's 0.85 to 0.89: {met})"
        lines.append(
            f"| {row['op']} | {row['nics']} | {row['size'] / (1 << 20):g} | "
            f"{row['healthy_gbs']:.4g} | {row['lost_gbs']:.4g} | {row['share']:.3f}{note} | "
            f"{row['of_left']:.3f} |"
        )
    return lines


def say(text: str) -> None:
    print(text, flush=True)


def as_bytes(text: str) -> int:
    unit = text[-1:].upper()
    if unit not in ("K", "M", "G") or not text[:-1].isdecimal() or not int(text[:-1]):
        raise ValueError(f"size '{text}': a whole number with K, M or G")
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]


@dataclass
class Setup:
    opts: argparse.Namespace
    shape: Shape
    least: int
    ends: float  # monotonic seconds: nothing is begun that may end after it

    def lose_at(self, text: str) -> bool:
        """Whether this line of the job is where its NIC goes."""
        if self.opts.standin:
            return nccl_output.parse_row(text) is not None
        return "out-of-place" in text

    def job(self, bed: LabBed, op: str, on_line: Any) -> Job:
        opts = self.opts
        args = [
            "-b",
            str(self.least // opts.factor),
            "-e",
            str(as_bytes(opts.max)),
            "-f",
            str(opts.factor),
            "-n",
            str(opts.iters),
            "-w",
            "2" if opts.standin else "1",
            "-c",
            "1",
        ]
        env = transports.transport_env(transports.parse_variant("r2ccl"), bed.nic_prefix, bed.oob)
        if opts.standin:
            argv = [str(transports.ROOT / "build" / "r2ccl_perf"), "--op", op, *args]
            places: list[Path | None] = [transports.ROOT / "build" / "hostnccl"]
            env |= {"HOSTNCCL_HARSH": "off", "NCCL_PROTO": "Simple"}
        else:
            tests = Path(transports.required("NCCL_TESTS"))
            argv = [str(tests / f"{op}_perf"), *args]
            places = [transports.find_nccl(), tests]  # libmpi.so is beside the programs
            if not Path(argv[0]).is_file():
                raise ValueError(f"{argv[0]} does not exist: set NCCL_TESTS to where nccl-tests is")
        env["LD_LIBRARY_PATH"] = transports.library_path(*places)
        env.setdefault("NCCL_DEBUG", "WARN")
        return Job(bed, self.shape, argv, env, on_line)


def rows_after(rows: Sequence[float], gone: float, standin: bool) -> bool:
    """Whether the rows that count came after the loss. rows: when each was printed."""
    return bool(gone) and (standin or rows[0] > gone)


def run_one(setup: Setup, bed: LabBed, op: str, lost: bool, cells: Cells) -> bool:
    """One job; whether it was right, and lost its NIC in time."""
    node, nic, gone = bed.nodes - 1, bed.nics - 1, 0.0
    timer: threading.Timer | None = None

    def lose() -> None:
        nonlocal gone
        bed.fail(node, nic, "carrier")
        gone = time.monotonic()

    def on_line(_now: float, text: str) -> None:
        nonlocal timer
        if lost and timer is None and setup.lose_at(text):
            timer = threading.Timer(0 if setup.opts.standin else WARM_S, lose)
            timer.start()

    job = setup.job(bed, op, on_line)
    job.start()
    try:
        ended = job.wait(max(1.0, min(setup.opts.timeout, setup.ends - time.monotonic())))
    finally:
        if timer:
            timer.join()
            bed.recover(node, nic)
    out = nccl_output.parse_output(text for _, text in ended.lines)
    good = ended.ok and out.wrong == 0 and not out.out_of_bounds and len(out.rows) > 1
    printed = [now for now, text in ended.lines if nccl_output.parse_row(text)]
    if good and lost and not rows_after(printed, gone, setup.opts.standin):
        say("the NIC went too late: larger sizes, or a lower --rate")
        good = False
    state = f"1 of {bed.nics} lost" if lost else f"{bed.nics} healthy"
    say(f"{op}, {state}: {'ok' if good else 'FAILED'} in {ended.wall_s:.1f} s")
    if good:
        add(cells, op, bed.nics, lost, setup.least, out.rows)
    else:
        say(ended.tail())
    return good


def run_all(setup: Setup, rates: dict[int, int], cells: Cells) -> bool:
    """Every operation once on each number of NICs, then all again."""
    good, longest = True, dict.fromkeys(rates, 0.0)
    for rep in range(setup.opts.reps):
        for nics, rate in rates.items():
            with lab_bed(setup.opts.nodes, nics, rate=rate) as bed:
                for op in setup.opts.ops:
                    begun = time.monotonic()
                    if begun + longest[nics] > setup.ends:
                        say(f"{op}, {nics} NICs, repetition {rep + 1}: left out, no time left")
                        continue
                    for lost in (False, True):
                        good = run_one(setup, bed, op, lost, cells) and good
                    longest[nics] = max(longest[nics], time.monotonic() - begun)
    return good


def rates_of(nics: Sequence[int], text: str) -> dict[int, int]:
    """One rate for every number of NICs, or one each."""
    words = text.split(",")
    if len(words) not in (1, len(nics)):
        raise ValueError(f"--rate {text}: one rate, or one for each of --nics")
    rates = {}
    for number, word in zip(nics, words * (len(nics) // len(words)), strict=True):
        rate = parse_rate(word)
        if rate is None:
            raise ValueError("--rate none: without a rate the cores are the limit, not the NICs")
        rates[number] = rate
    return rates


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--nics", default="2,4,8", help="NICs per node, one lab for each number")
    p.add_argument("--rate", default="1gbit", help="of each NIC, or one for each of --nics")
    p.add_argument("--ops", default=",".join(OPS))
    p.add_argument("--min", default="8M")
    p.add_argument("--max", default="512M")
    p.add_argument("--factor", type=int, default=4, help="between sizes")
    p.add_argument("--iters", type=int, default=5)
    p.add_argument("--reps", type=int, default=2, help="jobs of each state")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds of a job")
    p.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    p.add_argument("--standin", action="store_true", help="the stand-in for NCCL, without GPUs")
    p.add_argument("--json", default=None, metavar="FILE")
    opts = p.parse_args(argv)
    opts.ops = [op for op in opts.ops.split(",") if op]
    for op in opts.ops:
        if op not in OPS:
            p.error(f"--ops '{op}': of {', '.join(OPS)}")
    try:
        opts.nics = [int(word) for word in opts.nics.split(",")]
        least, most = as_bytes(opts.min), as_bytes(opts.max)
    except ValueError as err:
        p.error(str(err))
    if min(opts.nics) < 2:
        p.error("--nics: 2 or more, since one is lost")
    if opts.factor < 2 or opts.iters < 1 or opts.reps < 1 or opts.nodes < 2:
        p.error("--factor and --nodes: 2 or more; --iters and --reps: 1 or more")
    if least > most:
        p.error(f"--min {opts.min}: at most --max {opts.max}")
    return opts


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    end_on_term()
    cells: Cells = {}
    ends = time.monotonic() + opts.budget
    try:
        rates = rates_of(opts.nics, opts.rate)
        gpus = 0 if opts.standin else gpu_count()
        if not opts.standin and gpus == 0:
            raise ValueError("no NVIDIA GPU on this machine (no /dev/nvidia0): use --standin")
        shape = shape_for(opts.nodes, 1, gpus)
        good = run_all(Setup(opts, shape, as_bytes(opts.min), ends), rates, cells)
    except (transports.TransportError, LabError, ValueError) as err:
        print(f"run_retention: {err}", file=sys.stderr)
        return 2
    rows = summary(cells, rates, opts.nodes)
    bed = "stand-in for NCCL, no GPU" if opts.standin else f"{gpus} GPUs"
    cores = len(os.sched_getaffinity(0))
    say(f"{opts.nodes} emulated nodes, NICs of {opts.rate}, {bed}, {cores} cores")
    say("\n".join(markdown(rows)))
    if opts.json:
        result = {
            "schema": 1,
            "ok": good,
            "nodes": opts.nodes,
            "gpus": gpus,
            "standin": opts.standin,
            "cores": cores,
            "rows": rows,
        }
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if good and rows else 1


if __name__ == "__main__":
    sys.exit(main())
