"""GPUs and NICs of this host: how near they are, and which NICs serve each GPU in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from r2ccl_ctl import hostnics
from r2ccl_ctl.gpus import DISTANCES, Gpu, distance, hops, shared
from r2ccl_ctl.hostnics import HostNic

WAYS = {
    "PIX": "behind the same PCIe switch",
    "PXB": "behind several PCIe switches",
    "PHB": "at the same host bridge",
    "NODE": "in the same NUMA node",
    "SYS": "in another NUMA node",
}


@dataclass(frozen=True)
class Service:
    """Which NICs serve a GPU. ways: of all NICs, as `nvidia-smi topo -m` names them. order: the
    home NIC first, then the others as they take over, each with the reason for its place."""

    gpu: Gpu
    ways: tuple[str, ...]
    home: HostNic
    why: str
    order: tuple[tuple[HostNic, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.gpu.as_dict(),
            "home": self.home.name,
            "why": self.why,
            "spills_over": [{"nic": nic.name, "near": near} for nic, near in self.order],
        }


def services(gpus: Sequence[Gpu], nics: Sequence[HostNic]) -> list[Service]:
    """For each GPU; none where there is no NIC. NCCL chooses a nearest NIC for a GPU. Among equally
    near ones GPUs take turns here, as NCCL spreads its channels over them."""
    if not nics:
        return []
    found, turns = [], dict[tuple[int, ...], int]()
    for gpu in gpus:
        near = _nearest(gpu, nics)
        turn = turns.get(near, 0)
        turns[near] = turn + 1
        home = near[turn % len(near)]
        ways = tuple(distance(nic, gpu) for nic in nics)
        order = hostnics.spill_order(nics, home)[1:]
        others = tuple((nics[i], hostnics.why_near(nics[home], nics[i])) for i in order)
        why = WAYS[ways[home]] if nics[home].pci_path else "it is no PCI device"
        others_near = len(near) - 1
        why += f" ({others_near} more as near)" if others_near else ""
        found.append(Service(gpu, ways, nics[home], why, others))
    return found


def _nearest(gpu: Gpu, nics: Sequence[HostNic]) -> tuple[int, ...]:
    """Numbers of the NICs that are nearest to it; spares only where there is nothing else."""
    serving = [i for i, nic in enumerate(nics) if nic.weight] or list(range(len(nics)))

    def rank(i: int) -> tuple[int, int]:
        common = shared(hops(nics[i].pci_path), hops(gpu.pci_path))
        return DISTANCES.index(distance(nics[i], gpu)), -common

    best = min(rank(i) for i in serving)
    return tuple(i for i in serving if rank(i) == best)


@dataclass
class Branch:
    """A part of the PCIe tree: a host bridge, a port of a switch, or a device."""

    name: str
    devices: list[Gpu | HostNic] = field(default_factory=list)
    below: dict[str, Branch] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(device_text(device) for device in self.devices)

    def follow(self) -> tuple[str, Branch]:
        """Past ports that lead to one thing only: their names, and what stands behind them."""
        name, branch = self.name, self
        while len(branch.below) == 1 and not branch.devices:
            branch = next(iter(branch.below.values()))
            name += f" > {branch.name}"
        return name, branch

    def sorted(self) -> list[Branch]:
        return [self.below[hop] for hop in sorted(self.below)]


def device_text(device: Gpu | HostNic) -> str:
    if isinstance(device, Gpu):
        return f"GPU {device.index} {device.name}"
    return f"NIC {device.name} {device.rdma}".rstrip()


def roots(gpus: Sequence[Gpu], nics: Sequence[HostNic]) -> list[Branch]:
    """NUMA nodes, and below each its PCIe devices."""
    found: dict[str, Branch] = {}
    devices: list[Gpu | HostNic] = [*gpus, *nics]
    for device in devices:
        name = "NUMA node unknown" if device.numa is None else f"NUMA node {device.numa}"
        branch = found.setdefault(name, Branch(name))
        for hop in hops(device.pci_path) or ["no PCI device"]:
            branch = branch.below.setdefault(hop, Branch(hop))
        branch.devices.append(device)
    return [found[name] for name in sorted(found)]


def tree(gpus: Sequence[Gpu], nics: Sequence[HostNic]) -> list[str]:
    """The tree as lines."""
    return [line for root in roots(gpus, nics) for line in _lines(root, "")]


def _lines(branch: Branch, indent: str) -> list[str]:
    name, branch = branch.follow()
    text = f"{indent}{name}" + (f"  {branch.label}" if branch.label else "")
    below = (_lines(one, indent + "  ") for one in branch.sorted())
    return [text, *(line for lines in below for line in lines)]
