"""Real labs: links, carriers, shapers, black holes, variants, and leaving no trace.

Rung 4. It cannot prove what a physical NIC or switch does, nor exact rates: the bounds on rates
here only tell a shaper that works from one that does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import ROOT
from segment_bed import until

from r2ccl_ctl.cli.lab_cmds import lab as lab_command
from r2ccl_ctl.lab import Lab, LabError, LabSpec, LabUsageError, known_labs, remove
from r2ccl_ctl.lab.netns import NsDir

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_admin")]

NAME = f"t{os.getpid()}"
PORT = 7007


@pytest.fixture
def fresh() -> Iterator[Callable[..., Lab]]:
    """Make a lab of this process's name; it is gone at the end, whatever the test did."""

    def make(**spec: object) -> Lab:
        return Lab.up(LabSpec(name=NAME, **spec))  # type: ignore[arg-type]

    try:
        yield make
    finally:
        remove(NAME)


@pytest.fixture(scope="module")
def shared(lab_admin: None) -> Iterator[Lab]:
    """One lab, 2 nodes x 2 unshaped NICs, for tests that mend what they break."""
    with Lab.up(LabSpec(name=f"{NAME}s")) as lab:
        yield lab


@pytest.fixture
def duo(shared: Lab) -> Iterator[Lab]:
    yield shared
    shared.recover_all()


def udp(lab: Lab, node: str, nic: str, port: int = PORT) -> socket.socket:
    """A UDP socket inside a node, bound to one NIC as a path is (invariant "a path is its NIC")."""

    def make() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, nic.encode())
        sock.bind(("", port))
        return sock

    sock = lab.call_in(node, make)
    sock.settimeout(0.05)
    return sock


def arrives(
    lab: Lab, source: tuple[str, str], target: tuple[str, str], *, within: float = 1.5
) -> bool:
    """Whether a datagram gets from one NIC to another within some seconds."""
    word = os.urandom(8)
    with udp(lab, *source) as out, udp(lab, *target) as into:
        end = time.monotonic() + within
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                out.sendto(word, (lab.address(*target), PORT))
            with contextlib.suppress(TimeoutError):
                if into.recv(64) == word:
                    return True
    return False


def talk(lab: Lab, nic: str, *, within: float = 1.5) -> bool:
    """Whether n0 and n1 reach each other both ways over one rail."""
    return arrives(lab, ("n0", nic), ("n1", nic), within=within) and arrives(
        lab, ("n1", nic), ("n0", nic), within=within
    )


def carrier(lab: Lab, node: str, nic: str) -> str:
    """The carrier as a process inside the node reads it; EINVAL when the NIC is set down."""
    done = lab.run(node, ["cat", f"/sys/class/net/{nic}/carrier"], check=False)
    return done.stdout.strip() if done.returncode == 0 else "down"


