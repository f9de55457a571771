"""R2CCL_TELL_ERRORS on the stand-in: one rank of a ring is killed. Who receives from it gets an
error from its connection; the others wait, and only hear of it by the shim.

Rung 3: ranks as processes over loopback. It cannot prove what real NCCL does with the error.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build
from plan_bed import comms, processes
from segment_bed import until

from r2ccl_ctl.job import Job, LaunchSpec
from r2ccl_ctl.journal import read_all
from r2ccl_ctl.launch import start

RANKS = 6
REMOTE = 6


@contextmanager
def job(build: Build, name: str, folder: Path, **env: str) -> Iterator[Job]:
    spec = LaunchSpec(
        argv=(sys.executable, str(ROOT / "tests/py/tell_worker.py"), str(folder)),
        ranks=RANKS,
        emulate_nodes=RANKS,
        nics=1,
        job=name,
        grace=60,
        env={
            "LD_PRELOAD": str(build.path / "libr2ccl.so"),
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            **env,
        },
    )
    running = start(spec, echo=False)
    try:
        yield running
    finally:
        (folder / "stop").touch()
        running.kill()


def told(folder: Path) -> dict[int, int]:
    return {int(f.suffix[1:]): int(f.read_text() or "0") for f in folder.glob("told.*")}


def killed(folder: Path, name: str, victim: int) -> None:
    until(lambda: len(list(folder.glob("works.*"))) == RANKS, "operations", 60)
    (pid,) = [p.pid for p in processes(name) if p.rank == victim]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", [3, 0])
def test_all_ranks_are_told(build: Build, tmp_path: Path, victim: int) -> None:
    """Rank 0 leads; where it is the dead one the others tell each other."""
    name = f"tell{victim}-{os.getpid()}"
    with job(build, name, tmp_path):
        killed(tmp_path, name, victim)
        others = {rank: REMOTE for rank in range(RANKS) if rank != victim}
        until(lambda: told(tmp_path) == others, "what the others are told", 40.0)

        def rows() -> list[Any]:
            return [c for c in comms(name) if c.rank != victim]

        until(lambda: {c.state for c in rows()} == {"failed"}, "their rows say so")
        assert any("ncclRemoteError at rank" in c.cause for c in rows()), [c.cause for c in rows()]
        for process in processes(name):
            lines = [e.cause for e in read_all(process) if e.event == "error"]
            if process.rank == victim:
                assert not lines
            else:  # before the application could hear of it, and once
                assert len(lines) == 1, lines
                assert re.search("communicator .* has failed: ncclRemoteError", lines[0])


@pytest.mark.parametrize("most", ["0", "5"], ids=["off", "too-many-ranks"])
def test_off_means_by_connections_only(build: Build, tmp_path: Path, most: str) -> None:
    """What the word is for: without it, ranks that have no connection to the dead one wait on. So
    may the one that sends to it, which waits for nothing of it when all it sent has arrived."""
    name = f"untold{most}-{os.getpid()}"
    with job(build, name, tmp_path, R2CCL_TELL_ERRORS=most):
        killed(tmp_path, name, 3)
        until(lambda: 4 in told(tmp_path), "the error of who receives from it", 40.0)
        time.sleep(1)
        assert {4} <= set(told(tmp_path)) <= {2, 4}
