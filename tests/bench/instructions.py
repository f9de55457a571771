"""Instructions that the engine and its transport spend on a message: over queue pairs of the
stand-in for libibverbs, beside sockets. One process pair on a loopback NIC, both sides counted by
callgrind. The figure is the difference of two runs of different length: the start is not in it.

Counted is what was compiled from net_plugin/, inlined parts of libibverbs' header included: not the
C library (copies, locks), not the kernel, not the stand-in. Callgrind runs one thread at a time, so
threads that poll in vain cost less here than on a machine; it says nothing about time."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from figures import MeasurementWrong, Row, Section, median
from rig import BenchError, Options, clean_env, program

from r2ccl_ctl import paths

TITLE = "Instructions per message (callgrind), queue pairs of the stand-in beside sockets"
NIC = "127.0.1.1"
LIMIT_S = 100.0
TARGET = 1.0
OURS = "net_plugin/"
# Looks at who shares the machine: how many there are in a run is chance.
BY_THE_CLOCK = ("io/sharing.c", "io/pollers.c", "control/sweep.c")
# name, bytes of a message, messages of the short and the long run
KINDS = (("1 MiB", 1 << 20, 32, 160), ("8 bytes", 8, 400, 2400))
SMOKE = (("8 bytes", 8, 100, 400),)
SMOKE_TRIES = 4  # how a rate is found out at the start differs by as much as a short run costs
STANDIN = "/libibverbs.so"  # has some of the sources in it that the plugin is made of
NAME = re.compile(r"^(ob|fl|fi|fe|cob|cfl|cfi)=\((\d+)\)(?: (.*))?$")
COST = re.compile(r"^[+\-*\d]\S* (\d+)$")


def count(lines: list[str]) -> Counter[str]:
    """Instructions by source file of one callgrind file: what each line itself cost, without what
    it called, and without what the stand-in's library ran."""
    names: dict[tuple[bool, str], str] = {}  # of objects, and of files
    found: Counter[str] = Counter()
    now, ours, skip = "", True, False
    for line in lines:
        name = NAME.match(line)
        if name:
            of_object = name[1].endswith("ob")
            if name[3]:
                names[of_object, name[2]] = name[3]
            text = names.get((of_object, name[2]), "")
            if name[1] == "ob":
                ours = STANDIN not in text
            elif not name[1].startswith("c"):  # else that of what is called
                now = text
        elif line.startswith("calls="):
            skip = True  # the next line is what the call cost in all
        elif cost := COST.match(line):
            if not skip and ours:
                found[now] += int(cost[1])
            skip = False
    return found


def environment(transport: str, **settings: str) -> dict[str, str]:
    more = {"NCCL_IB_DISABLE": "1"}
    if transport == "verbs":
        library = paths.native_dir() / "fakeverbs" / "libibverbs.so.1"
        more = {"R2CCL_IBVERBS_LIB": str(library)}
    # A message is cut by the rate that a path is seen to have, which under callgrind is chance: at
    # its least length a chunk is as long whatever that is.
    more |= {"R2CCL_HEARTBEAT": "1s", "R2CCL_CHUNK": "64K"} | settings
    return clean_env(R2CCL_NICS=NIC, R2CCL_LOG="warn", **more)


def _pair(env: dict[str, str], size: int, messages: int, folder: Path) -> Counter[str]:
    """Instructions of both sides together, by source file."""
    with socket.socket() as free:
        free.bind((NIC, 0))
        where = f"{NIC}:{free.getsockname()[1]}"
    each = ["valgrind", "--tool=callgrind", "--quiet", "--fair-sched=try", "--dump-line=no"]
    ask = ["--size", str(size), "--bytes", str(size * messages), "--iters", "1"]
    ask += ["--warmup", str(size * 4), "--poll-us", "2000", "--stall", "60"]
    procs: list[subprocess.Popen[str]] = []
    try:
        for number, (how, more) in enumerate((("--listen", []), ("--dial", ask))):
            out = f"--callgrind-out-file={folder}/out.{number}"
            words = [*each, out, program("msgs"), how, where, *more]
            procs.append(
                subprocess.Popen(
                    words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            time.sleep(0.2)
        ends = time.monotonic() + LIMIT_S
        texts = [proc.communicate(timeout=max(1, ends - time.monotonic()))[0] for proc in procs]
    except subprocess.TimeoutExpired as late:
        raise BenchError(f"messages of {size} bytes: still running after {LIMIT_S:g} s") from late
    finally:
        for proc in procs:
            proc.kill()
            proc.wait()
    if any(proc.returncode for proc in procs):
        raise BenchError(f"messages of {size} bytes: {' '.join(texts)[-2000:]}")
    found: Counter[str] = Counter()
    for number in range(2):
        found += count((folder / f"out.{number}").read_text(errors="replace").splitlines())
    return found


def per_message(env: dict[str, str], size: int, short: int, long: int) -> Counter[str]:
    """By file; what is ours only, and not what the clock asks for however many messages go."""
    with tempfile.TemporaryDirectory() as folder:
        few = _pair(env, size, short, Path(folder))
        many = _pair(env, size, long, Path(folder))
    return Counter(
        {
            name: round((many[name] - few[name]) / (long - short))
            for name in many
            if OURS in name and not name.endswith(BY_THE_CLOCK)
        }
    )


def run(options: Options, section: Section) -> None:
    if shutil.which("valgrind") is None:
        section.skipped = "no valgrind (apt-get install valgrind)"
        return
    if not (paths.native_dir() / "fakeverbs" / "libibverbs.so.1").exists():
        section.skipped = "no stand-in for libibverbs: libibverbs-dev's headers were missing"
        return
    turns = 1 if options.smoke else 3
    for kind, size, short, long in SMOKE if options.smoke else KINDS:
        seen: dict[str, list[int]] = {"tcp": [], "verbs": []}
        where: dict[str, Counter[str]] = {}
        for turn in range(turns):
            for transport, totals in seen.items():
                options.say(f"instructions, {kind}, {transport}, {turn + 1} of {turns}")
                for _ in range(SMOKE_TRIES if options.smoke else 1):
                    where[transport] = per_message(environment(transport), size, short, long)
                    if sum(where[transport].values()) > 0:
                        break
                totals.append(sum(where[transport].values()))
                other = "transport/verbs/" if transport == "tcp" else "transport/tcp/"
                if totals[-1] <= 0 or not options.smoke and _share(where[transport], other) > 0.1:
                    raise MeasurementWrong(f"{kind}, {transport}: {where[transport]}")
        section.rows.append(
            Row(
                f"message of {kind}, both sides",
                median([float(n) for n in seen["verbs"]]),
                "instructions",
                baseline=median([float(n) for n in seen["tcp"]]),
                baseline_name="sockets",
                target=TARGET,
                at_least=False,
                samples=turns,
                spread=(max(seen["verbs"]) - min(seen["verbs"])) / median(seen["verbs"]),
            )
        )
        section.details[kind] = {
            transport: dict(where[transport].most_common(20)) for transport in where
        }


def _share(files: Counter[str], part: str) -> float:
    return sum(n for name, n in files.items() if part in name) / max(1, sum(files.values()))
