"""Home NICs and spill orders of known servers, from their PCIe trees as facts. Rung 1, with the
order of the built plugin. It cannot prove what NCCL chooses on such a server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_cli import call, plugin

from r2ccl_ctl import gpus as cards
from r2ccl_ctl import hostnics, topo, topo_svg
from r2ccl_ctl.gpus import Gpu
from r2ccl_ctl.hostnics import HostNic, HostNics

SVG = "{http://www.w3.org/2000/svg}"
Server = tuple[list[Gpu], list[HostNic]]


@pytest.fixture(autouse=True)
def native(build: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(plugin().parent))


def server(gpus: list[tuple[str, int]], nics: list[tuple[str, int]]) -> Server:
    """From (path below /sys/devices, NUMA node) of each."""
    found = [
        Gpu(i, "H100", Path(path).name, f"/sys/devices/{path}", numa)
        for i, (path, numa) in enumerate(gpus)
    ]
    return found, [
        HostNic(f"eth{i}", f"eth{i}", f"10.0.{i}.1", 24, 9000, 400000, numa, f"/sys/devices/{path}",
                f"mlx5_{i}", 1, 100, i, True, False)
        for i, (path, numa) in enumerate(nics)
    ]  # fmt: skip


def switch(number: int, port: int) -> str:
    """A device behind a switch of a host bridge of its own."""
    bus = 0x10 * (number + 1)
    up = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return f"{up}/0000:{bus + 2:02x}:{port:02x}.0/0000:{bus + 3 + port:02x}:00.0"


def hgx() -> Server:
    """HGX H100: eight switches, a GPU and a NIC behind each, four of them at each socket."""
    return server(
        [(switch(i, 0), i // 4) for i in range(8)], [(switch(i, 1), i // 4) for i in range(8)]
    )


def two_sockets() -> Server:
    """Four GPUs and two NICs, each at a host bridge of its own."""
    roots = (("15", "16"), ("25", "26"), ("95", "96"), ("a5", "a6"), ("35", "36"), ("b5", "b6"))
    at = [f"pci0000:{root}/0000:{root}:01.0/0000:{bus}:00.0" for root, bus in roots]
    return server([(at[0], 0), (at[1], 0), (at[2], 1), (at[3], 1)], [(at[4], 0), (at[5], 1)])


def p5() -> Server:
    """AWS p5: behind each of eight switches a GPU and four NICs."""
    return server(
        [(switch(i, 0), i // 4) for i in range(8)],
        [(switch(i, port), i // 4) for i in range(8) for port in range(1, 5)],
    )


def gb200() -> Server:
    """A GB200 tray: two GPUs and two NICs at each CPU, nothing behind a common bridge."""

    def at(domain: str) -> str:
        return f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0"

    gpus = [(at("0008"), 0), (at("0009"), 0), (at("0018"), 1), (at("0019"), 1)]
    return server(gpus, [(at("0000"), 0), (at("0002"), 0), (at("0010"), 1), (at("0012"), 1)])


def homes(which: Server) -> list[str]:
    return [one.home.name for one in topo.services(*which)]


def then(which: Server, gpu: int) -> list[str]:
    """The words of the NICs that take over, in their order."""
    return [near for _, near in topo.services(*which)[gpu].order]


def test_hgx() -> None:
    assert homes(hgx()) == [f"eth{i}" for i in range(8)]
    first = topo.services(*hgx())[2]
    assert first.ways == ("NODE", "NODE", "PIX", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert first.why == "behind the same PCIe switch"
    assert [nic.name for nic, _ in first.order] == [
        "eth3", "eth0", "eth1", "eth4", "eth5", "eth6", "eth7"
    ]  # fmt: skip
    assert then(hgx(), 2) == ["same NUMA node"] * 3 + ["across"] * 4


def test_two_sockets() -> None:
    assert homes(two_sockets()) == ["eth0", "eth0", "eth1", "eth1"]
    assert then(two_sockets(), 0) == ["across"]


def test_p5() -> None:
    assert homes(p5()) == [f"eth{4 * i}" for i in range(8)]
    assert topo.services(*p5())[0].why == "behind the same PCIe switch (3 more as near)"
    words = then(p5(), 0)
    assert words == ["same switch"] * 3 + ["same NUMA node"] * 12 + ["across"] * 16


def test_gb200() -> None:
    assert homes(gb200()) == ["eth0", "eth1", "eth2", "eth3"]  # GPUs that have two take turns
    assert topo.services(*gb200())[1].why == "in the same NUMA node (1 more as near)"
    assert then(gb200(), 0) == ["same NUMA node", "across", "across"]


def test_a_spare_is_no_home() -> None:
    gpus, nics = two_sockets()
    spare = HostNic(**{**vars(nics[0]), "weight": 0})
    assert homes((gpus, [spare, nics[1]])) == ["eth1"] * 4
    assert then((gpus, [spare, nics[1]]), 0) == ["spare"]
    assert topo.services(gpus, []) == []


def test_tree() -> None:
    lines = topo.tree(*hgx())
    assert lines[0].startswith("NUMA node 0") and sum("GPU" in line for line in lines) == 8
    at = next(i for i, line in enumerate(lines) if "GPU 0" in line)
    assert "NIC eth0" in lines[at + 1]  # behind the same switch
    indent = len(lines[at]) - len(lines[at].lstrip())
    assert lines[at + 1][indent] != " "


# The picture


def rectangles(text: str) -> list[tuple[str, float, float, float, float]]:
    """Class, left, top, right, bottom of each."""
    found = []
    for rect in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.get(n, "")) for n in ("x", "y", "width", "height"))
        found.append((rect.get("class", ""), x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("which", [hgx, two_sockets, p5, gb200])
def test_picture(which: Callable[[], Server]) -> None:
    """A box for each device, none over another; a line from each GPU to its home NIC's edge."""
    gpus, nics = which()
    text = topo_svg.picture(gpus, nics)
    root = ElementTree.fromstring(text)
    devices = [box for box in rectangles(text) if box[0] in ("gpu", "nic")]
    assert Counter(box[0] for box in devices) == {"gpu": len(gpus), "nic": len(nics)}
    for i, (_, x, y, right, bottom) in enumerate(devices):
        assert 0 <= x < right <= float(root.get("width", 0))
        assert 0 <= y < bottom <= float(root.get("height", 0))
        for _, x2, y2, right2, bottom2 in devices[:i]:
            assert right <= x2 or right2 <= x or bottom <= y2 or bottom2 <= y
    lines = [path.get("d", "") for path in root.iter(f"{SVG}path")]
    assert len(lines) == len(gpus)
    assert {title.text for title in root.iter(f"{SVG}title")} >= {
        topo_svg.order_text(one) for one in topo.services(gpus, nics)
    }


