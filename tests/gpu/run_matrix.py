#!/usr/bin/env python3
"""The rows of docs/shim.md's table of runs, on the real NCCL: one command each, several at a time.

    run_matrix.py --budget 190 --json matrix.json        # all rows, in order of need
    run_matrix.py --rows jax,cupy,generations            # some of them
    run_matrix.py --list

Every row takes a NIC away in the middle of a job that has only the shim, unless it says otherwise.
It passes only if the numbers are right and the plugin's journal has seen the NIC go: otherwise the
traffic went somewhere else. Left out, with the reason: rows that no longer fit into --budget, rows
whose Python package --python has not, and nccl-tests' without NCCL_TESTS (run_nccl_tests.py).
Exit code 0: every row that ran passed, and one did; 1: not; 2: usage, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs import gpu_count
from run_nccl_tests import end_on_term, say, words
from transports import ROOT

HERE = Path(__file__).resolve().parent
PORTS_OF_A_ROW = 60
ONCE = "0.3:carrier:n1:nic0,0.7:up:n1:nic0"
MODULES = {"jax_app.py": "jax", "cupy_app.py": "cupy", "megatron_train.py": "megatron.core",
           "megatron_lm.py": "pretrain_gpt", "vllm_app.py": "vllm", "vllm_serve.py": "vllm"}
SMALL = "--train dim=384 --train layers=3 --steps 80 --baselines 1"


@dataclass(frozen=True)
class Row:
    """One command. seconds: what it may take. faults: NICs fail, and the journal must say so.
    needs: the Python module without which it is left out."""

    name: str
    what: str
    script: str
    args: str
    seconds: int
    faults: bool = True
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""

    def argv(self, python: str, out: Path) -> list[str]:
        words_of = [word.replace("BUILD", str(ROOT / "build")) for word in self.args.split()]
        return [python, str(HERE / self.script), *words_of, "--json", str(out)]


def ddp(name: str, what: str, args: str, seconds: int = 60) -> Row:
    return Row(name, what, "run_ddp.py", f"exact --scenarios {ONCE} {args}", seconds,
               needs="torch")


def app(name: str, what: str, program: str, args: str, seconds: int = 60) -> Row:
    return replace(ddp(name, what, f"--program {program} --baselines 1 {args}", seconds),
                   needs=MODULES.get(program, "torch"))


def megatron(name: str, what: str, args: str, program: str = "megatron_train.py") -> Row:
    """Two ranks on two nodes, so that what they share crosses the NICs however many GPUs there are;
    two runs without failures, which must agree first."""
    whose = "Megatron-LM's pretrain_gpt.py" if program == "megatron_lm.py" else "Megatron-Core, GPT"
    row = ddp(name, f"{whose}, {what}", f"--program {program} --variants preload "
              f"--ranks-per-node 1 --steps 60 --timeout 100 {args}", 200)
    return replace(row, needs=MODULES[program])


def vllm(name: str, what: str, args: str, program: str = "vllm_app.py", seconds: int = 200) -> Row:
    """Two ranks on two nodes, as megatron's."""
    row = ddp(name, f"vLLM, {what}", f"--program {program} --ranks-per-node 1 "
              f"--timeout {seconds - 30} {args}", seconds)
    return replace(row, needs=MODULES[program])


def nccl_tests(name: str, what: str, args: str, seconds: int = 50) -> Row:
    return Row(name, what, "run_nccl_tests.py", args, seconds)


