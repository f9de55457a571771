"""The journals of a job's processes, taken while it runs: one that ends in order leaves none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import transports
from faults import FaultThread
from jobs import Ended, Job

# `journal --follow` looks for new processes and new events several times a second.
SETTLE_S = 0.5


class JournalWatch:
    """Follows all processes on this machine. Use as a context manager around the job."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._proc: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._events: list[dict[str, Any]] = []
        self._said: list[str] = []

    def __enter__(self) -> JournalWatch:
        if self._wanted:
            argv = [sys.executable, "-m", "r2ccl_ctl", "journal", "--follow", "--json"]
            self._proc = subprocess.Popen(argv, cwd=transports.ROOT, text=True, bufsize=1,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def _read(self) -> None:
        if self._proc is None or self._proc.stdout is None:
            return
        for line in self._proc.stdout:
            try:
                self._events.append(json.loads(line))
            except ValueError:
                self._said.append(line.rstrip())

    def __exit__(self, *exc: object) -> None:
        if self._proc is None or self._reader is None:
            return
        time.sleep(SETTLE_S)
        self._proc.terminate()
        try:
            self._proc.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._proc.kill()
            self._proc.wait(timeout=10)
        self._reader.join(timeout=10)
        if self._said:
            print(f"journal: {' / '.join(self._said[-3:])}", flush=True)

    def sees(self, pids: Sequence[int]) -> bool:
        """Whether the journals of all these processes are read by now (none wanted: yes): one that
        ends before it was seen leaves nothing."""
        return not self._wanted or set(pids) <= {event.get("pid") for event in list(self._events)}

    def of(self, pids: Sequence[int] | None) -> list[dict[str, Any]]:
        """The events of those processes (None: of all) as they were read. Call after the block."""
        return [event for event in self._events if pids is None or event.get("pid") in pids]


def run_watched(job: Job, faults: FaultThread, timeout: float,
                wanted: bool) -> tuple[Ended, bool, JournalWatch]:
    """Runs the job while NICs fail: how it ended, whether all failures were carried out, and, if
    wanted, its journals."""
    with JournalWatch(wanted) as watch:
        faults.start()
        job.start()
        try:
            ended = job.wait(timeout)
        finally:
            complete = faults.stop()
    return ended, complete, watch
