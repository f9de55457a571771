"""Faults under two engines on loopback NICs: nothing is lost, doubled or late, and the journal
tells what happened.

Rung 3: real sockets and processes, injected faults, no privileges. It cannot prove what a link
event, a real carrier or a real network does (rung 4), nor anything about GPUs (rung 6).
"""

from __future__ import annotations

import time

import pytest
from conftest import Build
from failover_bed import loopback, running_pair, until

BULK = ("--size", "1M", "--conns", 2, "--stall", 20)


@pytest.mark.parametrize(
    ("size", "outstanding", "verify"),
    [("8", 1, 0), ("8", 32, 1), ("8192", 1, 1), ("8193", 1, 0), ("100000", 2, 1)],
)
def test_healthy(build: Build, size: str, outstanding: int, verify: int) -> None:
    """Messages of each kind flow without any fault, also one at a time: the credit for small
    messages comes back although they were acknowledged before their receive was posted."""
    words = ("--size", size, "--outstanding", outstanding, "--stall", 10)
    with running_pair(build.path, *words, nics=loopback(2), R2CCL_VERIFY=verify) as pair:
        pair.moving(1500)
        pair.finish()
        assert not pair.tx.named("replay")
        ended = "the peer "  # has closed or reset the connection: it left first
        assert all(event.cause.startswith(ended) for event in pair.tx.named("path-down")), str(pair)


@pytest.mark.parametrize("side", ["tx", "rx"])
@pytest.mark.parametrize(
    ("kind", "direction"),
    [("blackhole", "tx"), ("blackhole", "rx"), ("blackhole", "both"), ("error", "both")],
)
def test_one_nic_dies(build: Build, kind: str, direction: str, side: str) -> None:
    """A NIC of either side dies in the middle of a chunk: the rest of the job goes over the other
    one, and what was lost is replayed."""
    with running_pair(build.path, *BULK, nics=loopback(2)) as pair:
        for nic in ("127.0.2.1", "127.0.1.1"):
            pair.tx.fail(nic, "slow", rate=100_000_000)
        pair.moving()
        said = pair.side(side).fail("127.0.2.1", kind, direction)
        assert ("in place of an earlier one" in said) == (side == "tx")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("replay")))
        pair.tx.recover("127.0.1.1")
        pair.finish()
        assert pair.side(side).named("fault-injected")
        assert pair.tx.named("path-down"), str(pair)
        assert pair.rx.named("fenced"), str(pair)
        chunks, lost = pair.tx.counter("replayed_chunks"), pair.tx.counter("replayed_bytes")
        assert chunks * 128 <= lost <= chunks << 20, f"{lost} bytes in {chunks} chunks"
        assert (lost > 0) == (chunks > 0)


@pytest.mark.parametrize("kind", ["blackhole", "error"])
def test_all_away_then_one_back(build: Build, kind: str) -> None:
    """With no path left the job waits; one NIC that comes back is enough, and the bytes that were
    on both when they died are replayed."""
    with running_pair(build.path, *BULK, nics=loopback(2)) as pair:
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=100_000_000)
        pair.moving()
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, kind)
        time.sleep(1.5)
        stalled = pair.rx.counter("messages_received")
        time.sleep(0.2)
        assert pair.rx.counter("messages_received") == stalled
        pair.tx.recover("127.0.2.1")
        pair.moving(50)
        pair.finish()


@pytest.mark.parametrize(("kind", "threads"), [("blackhole", 1), ("error", 6)])
def test_nics_fail_in_turn(build: Build, kind: str, threads: int) -> None:
    """NICs of both sides die and come back, again and again; with many threads what waits is
    offered to few lanes."""
    words = ("--size", "128K", "--outstanding", 16, "--conns", 3, "--stall", 20, "--bidir")
    env: dict[str, str | int] = {"R2CCL_IO_THREADS": threads, "R2CCL_DAMP": 0}
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        pair.moving()
        for turn in range(4):
            side = pair.side(("tx", "rx")[turn % 2])
            nic = ("127.0.1.1", "127.0.2.1")[turn // 2 % 2]
            downs = len(side.named("path-down"))
            side.fail(nic, kind)
            until("it is noticed", lambda s=side, n=downs: len(s.named("path-down")) > n)  # type: ignore[misc]
            pair.moving(50)
            ups = len(side.named("path-up"))
            side.recover(nic)
            until("it is back", lambda s=side, n=ups: len(s.named("path-up")) > n)  # type: ignore[misc]
            pair.moving(50)
        pair.finish()
        assert pair.tx.named("replay") or pair.rx.named("replay"), str(pair)