class Traces(dict[str, object]):
    """Equal are those that agree in what both know."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Traces)
        return all(self[key] == other[key] for key in self.keys() & other.keys())

    def __ne__(self, other: object) -> bool:
        return not self == other


def traces() -> Traces:
    """What a lab might leave behind on this machine. Other labs may come and go meanwhile, with the
    folder that all share."""
    links = sorted(os.listdir("/sys/class/net"))
    namespaces = NsDir().names(re.compile(".*"))
    with open("/proc/self/mounts", encoding="utf-8") as file:
        points = [line.split()[1] for line in file]
    others = [n for n in namespaces if not n.startswith(NAME)]
    found = Traces(
        {
            "netns": [n for n in namespaces if n.startswith(NAME)],
            "links": links,
            "mounts": sorted(p for p in points if NAME in p or not p.startswith("/run/netns")),
            "labs": [n for n in known_labs() if n.startswith(NAME)],
            "threads": sorted(t.name for t in threading.enumerate() if NAME in t.name),
        }
    )
    if not others:
        found["netns dir"] = NsDir().path.exists()
    return found


def test_nodes_see_their_own_world(duo: Lab) -> None:
    for index, node in enumerate(duo.nodes):
        script = "hostname; ls /sys/class/net; cat /sys/class/net/nic0/mtu"
        lines = duo.run(node, ["sh", "-c", script]).stdout.split()
        assert lines == [node, "lo", "mgmt0", "nic0", "nic1", "9000"]
        hosts = duo.run(node, ["cat", "/etc/hosts"]).stdout
        assert f"10.250.0.{index + 1} {node}\n" in hosts
    assert os.uname().nodename not in duo.nodes


def test_every_rail_and_loopback_carry(duo: Lab) -> None:
    for nic in ("nic0", "nic1", "mgmt0"):
        assert talk(duo, nic)

    def connect_to_self() -> None:
        with socket.create_server(("127.0.3.7", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()

    duo.call_in("n0", connect_to_self)


def test_carrier_loss(duo: Lab) -> None:
    duo.fail_link("n0", "nic0")
    assert carrier(duo, "n0", "nic0") == "0"
    assert carrier(duo, "n1", "nic0") == "1"
    assert carrier(duo, "n0", "nic1") == "1"
    assert not talk(duo, "nic0", within=0.4) and talk(duo, "nic1")
    duo.fail_link("n0", "nic0")
    duo.recover_link("n0", "nic0")
    assert carrier(duo, "n0", "nic0") == "1"
    assert talk(duo, "nic0")


def test_admin_down(duo: Lab) -> None:
    duo.fail_link("n1", "nic1", "admin")
    assert carrier(duo, "n1", "nic1") == "down"
    assert not talk(duo, "nic1", within=0.4)
    duo.fail_link("n1", "nic1", "carrier")
    assert carrier(duo, "n1", "nic1") == "0"
    duo.recover_link("n1", "nic1")
    assert talk(duo, "nic1")


@pytest.mark.parametrize("direction", ["tx", "rx", "both"])
def test_black_hole(duo: Lab, direction: str) -> None:
    """Carriers stay up; only the named directions lose their packets, on one rail only."""
    assert talk(duo, "nic0")  # neighbours are known before packets vanish
    duo.fail_link("n0", "nic0", "silent", direction=direction)
    assert carrier(duo, "n0", "nic0") == carrier(duo, "n1", "nic0") == "1"
    out = arrives(duo, ("n0", "nic0"), ("n1", "nic0"), within=0.4)
    back = arrives(duo, ("n1", "nic0"), ("n0", "nic0"), within=0.4)
    assert (out, back) == (direction == "rx", direction == "tx")
    assert talk(duo, "nic1")
    duo.recover_link("n0", "nic0")
    assert talk(duo, "nic0")


def test_random_loss(duo: Lab) -> None:
    """Half of 600 datagrams, give or take 6 standard deviations."""
    assert talk(duo, "nic0")
    duo.fail_link("n0", "nic0", "silent", direction="tx", loss=50)
    got = 0
    with udp(duo, "n0", "nic0") as out, udp(duo, "n1", "nic0") as into:
        for _ in range(30):
            for _ in range(20):
                out.sendto(b"x", (duo.address("n1", "nic0"), PORT))
            with contextlib.suppress(TimeoutError):
                while into.recv(64):
                    got += 1
    assert abs(got - 300) < 6 * 12.3, got


def test_cut_pair(fresh: Callable[..., Lab]) -> None:
    lab = fresh(nodes=3, nics=(2,))
    lab.cut_pair("n1", "n0", "nic0")
    assert not arrives(lab, ("n0", "nic0"), ("n1", "nic0"), within=0.4)
    assert not arrives(lab, ("n1", "nic0"), ("n0", "nic0"), within=0.4)
    assert arrives(lab, ("n0", "nic0"), ("n2", "nic0"))
    assert arrives(lab, ("n1", "nic0"), ("n2", "nic0"))
    assert arrives(lab, ("n0", "nic1"), ("n1", "nic1"))
    assert lab.status()["cut_pairs"] == [{"nic": "nic0", "nodes": ["n0", "n1"]}]
    lab.cut_pair("n0", "n1", "nic0", cut=False)
    assert talk(lab, "nic0")


def test_faults_add_up_and_go_together(duo: Lab) -> None:
    duo.fail_link("n0", "nic0", "silent", direction="tx")
    duo.fail_link("n0", "nic0", "silent", direction="rx", loss=25)
    duo.fail_link("n0", "nic0", "carrier")
    duo.cut_pair("n0", "n1", "nic0")
    nic = next(n for n in duo.status()["nodes"][0]["nics"] if n["nic"] == "nic0")
    assert nic["faults"] == ["carrier-down", "silent-tx", "loss-rx=25%"]
    assert nic["admin_up"] and not nic["carrier"] and not nic["fab_port_up"]
    duo.recover_link("n0", "nic0")
    after = duo.status()
    assert all(n["faults"] == [] for node in after["nodes"] for n in node["nics"])
    assert after["cut_pairs"] == []
    assert talk(duo, "nic0")


def test_random_faults_then_recover_all(duo: Lab, seed: int) -> None:
    """Any sequence of faults is undone by recover_all, seen from a second handle as well."""
    rng = random.Random(seed)
    other = Lab.load(duo.name)
    try:
        for _ in range(40):
            handle = rng.choice([duo, other])
            node, nic = rng.choice(duo.nodes), rng.choice(["nic0", "nic1", "mgmt0"])
            if rng.random() < 0.3:
                handle.recover_link(node, nic)
            elif rng.random() < 0.2:
                handle.cut_pair("n0", "n1", nic, cut=rng.random() < 0.7)
            else:
                mode = rng.choice(["carrier", "admin", "silent"])
                handle.fail_link(
                    node,
                    nic,
                    mode,
                    direction=rng.choice(["tx", "rx", "both"]),
                    loss=rng.choice([100.0, 30.0]),
                )
        other.recover_all()
    finally:
        other.close()
    assert all(talk(duo, nic) for nic in ("nic0", "nic1", "mgmt0"))


def transfer(lab: Lab, nic: str, size: int) -> float:
    """Seconds that `size` bytes take from n0 to n1 over one rail, to the receiver's last byte."""
    server = lab.call_in("n1", lambda: socket.create_server((lab.address("n1", nic), 0)))
    client = lab.call_in("n0", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    with server, client:
        client.settimeout(20)
        client.connect(server.getsockname())
        peer, _ = server.accept()
        peer.settimeout(20)
        started = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        sender.start()
        with peer:
            left = size
            while left:
                left -= len(peer.recv(min(left, 1 << 20)))
        sender.join(20)
        return time.monotonic() - started


def test_rates_bound(fresh: Callable[..., Lab]) -> None:
    """Sanity only: each NIC has its own rate, and a change takes effect."""
    lab = fresh(rates=(100_000_000, 20_000_000))
    megabyte = 1_000_000
    fast = 8 * 3 * megabyte / transfer(lab, "nic0", 3 * megabyte)
    slow = 8 * megabyte / transfer(lab, "nic1", megabyte)
    assert 50e6 < fast < 140e6
    assert 10e6 < slow < 30e6
    lab.set_rate("n0", "nic1", "none")
    lab.set_rate("n1", "nic1", "none")
    freed = 8 * 3 * megabyte / transfer(lab, "nic1", 3 * megabyte)
    assert freed > 150e6
    lab.set_rate("n1", "nic0", "20mbit")  # the receiver's end shapes too
    assert 8 * megabyte / transfer(lab, "nic0", megabyte) < 30e6
    rates = [n["rate"] for node in lab.status()["nodes"] for n in node["nics"]]
    assert rates == ["none", "100mbit", "none", "none", "20mbit", "none"]


def test_routed_rails(fresh: Callable[..., Lab]) -> None:
    lab = fresh(variant="routed", nics=(3,))
    pairs = [("nic0", "nic2"), ("nic2", "nic1"), ("nic1", "nic1")]
    for near, far in pairs:
        assert arrives(lab, ("n0", near), ("n1", far))
    lab.fail_link("n0", "nic0", "admin")
    assert arrives(lab, ("n0", "nic1"), ("n1", "nic0"))
    lab.recover_link("n0", "nic0")  # brings the routes back as well
    for near, far in pairs:
        assert arrives(lab, ("n0", near), ("n1", far))


def test_ipv6(fresh: Callable[..., Lab]) -> None:
    lab = fresh(ipv6=True)

    def reach() -> int:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"nic1")
            return sock.sendto(b"x", (lab.spec.nic_address6(1, 1), PORT))

    assert lab.call_in("n0", reach) == 1
    lab.fail_link("n0", "nic1", "admin")
    lab.recover_link("n0", "nic1")
    assert lab.call_in("n0", reach) == 1  # the address has survived


