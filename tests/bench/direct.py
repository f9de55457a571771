"""AllReduce carried out by R2CCL (direct) beside NCCL's ring, healthy and with a NIC lost.

Rung 4, shaped NICs that are really down, one rank per node. `direct` is tests/bench/allreduce.c, on
host memory without NCCL, with the weights of shim/plan/shard.h; the ring is the stand-in's over
the plugin. Both in turn in one run. The bound is max(n / min B, 2 (p - 1) n / sum B) with what
payload the shapers let through. What it cannot show: GPUs, and NICs faster than the cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from figures import Row, Section, check_bound, median, payload_bound
from rig import Bed, BenchError, Options, burst_credit, lab_bed, perf, perf_spec, program, raw

from r2ccl_ctl import launch
from r2ccl_ctl.lab import Lab

TITLE = "AllReduce carried out by R2CCL (direct), the ring and the lower bound"
MIB = 1 << 20
MTU = 9000
TARGET = 1.02  # of the bound
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


CASES = (Case(4, 100_000_000, 32 * MIB),)
LARGE = (Case(4, 1_000_000_000, 256 * MIB),)
SMOKE = (Case(4, 100_000_000, 2 * MIB),)
STATES: dict[str, list[int]] = {
    "all healthy": [],
    f"{LOST_NIC} of one node lost": [1],
    f"{LOST_NIC} of two nodes lost": [0, 1],
}


Carried = dict[tuple[int, str], tuple[int, int]]  # bytes to and from each node's NIC


class Wires:
    """How busy each NIC of a lab was. Reads the kernel's counters until the end of the block."""

    EVERY_S = 0.01

    def __init__(self, lab: Lab, nodes: int) -> None:
        self._files = [
            lab.call_in(f"n{node}", lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY))
            for node in range(nodes)
        ]
        self._seen: list[tuple[float, Carried]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Wires:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        for fd in self._files:
            os.close(fd)

    def _run(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            now: Carried = {}
            for node, fd in enumerate(self._files):
                now.update(carried(node, os.pread(fd, 1 << 16, 0).decode()))
            self._seen.append((time.monotonic(), now))

    def busy(self, begin: float, end: float, rate: int) -> dict[str, tuple[float, float]]:
        """Parts of the wire's rate, to the NIC and from it."""
        inside = [sample for sample in self._seen if begin <= sample[0] <= end]
        if len(inside) < 2:
            return {}
        (t0, first), (t1, last) = inside[0], inside[-1]
        all_of_it = rate / 8 * (t1 - t0)
        return {
            f"n{node} {nic}": (
                (last[node, nic][0] - first[node, nic][0]) / all_of_it,
                (last[node, nic][1] - first[node, nic][1]) / all_of_it,
            )
            for node, nic in first
        }


def carried(node: int, text: str) -> Carried:
    """From /proc/net/dev."""
    found: Carried = {}
    for line in text.splitlines()[2:]:
        nic, _, rest = line.partition(":")
        words = rest.split()
        if nic.strip().startswith("nic"):
            found[node, nic.strip()] = (int(words[0]), int(words[8]))
    return found


@dataclass
class Found:
    """Of one state of a case: seconds of each operation, and how busy the NICs were."""

    ring: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    busy: dict[str, tuple[float, float]] = field(default_factory=dict)


def run(options: Options, section: Section) -> None:
    cases = SMOKE if options.smoke else CASES
    if not options.smoke and len(os.sched_getaffinity(0)) >= 16:
        cases = LARGE
    for case in cases:
        with lab_bed("direct", case.nics, (case.rate,) * case.nics, nodes=case.nodes) as bed:
            _measure(case, bed, options, section)
    section.notes.append("float32 sums, every value checked; medians of all operations")


def lower_bound(size: int, bandwidths: Sequence[float]) -> float:
    p = len(bandwidths)
    return max(size / min(bandwidths), 2 * (p - 1) * size / sum(bandwidths))


@contextlib.contextmanager
def _down(lab: Lab, nodes: Sequence[int]) -> Iterator[None]:
    for node in nodes:
        lab.fail_link(f"n{node}", LOST_NIC)
    try:
        yield
    finally:
        lab.recover_all()


def _ring(case: Case, lab: Lab, options: Options) -> float:
    iters = "1" if options.smoke else "3"
    argv = ["--op", "all_reduce", "-b", str(case.size), "-e", str(case.size), "-n", iters]
    env = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NET": "R2CCL"}
    return perf([*argv, "-w", "1"], lab=lab, nics=case.nics, env=env)[0].seconds


def _measure(case: Case, bed: Bed, options: Options, section: Section) -> None:
    if bed.lab is None:
        raise BenchError("this benchmark needs a lab")
    found = {state: Found() for state in STATES}
    rates: list[float] = []
    for turn in range(1 if options.smoke else options.repetitions):
        options.say(f"{case.name}: turn {turn + 1}")
        rates += _raw(case, bed, options)
        for state, nodes in STATES.items():
            with _down(bed.lab, nodes):
                found[state].ring.append(_ring(case, bed.lab, options))
                _direct(case, bed.lab, nodes, options, found[state])
    section.compare(
        f"{case.name}: raw TCP over one NIC",
        [rate / 1e6 for rate in rates],
        [payload_bound(case.rate, MTU) / 1e6],
        "MB/s",
        "what the bound assumes",
        None,
    )
    for state, nodes in STATES.items():
        _row(case, state, nodes, found[state], section)


def _raw(case: Case, bed: Bed, options: Options) -> list[float]:
    """Payload bytes per second of each NIC by itself."""
    amount = case.rate / 8 * (0.2 if options.smoke else 1)
    size = ["--bytes", str(int(amount)), "--iters", "1", "--warmup", str(int(amount / 4))]
    return [raw(bed, [nic], *size)[0].rate for nic in range(case.nics)]


def _direct(case: Case, lab: Lab, nodes: list[int], options: Options, found: Found) -> None:
    rates = ",".join(f"{rate:.0f}" for rate in case.bandwidths(nodes))
    with tempfile.TemporaryDirectory() as folder:
        words = ["--folder", folder, "--bytes", str(case.size), "--rates", rates]
        words += ["--iters", "1" if options.smoke else "3"]
        spec = perf_spec(
            [program("allreduce"), *words], lab, case.nodes, 1, case.nics, False, {}, 120
        )
        with Wires(lab, case.nodes) as wires, launch.start(spec, echo=False) as job:
            code = job.wait(150)
            said = "".join(rank.output for rank in job.ranks)
    lines = [line for line in said.splitlines() if '"seconds"' in line]
    if code != 0 or not lines:
        raise BenchError(f"allreduce ended with {code}: {said[-400:]}")
    told = json.loads(lines[0][lines[0].index("{") :])
    found.direct += told["seconds"]
    begun = told["ended"] - sum(told["seconds"])
    found.busy = wires.busy(begun, told["ended"], case.rate) or found.busy


def _row(
    case: Case,
    state: str,
    nodes: list[int],
    found: Found,
    section: Section,
) -> None:
    bandwidths = case.bandwidths(nodes)
    bound = lower_bound(case.size, bandwidths)
    ring, direct = median(found.ring), median(found.direct)
    nics = round(min(bandwidths) / payload_bound(case.rate, MTU))
    check_bound(state, case.size, direct, min(bandwidths), burst_credit((case.rate,) * nics))
    busy = "; ".join(f"{nic} {rx:.2f} {tx:.2f}" for nic, (rx, tx) in sorted(found.busy.items()))
    if busy:
        section.notes.append(f"{case.name}, {state}: busy, in and out: {busy}")
    section.rows.append(
        Row(
            f"{case.name}, {state}: direct",
            direct * 1e3,
            "ms",
            baseline=bound * 1e3,
            baseline_name="lower bound",
            target=TARGET,
            at_least=False,
            samples=len(found.direct),
            note=f"{direct / ring:.3f} of the ring's {ring * 1e3:.0f} ms",
        )
    )
