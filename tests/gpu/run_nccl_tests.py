#!/usr/bin/env python3
"""nccl-tests over emulated nodes: speed beside the baselines, and exactness while NICs fail.

    run_nccl_tests.py bench  --ops all_reduce,alltoall --variants r2ccl,sockets-2x4 --reps 5
    run_nccl_tests.py faults --ops all_reduce --protos LL,LL128,Simple --scenarios one,silent
    run_nccl_tests.py kill   --ops all_reduce
    run_nccl_tests.py perf   --args "--op all_reduce -b 8 -e 64M -f 32"   # r2ccl_perf on real NCCL
    run_nccl_tests.py info

NCCL_TESTS (or --nccl-tests) names the directory of the *_perf programs, built with MPI=1 against
tests/gpu/minimpi; NCCL_LIB that of libnccl.so.2 (default: PyTorch's); FASTSOCKET the FastSocket
plugin. Needs GPUs, root (or user namespaces) and pyroute2. Exit code 1: a value was wrong, a job
failed, or a failure was not carried out; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nccl_output
import transports
from beds import LabError, lab_bed
from faults import SCENARIOS, FaultError, FaultThread, parse_schedule, scenario
from jobs import Bed, Ended, Job, Shape, gpu_count, largest_gap, shape_for
from journal_watch import JournalWatch, run_watched

from r2ccl_ctl.lab import parse_rate

OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast")
LATENCY_LIMIT = 1 << 20


class RunError(Exception):
    """Something needed is missing; the text names the remedy."""


@dataclass
class Setup:
    """What every run has in common."""

    bed: Bed
    shape: Shape
    tests: Path
    nccl_lib: Path | None
    timeout: float
    extra_env: dict[str, str]

    def program(self, op: str) -> str:
        path = self.tests / f"{op}_perf"
        if not path.is_file():
            raise RunError(f"{path} does not exist: set NCCL_TESTS to where nccl-tests was built")
        return str(path)

    def env(self, variant: transports.Variant, proto: str) -> dict[str, str]:
        env = transports.transport_env(variant, self.bed.nic_prefix, self.bed.oob)
        env["LD_LIBRARY_PATH"] = transports.library_path(self.nccl_lib, self.tests)
        env.setdefault("NCCL_DEBUG", "WARN")
        if proto != "auto":
            env["NCCL_PROTO"] = proto
        return env | self.extra_env

    def job(self, program: str, variant: transports.Variant, proto: str, args: Sequence[str],
            on_line: Callable[[float, str], None] | None = None, **more: str) -> Job:
        env = self.env(variant, proto) | more
        return Job(self.bed, self.shape, [program, *args], env, on_line)


def say(text: str) -> None:
    print(text, flush=True)


def bench(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """Interleaved: every repetition runs all variants once before the next begins."""
    variants = [transports.parse_variant(v) for v in opts.variants]
    args = ["-b", opts.min, "-e", opts.max, "-f", str(opts.factor), "-n", str(opts.iters),
            "-w", str(opts.warmup), "-c", str(opts.check), *shlex.split(opts.test_args)]
    runs: list[dict[str, Any]] = []
    for rep in range(opts.reps):
        for op in opts.ops:
            for proto in opts.protos:
                for variant in variants:
                    ended = run_job(setup.job(setup.program(op), variant, proto, args),
                                    setup.timeout)
                    out = nccl_output.parse_output(t for _, t in ended.lines)
                    good = ended.ok and out.wrong == 0 and not out.out_of_bounds and bool(out.rows)
                    runs.append({"rep": rep, "op": op, "proto": proto, "variant": variant.name,
                                 "ours": variant.base in transports.OURS, "ok": good,
                                 **ended.summary(), **out.to_json()})
                    say(f"bench rep {rep} {op} {proto} {variant.name}: "
                        f"{'ok' if good else 'FAILED'} in {ended.wall_s:.1f} s, "
                        f"{best_words(out)}")
                    if not good:
                        say(ended.tail())
    table = medians(runs)
    for line in format_table(table):
        say(line)
    return {"ok": all(r["ok"] for r in runs), "runs": runs, "medians": table}


def run_job(job: Job, timeout: float) -> Ended:
    job.start()
    return job.wait(timeout)


def best_words(out: nccl_output.Output) -> str:
    if not out.rows:
        return "no result"
    first, last = out.rows[0], out.rows[-1]
    return (f"{first.size} B {first.out_of_place.time_us:g} us, "
            f"{last.size} B {last.out_of_place.busbw_gbs:g} GB/s bus")


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per operation, protocol and size: each variant's median, and r2ccl beside the best other.

    The ratio is r2ccl's time over the best time up to 1 MiB (lower is better). Above, it is the bus
    bandwidth over the best (higher is better). Out-of-place figures; the JSON keeps both halves.
    """
    ours: set[str] = set()
    cells: dict[tuple[str, str, int], dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        if not run["ok"]:
            continue
        for row in run["rows"]:
            half = row["out_of_place"]
            cell = cells.setdefault((run["op"], run["proto"], row["size"]), {})
            ours |= {run["variant"]} if run.get("ours") else set()
            cell.setdefault(run["variant"], []).append((half["time_us"], half["busbw_gbs"]))
    table = []
    for (op, proto, size), by_variant in sorted(cells.items()):
        line: dict[str, Any] = {"op": op, "proto": proto, "size": size, "variants": {}}
        for variant, pairs in by_variant.items():
            line["variants"][variant] = {
                "time_us": statistics.median(t for t, _ in pairs),
                "busbw_gbs": statistics.median(b for _, b in pairs),
                "runs": len(pairs),
            }
        line.update(_ratio(size, line["variants"], ours))
        table.append(line)
    return table


def _ratio(size: int, by_variant: dict[str, Any], own: set[str]) -> dict[str, Any]:
    ours = by_variant.get("r2ccl")
    others = {n: v for n, v in by_variant.items() if n not in own and n != "r2ccl"}
    if ours is None or not others:
        return {"best_other": None, "ratio": None, "measure": None}
    if size <= LATENCY_LIMIT:
        name = min(others, key=lambda n: float(others[n]["time_us"]))
        base, mine, measure = others[name]["time_us"], ours["time_us"], "time"
    else:
        name = max(others, key=lambda n: float(others[n]["busbw_gbs"]))
        base, mine, measure = others[name]["busbw_gbs"], ours["busbw_gbs"], "busbw"
    return {"best_other": name, "ratio": round(mine / base, 3) if base else None,
            "measure": measure}


def format_table(table: Sequence[dict[str, Any]]) -> list[str]:
    """The medians as a Markdown table: us up to 1 MiB, GB/s of bus bandwidth above."""
    names = sorted({n for row in table for n in row["variants"]}, key=lambda n: (n != "r2ccl", n))
    lines = ["| op | proto | size | " + " | ".join(names) + " | best other | ratio |",
             "|---|---|---|" + "---|" * (len(names) + 2)]
    for row in table:
        cells = []
        for name in names:
            value = row["variants"].get(name)
            if value is None:
                cells.append("-")
            elif row["size"] <= LATENCY_LIMIT:
                cells.append(f"{value['time_us']:.4g} us")
            else:
                cells.append(f"{value['busbw_gbs']:.4g} GB/s")
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f} ({row['measure']})"
        lines.append(f"| {row['op']} | {row['proto']} | {row['size']} | " + " | ".join(cells)
                     + f" | {row['best_other'] or '-'} | {ratio} |")
    return lines