def test_no_trace(fresh: Callable[..., Lab], tmp_path: Path) -> None:
    before = traces()
    lab = fresh(nodes=3, nics=(3,), rates=(10**9,))
    lab.fail_link("n0", "nic0")
    lab.fail_link("n1", "nic0", "silent")
    lab.cut_pair("n0", "n2", "nic1")
    child = lab.popen("n2", ["sleep", "100"])
    deaf = tmp_path / "deaf"
    stubborn = ["sh", "-c", "trap '' TERM; : >$0; while :; do sleep 0.05; done", str(deaf)]
    other = lab.popen("n0", stubborn, new_session=True)
    until(deaf.exists, "it hears no SIGTERM", 60)
    until(lambda: lab.status()["nodes"][2]["pids"] == [child.pid], "the other is in its node", 60)
    assert lab.down() >= 2
    assert child.wait(5) == -signal.SIGTERM
    assert other.wait(5) == -signal.SIGKILL
    assert traces() == before
    assert remove(NAME) is None


KILLED = """
import os, signal, sys
from r2ccl_ctl.lab import Lab, LabSpec
from r2ccl_ctl.lab.fabric import Fabric
real, step = getattr(Fabric, sys.argv[1]), int(sys.argv[2])
calls = 0
def dying(self, *args):
    global calls
    real(self, *args)
    calls += 1
    if calls == step:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(Fabric, sys.argv[1], dying)
Lab.up(LabSpec(name=sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("where", "step"),
    [("_create_namespace", 3), ("_plug", 3)],
)
@pytest.mark.parametrize("then", ["up", "down"])
def test_after_a_killed_up(fresh: Callable[..., Lab], where: str, step: int, then: str) -> None:
    before = traces()
    argv = [sys.executable, "-c", KILLED, where, str(step), NAME]
    done = subprocess.run(argv, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert traces() != before
    with pytest.raises(LabError, match="lab down"):
        Lab.load(NAME)
    if then == "up":
        lab = fresh()
        assert talk(lab, "nic1")
        lab.down()
    else:
        assert remove(NAME) == 0
    assert traces() == before


def test_a_failing_up_cleans_up(fresh: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    from r2ccl_ctl.lab.fabric import Fabric

    before = traces()

    def refuse(self: Fabric, node: int) -> None:
        raise LabError("no more cables")

    monkeypatch.setattr(Fabric, "_build_node", refuse)
    with pytest.raises(LabError, match="no more cables"):
        fresh()
    assert traces() == before


def test_second_up_and_unknown_names(duo: Lab) -> None:
    with pytest.raises(LabError, match="already up"):
        Lab.up(duo.spec)
    with pytest.raises(LabUsageError, match=r"no node 'n9'.*n0, n1"):
        duo.fail_link("n9", "nic0")
    with pytest.raises(LabUsageError, match=r"no NIC 'eth0'.*nic0, nic1, mgmt0"):
        duo.set_rate("n0", "eth0", "1gbit")
    with pytest.raises(LabUsageError, match="no lab 'nosuch'"):
        Lab.load("nosuch")
    with pytest.raises(LabUsageError, match="two different nodes"):
        duo.cut_pair("n0", "n0", "nic0")
    assert talk(duo, "nic0")


def test_popen_passes_streams_and_codes(duo: Lab) -> None:
    child = duo.popen(
        "n1",
        ["sh", "-c", "read line; echo $line $FOO; exit 5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"FOO": "bar", "PATH": "/usr/bin:/bin"},
    )
    out, _ = child.communicate(b"hello\n", timeout=10)
    assert (out, child.returncode) == (b"hello bar\n", 5)
    gone = duo.run("n1", ["no-such-program"], check=False)
    assert gone.returncode == 127 and "cannot run no-such-program" in gone.stderr
    assert "Traceback" not in gone.stderr


def command(*args: str) -> Result:
    return CliRunner().invoke(lab_command, list(args))


def test_command_line(fresh: Callable[..., Lab]) -> None:
    """The commands of the manual, one after the other."""
    name = ("--name", NAME)
    done = command("up", "--nodes", "2", "--nics", "2,1", "--rate", "1gbit,none", *name)
    assert done.exit_code == 0, done.output
    assert command("up", *name).exit_code == 1
    undo = f"recover-link {{}} --name {NAME}` undoes it"
    for args, says in (
        (("fail-link", "n0", "nic0", "--admin"), "n0 nic0: set down; "),
        (("recover-link", "n0", "nic0"), "n0 nic0: up"),
        (("fail-link", "n0", "nic0"), "n0 nic0: no carrier; "),
        (("fail-link", "n0", "nic0"), undo.format("n0 nic0")),
        (("recover-link", "n0", "nic0"), "n0 nic0: up"),
        (
            ("fail-link", "n0", "nic1", "--silent", "--direction", "rx"),
            "n0 nic1: loses every packet that it should receive; ",
        ),
        (("fail-link", "n1", "nic0", "--loss", "3"), "n1 nic0: loses 3 % of the packets; "),
        (("cut-pair", "n0", "n1", "nic0"), ""),
        (("rate", "n0", "nic0", "200mbit"), ""),
    ):
        done = command(*args, *name)
        assert done.exit_code == 0 and says in done.output, (args, done.output)
    text = command("status", *name).output
    for word in ("silent-rx", "loss-both=3%", "200mbit", "cut: n0 - n1 over nic0", "10.250.0.2"):
        assert word in text
    assert re.search(r"  \d+ B +\d+ B$|  [\d.]+ KiB", text, re.MULTILINE), text
    found = json.loads(command("status", "--json", *name).output)
    assert found["schema"] == 1 and [n["node"] for n in found["nodes"]] == ["n0", "n1"]
    assert command("recover-link", "--all", *name).exit_code == 0
    argv = [sys.executable, "-c", "from r2ccl_ctl.cli.lab_cmds import lab; lab()", "exec", *name]
    ran = subprocess.run(
        [*argv, "n1", "--", "sh", "-c", "hostname; exit 3"],
        cwd=ROOT,
        timeout=30,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("n1\n", 3)
    assert command("down", *name).exit_code == 0
    again = command("down", *name)
    assert again.exit_code == 0 and "nothing to take down" in again.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["up", "--rate", "fast"], "'fast' is no rate"),
        (["up", "--nics", "2,x"], "'2,x'"),
        (["up", "--variant", "ring"], "rail-only"),
        (["up", "--name", "../x"], "../x"),
        (["fail-link", "n0", "nic0", "--silent", "--admin"], "exclude each other"),
        (["fail-link", "n0", "nic0", "--direction", "tx"], "--silent"),
        (["recover-link", "n0"], "NODE and NIC"),
        (["status", "--name", "nosuch"], "no lab 'nosuch'"),
        (["exec", "n0", "--name", "nosuch", "--", "true"], "no lab 'nosuch'"),
    ],
)
def test_usage_errors(args: list[str], words: str) -> None:
    done = command(*args)
    assert done.exit_code == 2 and words in done.output, done.output
    assert "Traceback" not in done.output
