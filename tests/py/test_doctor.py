"""Checks before a job: facts that are made up (rung 1), and hosts that are network namespaces,
reached by a stand-in for ssh (rung 3). It cannot prove what a real switch or firewall does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Build, missing

from r2ccl_ctl import remote, settings_view
from r2ccl_ctl.doctor import exchange, hosts, local
from r2ccl_ctl.doctor.finding import Finding, exit_code, worst_first
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.hostnics import HostNic, HostNics

ETH0 = HostNic("eth0", "eth0", "10.0.0.1", 24, 1500, 1000, 0, "", "", 0, 100, 0, True, False)
ETH1 = replace(ETH0, name="eth1", ifname="eth1", addr="10.0.0.2", rail=1)


def kinds(found: list[Finding]) -> dict[str, str]:
    """check -> severity, without what is well."""
    return {one.check: one.severity for one in found if one.severity != "ok"}


# One host


def test_nics() -> None:
    assert kinds(local.check_nics(HostNics((ETH0, ETH1), {}, ""))) == {}
    assert kinds(local.check_nics(HostNics((), {}, "none"))) == {"nics": "error"}
    assert kinds(local.check_nics(HostNics((ETH0,), {}, ""))) == {"nics": "warning"}
    down = replace(ETH1, link_up=False, mtu=9000)
    found = local.check_nics(HostNics((ETH0, down), {"lo": "it is a loopback"}, ""))
    assert kinds(found) == {"nics": "note", "link": "warning", "mtu": "warning"}
    assert any("lo is not used: it is a loopback" in one.evidence for one in found)
    assert any("mtu 9000" in one.remedy for one in found)


def test_shared_subnet() -> None:
    values = {"net/ipv4/conf/all/rp_filter": 1, "net/ipv4/conf/eth1/rp_filter": 2}
    found = local.check_subnets([ETH0, ETH1], lambda name: values.get(name))
    remedies = [one.remedy for one in found if one.check == "rp_filter"]
    assert remedies == ["sysctl -w net.ipv4.conf.eth0.rp_filter=2"]  # the larger one counts
    assert sum(one.check == "arp_ignore" for one in found) == 2
    values = {"net/ipv4/conf/all/arp_ignore": 1}
    assert kinds(local.check_subnets([ETH0, ETH1], lambda name: values.get(name))) == {
        "subnet": "note"
    }
    assert local.check_subnets([ETH0, replace(ETH1, addr="10.0.1.1")], lambda name: None) == []
    vlan = replace(ETH1, ifname="eth0.7")
    found = local.check_subnets([ETH0, vlan], lambda name: None)
    assert "net/ipv4/conf/eth0.7/arp_ignore=1" in found[-1].remedy


def test_limits() -> None:
    def judged(*facts: int | None, rdma: bool = False) -> dict[str, str]:
        return kinds(local.judge_limits(*facts, rdma=rdma))

    assert judged(None, 65536, 1 << 30) == {}
    assert judged(1024, 65536, 1 << 30) == {"files": "warning"}
    assert judged(65536, 65536, 1 << 30, rdma=True) == {"memlock": "warning"}
    assert judged(65536, None, 1 << 20, rdma=True) == {"shm": "warning"}
    assert judged(65536, None, None) == {"shm": "warning"}


def test_variables(build: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_view, "complaints", lambda added: [])
    known = {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG"}
    base = {"NCCL_SOCKT_IFNAME": "eth0", "NCCL_NET": "Socket", "HOME": "/x"}
    found = local.check_variables(base, known)
    words = [(one.severity, one.evidence.split(" ")[-1], one.remedy) for one in found]
    assert ("warning", "NCCL_SOCKT_IFNAME", "did you mean NCCL_SOCKET_IFNAME?") in words
    assert [one.severity for one in found if "NCCL_NET=Socket" in one.evidence] == ["error"]
    assert kinds(local.check_variables({"R2CC_MODE": "2", "NCCL_DEBUG": "INFO"}, known)) == {}


def test_nccls_file_and_its_env_plugin(
    build: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL_NET in a file is as grave as in the environment."""
    monkeypatch.setattr(settings_view, "complaints", lambda added: [])
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_NET=Socket\n")
    base = {"NCCL_CONF_FILE": str(file)}
    assert kinds(local.check_variables(base, set())) == {"variables": "error"}
    assert kinds(local.check_variables({**base, "NCCL_NET": "R2CCL"}, set())) == {}
    (note,) = local.check_variables({"NCCL_ENV_PLUGIN": "gib"}, set())
    assert note.severity == "note" and "NCCL_ENV_PLUGIN=gib" in note.evidence
    assert kinds(local.check_variables({"NCCL_ENV_PLUGIN": "none"}, set())) == {}


def test_plugin(build: Build, tmp_path: Path) -> None:
    (found,) = local.check_plugin(build.plugin)
    assert found.severity == "ok" and "net API v6 to v12; it needs glibc 2." in found.evidence
    other = tmp_path / "libnccl-net-other.so"
    other.write_bytes(b"\0ncclNetPlugin\0GLIBC_2.9\0")
    assert [one.severity for one in local.check_plugin(other)] == ["error"]
    other.write_bytes(b"\0ncclNetPlugin_v8\0ncclNetPlugin_v10\0GLIBC_2.9\0GLIBC_2.17\0")
    assert "v8 to v10; it needs glibc 2.17," in local.check_plugin(other)[0].evidence