# Those that were run last come first.
ROWS = (
    vllm("vllm-serve", "`vllm serve` over two nodes, asked over HTTP, as r2ccl-ctl run starts it",
         "--variants r2ccl --steps 60 --baselines 1", "vllm_serve.py", 330),
    vllm("vllm-tp", "tensor parallel 2 under CUDA graphs; R2CCL_DLSYM=1",
         "--variants dlopen --steps 40 --train attention=FLASH_ATTN"),
    vllm("vllm-named", "tensor parallel 2, VLLM_NCCL_SO_PATH; nothing preloaded",
         "--variants named --steps 40 --baselines 1 --train so=BUILD/nccl/libnccl.so.2"),
    vllm("vllm-pp", "pipeline parallel 2 without graphs; R2CCL_DLSYM=1",
         "--variants dlopen --steps 40 --baselines 1 --train graph=0 --train pp=2"),
    megatron("megatron-lm-tp", "tensor parallel 2", "--train tp=2", "megatron_lm.py"),
    megatron("megatron-lm-dp", "data parallel 2, distributed optimizer, overlapped",
             "--train overlap=1", "megatron_lm.py"),
    megatron("megatron-lm-pp", "pipeline parallel 2", "--train pp=2 --train micro=4",
             "megatron_lm.py"),
    megatron("megatron-tp", "tensor parallel 2", "--train tp=2"),
    megatron("megatron-dp", "data parallel 2, distributed optimizer, overlapped",
             "--train overlap=1"),
    megatron("megatron-pp", "pipeline parallel 2", "--train pp=2 --train micro=4"),
    app("generations", "a hundred communicators, made and destroyed one after the other (ctypes)",
        "ctypes_app.py", "--variants dlopen --steps 200 --train again=2 --train size=1048576", 120),
    app("jax", "JAX, a process per GPU; R2CCL_DLSYM=1", "jax_app.py", "--variants dlopen"),
    app("cupy", "CuPy; R2CCL_DLSYM=1", "cupy_app.py", "--variants dlopen"),
    app("named", "ctypes, given nccl/libnccl.so.2 as VLLM_NCCL_SO_PATH does; nothing preloaded",
        "ctypes_app.py", "--variants named --train nccl=BUILD/nccl/libnccl.so.2"),
    ddp("fsdp2", "PyTorch FSDP2 (fully_shard)", f"--variants preload {SMALL} "
        "--train parallel=fsdp2"),
    ddp("split", "PyTorch DDP on a communicator that it split off (device_id)",
        f"--variants preload {SMALL} --train split=1"),
    nccl_tests("shadow", "nccl-tests, 4 nodes on the GPUs there are, R2CCL_PLAN=shadow",
               "faults --nodes 4 --ranks-per-node 1 --variants "
               f"shadow=preload:R2CCL_PLAN=shadow --protos auto --cycles 20 --scenarios {ONCE}"),
    # Those with a run of an earlier build.
    ddp("ddp", "PyTorch DDP", f"--variants preload {SMALL}"),
    ddp("fsdp", "PyTorch FSDP", f"--variants preload {SMALL} --train parallel=fsdp"),
    ddp("nonblocking", "PyTorch DDP, TORCH_NCCL_USE_COMM_NONBLOCKING=1",
        f"--variants preload {SMALL} --env TORCH_NCCL_USE_COMM_NONBLOCKING=1"),
    ddp("torchrun", "PyTorch DDP under torchrun", f"--variants preload {SMALL} --torchrun", 75),
    app("dlopen-graphs", "NCCL by dlopen through ctypes under CUDA graphs; R2CCL_DLSYM=1",
        "ctypes_app.py", "--variants dlopen --train graph=4"),
    nccl_tests("mpirun", "nccl-tests all_reduce_perf, a process per GPU",
               f"faults --variants preload --protos auto --cycles 20 --scenarios {ONCE}"),
    nccl_tests("graphs", "nccl-tests with CUDA graphs (-G 2)",
               "faults --variants preload --protos auto --cycles 15 --test-args=-G2 "
               f"--scenarios {ONCE}"),
    Row("watchdog", "PyTorch's watchdog, a rank that stops calling NCCL", "run_ddp.py",
        "stall --variants preload --train stall=30 --train limit=10 --watch 45 "
        "--train dim=384 --train layers=3", 75, faults=False, needs="torch"),
    Row("kill", "PyTorch DDP, a rank killed: the other is told", "run_ddp.py",
        "kill --variants preload --within 10 --train dim=384 --train layers=3", 45, faults=False,
        needs="torch"),
)


@dataclass
class Done:
    """What became of a row. seen: paths that its journals saw go down."""

    name: str
    what: str
    ok: bool
    code: int | None
    seconds: float
    seen: int = 0
    why: str = ""
    command: str = ""


def paths_lost(result: dict[str, Any]) -> int:
    """Of the runs in which NICs failed, the least number of journal entries that a path went down:
    only connections of the plugin's have paths."""
    counts = [
        sum(all(w in str(entry.get("event", "")) for w in ("path", "down"))
            for entry in run.get("journal") or [])
        for run in result.get("runs", []) if run.get("events")
    ]
    return min(counts, default=0)


def judge(row: Row, code: int | None, seconds: float, result: dict[str, Any], tail: str) -> Done:
    """tail: the end of what it printed, for the reason."""
    seen = paths_lost(result)
    why = ""
    if code is None:
        why = f"still running after {row.seconds} s: {tail[-600:]}"
    elif code != 0 or not result.get("ok"):
        why = f"exit code {code}: {tail[-600:]}"
    elif row.faults and seen == 0:
        why = "no journal saw a path go down: the traffic went past the plugin"
    return Done(row.name, row.what, not why, code, round(seconds, 1), seen, why,
                f"{row.script} {row.args}")