def fault_run(setup: Setup, opts: argparse.Namespace, op: str, proto: str,
              variant: transports.Variant, name: str) -> dict[str, Any]:
    """One job with NICs failing in its middle: every checked value right, every rank exits 0."""
    nics = setup.bed.nics
    events = parse_schedule(name) if ":" in name else scenario(name, nics)
    thread = FaultThread(setup.bed, events)
    seen = 0

    def on_line(_now: float, text: str) -> None:
        nonlocal seen
        if nccl_output.parse_row(text) is not None:
            seen += 1
            thread.progress(seen / opts.cycles)

    args = ["-b", opts.size, "-e", opts.size, "-n", str(opts.iters), "-w", "1",
            "-c", str(opts.check), "-N", str(opts.cycles), *shlex.split(opts.test_args)]
    job = setup.job(setup.program(op), variant, proto, args, on_line)
    ours = variant.base in transports.OURS
    ended, complete, watch = run_watched(job, thread, setup.timeout, ours)
    out = nccl_output.parse_output(t for _, t in ended.lines)
    rows = [(t, x) for t, x in ended.lines if nccl_output.parse_row(x) is not None]
    exact = out.wrong == 0 and out.out_of_bounds == 0 and all(r.checked for r in out.rows)
    good = ended.ok and exact and complete and len(out.rows) == opts.cycles
    gaps = [round(largest_gap(rows, d.began, d.began + 1.0) * 1000, 1) for d in thread.done]
    result: dict[str, Any] = {
        "op": op, "proto": proto, "variant": variant.name, "scenario": name, "nics": nics,
        "ok": good, "wrong": out.wrong, "out_of_bounds": out.out_of_bounds,
        "rows": len(out.rows), "cycles": opts.cycles, "events_complete": complete,
        "events": [d.to_json(ended.started) for d in thread.done], "line_gap_ms": gaps,
        "median_line_ms": round(median_gap(rows) * 1000, 2), "errors": out.errors,
        **ended.summary(),
    }
    if ours:
        result["journal"] = watch.of(ended.pids)
    say(f"faults {op} {proto} {variant.name} {name}: {'ok' if good else 'FAILED'} "
        f"wrong={out.wrong} rows={len(out.rows)}/{opts.cycles} codes={ended.codes} "
        f"events={len(thread.done)}/{len(events)} gaps_ms={gaps} in {ended.wall_s:.1f} s")
    if not good:
        say(ended.tail())
    return result


