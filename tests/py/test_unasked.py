"""Messages that come before their receives over the bulk sockets (R2CCL_UNASKED), while NICs fail:
nothing is lost, doubled or late.

Rung 3: real sockets and processes, injected faults. That they may come at all, and how many, is
test_engine_unasked's matter; what it gains, the benchmark's.
"""

from __future__ import annotations

import pytest
from conftest import Build
from failover_bed import loopback, running_pair, until


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("size", "outstanding", "verify"),
    [("8193", 32, 0), ("131072", 1, 0), ("131072", 8, 1), ("131073", 8, 0), ("100000", 32, 0)],
)
def test_healthy(build: Build, size: str, outstanding: int, verify: int, threads: int) -> None:
    """Every byte right, one message at a time and many, with one I/O thread and more."""
    words = ("--size", size, "--outstanding", outstanding, "--conns", 3, "--stall", 10, "--bidir")
    env: dict[str, str | int] = {
        "R2CCL_UNASKED": "128K",
        "R2CCL_VERIFY": verify,
        "R2CCL_IO_THREADS": threads,
    }
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        pair.moving(2000)
        pair.finish()
        assert not pair.tx.named("replay")


@pytest.mark.parametrize("threads", [1, 4, 12])
@pytest.mark.parametrize("kind", ["blackhole", "error"])
def test_nics_fail_in_turn(build: Build, kind: str, threads: int) -> None:
    """NICs of both sides die in the middle of such messages and come back, again and again; with
    many threads what waits is offered to few lanes."""
    words = ("--size", "128K", "--outstanding", 16, "--conns", 3, "--stall", 20, "--bidir")
    env: dict[str, str | int] = {
        "R2CCL_UNASKED": "128K",
        "R2CCL_IO_THREADS": threads,
        "R2CCL_DAMP_SUPPRESS": 0,
    }
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        pair.moving()
        for turn in range(6):
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
