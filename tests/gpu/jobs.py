"""Starts the ranks of a job in the nodes of a bed, watches them, and always ends them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Line = tuple[float, str]
_ports = itertools.count(int(os.environ.get("R2_GPU_PORT", "29500")))


class Bed(Protocol):
    """Emulated nodes. `command` gives the command line that runs another one inside a node."""

    nodes: int
    nics: int
    master_addr: str
    nic_prefix: str
    oob: str

    def command(self, node: int, argv: Sequence[str]) -> list[str]: ...

    def fail(self, node: int, nic: int, kind: str) -> None: ...

    def recover(self, node: int, nic: int) -> None: ...


@dataclass(frozen=True)
class Shape:
    """How many ranks each node has and which GPUs they see (empty: all, or none there)."""

    nodes: int
    ranks_per_node: int
    gpus: tuple[tuple[int, ...], ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


def shape_for(nodes: int, ranks_per_node: int, gpu_count: int) -> Shape:
    """Deals the GPUs out to the nodes; nodes share GPUs when there are too few."""
    if gpu_count == 0:
        return Shape(nodes, ranks_per_node)
    gpus = []
    for node in range(nodes):
        first = node * ranks_per_node
        gpus.append(tuple((first + i) % gpu_count for i in range(ranks_per_node)))
        if len(set(gpus[-1])) < ranks_per_node:
            raise ValueError(
                f"{ranks_per_node} ranks per node on {gpu_count} GPUs: two ranks of one node "
                "would share a GPU, which NCCL refuses; use fewer ranks per node"
            )
    return Shape(nodes, ranks_per_node, tuple(gpus))


def gpu_count() -> int:
    """The number of NVIDIA GPUs of this machine by the driver's files, or $GPU_COUNT of them."""
    named = os.environ.get("GPU_COUNT")
    if named:
        return int(named)
    return sum(1 for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit())


PROBE = """
import ctypes, sys
cuda, context, gpus = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
sys.exit(cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(gpus)) != 0
         or any(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
                for gpu in range(gpus.value)))
"""


def gpu_free_again(limit: float = 30.0) -> float:
    """Waits until a process can use all GPUs: MPS refuses for a while after a client was killed.
    Returns the seconds; at most about `limit`."""
    began, good = time.monotonic(), 0
    while gpu_count() and good < 2 and time.monotonic() < began + limit:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=limit,
                              check=False)
        good = good + 1 if done.returncode == 0 else 0
        time.sleep(0.3)
    return time.monotonic() - began


@dataclass
class Ended:
    """How a job ended. codes: exit code per rank, None for one that had to be killed."""

    codes: list[int | None]
    pids: list[int]
    lines: list[Line]
    logs: list[str]
    started: float
    wall_s: float
    timed_out: bool
    ended_at: list[float | None]

    @property
    def ok(self) -> bool:
        return not self.timed_out and all(code == 0 for code in self.codes)

    def tail(self, chars: int = 3000) -> str:
        """The end of what the ranks printed, for a report of a failure."""
        parts = [f"--- rank 0 stdout ---\n{''.join(t for _, t in self.lines)[-800:]}"]
        for rank, text in enumerate(self.logs):
            if text.strip():
                parts.append(f"--- rank {rank} ---\n{text[-chars:]}")
        return "\n".join(parts)

    def summary(self) -> dict[str, Any]:
        return {"codes": self.codes, "wall_s": round(self.wall_s, 3), "timed_out": self.timed_out}


@dataclass
class Job:
    """One run of a program as ranks 0..n-1, started torchrun-style."""

    bed: Bed
    shape: Shape
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    on_line: Callable[[float, str], None] | None = None

    def __post_init__(self) -> None:
        self._procs: list[subprocess.Popen[bytes]] = []
        self._files: list[Any] = []
        self._lines: list[Line] = []
        self._reader: threading.Thread | None = None
        self._started = 0.0
        self._token = secrets.token_hex(16)

    def rank_env(self, rank: int, port: int) -> dict[str, str]:
        node, local = divmod(rank, self.shape.ranks_per_node)
        env = dict(os.environ) | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.shape.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.shape.ranks_per_node),
            "MASTER_ADDR": self.bed.master_addr,
            "MASTER_PORT": str(port),
            "R2CCL_RENDEZVOUS_TOKEN": self._token,
        }
        if self.shape.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.shape.gpus[node]))
        return env | self.env

    def start(self) -> None:
        """Starts all ranks. Call from the thread that lives as long as the job."""
        port = next(_ports)
        self._started = time.monotonic()
        try:
            for rank in range(self.shape.world):
                self._start_rank(rank, port)
        except BaseException:
            self.kill()
            raise
        self._reader = threading.Thread(target=self._read, name="rank0", daemon=True)
        self._reader.start()

    def _start_rank(self, rank: int, port: int) -> None:
        node = rank // self.shape.ranks_per_node
        log = tempfile.TemporaryFile()
        self._files.append(log)
        self._procs.append(
            subprocess.Popen(
                self.bed.command(node, self.argv),
                env=self.rank_env(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                start_new_session=True,
            )
        )

    def _read(self) -> None:
        pipe = self._procs[0].stdout
        if pipe is None:
            return
        for raw in pipe:
            now = time.monotonic()
            text = raw.decode(errors="replace")
            self._lines.append((now, text))
            if self.on_line is not None:
                self.on_line(now, text)

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._procs]

    @property
    def procs(self) -> list[subprocess.Popen[bytes]]:
        return list(self._procs)

    @property
    def lines(self) -> list[Line]:
        return list(self._lines)

    def wrote(self, rank: int, text: bytes) -> bool:
        """Whether the rank's standard error holds `text` by now."""
        fd = self._files[rank].fileno()
        return text in os.pread(fd, os.fstat(fd).st_size, 0)

    def kill_rank(self, rank: int) -> float:
        """Kills one rank at once, if it still runs; returns when (monotonic seconds)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._procs[rank].pid, signal.SIGKILL)
        return time.monotonic()

    def kill(self) -> None:
        for proc in self._procs:
            if proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(proc.pid, signal.SIGKILL)

    def wait(self, timeout: float, stop: Callable[[], bool] | None = None) -> Ended:
        """Waits for all ranks, at most `timeout` seconds or until stop() says so, then kills."""
        ended: list[float | None] = [None] * len(self._procs)
        deadline = time.monotonic() + timeout
        while any(t is None for t in ended):
            now = time.monotonic()
            for i, proc in enumerate(self._procs):
                if ended[i] is None and proc.poll() is not None:
                    ended[i] = now
            if now > deadline or (stop is not None and stop()):
                break
            time.sleep(0.005)
        timed_out = any(t is None for t in ended)
        wall = time.monotonic() - self._started
        codes = [p.returncode if t is not None else None
                 for p, t in zip(self._procs, ended, strict=True)]
        self._finish()
        return Ended(codes, self.pids, list(self._lines), self._logs(), self._started, wall,
                     timed_out, ended)

    def _finish(self) -> None:
        self.kill()
        for proc in self._procs:
            proc.wait(timeout=20)
        if self._reader is not None:
            self._reader.join(timeout=5)

    def _logs(self) -> list[str]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        return texts


def largest_gap(lines: Sequence[Line], begin: float, end: float) -> float:
    """The longest silence in seconds between lines, of those that touch [begin, end]."""
    gap = 0.0
    for (a, _), (b, _) in zip(lines, lines[1:], strict=False):
        if b >= begin and a <= end:
            gap = max(gap, b - a)
    return gap
