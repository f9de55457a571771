"""Somebody writes into the control segment of a running job, or cuts it short: the job neither
waits nor ends, and what the tools read is right again within seconds. Rung 3: real processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Build
from failover_bed import loopback, running_pair, until
from test_health import LONG, state

from r2ccl_ctl import control, journal
from r2ccl_ctl.errors import R2Error

A = "127.0.1.1"


def noise(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(byte | 1 for byte in random.Random(7).randbytes(path.stat().st_size)))


def cut_short(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [noise, cut_short, empty])
def test_a_damaged_segment_stops_nothing(build: Build, damage: Callable[[Path], None]) -> None:
    with running_pair(build.path, *LONG, nics=loopback(2)) as pair:
        pair.moving()
        path = pair.tx.segment.path
        for _ in range(3):
            damage(path)

        def readable() -> bool:
            found = control.describe(path)
            try:
                return found is not None and found.running and bool(found.snapshot().nics)
            except R2Error:
                return False

        until(f"readable again: {pair}", readable)
        pair.moving()
        pair.tx.fail(A, "blackhole")
        until(f"a failure is seen: {pair}", lambda: state(pair.tx, A) == "probing")
        # What was there before the damage is back within a second.
        wanted = {"started", "fault-injected", "path-down"}
        until(
            f"the journal is whole: {pair}",
            lambda: wanted <= {e.event for e in journal.read_all(pair.tx.segment)},
        )
        pair.tx.recover(A)
        pair.finish()