def test_names_in_a_picture_are_text() -> None:
    gpus, nics = two_sockets()
    root = ElementTree.fromstring(topo_svg.picture([replace(gpus[0], name="<A & B>")], nics))
    assert "GPU 0  <A & B>" in [text.text for text in root.iter(f"{SVG}text")]
    assert ElementTree.fromstring(topo_svg.picture([], [])).tag == f"{SVG}svg"


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus, nics = hgx()
    monkeypatch.setattr(cards, "list_gpus", lambda: gpus)
    monkeypatch.setattr(hostnics, "load", lambda: HostNics(tuple(nics), {}, ""))
    text = call("topo").stdout
    assert "GPU 2  NODE  NODE  PIX" in text
    assert "same NUMA node: eth3, eth0, eth1; across: eth4," in text
    found = json.loads(call("topo", "--json").stdout)
    assert [gpu["home"] for gpu in found["gpus"]] == homes(hgx())
    assert found["nics"][0]["spill_order"][0] == "eth1"
    file = tmp_path / "topology.svg"
    assert call("topo", "--svg", str(file)).stdout == ""
    assert file.read_text() == topo_svg.picture(gpus, nics)
    assert "without --json" in call("topo", "--svg", str(file), "--json", code=2).output
    assert "No such file" in call("topo", "--svg", str(tmp_path / "a/b"), code=1).output
