"""The verbs transport over a stand-in for libibverbs: what arrives is right whatever devices do,
and the job goes on while one path is left.

Rung 3: real processes, a real protocol, no RDMA hardware; the stand-in keeps the rules of the
specification and breaks on request what it leaves open. It cannot prove what devices and drivers do
(the RDMA guest, rung 5, and hardware), nor speed.
"""

from __future__ import annotations

import pytest
from conftest import Build
from failover_bed import Pair, Side, loopback, running_pair, running_perf, until
from verbs_bed import PATIENT, command, moved, over, settings

from r2ccl_ctl import control

BULK = ("--register", "--size", "1M", "--conns", 2, "--stall", 20)


@pytest.mark.parametrize(
    ("size", "outstanding", "count", "verify"),
    [("8", 1, 1000, 0), ("8193", 1, 1000, 1), ("100000", 2, 1000, 0), ("1M", 4, 300, 1)],
)
def test_healthy(build: Build, size: str, outstanding: int, count: int, verify: int) -> None:
    """Messages of each kind go over queue pairs, and no socket carries any."""
    words = (
        "--register",
        "--size",
        size,
        "--outstanding",
        outstanding,
        "--stall",
        20,
    )
    env = settings(build, R2CCL_VERIFY=verify)
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        over(pair, "verbs")
        pair.moving(count)
        seen = pair.tx.snapshot()
        pair.finish()
        assert not pair.tx.named("replay")
        assert moved(seen, "tcp") == 0


@pytest.mark.parametrize("op", ["all_reduce", "alltoall"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(build: Build, op: str, ranks: int) -> None:
    """Collectives of all sizes and protocols, every value checked."""
    words = ("--op", op, "-b", "8", "-e", "4M", "-f", "16", "-n", "150")
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


@pytest.mark.parametrize("verify", [0, 1])
def test_device_memory(build: Build, verify: int) -> None:
    """Memory that no thread can touch, shown by flushes only, while a port goes and comes back:
    every byte is right, and no socket carried any."""
    env = settings(
        build, R2CCL_GPU_MEMORY="direct", R2_FAKEVERBS_CHAOS="seed=1,gpu=1", R2CCL_VERIFY=verify
    )
    words = ("--device", "--size", "300001", "--random-sizes", "--conns", 2, "--stall", 20)
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.tx.pid, "port fv1 1 down")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("replay")))
        command(pair.tx.pid, "port fv1 1 up")
        seen = pair.tx.snapshot()
        pair.finish()
        assert moved(seen, "tcp") == 0


def test_last_rdma_is_not_drained(build: Build) -> None:
    """Memory of devices cannot go over sockets: a NIC whose port is down is not among what would be
    left, although its interface is up, and one whose port is back is."""
    env = settings(build, R2CCL_GPU_MEMORY="direct", R2_FAKEVERBS_CHAOS="seed=1,gpu=1")
    words = ("--device", "--size", "300001", "--conns", 2, "--stall", 20)
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.tx.pid, "port fv1 1 down")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("path-down")))
        drain = control.Command("drain-nic", nic="127.0.1.1")
        told = control.send_command(pair.tx.segment, drain, timeout=10.0)
        assert not told.ok
        assert "the last usable NIC of this process with RDMA" in told.text
        command(pair.tx.pid, "port fv1 1 up")
        over(pair, "verbs", 2)
        until(
            f"it may be drained: {pair}",
            lambda: control.send_command(pair.tx.segment, drain, timeout=10.0).ok,
        )
        pair.moving()
        pair.finish()


@pytest.mark.parametrize("status", [1, 5, 12, 22], ids=lambda code: f"wc{code}")
def test_completion_codes(build: Build, status: int) -> None:
    """Whatever code a request fails with (test_verbs_tables.c has all), the path ends and the job
    goes on over the other one. The journal says whose fault it was; a flush is nobody's."""
    env = settings(build, **PATIENT)
    with running_pair(build.path, *BULK, nics=loopback(2), **env) as pair:
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=150_000_000)
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.tx.pid, f"inject fv0 {status}")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("replay")))
        pair.finish()
        down = [e for e in pair.tx.named("path-down") if e.nic == "127.0.1.1"]
        assert down, str(pair)
        if status != 5:  # flushed, which is nobody's
            assert any("fault)" in e.cause for e in down), str(pair)


