"""Ranks of r2ccl_perf under the preloaded shim, each on an emulated node of its own, and what their
segments say about plans. Everything started is ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from conftest import ROOT, Build
from segment_bed import until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.job import Job, LaunchSpec
from r2ccl_ctl.launch import start
from r2ccl_ctl.rows import Comm

RANKS = 4
NIC = "127.0.1.2"


@contextmanager
def preloaded(
    build: Build,
    name: str,
    words: Sequence[str],
    env: dict[str, str],
    ranks: int = RANKS,
    nodes: int | None = None,
) -> Iterator[Job]:
    """AllReduces of 2 MiB, as long as `words` say, of a job with that name. Without `nodes` each
    rank is on one of its own."""
    spec = LaunchSpec(
        argv=(str(build.perf), "-b", "2M", *words),
        ranks=ranks,
        emulate_nodes=nodes or ranks,
        nics=2,
        job=name,
        env={"LD_PRELOAD": str(build.path / "libr2ccl.so"), **env},
    )
    running = start(spec, echo=False)
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def _started(
    build: Build, name: str, argv: Sequence[str], ranks: int, grace: float
) -> Iterator[Job]:
    """Ranks of a Python program under the shim, with plans."""
    spec = LaunchSpec(
        argv=(sys.executable, *argv),
        ranks=ranks,
        emulate_nodes=ranks,
        nics=2,
        job=name,
        grace=grace,
        env={
            "LD_PRELOAD": str(build.path / "libr2ccl.so"),
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            "R2CCL_MODE": "optimal",  # direct, whatever is measured
            "R2CCL_PLAN_HOLD": "1",
        },
    )
    running = start(spec, echo=False)
    try:
        yield running
    finally:
        running.kill()


def floats(build: Build, name: str, folder: Path) -> AbstractContextManager[Job]:
    """Ranks of plan_worker.py; what they got goes to `folder`. The others may run on for 30 s after
    one has failed."""
    folder.mkdir(exist_ok=True)
    argv = (str(ROOT / "tests/py/plan_worker.py"), str(folder), "10")
    return _started(build, name, argv, RANKS, 30)


def processes(name: str) -> list[Process]:
    found = [process for process in control.list_processes() if process.job == name]
    return sorted(found, key=lambda process: process.rank or 0)


def comms(name: str) -> list[Comm]:
    return [comm for process in processes(name) for comm in process.snapshot().comms]


# ---- workers that make communicators out of others (shrink_worker.py, life_worker.py)


def working(
    build: Build, name: str, folder: Path, worker: str, ranks: int, *words: str
) -> AbstractContextManager[Job]:
    """Ranks of a worker, which keep a file of what they got in `folder`."""
    argv = (str(ROOT / "tests/py" / worker), str(folder), *words)
    return _started(build, name, argv, ranks, LaunchSpec.grace)


def sized(name: str, ranks: int) -> list[Comm]:
    """The communicators of so many ranks."""
    return [comm for comm in comms(name) if comm.ranks == ranks]


def plans(name: str, ranks: int) -> list[str]:
    """Of the communicator of so many ranks, each a node, at those that have met."""
    return [comm.plan for comm in sized(name, ranks) if comm.nodes == ranks]


def meets(name: str, ranks: int) -> bool:
    return len(plans(name, ranks)) == ranks


def runs(name: str, ranks: int, plan: str) -> bool:
    """Of all of its ranks: direct, or for "" NCCL's own choice."""
    found = plans(name, ranks)
    return len(found) == ranks and all(shown.split(",")[0] == plan for shown in found)


def lose(name: str) -> None:
    """Half of what rank 1 has."""
    _command(name, Command("fail-nic", nic=NIC, fault="blackhole", direction="both"))


def regain(name: str) -> None:
    _command(name, Command("recover-nic", nic=NIC))


def _command(name: str, what: Command) -> None:
    answer = control.send_command(processes(name)[1], what, timeout=10)
    assert answer.ok, answer.text


def plan_show(name: str) -> str:
    """All that `plan show` prints about the job."""
    argv = [sys.executable, "-m", "r2ccl_ctl", "plan", "show", "--job", name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT, check=False)
    return done.stdout + done.stderr


def last_of(folder: Path, rank: int) -> int:
    return int((folder / str(rank)).read_text().splitlines()[-1].split()[1])


def end_at(folder: Path, name: str, ahead: int = 60) -> None:
    """An operation that no rank has come to: each takes 10 ms, and none is ahead by two. The last
    line may be of operations that have ended: those of the next communicator begin with 0 again."""
    before = last_of(folder, 0)
    until(lambda: last_of(folder, 0) != before, "one more operation", 60)
    fresh = folder / f"{name}.new"
    fresh.write_text(str(last_of(folder, 0) + ahead))
    fresh.rename(folder / name)


def digests(folder: Path, rank: int, ranks: int) -> list[str]:
    lines = (folder / str(rank)).read_text().splitlines()
    return [line for line in lines if line.startswith(f"{ranks} ")]
