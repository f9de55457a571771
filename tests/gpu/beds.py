"""The bed that jobs run in: nodes and NICs made by `r2ccl_ctl.lab` in network namespaces."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from r2ccl_ctl.lab import Lab, LabError, LabSpec
from r2ccl_ctl.lab.nsexec import argv_for


class LabBed:
    """Nodes of a lab as a jobs.Bed. Nodes are numbered 0.. and NICs 0.. within a node."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.nodes = lab.spec.nodes
        self.nics = lab.spec.rails
        self.master_addr = lab.address("n0", "mgmt0")
        self.nic_prefix = "nic"
        self.oob = "mgmt0"

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        return argv_for(self.lab.plan(f"n{node}"), list(argv))

    def fail(self, node: int, nic: int, kind: str) -> None:
        mode, _, direction = kind.partition("-")
        self.lab.fail_link(f"n{node}", f"nic{nic}", mode, direction=direction or "both")

    def recover(self, node: int, nic: int) -> None:
        self.lab.recover_link(f"n{node}", f"nic{nic}")


@contextlib.contextmanager
def lab_bed(nodes: int, nics: int, variant: str = "rail-only",
            rate: int | None = None, number: int = 0) -> Iterator[LabBed]:
    """A lab, taken down at the end. rate: bits per second of each NIC, None unshaped. number: a
    process's labs at one time differ in it. LabError says what is missing."""
    name = f"gpu{os.getpid()}" + (f"-{number}" if number else "")
    lab = Lab.up(LabSpec(nodes=nodes, nics=(nics,), rates=(rate,), name=name, variant=variant))
    with lab:
        yield LabBed(lab)


__all__ = ["LabBed", "LabError", "lab_bed"]
