"""Nodes with NICs that have RDMA and NICs that have not: queue pairs and sockets carry side by
side, whatever fails, on either kind.

Rung 3, over the stand-in for libibverbs: which loopback NIC has a device is R2_FAKEVERBS's. It
cannot prove how real NICs of such different speed share (weights, and who stands by where nobody
has named NICs: test_engine_mixed.c)."""

from __future__ import annotations

import time

import pytest
from conftest import Build
from failover_bed import Pair, Side, loopback, running_pair, running_perf, until
from verbs_bed import PATIENT, both_right, command, settings, two_ends

BULK = ("--register", "--size", "1M", "--conns", 2, "--stall", 20)
RDMA, PLAIN = "127.0.1.1", "127.0.2.1"
MIXED = "fv0=127.0.1.1"  # the second NIC has none
ALL = "fv0=127.0.1.1,fv1=127.0.2.1"


def mixed(build: Build, devices: str = MIXED, **more: str | int) -> dict[str, str]:
    return settings(build, R2_FAKEVERBS=devices, **{**PATIENT, **more})


def by_nic(side: Side, via: str) -> dict[str, int]:
    """Bytes of messages by local NIC, over paths of that transport."""
    found: dict[str, int] = {}
    for p in side.snapshot().paths:
        if p.via == via:
            found[p.nic] = found.get(p.nic, 0) + p.tx_bytes + p.rx_bytes
    return found


BOTH = ((RDMA, "verbs"), (PLAIN, "tcp"))


def settled(side: Side, nics: tuple[str, ...]) -> dict[str, int]:
    """by_nic of sockets, once those of `nics` have stood still for a while."""
    seen: list[dict[str, int]] = [{}]

    def stands() -> bool:
        time.sleep(0.3)
        seen.append(by_nic(side, "tcp"))
        return all(seen[-1].get(nic, 0) == seen[-2].get(nic, -1) for nic in nics)

    until(f"sockets of {nics} stand still", stands, 20.0)
    return seen[-1]


def carrying(pair: Pair, side: Side, *kinds: tuple[str, str], least: int = 2_000_000) -> None:
    """Each of them carries messages from now on."""
    before = {kind: by_nic(side, kind[1]).get(kind[0], 0) for kind in kinds}
    until(
        f"{kinds} carry",
        lambda: all(by_nic(side, k[1]).get(k[0], 0) > n + least for k, n in before.items()),
        20.0,
        pair,
    )


def test_both_kinds_carry(build: Build) -> None:
    """Queue pairs of the one NIC and sockets of the other, at once; nothing goes by sockets of the
    NIC that has RDMA."""
    with running_pair(build.path, *BULK, nics=loopback(2), **mixed(build)) as pair:
        carrying(pair, pair.tx, (RDMA, "verbs"), (PLAIN, "tcp"))
        seen = pair.tx.snapshot()
        assert not any(p.nic == RDMA and p.via == "tcp" for p in seen.paths), str(pair)
        assert not any(p.nic == PLAIN and p.via == "verbs" for p in seen.paths), str(pair)
        pair.finish()
        assert not pair.tx.named("replay")


@pytest.mark.parametrize(
    ("side", "kind", "out", "back"),
    [
        ("tx", "verbs", "port fv0 1 down", "port fv0 1 up"),
        ("rx", "verbs", "remove fv0", "restore fv0"),
        ("tx", "tcp", "error", ""),
        ("rx", "tcp", "blackhole", ""),
    ],
)
def test_either_kind_fails(build: Build, kind: str, out: str, back: str, side: str) -> None:
    """One kind goes in the middle of messages: what it lost goes over the other, which never ended;
    it comes back and carries again."""
    with running_pair(build.path, *BULK, nics=loopback(2), **mixed(build)) as pair:
        at, nic, other = pair.side(side), *((RDMA, PLAIN) if kind == "verbs" else (PLAIN, RDMA))
        carrying(pair, pair.tx, *BOTH)
        for slowed in (RDMA, PLAIN):
            pair.tx.fail(slowed, "slow", rate=100_000_000)
        pair.moving()
        if back:
            command(at.pid, out)
        else:
            pair.tx.recover(nic)
            at.fail(nic, out)
        until("what it lost is sent again", lambda: bool(pair.tx.named("replay")), 20.0, pair)
        stays = (other, "tcp" if kind == "verbs" else "verbs")
        carrying(pair, pair.tx, stays)
        pair.tx.recover(other)
        if back:
            command(at.pid, back)
        pair.tx.recover(nic)
        at.recover(nic)
        carrying(pair, pair.tx, *BOTH)
        ended = pair.tx.named("path-down") + pair.rx.named("path-down")
        down = {(e.nic, e.remote_nic) for e in ended}
        assert (nic, nic) in down and (other, other) not in down, str(pair)
        pair.finish()


