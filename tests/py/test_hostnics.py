"""The NICs of this host and the order in which they take over, asked of the built plugin. Rung 2: a
network namespace with made-up interfaces; it cannot prove what a real driver says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import ROOT, missing

from r2ccl_ctl import hostnics

BRIDGE = "/sys/devices/pci0000:16/0000:16:02.0"
LINKS = """
ip link set lo up
for i in 0 1 2; do ip link add eth$i type veth peer name p$i
ip addr add 10.0.$i.1/24 dev eth$i; done
ip link set eth0 up; ip link set eth1 up
ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up
ip link add br9 type bridge; ip addr add 10.9.0.1/16 dev br9; ip link set br9 up
ip link add eth3 type veth peer name p3; ip link set eth3 up; ip -6 addr flush dev eth3
ip link add eth4 type veth peer name p4; ip link set eth4 master br9; ip link set eth4 up
ip -6 addr flush dev eth4
"""
ASK = """
import json
from r2ccl_ctl import hostnics
found = hostnics.load()
print(json.dumps([[nic.name for nic in found.nics], found.others, found.error]))
"""


def choice(**env: str) -> tuple[list[str], dict[str, str], str]:
    """What a job in a namespace with LINKS would use."""
    inside = ["unshare", "-Urn", "sh", "-ec", f'{LINKS}\nexec "$0" -c "$1"', sys.executable, ASK]
    done = subprocess.run(
        inside,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr:
        missing("userns", done.stderr)
    assert done.returncode == 0, done.stderr
    nics, others, error = json.loads(done.stdout)
    return nics, others, error


@pytest.mark.usefixtures("build", "lab_rights")
def test_why_not() -> None:
    nics, others, error = choice()
    assert (nics, error) == (["eth0", "eth1"], "")
    assert {name: why for name, why in others.items() if name[0] not in "ip"} == {  # no ifb, p0
        "lo": "it is a loopback",
        "eth2": "it is switched off",
        "docker0": "it belongs to Docker",
        "br9": "it is a bridge or a tunnel",
        "eth3": "it has no address",
        "eth4": "it has no address of its own: it is a part of br9",
    }


@pytest.mark.usefixtures("build", "lab_rights")
def test_why_not_by_variables() -> None:
    for variables, nic, why in (
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1", "NCCL_SOCKET_IFNAME leaves it out"),
        ({"R2CCL_NICS": "eth1"}, "eth1", "R2CCL_NICS does not name it"),
        ({"R2CCL_NICS": "^eth0"}, "eth1", "R2CCL_NICS excludes it"),
    ):
        nics, others, _ = choice(**variables)
        assert (nics, others["eth0"]) == ([nic], why)
    nics, others, error = choice(R2CCL_NICS="eth1,eth9")
    assert nics == ["eth1"] and "eth9" in error


@dataclass(frozen=True)
class Place:
    pci_path: str
    numa: int | None
    weight: int = 100


@pytest.mark.usefixtures("build", "lab_rights")
def test_order_is_by_distance() -> None:
    places = [
        Place(f"{BRIDGE}/0000:17:00.0/0000:18:00.0", 0),
        Place("/sys/devices/pci0000:80/0000:80:02.0/0000:81:00.0", 1),
        Place(f"{BRIDGE}/0000:17:01.0/0000:19:00.0", 0),
        Place("/sys/devices/pci0000:2a/0000:2a:02.0/0000:2b:00.0", 0),
        Place(f"{BRIDGE}/0000:17:02.0/0000:1a:00.0", 0, 0),
        Place("", None),
    ]
    words = {}
    for home, place in enumerate(places):
        order = hostnics.spill_order(places, home)
        assert order[0] == home and sorted(order) == list(range(len(places)))
        words[home] = [hostnics.why_near(place, places[i]) for i in order[1:]]
        ranks = [hostnics.NEARNESS.index(word) for word in words[home]]
        assert ranks == sorted(ranks), words[home]
    assert words[0] == ["same switch", "same NUMA node", "across", "across", "spare"]
    assert words[1] == ["across"] * 4 + ["spare"]


@pytest.mark.usefixtures("build")
def test_a_host_bridge_is_no_switch() -> None:
    """NICs at two ports of one host bridge are as near as their NUMA nodes say."""
    bridge = "/sys/devices/pci0000:16"
    places = [
        Place(f"{bridge}/0000:16:02.0/0000:17:00.0", 0),
        Place(f"{bridge}/0000:16:04.0/0000:18:00.0", 1),
        Place("/sys/devices/pci0000:2a/0000:2a:02.0/0000:2b:00.0", 0),
    ]
    order = hostnics.spill_order(places, 0)[1:]
    words = [hostnics.why_near(places[0], places[i]) for i in order]
    assert words == ["same NUMA node", "across"]
