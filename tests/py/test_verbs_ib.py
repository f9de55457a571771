"""InfiniBand ports without an interface, several on one device: they are NICs of their own, whose
queue pairs are agreed on over a NIC that has an address.

Rung 3, over the stand-in for libibverbs: LIDs lead nowhere outside their subnet there, packets of
another partition vanish, and a port's events are its own. It cannot prove what subnet managers,
switches and devices do."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import time

import pytest
from click.testing import CliRunner
from conftest import Build
from failover_bed import Pair, Side, running_pair, until
from verbs_bed import PATIENT, ask, both_right, command, moved, over, settings, two_ends

from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Snapshot

BULK = ("--register", "--size", "1M", "--conns", 2, "--stall", 20)
PORTS = "127.0.1.1,fvib:1,fvib:2"
ONE_SUBNET = "fvib=ib:127.0.3.1+ib:127.0.4.1"
TWO_SUBNETS = "fvib=ib:127.0.3.1+ib:127.1.4.1"


def ib(build: Build, devices: str = ONE_SUBNET, **more: str | int) -> dict[str, str]:
    return settings(build, R2_FAKEVERBS=devices, **{**PATIENT, **more})


def grown(pair: Pair, before: Snapshot) -> Snapshot:
    """The sender's, once more has moved over its queue pairs."""
    seen = [before]

    def look() -> bool:
        seen.append(pair.tx.snapshot())
        return moved(seen[-1], "verbs") > moved(before, "verbs")

    until("more over queue pairs", look, 20.0)
    return seen[-1]


def pairs_up(seen: Snapshot) -> set[tuple[str, str]]:
    return {(p.nic, p.remote_nic) for p in seen.paths if p.state == "up" and p.via == "verbs"}


def test_ports_are_nics(build: Build) -> None:
    """Each port is a NIC with its own name, GUID, LID and rail. Queue pairs carry all. Once they
    are there, the interface over which they were agreed on carries nothing more. On a slow machine
    that may be after the first messages."""
    with running_pair(build.path, *BULK, nics=PORTS, **ib(build)) as pair:
        over(pair, "verbs", 2)
        before = seen = pair.tx.snapshot()
        for _ in range(3):  # the segment has what moved a little later
            before = seen
            seen = grown(pair, before)
        pid = str(pair.tx.pid)
        shown = [
            CliRunner().invoke(main, [verb, "--pid", pid]).output for verb in ("nics", "status")
        ]
        pair.finish()
    assert {("fvib:1", "fvib:1"), ("fvib:2", "fvib:2")} <= pairs_up(seen)
    assert moved(seen, "tcp") == moved(before, "tcp")
    nics = {n.name: n for n in seen.nics}
    assert nics["fvib:1"].rdma_lid == 0x0301 and nics["fvib:2"].rdma_lid == 0x0401
    assert nics["fvib:1"].rdma_link == "InfiniBand" and nics["fvib:1"].weight == 100
    assert nics["fvib:1"].addr.startswith("0x") and nics["fvib:1"].addr != nics["fvib:2"].addr
    gid = nics["fvib:1"].gid
    assert gid and nics["fvib:1"].queue_pairs > 0
    row = [
        r"fvib:1",
        "fvib",
        "1",
        "Active",
        "LinkUp",
        "100",
        str(0x0301),
        "InfiniBand",
        gid,
        r"\d+",
    ]
    for text in shown:
        assert "BASE LID" in text and "QUEUE PAIRS" in text, text
        assert re.search(r"\b" + r" +".join(row) + "$", text, re.MULTILINE), text


def test_port_that_comes_up_later(build: Build) -> None:
    """A port that is named and has no link when the processes start is a NIC that is down: the
    other one carries, and it joins in when its link comes."""
    with running_pair(
        build.path, *BULK, nics=PORTS, **ib(build, R2_FAKEVERBS_HANG="fvib down2")
    ) as pair:
        over(pair, "verbs", 1)
        pair.moving()
        for side in (pair.tx, pair.rx):
            assert {n.name: n.link for n in side.snapshot().nics}["fvib:2"] == "down", str(pair)
        assert pairs_up(pair.tx.snapshot()) == {("fvib:1", "fvib:1")}, str(pair)
        for side in (pair.tx, pair.rx):
            command(side.pid, "port fvib 2 up")
        until(
            f"it joins in: {pair}",
            lambda: ("fvib:2", "fvib:2") in pairs_up(pair.tx.snapshot()),
            20.0,
        )
        pair.moving()
        pair.finish()


def test_other_subnet_by_grh(build: Build) -> None:
    """Ports of different subnets reach each other by GID, through a router; by LID alone they
    could not. The own port of rail 2 is down here, that of rail 1 at the peer. So the only way
    leads from subnet 0 to subnet 1."""
    with running_pair(build.path, *BULK, nics=PORTS, **ib(build, TWO_SUBNETS)) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.tx.pid, "port fvib 2 down")
        command(pair.rx.pid, "port fvib 1 down")
        until(
            f"across: {pair}", lambda: pairs_up(pair.tx.snapshot()) == {("fvib:1", "fvib:2")}, 20.0
        )
        before = moved(pair.tx.snapshot(), "verbs")
        until(
            f"it carries: {pair}", lambda: moved(pair.tx.snapshot(), "verbs") > before + 5_000_000
        )
        pair.finish()