def test_last_resort_of_the_rdma_nics(build: Build) -> None:
    """Two NICs with RDMA and one without. All RDMA goes: the sockets of those NICs carry with the
    third one's. One port comes back: only the third one's sockets carry beside it."""
    third = "127.0.3.1"
    nics = loopback(3)
    with running_pair(build.path, *BULK, nics=nics, **mixed(build, ALL)) as pair:
        carrying(pair, pair.tx, (RDMA, "verbs"), (PLAIN, "verbs"), (third, "tcp"))
        for nic in nics.split(","):
            pair.tx.fail(nic, "slow", rate=60_000_000)
        pair.moving()
        for device in ("fv0", "fv1"):
            command(pair.tx.pid, f"port {device} 1 down")
        carrying(pair, pair.tx, *((nic, "tcp") for nic in nics.split(",")))
        command(pair.tx.pid, "port fv0 1 up")
        for nic in nics.split(","):
            pair.tx.recover(nic)
        carrying(pair, pair.tx, (RDMA, "verbs"), (third, "tcp"))
        before = settled(pair.tx, (RDMA, PLAIN))  # what sockets had taken before
        carrying(pair, pair.tx, (RDMA, "verbs"), (third, "tcp"))
        after = by_nic(pair.tx, "tcp")
        for nic in (RDMA, PLAIN):
            assert after[nic] == before[nic], f"{nic}: its sockets stand by; {pair}"
        down = {(e.nic, e.remote_nic) for e in pair.tx.named("path-down")}
        assert (third, third) not in down, str(pair)
        pair.finish()


@pytest.mark.parametrize(("first", "second"), [(MIXED, ALL), (ALL, MIXED)])
def test_rdma_only_meets_mixed(build: Build, first: str, second: str) -> None:
    """All of a node's NICs have RDMA, one of the other's: that pair's queue pairs carry, and
    sockets join the NICs that are left, whichever end connects."""
    env = [mixed(build, devices) for devices in (first, second)]
    with two_ends(build.path, loopback(2), env[0], env[1], 600, "4M") as sides:
        tx = Side("tx", sides[0].pid)
        wanted = {(RDMA, RDMA, "verbs"), (PLAIN, PLAIN, "tcp")}

        def carry() -> set[tuple[str, str, str]]:
            paths = tx.snapshot().paths
            return {(p.nic, p.remote_nic, p.via) for p in paths if p.tx_bytes > 4_000_000}

        until(f"{wanted} carry", lambda: wanted <= carry(), 20.0)
        assert not any(nic == RDMA and via == "tcp" for nic, _, via in carry())
        both_right(sides)
        tx.close()


@pytest.mark.parametrize(("op", "ranks"), [("all_reduce", 2), ("all_reduce", 3), ("alltoall", 2)])
def test_collectives_while_a_kind_fails(build: Build, op: str, ranks: int) -> None:
    """Collectives, every value checked, while RDMA of one rank goes and comes back, then the other
    NIC of another."""
    env = settings(build, R2_FAKEVERBS_DEVICES=1)
    words = ("--op", op, "-b", "2M", "--duration", 80)
    with running_perf(build, *words, ranks=ranks, nics=2, env=env) as job:
        job.moving(16)
        nic = [n.name for n in job.sides[-1].snapshot().nics][1]
        for kind in ("blackhole", "error"):
            command(job.sides[0].pid, "port fv0 1 down")
            job.moving(16)
            command(job.sides[0].pid, "port fv0 1 up")
            job.sides[-1].fail(nic, kind)
            job.moving(16)
            job.sides[-1].recover(nic)
            job.moving(8)
        vias = {p.via for p in job.sides[0].snapshot().paths if p.tx_bytes}
        assert vias == {"tcp", "verbs"}, str(job)
        job.finish()
