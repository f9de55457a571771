"""Which NICs reach each other, and what is said where they do not: silence on the last common rail,
unlike address families, packets that are too large for the way, one subnet for several NICs.

Rung 4: real addresses, bridges and silence between network namespaces. It cannot prove what a
physical switch does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import Build, missing
from failover_bed import PerfJob, Side, running_perf, until
from pyroute2 import IPRoute

from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

RATE = 1_000_000_000


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    """2 nodes x 2 NICs on rails of their own."""
    with Lab.up(LabSpec(name=f"r{os.getpid()}", rates=(RATE,), ipv6=True)) as made:
        yield made


@pytest.fixture(autouse=True)
def links_work_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves the links of the module's lab as the next one needs them."""
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").recover_all()


class Two:
    """A process of n0 that sends to one of n1, each with NICs of its own choice."""

    def __init__(
        self, build: Build, lab: Lab, nics: tuple[str, str], env: dict[str, dict[str, str]]
    ) -> None:
        where = f"{lab.address('n0', 'mgmt0')}:7411"
        words = ["--size", "64K", "--until-told", "--stall", "60"]
        self.logs = [tempfile.TemporaryFile() for _ in nics]
        self.children = []
        for node, how, named, log in zip(
            ("n0", "n1"), ("--listen", "--dial"), nics, self.logs, strict=True
        ):
            child = lab.popen(
                node,
                [str(build.path / "stress/pair"), *words, how, where],
                env={**os.environ, "R2CCL_NICS": named, "R2CCL_LOG": "warn", **env.get(node, {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self.children.append(child)
        names = ("sender", "receiver")
        self.sides = [Side(n, c.pid) for n, c in zip(names, self.children, strict=True)]

    def text(self, index: int) -> str:
        size = os.fstat(self.logs[index].fileno()).st_size
        return os.pread(self.logs[index].fileno(), size, 0).decode(errors="replace")

    def __str__(self) -> str:
        return "\n".join(f"--- n{i}\n{self.text(i)}" for i in range(2))

    def moving(self, count: int = 16) -> None:
        side = self.sides[1]
        goal = side.counter("messages_received") + count
        until("messages move", lambda: side.counter("messages_received") >= goal, 30.0, self)

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(20)
        for side in self.sides:
            side.close()


@contextlib.contextmanager
def two(build: Build, lab: Lab, *nics: str, **env: dict[str, str]) -> Iterator[Two]:
    made = Two(build, lab, (nics[0], nics[1]), env)
    try:
        yield made
    finally:
        made.close()


def sysctl(lab: Lab, node: str, name: str, value: str) -> None:
    lab.call_in(node, lambda: Path("/proc/sys/net", name).write_text(value))


def told(job: PerfJob, nic: str) -> list[str]:
    names = ("nic-down", "nic-probing", "nic-ramping", "nic-up", "nic-healthy")
    return [f"{e.event}: {e.cause}" for e in job.named(*names) if e.nic == nic]


def ups(job: PerfJob, nic: str) -> list[str]:
    return [e.cause for e in job.named("path-up") if e.nic == nic]


def test_dead_nic_is_not_back_when_the_last_rail_goes(build: Build, lab: Lab) -> None:
    """nic1 is dead, then nic0 falls silent as well: nobody answers any more, which says nothing for
    nic1. Once both work again, the job goes on."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "500ms"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until(
            f"nic1 is lost: {job}",
            lambda: any(t.startswith(("nic-down", "nic-probing")) for t in told(job, "nic1")),
        )
        time.sleep(3.0)  # longer than a NIC is looked at before it counts as not needed
        before = told(job, "nic1")
        lab.fail_link("n1", "nic0", "silent")
        time.sleep(4.0)
        after = told(job, "nic1")[len(before) :]
        assert not [t for t in after if t.startswith(("nic-ramping", "nic-up"))], f"{after} {job}"
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until(f"back: {job}", lambda: "nic-up" in " ".join(told(job, "nic1")[len(before) :]), 20.0)
        job.moving()
        job.finish()


def test_ramp_does_not_end_in_silence(build: Build, lab: Lab) -> None:
    """nic1 is on its way back when all NICs fall silent: it does not count as back."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "4s"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until("nic1 is lost", lambda: "nic-probing" in " ".join(told(job, "nic1")), 10.0, job)
        lab.recover_link("n1", "nic1")
        until("nic1 ramps", lambda: "nic-ramping" in " ".join(told(job, "nic1")), 10.0, job)
        for nic in ("nic0", "nic1"):
            lab.fail_link("n1", nic, "silent")
        time.sleep(5.0)
        assert "nic-up" not in " ".join(told(job, "nic1")), str(job)
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until("nic1 is back", lambda: "nic-up" in " ".join(told(job, "nic1")), 20.0, job)
        job.finish()


def test_refusal_by_another_nic_ends_nobody(build: Build, lab: Lab) -> None:
    """n0 uses nic0, n1 only nic1, and n1's kernel answers at nic0 for nic1's address: refused, and
    the process lives. The user is told who does not reach whom."""
    for node in ("n0", "n1"):
        sysctl(lab, node, "ipv4/conf/all/arp_ignore", "0")
        sysctl(lab, node, "ipv4/conf/nic0/arp_ignore", "0")
    try:
        with two(build, lab, "nic0", "nic1") as job:
            word = f"nic0 to {lab.address('n1', 'nic1')}:"
            until("it is said", lambda: word in job.text(0), 30.0, job)
            assert "no NIC here reaches a peer process" in job.text(0)
            assert "nobody listens there" in job.text(0)
            time.sleep(2.0)
            assert [c.poll() for c in job.children] == [None, None], str(job)
            assert not job.sides[0].named("peer-gone"), str(job)
            peers = job.sides[0].snapshot().peers
            assert [p.cause for p in peers if p.cause] == ["no NIC here reaches it"], str(job)
    finally:
        for node in ("n0", "n1"):
            sysctl(lab, node, "ipv4/conf/all/arp_ignore", "1")
            sysctl(lab, node, "ipv4/conf/nic0/arp_ignore", "1")


@contextlib.contextmanager
def without(lab: Lab, gone: list[tuple[str, str]]) -> Iterator[None]:
    """These NICs have their IPv6 address only."""

    def change(verb: str) -> None:
        for node, nic in gone:
            text = lab.address(node, nic)

            def work(nic: str = nic, text: str = text) -> None:
                with IPRoute() as ip:
                    ip.addr(verb, index=ip.link_lookup(ifname=nic)[0], address=text, prefixlen=24)

            lab.call_in(node, work)

    change("del")
    try:
        yield
    finally:
        change("add")


@pytest.mark.parametrize("few", [1, 2])
def test_nics_with_one_family_only(build: Build, lab: Lab, few: int) -> None:
    """n1's NICs, one or both, have no IPv4 address; n0's have both: all are used, both ways."""
    with (
        without(lab, [("n1", f"nic{i}") for i in range(few)]),
        running_perf(build, lab=lab.name, per_node=1) as job,
    ):
        job.moving()
        for side in job.sides:
            for nic in ("nic0", "nic1"):
                until(f"{nic} carries", partial(carries, side, nic), 20.0, job)
        lab.fail_link("n1", "nic1")
        until("nic1 is lost", lambda: "nic-down" in " ".join(told(job, "nic1")), 10.0, job)
        job.moving()
        lab.recover_link("n1", "nic1")
        job.finish()


def carried(side: Side, nic: str) -> int:
    paths = [p for p in side.snapshot().paths if p.nic == nic]
    return min(sum(p.tx_bytes for p in paths), sum(p.rx_bytes for p in paths))


def carries(side: Side, nic: str) -> bool:
    return carried(side, nic) > 8e6


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_no_common_family(build: Build, lab: Lab, family: str) -> None:
    """n0 was told one family, n1 has the other only: said at once, with both sides' addresses."""
    other = {"AF_INET": "AF_INET6", "AF_INET6": "AF_INET"}[family]
    with two(build, lab, "nic0", "nic0", n0={"NCCL_SOCKET_FAMILY": family},
             n1={"NCCL_SOCKET_FAMILY": other}) as job:  # fmt: skip
        until("it is said", lambda: "no address family in common" in job.text(0), 5.0, job)
        v4, v6 = ("n0", "n1") if family == "AF_INET" else ("n1", "n0")
        assert f"{lab.address(v4, 'nic0')}" in job.text(0), str(job)
        assert lab.spec.nic_address6(lab.node_index(v6), 0) in job.text(0), str(job)
        assert job.text(0).count("no address family in common") == 1, str(job)


def test_one_subnet_with_the_kernels_usual_settings(build: Build, lab_admin: None) -> None:
    """rp_filter=1 and arp_ignore=0, two NICs in one subnet: one NIC is never used, and the warning
    names both settings."""
    spec = LabSpec(name=f"o{os.getpid()}", rates=(RATE,), variant="one-subnet")
    with Lab.up(spec) as lab:
        for node in lab.nodes:
            for scope in ("all", "nic0", "nic1"):
                sysctl(lab, node, f"ipv4/conf/{scope}/arp_ignore", "0")
                sysctl(lab, node, f"ipv4/conf/{scope}/rp_filter", "1")
        with running_perf(build, lab=lab.name, per_node=1) as job:
            lines = job.job.ranks

            def warned() -> list[str]:
                text = "\n".join(rank.output for rank in lines)
                return [line for line in text.splitlines() if "not protected" in line]

            until("it is said", lambda: bool(warned()), 30.0, job)
            assert "rp_filter=1, arp_ignore=0" in warned()[0], str(job)
            assert "shares a subnet with nic" in warned()[0], str(job)
            job.finish()


def ports(lab: Lab, rails: tuple[int, ...], mtu: int) -> None:
    """The fabric's ports get this MTU: the bridge drops what is larger, but for pieces that its
    kernel has not cut into packets yet."""
    fabric = lab._fabric

    def work() -> None:
        for port in [f"n{node}r{rail}" for node in (0, 1) for rail in rails]:
            fabric.ipr("fab").link("set", index=fabric.index("fab", port), mtu=mtu)

    lab._call(work)


@pytest.mark.parametrize("rails", [(0,), (0, 1)])
def test_way_that_takes_small_packets_only(build: Build, lab: Lab, rails: tuple[int, ...]) -> None:
    """Bridges take packets of 1500 bytes where NICs send 9000: the job goes on, the user is told,
    and the NIC carries small packets."""
    ports(lab, rails, 1500)
    try:
        with running_perf(build, lab=lab.name, per_node=1) as job:
            told = "are lost on the way"
            until("it is said", lambda: any(told in r.output for r in job.job.ranks), 30.0, job)
            before = [s.counter("messages_received") for s in job.sides]
            until(
                "the job moves",
                lambda: all(
                    s.counter("messages_received") > b + 32
                    for s, b in zip(job.sides, before, strict=True)
                ),
                30.0,
                job,
            )
            job.finish()
            assert "packets of 9000 bytes" in str(job.job.ranks[0].output + job.job.ranks[1].output)
    finally:
        ports(lab, rails, 9000)


@pytest.mark.parametrize("verdict", ["drop", "reject with tcp reset"])
def test_firewall_that_shuts_ports_of_the_range(build: Build, lab: Lab, verdict: str) -> None:
    """The firewall of n1 does not let in what R2CCL_PORT_RANGE has: the message names the addresses
    with their ports, the range, what a node needs of it, and the firewalls."""
    nft = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not nft:
        missing("lab", "no nft, which makes the firewall of this test")
    rules = "table inet r2fw {\n chain in {\n type filter hook input priority 0;\n"
    rules += f' iifname "nic*" tcp dport 41000-41001 {verdict};\n }}\n}}\n'
    child = lab.popen("n1", [nft, "-f", "-"], stdin=subprocess.PIPE)
    child.communicate(rules.encode(), timeout=20)
    assert child.returncode == 0
    try:
        env = {"R2CCL_PORT_RANGE": "41000-41001"}
        with running_perf(build, lab=lab.name, per_node=1, env=env) as job:
            says = "R2CCL_PORT_RANGE=41000-41001 has 2 ports. A node needs one for each of its "
            says += "processes (1 here), two with the shim. Firewalls must let in all of it"
            lines: list[str] = []

            def told() -> bool:
                output = "".join(rank.output for rank in job.job.ranks)
                lines[:] = [line for line in output.splitlines() if says in line]
                return bool(lines)

            until("the range is named", told, 15.0, job)
            assert "10.1.0.2:4100" in lines[0] or "fd52:" in lines[0], str(job)
            how = "waits for a path" if verdict == "drop" else "a firewall refuses"
            assert how in lines[0], str(job)
            if verdict == "drop":  # it waits: NICs whose names nobody has said yet have addresses
                rows = [path for side in job.sides for path in side.snapshot().paths]
                assert rows and all(path.remote_nic for path in rows), f"{rows} {job}"
    finally:
        flush = lab.popen("n1", [nft, "delete", "table", "inet", "r2fw"])
        assert flush.wait(20) == 0
