"""Two engines that move checked messages (build/stress/pair), or ranks that check every value of
their collectives (r2ccl_perf on the stand-in for NCCL). And what a test does to them: faults by NIC
and direction through the control segment, signals, a look at the journal.

In a pair the parent sends and is called `tx`, its child receives and is called `rx`; with
`--bidir` both do both. Every wait here is bounded; everything started is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Build, over_verbs

from r2ccl_ctl import control, journal, launch
from r2ccl_ctl.control import Command, Process, Snapshot
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.journal import Event

PATIENCE_S = 60.0


def loopback(count: int, last: int = 1) -> str:
    """R2CCL_NICS of `count` NICs that need no privileges."""
    return ",".join(f"127.0.{n}.{last}" for n in range(1, count + 1))


def until(what: str, reached: Callable[[], bool], within: float = 10.0, show: object = "") -> None:
    """Wait for it, or fail the test; `show` is printed then, as it is then."""
    end = time.monotonic() + within
    while not reached():
        if time.monotonic() > end:
            pytest.fail(f"not within {within:g} s: {what} {show}", pytrace=False)
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class State:
    """What the kernel says of a process, as text, when it is asked for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __str__(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            word = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return "(it has ended)" if word == "Z" else f"(it is there, state {word})"
        return "(it is gone)"


class Side:
    """One process of a job, through its control segment."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._looked = 0.0
        self._segment: Process | None = None
        self._events: list[Event] = []
        self._cursor: journal.Cursor | None = None

    def has_segment(self) -> bool:
        """Once seen, it is known. To look for it is to read every object there is, which takes
        seconds where many tests run: not before there is one of that name, except now and then."""
        if self._segment is None and (self.is_named() or time.monotonic() > self._looked + 1.0):
            with contextlib.suppress(R2Error):
                found = control.find(self.pid)
                if found.state == "running":
                    self._cursor = journal.Cursor(found)
                    self._segment = found
            self._looked = time.monotonic()
        return self._segment is not None

    def is_named(self) -> bool:
        """The name tells the process as its own PID namespace counts."""
        return any(re.match(rf"r2ccl\.\d+\.\d+\.{self.pid}\.", n) for n in os.listdir(control.SHM))

    @property
    def segment(self) -> Process:
        what = f"{self.name} (pid {self.pid}) has a control segment"
        until(what, self.has_segment, 30.0, State(self.pid))
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

    def fail(self, nic: str, kind: str, direction: str = "both", **more: Any) -> str:
        """Inject a fault: kind, and rate, loss_ppm, after_bytes, for_ms as Command has them. The
        answer."""
        return self._command(Command("fail-nic", nic=nic, fault=kind, direction=direction, **more))

    def recover(self, nic: str) -> None:
        self._command(Command("recover-nic", nic=nic))

    def _command(self, command: Command) -> str:
        answer = control.send_command(self.segment, command, timeout=10.0)
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert answer.ok or state != "Z", f"{self.name} has ended: {command} came too late"
        assert answer.ok, answer
        return answer.text

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.path.unlink()


class Pair:
    """A running build/stress/pair: messages until `finish` (or as many as `--count` says)."""

    def __init__(self, build: Path, words: Sequence[str], env: dict[str, str]) -> None:
        self.told_to_end = "--count" in words
        forever = [] if self.told_to_end else ["--until-told"]
        if over_verbs() and "--register" not in words:  # as NCCL does; others go over sockets
            forever.append("--register")
        self.command = [str(build / "stress" / "pair"), *words, *forever]
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
        # Not by a seek: the processes write where this descriptor stands.
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

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
        """It must end well, with every byte right; now, unless it had a --count."""
        for side in self.sides:
            assert side.segment
        if not self.told_to_end:
            self.told_to_end = True
            self.tx.signal(signal.SIGUSR1)
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


class PerfJob:
    """Running ranks of r2ccl_perf, every value checked; on the stand-in, unless `spec` names an
    NCCL. `sides[r]` is rank r."""

    def __init__(self, build: Build, words: Sequence[str], spec: dict[str, Any]) -> None:
        os.environ["R2CCL_BUILD_DIR"] = str(build.path)
        perf = [str(build.perf), *words, "-c", "1", "--check-every"]
        argv = spec.pop("argv", perf)
        self.until: Path | None = None
        if "--duration" in argv:
            self.until = Path(tempfile.mkdtemp()) / "end"
            argv = [*argv, "--until", str(self.until)]
        spec = {"argv": argv, "nccl": "standin", **spec}
        self.job = launch.start(launch.LaunchSpec(**spec), echo=False)
        self.began = time.monotonic()
        self.sides = [Side(f"rank {r.place.rank}", r.pid) for r in self.job.ranks]

    def ready(self) -> bool:
        """Wait until every rank has its control segment; its journal outlives it from there. False:
        the job has ended, and well, before all were seen."""

        def begun() -> bool:
            return all(side.has_segment() for side in self.sides) or not self.job.running

        until("every rank has a control segment", begun, 30.0)
        if all(side.has_segment() for side in self.sides):
            return True
        assert self.end() == 0, f"ended early: {self}"
        return False

    def moving(self, count: int = 8) -> None:
        """Wait until every rank has received that many more messages."""
        if not self.ready():
            return  # they did move, until all was done
        goal = [side.counter("messages_received") + count for side in self.sides]
        end = time.monotonic() + 30.0
        while any(
            s.counter("messages_received") < g for s, g in zip(self.sides, goal, strict=True)
        ):
            if not self.job.running:  # they did move, until all was done
                assert self.job.exit_code == 0, f"ended early: {self}"
                return
            if time.monotonic() > end:
                pytest.fail(f"no {count} more messages in 30 s: {self}", pytrace=False)
            time.sleep(0.01)

    def finish(self, within: float = PATIENCE_S) -> None:
        """Some more messages; then it must end well, with every value right: now, unless it is to
        do a number of them."""
        self.ready()
        if self.until:
            self.moving(32 if len(self.sides) <= 4 else 2)  # many ranks are slow on few cores
            self.until.touch()
        code = self.end(within)
        assert code == 0, f"exit code {code}: {self}"
        assert "Out of bounds values : 0 OK" in self.job.ranks[0].output, str(self)

    def end(self, within: float = PATIENCE_S) -> int:
        try:
            return self.job.wait(within)
        except TimeoutError:
            pytest.fail(f"still running after {within:g} s: {self}", pytrace=False)

    def named(self, *events: str) -> list[Event]:
        """Of all ranks but one that ended, and well, before it was ever seen (`ready`)."""
        seen = [side for side in self.sides if side.has_segment() or self.job.running]
        return [event for side in seen for event in side.named(*events)]

    def close(self) -> None:
        if self.job.running:
            self.job.kill(0)
        if self.until:
            shutil.rmtree(self.until.parent, ignore_errors=True)
        for side in self.sides:
            side.close()

    def __str__(self) -> str:
        lines = [" ".join(self.job.spec.argv), *(f"{k}={v}" for k, v in self.job.spec.env.items())]
        for side, rank in zip(self.sides, self.job.ranks, strict=True):
            lines.append(f"--- {side.name}, exit code {rank.code}")
            with contextlib.suppress(R2Error, OSError):
                lines += [
                    f"{e.mono_ns / 1e9 - self.began:.2f} {e.event} {e.nic} -> {e.remote_nic} "
                    f"gen {e.generation} {e.bytes} B {e.cause}"
                    for e in (side.events() if side.has_segment() else [])
                ][-60:]
            lines.append(rank.output[-2500:])
        return "\n".join(lines)


@contextlib.contextmanager
def running_perf(
    build: Build,
    *words: str | int,
    seconds: float = 80.0,  # beyond the patience of `finish`
    env: Mapping[str, str | int] | None = None,
    **spec: Any,
) -> Iterator[PerfJob]:
    """All-reduces of 2 MiB until `finish`, for `seconds` at most (or what `words` say).

    `spec` goes to launch.LaunchSpec: lab, ranks, per_node, emulate_nodes, nics, argv, ...
    """
    perf = [str(word) for word in words] or ["-b", "2M", "--duration", str(seconds)]
    settings = {"R2CCL_LOG": "info", **{k: str(v) for k, v in (env or {}).items()}}
    job = PerfJob(build, [*perf, "--timeout", "40"], {"timeout": 90.0, "env": settings, **spec})
    try:
        yield job
    finally:
        job.close()