def test_device_with_two_ports_removed(build: Build) -> None:
    """The device goes with both its ports: sockets carry the job. It is put in again: both NICs
    come back."""
    with running_pair(build.path, *BULK, nics=PORTS, **ib(build)) as pair:
        over(pair, "verbs", 2)
        pair.moving()
        command(pair.rx.pid, "remove fvib")
        over(pair, "tcp")
        pair.moving()
        assert {e.nic for e in pair.rx.named("nic-down")} == {"fvib:1", "fvib:2"}
        sockets = {p.nic for p in pair.tx.snapshot().paths if p.via == "tcp"}
        assert sockets == {"lo"}, "a port without an interface has none"
        command(pair.rx.pid, "restore fvib")
        over(pair, "verbs", 2)
        before = moved(pair.tx.snapshot(), "verbs")
        until("queue pairs carry it again", lambda: moved(pair.tx.snapshot(), "verbs") > before)
        pair.finish()


@pytest.mark.parametrize(("index", "via"), [(1, "verbs"), (7, "tcp")])
def test_partition_key_index(build: Build, index: int, via: str) -> None:
    """NCCL_IB_PKEY is an index into the port's table; one that is not there makes no queue pair."""
    with running_pair(build.path, *BULK, nics=PORTS, **ib(build, NCCL_IB_PKEY=index)) as pair:
        over(pair, via)
        pair.moving()
        if via == "tcp":
            assert moved(pair.tx.snapshot(), "verbs") == 0
        else:  # sockets may have begun before the queue pairs were up
            until("sockets stand by", functools.partial(stands, pair.tx, "tcp"))
        pair.finish()


def stands(side: Side, via: str) -> bool:
    before = moved(side.snapshot(), via)
    time.sleep(0.3)
    return moved(side.snapshot(), via) == before


@pytest.mark.parametrize("hca", ["", "=fvib:2", "fvib:2", "^fvib:1"])
def test_one_port_named(build: Build, hca: str) -> None:
    """R2CCL_NICS names one port, with a list of NCCL's that has it or without: the other one is no
    NIC."""
    env = ib(build, NCCL_IB_HCA=hca)
    with running_pair(build.path, *BULK, nics="127.0.1.1,fvib:2", **env) as pair:
        over(pair, "verbs")
        pair.moving()
        names = [n.name for n in pair.tx.snapshot().nics]
        pair.finish()
    assert names == ["lo", "fvib:2"]


@pytest.mark.parametrize("keys", [(0, 1), (1, 1)])
def test_partitions(build: Build, keys: tuple[int, int]) -> None:
    """Processes of different partitions (NCCL_IB_PKEY) agree on queue pairs over which nothing ever
    arrives: no paths, and the job goes on over sockets. In the same one, queue pairs carry all."""
    same = keys[0] == keys[1]
    env = [settings(build, NCCL_IB_PKEY=key, **(PATIENT if same else {})) for key in keys]
    count = 300 if same else 4000  # longer than three heartbeats
    with two_ends(build.path, "127.0.1.1,127.0.2.1", env[0], env[1], count) as sides:
        texts = both_right(sides)
    silent = any("heartbeats unanswered" in text or "silent" in text for text in texts)
    assert silent != same, texts


@pytest.mark.parametrize(
    ("first", "second", "agreed"),
    [
        ({"R2CCL_IB_MTU": "512"}, {}, 2),
        ({}, {"R2CCL_IB_MTU": "256"}, 1),
        ({"R2_FAKEVERBS_MTU": "2048"}, {"R2_FAKEVERBS_MTU": "4096"}, 4),
        ({"R2_FAKEVERBS_MTU": "4096"}, {"R2_FAKEVERBS_MTU": "4096", "R2CCL_IB_MTU": "2048"}, 4),
    ],
)
def test_path_mtu_is_agreed_on(
    build: Build, first: dict[str, str], second: dict[str, str], agreed: int
) -> None:
    """Ends with other settings, or other ports, use the lesser MTU, both of them: packets of
    another size than the responder's vanish in the stand-in. (Numbers: enum ibv_mtu.)"""
    env = [{**settings(build, **PATIENT), **more} for more in (first, second)]
    with two_ends(build.path, "127.0.1.1,127.0.2.1", env[0], env[1], 4000) as sides:
        for side in sides:
            what = f"mtu {agreed} in {side.pid}"
            until(what, functools.partial(lambda pid: mtu_of(pid) == agreed, side.pid))
        texts = both_right(sides)
    assert not any("is down: heartbeats" in text for text in texts), texts


def mtu_of(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has only begun
        return int(ask(pid, "attr mtu"))
    return -1


def test_bad_mtu(build: Build) -> None:
    """No size that queue pairs know: an error that names the setting, the value, the choices."""
    env = settings(build, R2CCL_IB_MTU="1500")
    with two_ends(build.path, "127.0.1.1", env, env, 10) as sides:
        texts = [side.communicate(timeout=60)[0] for side in sides]
    for word in ("R2CCL_IB_MTU", "1500", "256", "4096", "auto"):
        assert word in texts[0], texts


@pytest.mark.parametrize(
    ("nics", "words"),
    [
        ("fvib:1,fvib:2", ["InfiniBand ports only", "name an interface"]),
        ("127.0.1.1,fvib:x", ["fvib:x", "mlx5_0:1"]),
    ],
)
def test_bad_names(build: Build, nics: str, words: list[str]) -> None:
    """A name that is no such port: what is wrong and what would be right."""
    done = subprocess.run(
        [str(build.path / "stress" / "pair"), "--register", "--count", "1"],
        env={"R2CCL_NICS": nics, "R2CCL_LOG": "warn", **ib(build)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    for word in words:
        assert word in done.stdout + done.stderr, done.stdout + done.stderr
