"""The verbs transport over a stand-in for libibverbs: what arrives is right whatever devices do,
and the job goes on while one path is left.

Rung 3: real processes, a real protocol, no RDMA hardware; the stand-in keeps the rules of the
specification and breaks on request what it leaves open. It cannot prove what devices and drivers do
(the RDMA guest, rung 5, and hardware), nor speed.
"""

from __future__ import annotations

import pytest
from conftest import Build
from failover_bed import loopback, running_pair, running_perf, until
from verbs_bed import command, moved, over, settings

BULK = ("--register", "--size", "1M", "--count", 700, "--conns", 2, "--stall", 20)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize(
    ("size", "outstanding", "count"),
    [("8", 1, 20000), ("8193", 1, 2000), ("100000", 2, 1500), ("1M", 4, 300)],
)
def test_healthy(build: Build, size: str, outstanding: int, count: int, verify: int) -> None:
    """Messages of each kind go over queue pairs, and no socket carries any."""
    words = (
        "--register",
        "--size",
        size,
        "--outstanding",
        outstanding,
        "--count",
        1000,
        "--stall",
        20,
    )
    env = settings(build, R2CCL_VERIFY=verify)
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        over(pair, "verbs")
        seen = pair.tx.snapshot()
        pair.finish()
        assert not pair.tx.named("replay")
        assert moved(seen, "tcp") == 0


@pytest.mark.parametrize("op", ["all_reduce", "alltoall"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(build: Build, op: str, ranks: int) -> None:
    """Collectives of all sizes and protocols, every value checked."""
    words = ("--op", op, "-b", "8", "-e", "4M", "-f", "16", "-n", "40")
    with running_perf(build, *words, ranks=ranks, nics=2, env=settings(build)) as job:
        job.finish()


def test_port_down_and_up(build: Build) -> None:
    """A port goes down in the middle: the event ends its paths at once, the rest of the message
    goes over the other port, and the first comes back with its port."""
    with running_pair(build.path, *BULK, nics=loopback(2), **settings(build)) as pair:
        over(pair, "verbs", 2)
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=100_000_000)
        pair.moving()
        command(pair.tx.pid, "port fv1 1 down")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("replay")))
        command(pair.tx.pid, "port fv1 1 up")
        until(
            f"it is back: {pair}",
            lambda: any(e.nic == "127.0.2.1" for e in pair.tx.named("path-up")[2:]),
        )
        pair.tx.recover("127.0.1.1")
        pair.tx.recover("127.0.2.1")
        pair.finish()
