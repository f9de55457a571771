"""Ranks of r2ccl_perf under the preloaded shim, each on an emulated node of its own, and what their
segments say about plans. Everything started is ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import ROOT, Build

from r2ccl_ctl import control
from r2ccl_ctl.control import Process
from r2ccl_ctl.job import Job, LaunchSpec
from r2ccl_ctl.launch import start
from r2ccl_ctl.rows import Comm

RANKS = 4


@contextmanager
def preloaded(build: Build, name: str, words: Sequence[str], env: dict[str, str]) -> Iterator[Job]:
    """AllReduces of 2 MiB, as long as `words` say, of a job with that name."""
    spec = LaunchSpec(
        argv=(str(build.perf), "-b", "2M", *words),
        ranks=RANKS,
        emulate_nodes=RANKS,
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
def floats(
    build: Build, name: str, folder: Path, pause: float, grace: float, env: dict[str, str]
) -> Iterator[Job]:
    """Ranks of plan_worker.py; what they got goes to `folder`. grace: seconds that the others may
    run on after one has failed."""
    folder.mkdir(exist_ok=True)
    spec = LaunchSpec(
        argv=(sys.executable, str(ROOT / "tests/py/plan_worker.py"), str(folder), str(pause)),
        ranks=RANKS,
        emulate_nodes=RANKS,
        nics=2,
        job=name,
        grace=grace,
        env={
            "LD_PRELOAD": str(build.path / "libr2ccl.so"),
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            "R2CCL_PLAN": "on",
            "R2CCL_PLAN_HOLD": "1",
            "R2CCL_PLAN_WITHDRAW": "0",
            **env,
        },
    )
    running = start(spec, echo=False)
    try:
        yield running
    finally:
        running.kill()


def processes(name: str) -> list[Process]:
    found = [process for process in control.list_processes() if process.job == name]
    return sorted(found, key=lambda process: process.rank or 0)


def comms(name: str) -> list[Comm]:
    return [comm for process in processes(name) for comm in process.snapshot().comms]
