"""Two engines that move checked messages (build/stress/pair), and what a test does to them: faults
by NIC and direction through the control segment, signals, a look at the journal.

In a pair the parent sends and is called `tx`, its child receives and is called `rx`; with
`--bidir` both do both. Every wait here is bounded; everything started is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from r2ccl_ctl import control, journal
from r2ccl_ctl.control import Command, Process, Snapshot
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.journal import Event

PATIENCE_S = 60.0


def loopback(count: int, last: int = 1) -> str:
    """R2CCL_NICS of `count` NICs that need no privileges."""
    return ",".join(f"127.0.{n}.{last}" for n in range(1, count + 1))


def until(what: str, reached: Callable[[], bool], within: float = 10.0) -> None:
    """Wait for it, or fail the test."""
    end = time.monotonic() + within
    while not reached():
        if time.monotonic() > end:
            pytest.fail(f"not within {within:g} s: {what}", pytrace=False)
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Side:
    """One process of a job, through its control segment."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._segment: Process | None = None
        self._events: list[Event] = []
        self._cursor: journal.Cursor | None = None

    def has_segment(self) -> bool:
        with contextlib.suppress(R2Error):
            found = control.find(self.pid)
            if self._segment is None and found.state == "running":
                self._segment = found
                self._cursor = journal.Cursor(found)
        return self._segment is not None

    @property
    def segment(self) -> Process:
        until(f"{self.name} (pid {self.pid}) has a control segment", self.has_segment)
        assert self._segment is not None
        return self._segment

    def events(self) -> list[Event]:
        """The journal so far; also after the process has ended."""
        assert self.segment and self._cursor
        self._events += self._cursor.events()
        return self._events

    def named(self, *events: str) -> list[Event]:
        return [event for event in self.events() if event.event in events]

    def snapshot(self) -> Snapshot:
        return self.segment.snapshot()

    def counter(self, name: str) -> int:
        return self.snapshot().counters[name]

    def fail(self, nic: str, kind: str, direction: str = "both", **more: int) -> None:
        """Inject a fault: kind, and rate, loss_ppm, after_bytes, for_ms as Command has them."""
        self._command(Command("fail-nic", nic=nic, fault=kind, direction=direction, **more))

    def recover(self, nic: str) -> None:
        self._command(Command("recover-nic", nic=nic))

    def _command(self, command: Command) -> None:
        answer = control.send_command(self.segment, command, timeout=10.0)
        assert answer.ok, answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.path.unlink()


class Pair:
    """A running build/stress/pair."""

    def __init__(self, build: Path, words: Sequence[str], env: dict[str, str]) -> None:
        self.command = [str(build / "stress" / "pair"), *words]
        self.env = env
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, "R2CCL_LOG": "info", **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until("pair has two processes", lambda: bool(children(self.process.pid)))
        self.tx = Side("tx", self.process.pid)
        self.rx = Side("rx", children(self.process.pid)[0])

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.tx, self.rx

    def side(self, name: str) -> Side:
        return self.tx if name == "tx" else self.rx

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def moving(self, count: int = 8) -> None:
        """Wait until that many more messages have arrived."""
        start = self.rx.counter("messages_received")
        until(
            f"{count} more messages",
            lambda: self.rx.counter("messages_received") >= start + count,
            20.0,
        )

    def wait(self, within: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {within:g} s: {self}", pytrace=False)

    def results(self) -> list[dict[str, Any]]:
        """The sides that received."""
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]

    def finish(self, within: float = PATIENCE_S) -> None:
        """It must end well, with every byte right."""
        for side in self.sides:
            assert side.segment
        code = self.wait(within)
        assert code == 0, f"exit code {code}: {self}"
        found = self.results()
        assert found and all(result["wrong"] == 0 for result in found), str(self)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        for side in self.sides:
            side.close()
        self.log.close()

    def __str__(self) -> str:
        lines = [f"{k}={v}" for k, v in sorted(self.env.items())]
        for side in self.sides:
            lines.append(f"--- journal of {side.name}")
            with contextlib.suppress(R2Error, OSError):
                lines += [
                    f"{e.event} {e.nic} -> {e.remote_nic} gen {e.generation} {e.bytes} B {e.cause}"
                    for e in side.events()
                ]
        return f"{' '.join([*lines[: len(self.env)], *self.command])}\n" + "\n".join(
            [*lines[len(self.env) :], "--- output", self.text()[-6000:]]
        )


@contextlib.contextmanager
def running_pair(build: Path, *words: str | int, nics: str, **env: str | int) -> Iterator[Pair]:
    """A pair of engines with these NICs (R2CCL_NICS), ended at the end."""
    settings = {"R2CCL_NICS": nics, **{name: str(value) for name, value in env.items()}}
    pair = Pair(build, [str(word) for word in words], settings)
    try:
        yield pair
    finally:
        pair.close()
