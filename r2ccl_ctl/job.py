"""A running job: ranks as processes, their output, and what happens when one of them ends.

Used through r2ccl_ctl.launch, which works out what each rank is started with.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.ports import Ports

CODE_TIMEOUT = 124
OUTPUT_LINES = 20000
READ_SIZE = 65536
MAX_LINE = 1 << 20
NCCL_STANDIN, NCCL_SYSTEM, NCCL_AUTO = "standin", "system", "auto"


class LaunchError(R2Error):
    """The job could not be started; the text says what to do."""


class LaunchUsageError(LaunchError, R2UsageError):
    """The caller asked for something that cannot be."""


@dataclass(frozen=True)
class LaunchSpec:
    """What to start.

    argv: the command of every rank. ranks: how many (0: per_node on every node).
    lab: name of a lab to run in; None for this machine. per_node: ranks of each node (0: spread
    evenly). emulate_nodes, nics: without a lab, how many nodes to pretend and how many loopback
    NICs each has (0: leave the NICs to the plugin).
    nccl: "standin", "system", "auto" (stand-in where there is no GPU), or a libnccl's path.
    plugin: path of the net plugin, "none" for NCCL's own transports, "" for the built one.
    env: added last, over everything else. grace, kill_after: seconds from the first failure to
    SIGTERM, and from there to SIGKILL. timeout: seconds for the whole job, None for no limit.
    """

    argv: Sequence[str]
    ranks: int = 0
    lab: str | None = None
    per_node: int = 0
    emulate_nodes: int = 1
    nics: int = 0
    nccl: str = NCCL_AUTO
    plugin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    job: str = ""
    grace: float = 5.0
    kill_after: float = 2.0
    timeout: float | None = None
    prefix: bool = True
    cwd: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its node and its number among the ranks there."""

    rank: int
    node: int
    local_rank: int
    local_size: int


@dataclass
class Rank:
    """A started rank. `code` is None while it runs; ended by signal N it is 128 + N."""

    place: Place
    pid: int = 0
    code: int | None = None
    ended_at: float | None = None
    unshown: str = ""  # why some of its output could not be shown
    _lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=OUTPUT_LINES)
    )

    @property
    def output(self) -> str:
        """What it printed so far, both streams, without prefixes; the last 20000 lines."""
        return "".join(list(self._lines))


