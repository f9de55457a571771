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
        gpu = self.gpu
        return {
            "index": gpu.index,
            "name": gpu.name,
            "bus_id": gpu.bus_id,
            "numa": gpu.numa,
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
        why += f", like {len(near) - 1} more" if len(near) > 1 else ""
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
    """A part of the PCIe tree: a host bridge, a port of a switch, or a device with its label."""

    name: str
    label: str = ""
    below: dict[str, Branch] = field(default_factory=dict)


def tree(gpus: Sequence[Gpu], nics: Sequence[HostNic]) -> list[str]:
    """NUMA nodes, and below each its PCIe devices, as lines."""
    roots: dict[str, Branch] = {}
    things = [(g.pci_path, g.numa, f"GPU {g.index} {g.name}") for g in gpus]
    things += [(n.pci_path, n.numa, f"NIC {n.name} {n.rdma}".rstrip()) for n in nics]
    for path, numa, label in things:
        name = "NUMA node unknown" if numa is None else f"NUMA node {numa}"
        branch = roots.setdefault(name, Branch(name))
        for hop in hops(path) or ["no PCI device"]:
            branch = branch.below.setdefault(hop, Branch(hop))
        branch.label = ", ".join(filter(None, (branch.label, label)))
    return [line for name in sorted(roots) for line in _lines(roots[name], "")]


def _lines(branch: Branch, indent: str) -> list[str]:
    name = branch.name
    while len(branch.below) == 1 and not branch.label:  # ports that lead to one thing only
        branch = next(iter(branch.below.values()))
        name += f" > {branch.name}"
    text = f"{indent}{name}" + (f"  {branch.label}" if branch.label else "")
    below = (_lines(branch.below[hop], indent + "  ") for hop in sorted(branch.below))
    return [text, *(line for lines in below for line in lines)]
