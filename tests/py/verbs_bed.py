"""Engines over tests/fakeverbs, the stand-in for libibverbs: its devices stand behind the loopback
NICs, and a datagram makes them fail."""

from __future__ import annotations

import os
import socket
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


def command(pid: int, text: str) -> None:
    """Tell the stand-in in that process; waits until it has heard."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(f"\0r2fv-test.{os.getpid()}.{pid}")
        s.settimeout(10)
        s.sendto(text.encode(), f"\0r2fv-ctl.{pid}")
        assert s.recv(16) == b"ok"


def moved(snapshot: Snapshot, via: str) -> int:
    """Bytes of messages over paths of that transport."""
    return sum(p.tx_bytes + p.rx_bytes for p in snapshot.paths if p.via == via)


def up(side: Side, via: str) -> int:
    return sum(p.state == "up" and p.via == via for p in side.snapshot().paths)


def over(pair: Pair, via: str, paths: int = 1) -> None:
    """Wait until the pair's paths are of that transport."""
    until(f"{paths} paths over {via}: {pair}", lambda: up(pair.tx, via) >= paths, 20.0)
