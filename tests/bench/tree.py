"""AllReduce when nodes have lost half of their NICs: the ring, the end-node tree, and the bound.

Rung 4, the stand-in for NCCL on the plugin, 1 rank per node, shaped NICs that are really down. A
node's place in the tree is its place in the rank order, so the degraded node is the last (an end:
light) or the second (inner) one. The bound is max(n / min B, 2 (p - 1) n / sum B) with what payload
the shapers let through; times are of the same run, in turn. The efficiencies are model / measured,
what the planner calls ring_efficiency and tree_efficiency. With R2CCL_PLAN=on the application's
order has the degraded node inside, and the shim moves it to an end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Row, Section, check_bound, median, payload_bound
from rig import Bed, BenchError, Cores, Options, burst_credit, lab_bed, perf

from r2ccl_ctl import paths
from r2ccl_ctl.lab import Lab

TITLE = "AllReduce with degraded nodes: ring, end-node tree and the lower bound"
MIB = 1 << 20
MTU = 9000
TARGET = 1.08  # of what the tree's loads allow
LOST_NIC = "nic1"


@dataclass(frozen=True)
class Case:
    """A lab: nodes, NICs of each, bits per second of each NIC, and the data of an AllReduce."""

    nodes: int
    rate: int
    size: int
    nics: int = 2

    @property
    def name(self) -> str:
        return f"{self.nodes} nodes x {self.nics} x {self.rate / 1e9:g} Gbit/s"

    def bandwidths(self, degraded: Sequence[int]) -> list[float]:
        """Payload bytes per second that each node can send (and receive)."""
        nic = payload_bound(self.rate, MTU)
        return [nic * (self.nics - (node in degraded)) for node in range(self.nodes)]


CASES = (Case(4, 100_000_000, 16 * MIB), Case(8, 50_000_000, 8 * MIB))
LARGE = (Case(4, 1_000_000_000, 256 * MIB), Case(8, 1_000_000_000, 256 * MIB))
SMOKE = (Case(4, 100_000_000, 2 * MIB),)


def tree_loads(nodes: int) -> list[float]:
    """What the node at each position sends (and receives), in times the data."""
    if nodes == 2:
        return [1.0, 1.0]
    if nodes % 2:
        return [1.5, 1.0, *[2.0] * (nodes - 3), 1.5]
    return [1.0, *[2.0] * (nodes - 2), 1.0]


def tree_model(size: int, bandwidths: Sequence[float]) -> float:
    loads = tree_loads(len(bandwidths))
    return max(load * size / b for load, b in zip(loads, bandwidths, strict=True))


def ring_model(size: int, bandwidths: Sequence[float]) -> float:
    p = len(bandwidths)
    return 2 * (p - 1) / p * size / min(bandwidths)


def lower_bound(size: int, bandwidths: Sequence[float]) -> float:
    p = len(bandwidths)
    return max(size / min(bandwidths), 2 * (p - 1) * size / sum(bandwidths))


def run(options: Options, section: Section) -> None:
    cases = SMOKE if options.smoke else CASES
    if not options.smoke and len(os.sched_getaffinity(0)) >= 16:
        cases = LARGE
    for case in cases:
        with lab_bed("tree", case.nics, (case.rate,) * case.nics, nodes=case.nodes) as bed:
            cores = Cores()
            _measure(case, bed, options, section)
            section.details[f"{case.name}: cores busy"] = round(cores.busy(), 3)
    section.notes.append("stand-in for NCCL, NCCL_PROTO=Simple, float32 sums, every value checked")


@contextlib.contextmanager
def _down(lab: Lab, nodes: Sequence[int]) -> Iterator[None]:
    for node in nodes:
        lab.fail_link(f"n{node}", LOST_NIC)
    try:
        yield
    finally:
        lab.recover_all()


def _measure(case: Case, bed: Bed, options: Options, section: Section) -> None:
    if bed.lab is None:
        raise BenchError("the tree's benchmark needs a lab")
    end = case.nodes - 1
    states: dict[str, list[int]] = {
        "all healthy": [],
        "last node (end) at 1/2": [end],
        "first and last at 1/2": [0, end],
        "second node (inner) at 1/2": [1],
    }
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(1 if options.smoke else options.repetitions):
        options.say(f"{case.name}: turn {turn + 1}")
        for state, nodes in states.items():
            with _down(bed.lab, nodes):
                for algo in ("Ring", "Tree"):
                    seconds = _all_reduce(case, bed.lab, algo, options)
                    _possible(case, nodes, f"{state}, {algo}", seconds)
                    found.setdefault((state, algo), []).append(seconds)
    efficiency: dict[str, list[float]] = {"Ring": [], "Tree": []}
    with _down(bed.lab, [1]):
        _planned(case, bed.lab, options, section)
    for state, nodes in states.items():
        _rows(case, state, nodes, found, section, efficiency)
    for algo, values in efficiency.items():
        section.rows.append(
            Row(
                f"{case.name}: {algo.lower()}_efficiency",
                median(values),
                "",
                samples=len(values),
                note="model / measured, over the states above",
            )
        )


def _all_reduce(case: Case, lab: Lab, algo: str, options: Options) -> float:
    iters = "1" if options.smoke else "3"
    argv = ["--op", "all_reduce", "-b", str(case.size), "-e", str(case.size), "-n", iters]
    env = {"NCCL_ALGO": algo, "NCCL_PROTO": "Simple", "NCCL_NET": "R2CCL"}
    return perf([*argv, "-w", "1"], lab=lab, nics=case.nics, env=env)[0].seconds


def _planned(case: Case, lab: Lab, options: Options, section: Section) -> None:
    """The same with the shim, which is given time to see the state and to switch."""
    bandwidths = case.bandwidths([1])
    ring = ring_model(case.size, bandwidths)
    end = tree_model(case.size, [bandwidths[1], *bandwidths[:1], *bandwidths[2:]])
    warmup = str(int(8 / ring) + 2)
    argv = ["--op", "all_reduce", "-b", str(case.size), "-e", str(case.size), "-n", "3"]
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "LD_PRELOAD": str(paths.shim_path()),
            "R2CCL_PLAN": "on",
            "NCCL_PROTO": "Simple",
            "NCCL_NET": "R2CCL",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": f"{folder}/nccl.%p",
        }
        values = [
            perf([*argv, "-w", warmup], lab=lab, nics=case.nics, env=env)[0].seconds
            for _ in range(1 if options.smoke else options.repetitions)
        ]
        logs = [file.read_text(errors="replace") for file in Path(folder).iterdir()]
    switched = sum("Algo Tree" in log for log in logs)
    if switched != len(logs):
        section.errors.append(f"{case.name}: {switched} of {len(logs)} ranks came to run the plan")
        return
    section.rows.append(
        Row(
            f"{case.name}, second node (inner) at 1/2, R2CCL_PLAN=on",
            median(values) * 1e3,
            "ms",
            baseline=end * 1e3,
            baseline_name="model of T",
            target=TARGET,
            at_least=False,
            samples=len(values),
            note=f"{median(values) / lower_bound(case.size, bandwidths):.3f} of the bound",
        )
    )


def _possible(case: Case, nodes: Sequence[int], what: str, seconds: float) -> None:
    """Every node sends all of its data once at least."""
    least = min(case.bandwidths(nodes))
    nics = round(least / payload_bound(case.rate, MTU))
    check_bound(what, case.size, seconds, least, burst_credit((case.rate,) * nics))


def _rows(
    case: Case,
    state: str,
    nodes: Sequence[int],
    found: dict[tuple[str, str], list[float]],
    section: Section,
    efficiency: dict[str, list[float]],
) -> None:
    bandwidths = case.bandwidths(nodes)
    bound = lower_bound(case.size, bandwidths)
    ring = median(found[state, "Ring"])
    for algo, model in (("Ring", ring_model), ("Tree", tree_model)):
        values = found[state, algo]
        middle = median(values)
        expected = model(case.size, bandwidths)
        efficiency[algo].append(expected / middle)
        section.rows.append(
            Row(
                f"{case.name}, {state}: {algo.lower()}",
                middle * 1e3,
                "ms",
                baseline=expected * 1e3,
                baseline_name="its model",
                target=TARGET if algo == "Tree" else None,
                at_least=False,
                samples=len(values),
                spread=(max(values) - min(values)) / middle,
                note=f"{middle / bound:.3f} of the bound of {bound * 1e3:.0f} ms, "
                f"{middle / ring:.3f} of the ring",
            )
        )