def median_gap(rows: Sequence[tuple[float, str]]) -> float:
    gaps = [b - a for (a, _), (b, _) in zip(rows, rows[1:], strict=False)]
    return statistics.median(gaps) if gaps else 0.0


def faults(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    runs = [
        fault_run(setup, opts, op, proto, transports.parse_variant(variant), name)
        for op in opts.ops for proto in opts.protos for variant in opts.variants
        for name in opts.scenarios
    ]
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


def first_after(events: Sequence[dict[str, Any]], pid: int, names: Sequence[str],
                since: float) -> float | None:
    """Seconds from `since` (monotonic) to the first of these events of a process's journal."""
    times = [e["mono_ns"] / 1e9 - since for e in events
             if e.get("pid") == pid and e["event"] in names and e["mono_ns"] / 1e9 >= since]
    return round(min(times), 3) if times else None


def kill_times(events: Sequence[dict[str, Any]], pids: Sequence[int],
               killed: float) -> dict[str, list[float | None]]:
    """Of each process, in seconds since the kill: when its engine gave the dead one up (None: it
    has no connection to it). Also when NCCL could tell the application. With the plugin alone that
    is the same; with the shim it is later (others are told first) or by another rank's word."""
    known = [first_after(events, pid, ("peer-gone", "connection-failed"), killed) for pid in pids]
    shim = [first_after(events, pid, ("error",), killed) for pid in pids]
    told = [k if s is None else s for k, s in zip(known, shim, strict=True)]
    return {"others_knew_after_s": known, "others_told_after_s": told}


def kill_run(setup: Setup, opts: argparse.Namespace, op: str, name: str) -> dict[str, Any]:
    variant, rows = transports.parse_variant(name), 0

    def on_line(_now: float, text: str) -> None:
        nonlocal rows
        rows += nccl_output.parse_row(text) is not None

    args = ["-b", opts.size, "-e", opts.size, "-n", "20", "-w", "1", "-c", "0", "-N", "0"]
    job = setup.job(setup.program(op), variant, opts.protos[0], args, on_line)
    ours = variant.base in transports.OURS
    with JournalWatch(ours) as watch:
        job.start()
        began = time.monotonic()
        while time.monotonic() - began < setup.timeout and (
                rows < 5 or not watch.sees(job.pids)):
            time.sleep(0.01)
        killed = job.kill_rank(setup.shape.world - 1)
        ended = job.wait(opts.within + 5)
    events = watch.of(ended.pids)
    others = [None if t is None else round(t - killed, 3) for t in ended.ended_at[:-1]]
    good = rows >= 5 and all(t is not None and t <= opts.within for t in others) and all(
        code not in (None, 0) for code in ended.codes[:-1])
    result: dict[str, Any] = {"op": op, "variant": name, "ok": good, "killed": killed,
                              "others_ended_after_s": others, **ended.summary()}
    words = f"the other ranks ended {others} s after, codes {ended.codes}"
    if ours:
        result |= kill_times(events, ended.pids[:-1], killed) | {"journal": events}
        words = (f"the other ranks knew {result['others_knew_after_s']}, were told "
                 f"{result['others_told_after_s']}, ended {others} s after, codes {ended.codes}")
    say(f"kill {op} {name}: {'ok' if good else 'FAILED'}: {words}")
    if not good:
        say(ended.tail())
    return result


def kill(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """Kills the last rank in the middle; every other rank must end with an error in --within s.

    When they were told is in their journals; the rest is the program's own way to its end."""
    runs = [kill_run(setup, opts, op, name) for op in opts.ops for name in opts.variants]
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


def info(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """What NCCL says about itself over each variant: version, plugin symbol, nodes, channels."""
    runs = []
    for name in opts.variants:
        variant = transports.parse_variant(name)
        job = setup.job(setup.program(opts.ops[0]), variant, opts.protos[0],
                        ["-b", "8", "-e", "1M", "-f", "1024"],
                        NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,ENV,GRAPH")
        ended = run_job(job, setup.timeout)
        text = [t for _, t in ended.lines]
        for log in ended.logs:
            text.extend(log.splitlines())
        facts = nccl_output.parse_debug(text)
        good = ended.ok and facts.nnodes == setup.shape.nodes
        runs.append({"variant": name, "ok": good, **facts.to_json(), **ended.summary()})
        say(f"info {name}: {'ok' if good else 'FAILED'} NCCL {facts.version}, network "
            f"{facts.network}, plugin {facts.plugin_api}, nNodes {facts.nnodes}, "
            f"via {facts.channels_via}")
        if not good:
            say(ended.tail(6000))
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


def perf(setup: Setup, opts: argparse.Namespace) -> dict[str, Any]:
    """r2ccl_perf, the program that also runs on the CPU stand-in, on the real NCCL."""
    runs = []
    for name in opts.variants:
        job = setup.job(str(Path(opts.program).resolve()), transports.parse_variant(name),
                        opts.protos[0], shlex.split(opts.args))
        ended = run_job(job, setup.timeout)
        out = nccl_output.parse_output(t for _, t in ended.lines)
        good = ended.ok and bool(out.rows) and out.wrong == 0 and all(r.checked for r in out.rows)
        runs.append({"variant": name, "args": opts.args, "ok": good, **ended.summary(),
                     **out.to_json()})
        say(f"perf {name} {opts.args}: {'ok' if good else 'FAILED'} wrong={out.wrong} "
            f"{best_words(out)} in {ended.wall_s:.1f} s")
        if not good:
            say(ended.tail())
    return {"ok": all(r["ok"] for r in runs), "runs": runs}


COMMANDS: dict[str, Callable[[Setup, argparse.Namespace], dict[str, Any]]] = {
    "bench": bench, "faults": faults, "kill": kill, "info": info, "perf": perf,
}


def words(text: str) -> list[str]:
    """A comma list; a schedule with commas of its own is written with ; between scenarios."""
    sep = ";" if ";" in text or ":n" in text else ","
    return [part for part in text.split(sep) if part]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=sorted(COMMANDS))
    p.add_argument("--ops", type=words, default=["all_reduce"], help=f"of {','.join(OPS)}")
    p.add_argument("--variants", type=words, default=["r2ccl"],
                   help=f"of {','.join(transports.VARIANTS)}, or NAME=BASE:KEY=VALUE")
    p.add_argument("--protos", type=words, default=["auto"], help="of auto,LL,LL128,Simple")
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--nics", type=int, default=2, help="NICs per node")
    p.add_argument("--ranks-per-node", type=int, default=0, help="default: GPUs / nodes")
    p.add_argument("--lab-variant", default="rail-only")
    p.add_argument("--rate", default="none", help="of each NIC, such as 4gbit; default: unshaped")
    p.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    p.add_argument("--nccl-tests", default=None)
    p.add_argument("--timeout", type=float, default=90.0, help="seconds for one job")
    p.add_argument("--json", default=None, metavar="FILE")
    g = p.add_argument_group("bench")
    g.add_argument("--reps", type=int, default=5)
    g.add_argument("--min", default="8")
    g.add_argument("--max", default="256M")
    g.add_argument("--factor", type=int, default=32)
    g.add_argument("--warmup", type=int, default=5)
    g = p.add_argument_group("bench and faults")
    g.add_argument("--iters", type=int, default=None, help="default 20; 1 with faults")
    g.add_argument("--check", type=int, default=None, help="checked rounds: 1; 10 with faults")
    g.add_argument("--test-args", default="", metavar="'OPTION...'",
                   help="further options of nccl-tests: '-g 2' GPUs per process, '-G 4' graphs")
    g = p.add_argument_group("faults and kill")
    g.add_argument("--size", default="32M")
    g.add_argument("--cycles", type=int, default=60, help="lines of results; the schedule's length")
    g.add_argument("--scenarios", type=words, default=["one"],
                   help=f"of {','.join(SCENARIOS)}, or events AT:ACTION:nX:nicY,...")
    g.add_argument("--within", type=float, default=5.0, help="kill: seconds for the others")
    g = p.add_argument_group("perf")
    g.add_argument("--program", default=str(transports.ROOT / "build" / "r2ccl_perf"))
    g.add_argument("--args", default="--op all_reduce -b 8 -e 64M -f 32 -c 1")
    return p


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = parser()
    opts = p.parse_args(argv)
    for op in opts.ops:
        if op not in OPS:
            p.error(f"operation '{op}': choose from {', '.join(OPS)}")
    for proto in opts.protos:
        if proto not in ("auto", "LL", "LL128", "Simple"):
            p.error(f"protocol '{proto}': choose from auto, LL, LL128, Simple")
    for pair in opts.env:
        if "=" not in pair:
            p.error(f"--env '{pair}': write KEY=VALUE")
    hard = opts.command == "faults"
    opts.iters = opts.iters or (1 if hard else 20)
    opts.check = opts.check if opts.check is not None else (10 if hard else 1)
    return opts


def end_on_term() -> None:
    """SIGTERM (of `timeout`) unwinds, so that ranks and the lab are taken down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    end_on_term()
    try:
        gpus = gpu_count()
        if gpus == 0:
            raise RunError("no NVIDIA GPU on this machine (no /dev/nvidia0): nccl-tests needs one")
        per_node = opts.ranks_per_node or max(1, gpus // opts.nodes)
        tests = Path(opts.nccl_tests or transports.required("NCCL_TESTS"))
        with lab_bed(opts.nodes, opts.nics, opts.lab_variant, parse_rate(opts.rate)) as bed:
            setup = Setup(bed, shape_for(opts.nodes, per_node, gpus), tests,
                          transports.find_nccl(), opts.timeout,
                          dict(pair.split("=", 1) for pair in opts.env))
            result = COMMANDS[opts.command](setup, opts)
    except (RunError, FaultError, transports.TransportError, LabError, ValueError) as err:
        print(f"run_nccl_tests: {err}", file=sys.stderr)
        return 2
    result |= {"schema": 1, "command": opts.command, "nodes": opts.nodes, "nics": opts.nics,
               "rate": opts.rate, "gpus": gpus, "ranks_per_node": per_node}
    if opts.json:
        Path(opts.json).write_text(json.dumps(result, indent=1) + "\n")
    say(f"run_nccl_tests {opts.command}: {'ok' if result['ok'] else 'FAILED'}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