@pytest.mark.parametrize(
    ("side", "trouble"),
    [
        ("tx", "fatal fv1"),
        ("rx", "fatal fv1"),
        ("rx", "refuse fv1 err 1000000"),
        ("tx", "port fv1 1 blackhole"),
    ],
)
def test_device_trouble(build: Build, side: str, trouble: str) -> None:
    """A device fails for good, cannot move queue pairs to ERR (they are destroyed instead), or
    swallows everything without a word; on either side."""
    env = settings(build, NCCL_IB_TIMEOUT=14)
    with running_pair(build.path, *BULK, nics=loopback(2), **env) as pair:
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=150_000_000)
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.side(side).pid, trouble)
        if trouble.startswith("refuse"):
            command(pair.side(side).pid, "port fv1 1 down")
        until(f"it is noticed: {pair}", lambda: bool(pair.tx.named("replay")), 20.0)
        pair.finish()


def test_last_resort_and_back(build: Build) -> None:
    """Both ports go: sockets carry the job. One comes back: so does the traffic."""
    with running_pair(build.path, *BULK, nics=loopback(2), **settings(build)) as pair:
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=60_000_000)
        over(pair, "verbs", 2)
        pair.moving()
        for device in ("fv0", "fv1"):
            command(pair.tx.pid, f"port {device} 1 down")
        over(pair, "tcp")
        pair.moving()
        assert moved(pair.tx.snapshot(), "tcp") > 0
        command(pair.tx.pid, "port fv0 1 up")
        over(pair, "verbs")
        before = moved(pair.tx.snapshot(), "verbs")
        pair.moving()
        until("queue pairs carry it again", lambda: moved(pair.tx.snapshot(), "verbs") > before)
        pair.finish()


def queue_pairs_fit(side: Side, nic: str) -> bool:
    """There are as many as the NIC's paths that are up need: 3 each (tests set no more)."""
    seen = side.snapshot()
    paths = sum(p.nic == nic and p.via == "verbs" and p.state == "up" for p in seen.paths)
    return next(n.queue_pairs for n in seen.nics if n.name == nic) == 3 * paths


def rdma_of(side: Side, nic: str) -> tuple[str, str]:
    return next((n.rdma_device, n.rdma_state) for n in side.snapshot().nics if n.name == nic)


def ups(side: Side, nic: str) -> int:
    return len([e for e in side.named("path-up") if e.nic == nic])


def carried(side: Side, nic: str) -> int:
    return sum(p.tx_bytes + p.rx_bytes for p in side.snapshot().paths if p.nic == nic)


def out_and_in(pair: Pair, at: Side, out: str, back: str) -> None:
    """The device behind 127.0.2.1 goes and comes back, and is used again."""
    nic = "127.0.2.1"
    pair.moving()
    replays, before = len(pair.tx.named("replay")), ups(at, nic)
    command(at.pid, out)
    until(f"it is noticed: {pair}", lambda: len(pair.tx.named("replay")) > replays)
    until(f"it is told: {pair}", lambda: rdma_of(at, nic)[1] == "Down")
    pair.moving()
    command(at.pid, back)
    until(f"it is back: {pair}", lambda: ups(at, nic) > before, 20.0)
    sent = carried(at, nic)
    until(f"it carries again: {pair}", lambda: carried(at, nic) > sent + 5_000_000, 20.0)


@pytest.mark.parametrize(
    ("side", "how"),
    [
        ("tx", "remove"),
        ("rx", "vanish"),
        pytest.param("tx", "vanish", marks=pytest.mark.soak),
        pytest.param("rx", "remove", marks=pytest.mark.soak),
    ],
)
def test_device_removed_and_back(build: Build, side: str, how: str) -> None:
    """A device is taken out in the middle, with the kernel's word or (as soft-RoCE) without, and
    put in again, twice, then under another name: the job goes on meanwhile, and queue pairs
    of the new device carry it afterwards, in the same process and with the same memory."""
    env = settings(build, NCCL_IB_TIMEOUT=14)
    with running_pair(build.path, *BULK, nics=loopback(2), **env) as pair:
        for nic in ("127.0.1.1", "127.0.2.1"):
            pair.tx.fail(nic, "slow", rate=150_000_000)
        over(pair, "verbs", 2)
        at, nic, name = pair.side(side), "127.0.2.1", "fv1"
        for back in ("fv1", "fv9"):
            out_and_in(pair, at, f"{how} {name}", f"restore {name} {back}")
            name = back
        assert rdma_of(at, nic) == ("fv9", "Active")
        until(
            f"queue pairs of old devices are gone: {pair}",
            lambda: queue_pairs_fit(at, nic),
        )
        seen = pair.tx.snapshot()
        pair.finish()
        assert moved(seen, "tcp") == 0
