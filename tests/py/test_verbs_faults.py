"""fail-nic over queue pairs: each kind does to the verbs transport what it does to sockets.

Rung 3, over the stand-in for libibverbs. Injected faults are the transport's own
(docs/failures.md, "Injected faults"); what devices do when they fail is
test_verbs.py's, and hardware's."""

from __future__ import annotations

import time

import pytest
from conftest import Build
from failover_bed import Side, loopback, running_pair, until
from verbs_bed import moved, over, settings

BULK = ("--register", "--size", "1M", "--conns", 2, "--stall", 20)
NIC, OTHER = "127.0.2.1", "127.0.1.1"


def carried(side: Side) -> int:
    """Bytes that have moved over the NIC, by its paths."""
    return sum(p.tx_bytes + p.rx_bytes for p in side.snapshot().paths if p.nic == NIC)


@pytest.mark.parametrize(
    ("kind", "direction", "side"),
    [
        ("blackhole", "tx", "tx"),
        ("blackhole", "rx", "tx"),
        ("blackhole", "tx", "rx"),
        ("blackhole", "both", "rx"),
        ("error", "both", "tx"),
    ],
)
def test_ends_paths(build: Build, kind: str, direction: str, side: str) -> None:
    """Paths of the NIC end, the other NIC carries on over its queue pairs, and after the fault they
    come back."""
    with running_pair(build.path, *BULK, nics=loopback(2), **settings(build)) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        at = pair.side(side)
        at.fail(NIC, kind, direction)
        until(f"it is noticed: {pair}", lambda: bool(at.named("path-down")), 20.0)
        assert {e.nic for e in at.named("path-down")} == {NIC}, str(pair)
        pair.moving()
        before = len([e for e in at.named("path-up") if e.nic == NIC])
        at.recover(NIC)
        until(
            f"it is back: {pair}",
            lambda: len([e for e in at.named("path-up") if e.nic == NIC]) > before,
            20.0,
        )
        seen = pair.tx.snapshot()
        pair.finish()
        assert moved(seen, "tcp") == 0


@pytest.mark.parametrize(
    ("side", "kind", "more", "bound"),
    [
        ("tx", "slow", {"rate": 2_000_000}, 2_000_000),
        ("rx", "loss", {"loss_ppm": 500_000}, 1_000_000),
    ],
)
def test_slows_the_nic(
    build: Build, kind: str, more: dict[str, int], bound: int, side: str
) -> None:
    """The NIC carries no more than the fault lets through (`bound`: bytes per second; a lost piece
    of 64 KiB costs 200 ms, so with half of them lost it is 640 KB); the job goes on."""
    with running_pair(build.path, *BULK, nics=loopback(2), **settings(build)) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        at = pair.side(side)
        at.fail(NIC, kind, "both", **more)
        time.sleep(1.0)  # what was under way has come through
        before, began = carried(at), time.monotonic()
        pair.moving()
        time.sleep(2.0)
        rate = (carried(at) - before) / (time.monotonic() - began)
        at.recover(NIC)
        pair.finish()
    # A chunk or two at the edges of the time.
    assert rate < bound + 1_000_000, f"{rate:.0f} bytes per second; {pair}"
