"""Which GPUs are near a NIC, from a made-up NVML and a made-up sysfs. Rung 1; it cannot prove what
a real driver says."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from segment_bed import StartWriter, start_writer
from test_cli import call

from r2ccl_ctl import control, gpus
from r2ccl_ctl.cli import view
from r2ccl_ctl.rows import Nic

__all__ = ["start_writer"]

# Two host bridges of node 0 and one of node 1. Behind 16:00.0 a switch with two GPUs and a NIC; the
# second switch, 1a:00.0, hangs on the first.
SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
FAR_SWITCH = f"{SWITCH}/0000:17:03.0/0000:1a:00.0"
DEVICES = {
    f"{SWITCH}/0000:17:00.0/0000:18:00.0": 0,
    f"{SWITCH}/0000:17:01.0/0000:19:00.0": 0,
    f"{FAR_SWITCH}/0000:1b:00.0/0000:1c:00.0": 0,
    "pci0000:15/0000:15:02.0/0000:20:00.0": 0,
    "pci0000:40/0000:40:01.0/0000:41:00.0": 0,
    "pci0000:80/0000:80:01.0/0000:81:00.0": 1,
}
NIC_PATH = f"/sys/devices/{SWITCH}/0000:17:02.0/0000:1f:00.0"
WAYS = ["PIX", "PIX", "PXB", "PHB", "NODE", "SYS"]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    links = tmp_path / "bus/pci/devices"
    links.mkdir(parents=True)
    for path, numa in DEVICES.items():
        device = tmp_path / "devices" / path
        device.mkdir(parents=True, exist_ok=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (links / device.name).symlink_to(device)
    return tmp_path


@dataclass
class Pci:
    domain: int
    bus: int
    device: int


@dataclass
class Nvml:
    """pynvml's functions, for GPUs at these buses. `lost`: GPUs that answer with an error."""

    buses: list[int]
    lost: tuple[int, ...] = ()
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    init_error: Exception | None = None
    said: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        self.said.append("init")
        if self.init_error is not None:
            raise self.init_error

    def nvmlShutdown(self) -> None:
        self.said.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.buses)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Pci:
        return Pci(0, self.buses[handle], 0)

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.name


BUSES = [0x18, 0x19, 0x1C, 0x20, 0x41, 0x81]


@pytest.fixture
def nic(start_writer: StartWriter) -> Nic:
    (found, *_) = start_writer().process.snapshot().nics
    return replace(found, pci_path=NIC_PATH, numa=0)


def test_gpus_of_the_machine(sysfs: Path) -> None:
    nvml = Nvml(BUSES)
    found = gpus.list_gpus(nvml, sysfs=sysfs)
    assert found is not None and [gpu.index for gpu in found] == list(range(6))
    first = found[0]
    assert (first.bus_id, first.numa, first.name) == ("0000:18:00.0", 0, nvml.name)
    assert first.pci_path.endswith(next(iter(DEVICES)))
    assert nvml.said == ["init", "shutdown"]


def test_distances_are_those_of_nvidia_smi(sysfs: Path, nic: Nic) -> None:
    found = gpus.list_gpus(Nvml(BUSES), sysfs=sysfs) or []
    assert [gpus.distance(nic, gpu) for gpu in found] == WAYS
    assert gpus.distance(replace(nic, numa=None), found[4]) == "SYS"
    for left, text in ((0, "0,1 PIX"), (2, "2 PXB"), (3, "3 PHB"), (4, "4 NODE"), (5, "5 SYS")):
        assert gpus.near_text(gpus.nearest(nic, found[left:])) == text
    assert gpus.nearest(replace(nic, pci_path=""), found) == []
    assert gpus.nearest(nic, []) == [] and gpus.near_text([]) == ""