def run_row(row: Row, number: int, python: str, limit: float) -> Done:
    """limit: seconds that are left. Whatever it started is ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        log = Path(folder) / "log"
        port = str(31000 + number * PORTS_OF_A_ROW)
        begun = time.monotonic()
        with log.open("wb") as file:
            proc = subprocess.Popen(
                row.argv(python, out), stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                env=dict(os.environ) | row.env | {"R2_GPU_PORT": port}, start_new_session=True)
            try:
                code: int | None = proc.wait(timeout=min(row.seconds, limit))
            except subprocess.TimeoutExpired:
                code = None
                proc.send_signal(signal.SIGTERM)  # it takes its ranks and its lab down
                try:
                    proc.wait(timeout=12)
                except subprocess.TimeoutExpired:
                    os.killpg(proc.pid, signal.SIGKILL)
                    proc.wait()
        result = json.loads(out.read_text()) if out.exists() else {}
        return judge(row, code, time.monotonic() - begun, result, log.read_text(errors="replace"))


def run_all(rows: Sequence[Row],
            opts: argparse.Namespace) -> tuple[list[Done], dict[str, str]]:
    """Results in the order of their ends, and why rows were left out, by their names."""
    ends = time.monotonic() + opts.budget
    waiting, lock = list(enumerate(rows)), threading.Lock()
    done: list[Done] = []
    left: dict[str, str] = {}

    def lane() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number, row = waiting.pop(0)
            rest = ends - time.monotonic() - 15
            if rest < min(row.seconds, 30):
                left[row.name] = f"{rest:.0f} s of --budget were left"
                continue
            one = run_row(row, number, opts.python, rest)
            with lock:
                done.append(one)
                say(f"{one.name}: {'ok' if one.ok else 'FAILED'} in {one.seconds} s"
                    + (f", {one.seen} paths seen to go down" if one.seen else "")
                    + (f": {one.why}" if one.why else ""))

    lanes = [threading.Thread(target=lane) for _ in range(opts.lanes)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return done, left


def lacking(python: str, modules: Sequence[str]) -> list[str]:
    """Those modules that this interpreter does not find. ValueError: it cannot be asked."""
    look = ("import importlib.util as u, json, sys\nfound = []\nfor name in sys.argv[1:]:\n"
            "    try:\n        found.append(u.find_spec(name) is not None)\n"
            "    except ImportError:\n        found.append(False)\nprint(json.dumps(found))")
    try:
        said = subprocess.run([python, "-c", look, *modules], capture_output=True, text=True,
                              check=True, timeout=60).stdout
    except subprocess.CalledProcessError as err:
        raise ValueError(f"--python {python}: exit code {err.returncode}: "
                         f"{err.stderr[-300:]}") from None
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ValueError(f"--python {python}: {err}; name one that runs") from None
    return [name for name, there in zip(modules, json.loads(said), strict=True) if not there]


def runnable(rows: Sequence[Row], python: str,
             have_tests: bool) -> tuple[list[Row], dict[str, str]]:
    """The rows that can be run here, and why the others cannot."""
    absent = lacking(python, sorted({row.needs for row in rows if row.needs}))
    left = {row.name: f"{python} has no module {row.needs}" for row in rows if row.needs in absent}
    left |= {row.name: "NCCL_TESTS is not set" for row in rows
             if row.script == "run_nccl_tests.py" and not have_tests}
    return [row for row in rows if row.name not in left], left


def chosen(names: Sequence[str]) -> list[Row]:
    """ValueError names a row that does not exist."""
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ValueError(f"row '{name}' does not exist: choose from {', '.join(known)}")
    return [known[name] for name in names] if names else list(ROWS)


def table(done: Sequence[Done]) -> list[str]:
    lines = ["| row | result | seconds | paths seen to go down |", "|---|---|---|---|"]
    order = {row.name: i for i, row in enumerate(ROWS)}
    for one in sorted(done, key=lambda d: order[d.name]):
        lines.append(f"| {one.what} | {'right' if one.ok else 'FAILED'} | {one.seconds} "
                     f"| {one.seen} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=words, default=[])
    p.add_argument("--list", action="store_true")
    p.add_argument("--lanes", type=int, default=4, help="rows at a time")
    p.add_argument("--budget", type=float, default=190.0, help="seconds for everything")
    p.add_argument("--python", default=os.environ.get("GPU_PYTHON", sys.executable))
    p.add_argument("--json", default=None, metavar="FILE")
    opts = p.parse_args(argv)
    if opts.list:
        say("\n".join(f"{row.name:14} {row.what}\n{'':14} {row.script} {row.args}"
                      for row in ROWS))
        return 0
    end_on_term()
    try:
        rows, absent = runnable(chosen(opts.rows), opts.python, bool(os.environ.get("NCCL_TESTS")))
    except ValueError as err:
        print(f"run_matrix: {err}", file=sys.stderr)
        return 2
    if gpu_count() == 0:
        print("run_matrix: no NVIDIA GPU on this machine (no /dev/nvidia0)", file=sys.stderr)
        return 2
    done, late = run_all(rows, opts)
    left = absent | late
    say("\n".join(table(done)))
    say("\n".join(f"left out: {name}: {why}" for name, why in left.items())
        or "left out: nothing")
    good = bool(done) and all(one.ok for one in done)
    if opts.json:
        text = {"schema": 2, "ok": good, "rows": [asdict(one) for one in done], "left_out": left}
        Path(opts.json).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