class _Stream:
    """One output pipe of one rank, cut into lines."""

    def __init__(self, pipe: IO[bytes], rank: Rank, sink: IO[str] | None, prefix: str) -> None:
        self.pipe, self.rank, self.sink, self.prefix = pipe, rank, sink, prefix
        self._partial = b""

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        data = os.read(self.pipe.fileno(), READ_SIZE)
        if not data:
            if self._partial:
                self._emit([self._partial + b"\n"])
            self.pipe.close()
            return False
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE:
            whole, self._partial = [*whole, self._partial], b""
        self._emit([line + b"\n" for line in whole])
        return True

    def _emit(self, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        self.rank._lines.extend(texts)
        if self.sink is not None and texts:
            try:
                self.sink.write("".join(self.prefix + text for text in texts))
                self.sink.flush()
            except BrokenPipeError:  # the reader has seen enough
                self.sink = None
            except (OSError, ValueError) as err:
                self.rank.unshown = getattr(err, "strerror", None) or str(err)


class Job:
    """Running ranks. Made by `start`."""

    def __init__(
        self,
        spec: LaunchSpec,
        name: str,
        commands: list[tuple[list[str], dict[str, str]]],
        places: list[Place],
        echo: bool,
        held: Ports | None = None,
    ) -> None:
        """`held` is closed when all ranks have ended."""
        self.name = name
        self.spec = spec
        self.ranks = [Rank(place) for place in places]
        self.exit_code: int | None = None
        self.timed_out = False
        self._commands = commands
        self._echo = echo
        self._held = held
        self._procs: list[subprocess.Popen[bytes]] = []
        self._started = threading.Event()
        self._done = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._error: BaseException | None = None
        self._deadline: float | None = None
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._termed = False
        # Ranks are forked by the thread that watches them: they die when it does.
        self._thread = threading.Thread(target=self._main, name=f"launch-{name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise LaunchError(f"cannot start the ranks: {self._why()}") from self._error

    def _why(self) -> str:
        """Why they could not be started."""
        if not isinstance(self._error, OSError) or not self._error.strerror:
            return str(self._error)
        name = f"{os.fsdecode(self._error.filename)}: " if self._error.filename else ""
        more = ""
        if self._error.errno == errno.EMFILE:
            more = f": each of {len(self.ranks)} takes three here; raise `ulimit -n`"
        return f"{name}{self._error.strerror}{more}"

    # For callers

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """The job's exit code: 0, that of the first rank that failed, or 124 past its timeout.

        TimeoutError when it still runs after `timeout` seconds; it goes on then.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"job {self.name} still runs after {timeout} s")
        assert self.exit_code is not None
        return self.exit_code

    def kill(self, grace: float | None = None) -> int:
        """End all ranks: SIGTERM, after `grace` seconds (default kill_after) SIGKILL."""
        now = time.monotonic()
        self._kill_at = now + (self.spec.kill_after if grace is None else grace)
        self._stop_at = now
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        return self.wait(30.0 + (grace or self.spec.kill_after))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.running:
            self.kill()

    # The watching thread

    def _main(self) -> None:
        streams: dict[int, _Stream] = {}
        pidfds: dict[int, int] = {}
        try:
            try:
                self._start_ranks(streams, pidfds)
            except BaseException as err:
                self._error = err
                for proc in self._procs:
                    _kill_group(proc.pid, signal.SIGKILL)
                    proc.wait()
                return
            finally:
                self._started.set()
            self._watch(streams, pidfds)
        finally:
            for fd in pidfds:
                os.close(fd)
            self._wake.close()
            self._waker.close()
            if self._held is not None:
                self._held.close()
            self._done.set()

    def _start_ranks(self, streams: dict[int, _Stream], pidfds: dict[int, int]) -> None:
        for rank, (argv, env) in zip(self.ranks, self._commands, strict=True):
            proc = subprocess.Popen(
                argv,
                env=env,
                cwd=self.spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._procs.append(proc)
            rank.pid = proc.pid
            prefix = f"[{rank.place.rank}] " if self.spec.prefix else ""
            for pipe, sink in ((proc.stdout, sys.stdout), (proc.stderr, sys.stderr)):
                assert pipe is not None
                shown = sink if self._echo else None
                streams[pipe.fileno()] = _Stream(pipe, rank, shown, prefix)
            pidfds[os.pidfd_open(proc.pid)] = rank.place.rank
        if self.spec.timeout is not None:
            self._deadline = time.monotonic() + self.spec.timeout

    def _watch(self, streams: dict[int, _Stream], pidfds: dict[int, int]) -> None:
        poller = select.poll()
        for fd in (*streams, *pidfds, self._wake.fileno()):
            poller.register(fd, select.POLLIN)
        while pidfds:
            for fd, _ in poller.poll(self._wait_ms()):
                if fd in streams:
                    if not streams[fd].read():
                        poller.unregister(fd)
                        del streams[fd]
                elif fd in pidfds:
                    self._reap(pidfds.pop(fd))
                    poller.unregister(fd)
                    os.close(fd)
                else:
                    self._wake.recv(64)
            self._act()
        self._drain(poller, streams)
        if self.exit_code is None:
            self.exit_code = 0

    def _drain(self, poller: select.poll, streams: dict[int, _Stream]) -> None:
        """The last lines; a straggler that keeps a pipe open cannot hold us for long."""
        end = time.monotonic() + 1.0
        while streams and time.monotonic() < end:
            for fd, _ in poller.poll(100):
                if fd in streams and not streams[fd].read():
                    poller.unregister(fd)
                    del streams[fd]
        for stream in streams.values():
            stream.pipe.close()

    def _wait_ms(self) -> int | None:
        """Until the next thing that time alone brings."""
        times = [t for t in (self._deadline, self._stop_at, self._kill_at) if t is not None]
        if not times:
            return None
        return max(1, int((min(times) - time.monotonic()) * 1000) + 1)

    def _reap(self, number: int) -> None:
        """A rank has ended: its stragglers too (its pid is still ours), then its code."""
        rank, proc = self.ranks[number], self._procs[number]
        _kill_group(proc.pid, signal.SIGKILL)
        status = proc.wait()
        rank.code = status if status >= 0 else 128 - status
        rank.ended_at = time.monotonic()
        if rank.code != 0 and self.exit_code is None:
            self.exit_code = rank.code
            if self._stop_at is None and not self._termed:
                self._stop_at = rank.ended_at + self.spec.grace

    def _act(self) -> None:
        """What is due now: time out, SIGTERM, SIGKILL."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline, self.timed_out = None, True
            self.exit_code = CODE_TIMEOUT if self.exit_code is None else self.exit_code
            self._stop_at = now
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self._signal_all(signal.SIGTERM)
            self._termed = True
            if self._kill_at is None:
                self._kill_at = now + self.spec.kill_after
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.code is None:
                _kill_group(rank.pid, number)


def _kill_group(pid: int, number: signal.Signals) -> None:
    """Signal a rank's whole session; the rank itself if it has not made its session yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