def test_of_those_at_one_bridge_the_ones_with_more_way_in_common(sysfs: Path, nic: Nic) -> None:
    """Both are PXB; one shares a switch with the NIC, the other only the port above it."""
    near = gpus.list_gpus(Nvml([0x1C]), sysfs=sysfs) or []
    far = replace(
        near[0], index=9, pci_path="/x/pci0000:15/0000:15:01.0/0000:2:0.0/0:3:0.0/0:4:0.0"
    )
    assert gpus.distance(nic, far) == gpus.distance(nic, near[0]) == "PXB"
    assert gpus.near_text(gpus.nearest(nic, [far, *near])) == "0 PXB"


def test_gpus_that_sysfs_does_not_show(tmp_path: Path, nic: Nic) -> None:
    (gpu,) = gpus.list_gpus(Nvml([0x18], name=b"A100"), sysfs=tmp_path) or []
    assert (gpu.pci_path, gpu.numa, gpu.name) == ("", None, "A100")
    assert gpus.near_text(gpus.nearest(nic, [gpu])) == "0 SYS"


def test_one_gpu_that_is_lost_does_not_hide_the_others(sysfs: Path) -> None:
    found = gpus.list_gpus(Nvml(BUSES, lost=(1,)), sysfs=sysfs)
    assert found is not None and [gpu.index for gpu in found] == [0, 2, 3, 4, 5]


def test_no_nvml(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpus.list_gpus(Nvml([], init_error=RuntimeError("not found"))) == []
    assert gpus.list_gpus(object()) == [], "a library of another version"
    assert isinstance(gpus.list_gpus(), list), "the real one, whether there is a GPU here or not"
    assert capfd.readouterr() == ("", "")


def test_a_driver_that_does_not_answer() -> None:
    answer = threading.Event()

    class Stuck(Nvml):
        def nvmlInit(self) -> None:
            answer.wait(60)

    begin = time.monotonic()
    try:
        assert gpus.list_gpus(Stuck([]), answer_s=0.1) is None
        assert time.monotonic() - begin < 30
    finally:
        answer.set()


# nics


def with_pci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whose NICs are PCI devices: the real ones of the tests are loopback addresses."""
    look = control.Process.snapshot

    def snapshot(self: control.Process) -> control.Snapshot:
        found = look(self)
        first, *others = found.nics
        return replace(found, nics=[replace(first, pci_path=NIC_PATH, numa=0), *others])

    monkeypatch.setattr(control.Process, "snapshot", snapshot)


def nics_json(job: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(call("nics", "--job", job, "--json").stdout)["nics"]
    return rows


def test_nics_shows_the_gpus(
    start_writer: StartWriter, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_writer().job
    with_pci(monkeypatch)
    there = gpus.list_gpus(Nvml(BUSES), sysfs=sysfs)
    monkeypatch.setattr(gpus, "list_gpus", lambda: there)
    head, first, second = call("nics", "--job", job).stdout.splitlines()[:3]
    at = head.index("GPUS")
    assert first[at:].startswith("0,1 PIX ") and second[at:].startswith("- ")
    one, two = nics_json(job)
    assert [gpu["index"] for gpu in one["gpus"]] == [0, 1] and two["gpus"] == []
    assert one["gpus"][0] == {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "bus_id": "0000:18:00.0", "numa": 0,
        "distance": "PIX",
    }  # fmt: skip


@pytest.mark.parametrize("answer", [[], None])
def test_nics_without_gpus(
    start_writer: StartWriter, monkeypatch: pytest.MonkeyPatch, answer: list[gpus.Gpu] | None
) -> None:
    """No column, no word; a word where there is a driver that does not answer."""
    job = start_writer().job
    with_pci(monkeypatch)
    monkeypatch.setattr(gpus, "list_gpus", lambda: answer)
    result = call("nics", "--job", job)
    assert "GPUS" not in result.stdout
    assert ("driver does not answer" in result.stderr) == (answer is None)
    assert [row["gpus"] for row in nics_json(job)] == [[], []]


def test_nvml_is_not_asked_for_nics_that_are_no_devices(
    start_writer: StartWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_writer().job

    def never() -> list[gpus.Gpu]:
        pytest.fail("asked")

    monkeypatch.setattr(gpus, "list_gpus", never)
    call("nics", "--job", job)
    assert view.nics_view([]) is not None