def test_names_come_from_the_library(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0NCCL_DEBUG\0xNCCL_IB_HCA\0NCCL_\0")
    assert local.nccl_names(library) == {"NCCL_DEBUG", "NCCL_IB_HCA"}
    assert local.nccl_names(None) == set()


@pytest.mark.parametrize(
    ("version", "severity"), [((2, 17), "error"), ((2, 20), "note"), ((2, 27), "ok")]
)
def test_nccl(version: tuple[int, int], severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "nccl_version", lambda library: version)
    assert [one.severity for one in local.check_nccl(Path("libnccl.so.2"))] == [severity]


def test_rdma(tmp_path: Path) -> None:
    gids = tmp_path / "class/infiniband/mlx5_0/ports/1/gids"
    gids.mkdir(parents=True)
    (gids / "0").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    nic = replace(ETH0, rdma="mlx5_0", rdma_port=1)
    assert [one.severity for one in local.check_rdma([nic], tmp_path)] == ["warning", "note"]
    (gids / "1").write_text("fe80:0000:0000:0000:0000:0000:0000:0001\n")
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert kinds(local.check_rdma([nic], tmp_path)) == {}


def test_exit_codes() -> None:
    def code(*severities: str, check: str = "x") -> int:
        return exit_code(Finding(severity, check, "") for severity in severities)

    assert [code(), code("ok", "note"), code("note", "warning"), code("warning", "error")] == [
        0, 0, 1, 2
    ]  # fmt: skip
    assert code("error", check="unknown") == 3
    mixed = [Finding(word, "x", "") for word in ("ok", "error", "note")]
    assert [one.severity for one in worst_first(mixed)] == ["error", "note", "ok"]


# Several hosts


def test_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# nodes\nb slots=8\n\nc:4\na\n")
    assert remote.parse_hosts("a, d", file) == ["a", "d", "b", "c"]
    with pytest.raises(R2UsageError, match="-oProxyCommand"):
        remote.parse_hosts("-oProxyCommand=x", None)
    with pytest.raises(R2UsageError, match="--hosts ' ,' names no host"):
        remote.parse_hosts(" ,", None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(R2UsageError, match="is no text"):
        remote.parse_hosts(None, file)
    file.write_bytes(b"a\0b\n")
    with pytest.raises(R2UsageError, match="is no host name"):
        remote.parse_hosts(None, file)
    for via in ("'open", " "):
        with pytest.raises(R2UsageError, match="--via"):
            remote.argv_for(via, "n1", {})


def test_starters() -> None:
    env = {"R2CCL_NICS": "eth0 eth1", "HOME": "/root"}
    ssh = remote.argv_for("ssh -p 22", "n1", env)
    assert ssh[:4] == ["ssh", "-p", "22", "n1"] and len(ssh) == 5  # one word for its shell
    assert "'R2CCL_NICS=eth0 eth1'" in ssh[4] and "HOME" not in ssh[4]
    srun = ["srun", "--overlap", "-N1", "-n1", "-w", "n1", "env"]
    assert remote.argv_for("srun", "n1", env)[:7] == srun
    assert remote.argv_for("mpirun", "n1", env)[:5] == ["mpirun", "-n", "1", "--host", "n1"]


def test_a_helper_finds_what_the_users_own_path_has() -> None:
    words = remote.argv_for("srun", "n1", {"PYTHONPATH": "/opt/a:/opt/b"})
    (path,) = [word for word in words if word.startswith("PYTHONPATH=")]
    assert path.endswith(":/opt/a:/opt/b") and Path(path[11:].split(":")[0], "r2ccl_ctl").is_dir()


def test_partners_are_by_subnet() -> None:
    there = [replace(ETH0, addr="10.0.1.9"), replace(ETH1, addr="10.0.0.9")]
    assert hosts.partner(ETH0, 0, there) == 1
    far = [replace(ETH0, addr="10.5.0.9"), replace(ETH1, addr="10.6.0.9")]
    assert [hosts.partner(nic, i, far) for i, nic in enumerate((ETH0, ETH1))] == [0, 1]
    assert hosts.partner(ETH0, 0, [replace(ETH0, addr="fd00::1")]) is None


def test_what_an_exchange_means() -> None:
    well: dict[str, Any] = {"error": "", "stage": "done", "rate": 1e8, "mss": 1448, "loss": 0.0}
    for change, check, severity, word in (
        ({}, "exchange", "ok", "1448"),
        ({"loss": 0.05}, "loss", "warning", "5.0%"),
        ({"error": "refused", "stage": "connect"}, "exchange", "error", "no connection"),
        ({"error": "no answer", "stage": "transfer"}, "exchange", "error", "connected, but"),
    ):
        found = hosts.judge("eth0 to b", ETH0, {**well, **change}, "a")
        assert (found.check, found.severity) == (check, severity) and word in found.evidence
    assert (
        "ping -M do -s 1472"
        in hosts.judge("eth0", ETH0, {**well, "error": "x", "stage": "transfer"}, "a").remedy
    )


def test_both_ends_of_the_port_range() -> None:
    """A firewall may pass a part of it: its last free port is tried, too."""
    lo = replace(ETH0, addr="127.0.0.1", loopback=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = min(free.getsockname()[1], 65000)
    servers = exchange.listeners(lo, (port, port + 200))
    ports = [server.getsockname()[1] for server in servers]
    assert port <= ports[0] < port + 100 < ports[1] <= port + 200
    with pytest.raises(OSError, match="no port of R2CCL_PORT_RANGE="):
        exchange.listeners(lo, (ports[0], ports[0]))
    for server in servers:
        server.close()
    (one,) = exchange.listeners(lo, (0, 0))
    one.close()


def test_the_last_port_is_judged() -> None:
    def site(last: int, error: str) -> Any:
        return SimpleNamespace(
            nics=[ETH0], host="n1", token="", places=[{"port": 1, "last": last}],
            ask=lambda *words, **more: {"error": error},
        )  # fmt: skip

    def found(last: int, error: str) -> list[Finding]:
        return hosts._last_port(site(0, error), site(last, ""), 0, 0, {"error": ""})

    assert found(0, "timed out") == [] == found(41000, "")
    (closed,) = found(41000, "timed out")
    assert closed.severity == "error" and "port 41000" in closed.evidence


# Two hosts, each a network namespace with two NICs; their cables end in bridges of this one.
CABLES = """
sleep 0.5
for i in 0 1; do ip link add br$i type bridge; ip link set br$i up; done
for host in 1 2; do
    eval pid=\\$pid$host
    nsenter -t $pid -n ip link set lo up
    for i in 0 1; do
        ip link add p$host$i type veth peer name eth$i netns $pid
        ip link set p$host$i master br$i; ip link set p$host$i up
        nsenter -t $pid -n ip addr add 10.0.$i.$host/24 dev eth$i
        nsenter -t $pid -n ip link set eth$i up
    done
done
"""
NETWORK = f"""
exec 3>&1 1>&2
for host in 1 2; do
    unshare -n sleep 300 3>&- & eval pid$host=$!
done
{CABLES}cat > ssh.sh <<END
case \\$1 in h1) pid=$pid1 ;; h2) pid=$pid2 ;; *) echo "no such host" >&2; exit 255 ;; esac
echo "Welcome to \\$1"
exec nsenter -t \\$pid -n sh -c "\\$2"
END
chmod +x ssh.sh
trap 'kill $pid1 $pid2' EXIT
"""


def doctor(folder: Path, names: str, prepare: str = "", **env: str) -> tuple[int, list[Finding]]:
    """What it finds between hosts of that network, after `prepare`."""
    command = f"{sys.executable} -m r2ccl_ctl doctor --hosts {names} --via 'sh ./ssh.sh' --json >&3"
    done = subprocess.run(
        ["unshare", "-Urn", "bash", "-ec", f"{NETWORK}\n{prepare}\nset +e\n{command}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in done.stderr:
        missing("userns", done.stderr)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["findings"]
    return done.returncode, [Finding(**row) for row in rows]


def exchanged(found: list[Finding], severity: str) -> list[str]:
    """NODE NIC of each exchange with that end."""
    there = [one for one in found if one.check == "exchange" and one.severity == severity]
    return sorted(f"{one.node} {one.evidence.split()[0]}" for one in there)


@pytest.mark.usefixtures("build", "lab_rights")
def test_two_hosts(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "h1,h2", R2CCL_PORT_RANGE="41000-41001")
    assert exchanged(found, "ok") == ["h1 eth0", "h1 eth1", "h2 eth0", "h2 eth1"]
    assert all(" port 4100" in one.evidence for one in found if one.check == "exchange")
    assert code in (0, 1), found
    assert not any(one.check == "ports" for one in found)
    _, alone = doctor(tmp_path, "h1")
    assert any("one host alone" in one.evidence for one in alone)


@pytest.mark.usefixtures("build", "lab_rights")
def test_a_cable_that_carries_nothing_and_another_mtu(tmp_path: Path) -> None:
    broken = "ip link set p21 nomaster; nsenter -t $pid2 -n ip link set eth0 mtu 1400"
    code, found = doctor(tmp_path, "h1,h2", broken)
    assert exchanged(found, "error") == ["h1 eth1", "h2 eth1"]
    assert exchanged(found, "ok") == ["h1 eth0", "h2 eth0"]
    assert any(one.check == "mtu" and "mtu 1500" in one.remedy for one in found)
    assert code == 2


@pytest.mark.usefixtures("build", "lab_rights")
def test_a_host_without_an_answer(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "h1,h9")
    assert [one.evidence for one in found if one.check == "unknown"] == [
        "the helper on h9 could not be asked: it ended with code 255: no such host"
    ]
    assert code == 3
