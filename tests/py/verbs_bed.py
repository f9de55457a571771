"""Engines over tests/fakeverbs, the stand-in for libibverbs: its devices stand behind the loopback
NICs, and a datagram makes them fail."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Build
from failover_bed import Pair, Side, until

from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.segment import layout


def library(build: Path) -> Path:
    """The stand-in, or a skipped test where it could not be built."""
    found = build / "fakeverbs" / "libibverbs.so.1"
    if not found.exists():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")
    return found


def settings(build: Build, **more: str | int) -> dict[str, str]:
    """Environment of an engine over the stand-in."""
    layout()  # reading the header takes a moment: a short run would be over before it is found
    return {
        "R2CCL_IBVERBS_LIB": str(library(build.path)),
        **{name: str(value) for name, value in more.items()},
    }


# A NIC of the stand-in answers from a thread of its process. A busy machine may keep that waiting
# for longer than three heartbeats of 100 ms or all retries; a real one needs nobody. For tests in
# which a path must not end.
PATIENT = {"R2CCL_HEARTBEAT": "1s", "NCCL_IB_TIMEOUT": "18"}


def ask(pid: int, text: str) -> str:
    """Tell the stand-in in that process; its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(f"\0r2fv-test.{os.getpid()}.{pid}")
        s.settimeout(10)
        s.sendto(text.encode(), f"\0r2fv-ctl.{pid}")
        return s.recv(16).decode()


def command(pid: int, text: str) -> None:
    """Tell the stand-in in that process; waits until it has heard."""
    assert ask(pid, text) == "ok"


def moved(snapshot: Snapshot, via: str) -> int:
    """Bytes of messages over paths of that transport."""
    return sum(p.tx_bytes + p.rx_bytes for p in snapshot.paths if p.via == via)


def up(side: Side, via: str) -> int:
    return sum(p.state == "up" and p.via == via for p in side.snapshot().paths)


def over(pair: Pair, via: str, paths: int = 1) -> None:
    """Wait until the pair's paths are of that transport."""
    until(f"{paths} paths over {via}: {pair}", lambda: up(pair.tx, via) >= paths, 20.0)


@contextlib.contextmanager
def two_ends(
    build: Path,
    nics: str,
    first: dict[str, str],
    second: dict[str, str],
    count: int,
    size: str = "256K",
) -> Iterator[list[subprocess.Popen[str]]]:
    """A sender and a receiver, each with an environment of its own; the receiver dials."""
    with socket.socket() as free:
        free.bind(("127.0.1.1", 0))
        where = f"127.0.1.1:{free.getsockname()[1]}"
    words = ["--register", "--size", size, "--count", str(count), "--stall", "20"]
    sides: list[subprocess.Popen[str]] = []
    try:
        for how, env in (("--listen", first), ("--dial", second)):
            sides.append(
                subprocess.Popen(
                    [str(build / "stress" / "pair"), *words, how, where],
                    env={"R2CCL_NICS": nics, "R2CCL_LOG": "info", **env},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            time.sleep(0.3)
        yield sides
    finally:
        for side in sides:
            side.kill()
            side.wait(20)


def both_right(sides: list[subprocess.Popen[str]]) -> list[str]:
    """They end well, with every byte right; what they said."""
    texts = [side.communicate(timeout=60)[0] for side in sides]
    assert [side.returncode for side in sides] == [0, 0], texts
    assert any('"wrong": 0' in text for text in texts), texts
    return texts
