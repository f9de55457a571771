"""Which GPUs are near a NIC: their names and bus ids from NVML, the way between from sysfs.

Where no NVML is (no driver, no GPU, a container without it) there are no GPUs, and nobody is told:
that is the usual case. A driver that does not answer keeps nobody waiting for long.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SYSFS = Path("/sys")
ANSWER_S = 5.0

# The words of `nvidia-smi topo -m`, nearest first: at most one PCIe switch between them; several;
# the same host bridge; the same NUMA node; across.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


class Device(Protocol):
    """A PCI device: its path in sysfs, "" for none, and its NUMA node."""

    @property
    def pci_path(self) -> str: ...
    @property
    def numa(self) -> int | None: ...


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine. index: NVML's, as nvidia-smi counts; CUDA counts the same way with
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and where all GPUs are alike. pci_path: its real path in sysfs,
    "" where sysfs does not show it. numa: None where it is not known."""

    index: int
    name: str
    bus_id: str
    pci_path: str
    numa: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "name": self.name,
            "bus_id": self.bus_id,
            "numa": self.numa,
        }


@dataclass(frozen=True)
class Near:
    """A GPU as a NIC sees it. distance: one of DISTANCES."""

    gpu: Gpu
    distance: str

    def as_dict(self) -> dict[str, Any]:
        return {**self.gpu.as_dict(), "distance": self.distance}


def list_gpus(
    nvml: Any = None, *, sysfs: Path = SYSFS, answer_s: float = ANSWER_S
) -> list[Gpu] | None:
    """All GPUs, none where there is no NVML; None when the driver does not answer within `answer_s`
    seconds. `nvml`: a module with pynvml's functions instead of pynvml. Never raises."""
    found: list[Gpu] = []
    thread = threading.Thread(target=_ask, args=(nvml, sysfs, found), daemon=True)
    thread.start()
    thread.join(timeout=answer_s)
    return None if thread.is_alive() else found


def _ask(nvml: Any, sysfs: Path, found: list[Gpu]) -> None:
    # Whatever a driver or a library of another version comes up with, it costs only this column.
    try:
        if nvml is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an older package of that name calls itself old
                nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(_gpu(nvml, index, sysfs))
            except Exception:  # one GPU that fell off the bus does not hide the others
                continue
    except Exception:
        return
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, sysfs: Path) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    bus_id = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    name = nvml.nvmlDeviceGetName(handle)
    device = sysfs / "bus/pci/devices" / bus_id
    real = os.path.realpath(device) if device.exists() else ""
    return Gpu(
        index=index,
        name=name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        bus_id=bus_id,
        pci_path=real,
        numa=_numa(device),
    )


def _numa(device: Path) -> int | None:
    try:
        number = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def hops(path: str) -> list[str]:
    """The PCI part of a path in sysfs, from the host bridge on: pci0000:15, 0000:15:01.0, ..."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[first:]


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many hops from the host bridge on are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def distance(nic: Device, gpu: Gpu) -> str:
    """The way between the two, as `nvidia-smi topo -m` names it. A switch shows itself as two hops:
    the port towards the CPU, which both have, and one port of each."""
    a, b = hops(nic.pci_path), hops(gpu.pci_path)
    same = shared(a, b)
    if same > 1:
        return "PIX" if max(len(a), len(b)) - same <= 2 else "PXB"
    if same == 1:
        return "PHB"
    return "NODE" if nic.numa is not None and nic.numa == gpu.numa else "SYS"


def nearest(nic: Device, gpus: Sequence[Gpu]) -> list[Near]:
    """The GPUs that are nearest to it, all that are equally near; none of a NIC that is no PCI
    device."""
    if not nic.pci_path:
        return []

    def rank(gpu: Gpu) -> tuple[int, int]:
        far = DISTANCES.index(distance(nic, gpu))
        return far, -shared(hops(nic.pci_path), hops(gpu.pci_path))

    best = min(map(rank, gpus), default=None)
    return [Near(gpu, distance(nic, gpu)) for gpu in gpus if rank(gpu) == best]


def near_text(near: Sequence[Near]) -> str:
    """ "0,1 PIX"; "" for none."""
    if not near:
        return ""
    return f"{','.join(str(one.gpu.index) for one in near)} {near[0].distance}"
