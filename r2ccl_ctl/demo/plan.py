"""What the demo is asked for, and the phases that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.units import show_bytes, show_rate

KINDS = ("blackhole", "error")
NICS_MAX = 16  # as many as the control segment shows
RANKS_MAX = 64
SIZE_MIN = 1 << 20
FOLDER = "r2ccl-demo"


@dataclass(frozen=True)
class Action:
    """What the operator does to a NIC: fail or recover."""

    verb: str
    nic: str


@dataclass(frozen=True)
class Phase:
    """A stretch of the demo: its actions come first. nics: how many of node 0 work in it."""

    name: str
    title: str
    nics: int
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class DemoSpec:
    """What to show.

    size in bytes; nic_rate in bytes per second and rank, 0 for NICs without a limit; seconds: how
    long a phase lasts at least; output: the folder for picture and figures, None for the default.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    nics: int = 4
    size: int = 64 << 20
    seconds: float = 5.0
    kind: str = "blackhole"
    nic_rate: int = 50_000_000
    output: Path | None = None

    def check(self) -> None:
        """R2UsageError for what cannot be shown."""
        limits = (
            ("--nics", self.nics, 2, NICS_MAX, "one NIC must be left when another one fails"),
            ("--nodes", self.nodes, 2, 16, "traffic between nodes is what the demo is about"),
            ("--ranks-per-node", self.ranks_per_node, 1, 16, "all of them share this machine"),
            ("--nodes x --ranks-per-node", self.ranks, 2, RANKS_MAX, "they share this machine"),
        )
        for name, value, least, most, why in limits:
            if not least <= value <= most:
                raise R2UsageError(f"{name} {value}: give {least} to {most}; {why}")
        if self.size < SIZE_MIN or self.size > 4 << 30:
            raise R2UsageError(f"--size {show_bytes(self.size)}: give 1M to 4G")
        if not (math.isfinite(self.seconds) and 0.5 <= self.seconds <= 600):
            raise R2UsageError(f"--seconds-per-phase {self.seconds:g}: give 0.5 to 600")
        if self.kind not in KINDS:
            raise R2UsageError(f"--kind {self.kind}: choose {' or '.join(KINDS)}")
        if self.nic_rate and self.nic_rate < 125_000:
            raise R2UsageError(
                f"--nic-rate {show_rate(self.nic_rate)}: give at least 1mbit, or 0 for no limit"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def nic(self, rail: int, node: int = 0) -> str:
        """The name of a loopback NIC, as `launch` gives them out."""
        return f"127.0.{rail + 1}.{node + 1}"

    @property
    def victims(self) -> tuple[str, ...]:
        """The NICs of node 0 that fail: two, but never the last one."""
        rails = (1,) if self.nics == 2 else (1, self.nics - 1)
        return tuple(self.nic(rail) for rail in rails)

    def phases(self) -> list[Phase]:
        found = [Phase("before", "before", self.nics)]
        for lost, nic in enumerate(self.victims, start=1):
            name, title = (("one_down", "one NIC lost"), ("two_down", "two NICs lost"))[lost - 1]
            found.append(Phase(name, title, self.nics - lost, (Action("fail", nic),)))
        back = tuple(Action("recover", nic) for nic in self.victims)
        return [*found, Phase("after", "after, all back", self.nics, back)]

    def folder(self) -> Path:
        """Where the picture and the figures go."""
        if self.output is not None:
            return self.output
        checkout = paths.checkout()
        return checkout / "build" / "demo" if checkout is not None else Path(FOLDER)

    def make_folder(self) -> Path:
        folder = self.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as err:
            raise R2UsageError(
                f"--output {folder}: cannot write there ({err.strerror}); give another folder"
            ) from err
        return folder

    def headline(self) -> str:
        limit = f", each limited to {show_rate(self.nic_rate)}" if self.nic_rate else ""
        return (
            f"{self.nodes} nodes x {self.ranks_per_node} ranks, AllReduce of "
            f"{show_bytes(self.size)} over {self.nics} loopback NICs per node{limit}"
        )
