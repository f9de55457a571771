"""Processes with a control segment, for tests: build/tests/segment_writer, started and ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, missing

from r2ccl_ctl import control
from r2ccl_ctl.segment import Segment

WAIT_S = 10.0


def program() -> Path:
    return (ROOT / os.environ.get("R2CCL_BUILD_DIR", "build") / "tests/segment_writer").resolve()


def until(holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Wait for a condition, for a bounded time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:.0f} s: {what}", pytrace=False)
        time.sleep(0.01)


@dataclass
class Writer:
    """A running segment_writer."""

    popen: subprocess.Popen[bytes]
    path: Path
    job: str

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def process(self) -> control.Process:
        found = control.describe(self.path)
        assert found is not None
        return found

    def write(self, offset: int, data: bytes) -> None:
        """Into its own rows, which it publishes; bytes written into the object do not stay."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(b"%d %s\n" % (offset, data.hex().encode()))
        self.popen.stdin.flush()
        assert read_line(self.popen) == "done\n"

    def rows(self) -> Segment:
        return OwnRows(self)

    def end(self) -> None:
        """Let it close in order."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(timeout=WAIT_S)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(timeout=WAIT_S)


class OwnRows(Segment):
    """Its segment, of which the process itself writes the rows."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer.path)
        self.writer = writer

    def write(self, offset: int, data: bytes) -> None:
        self.writer.write(offset, data)


StartWriter = Callable[..., Writer]


@contextlib.contextmanager
def writers() -> Iterator[StartWriter]:
    """A function that starts writers of one job; all are gone, and their objects, at the end."""
    if not program().is_file():
        missing("build", f"{program()}: not there; run `make native`")
    job = f"test-{secrets.token_hex(4)}"
    started: list[Writer] = []

    def start(*options: str, job: str = job) -> Writer:
        popen = subprocess.Popen(
            [program(), "--seconds", "60", "--job", job, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert popen.stdout is not None
        line = popen.stdout.readline().decode().split()
        assert line[:1] == ["ready"], line
        writer = Writer(popen, control.SHM / line[1].lstrip("/"), job)
        started.append(writer)
        return writer

    try:
        yield start
    finally:
        for writer in started:
            with contextlib.suppress(ProcessLookupError):
                writer.popen.send_signal(signal.SIGCONT)
            writer.popen.kill()
            writer.popen.wait(timeout=WAIT_S)
            writer.path.unlink(missing_ok=True)


@pytest.fixture
def start_writer() -> Iterator[StartWriter]:
    with writers() as start:
        yield start


def follow(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "r2ccl_ctl", *words], stdout=subprocess.PIPE, bufsize=0, cwd=ROOT
    )


def read_line(popen: subprocess.Popen[bytes]) -> str:
    assert popen.stdout is not None
    ready, _, _ = select.select([popen.stdout], [], [], 40)  # Python starts, too
    assert ready, "nothing came within 40 s"
    return popen.stdout.readline().decode()
