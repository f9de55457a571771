"""CPU seconds per GB and latency of small messages beside NCCL's own socket transport.

Rung 4, on the stand-in for NCCL and its Socket transport; with `--nccl DIR` on the NCCL of that
folder, whose ranks share the GPUs there are (rung 6; tests/gpu/README.md). Shaped NICs hold both at
the same throughput; there the callers' polling is most of what is spent, and the transports differ
by little. Unshaped, the cores are the limit, and what a byte costs shows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from figures import MeasurementWrong, Section, check_bound, median, payload_bound
from rig import Bed, Options, Perf, burst_credit, lab_bed, perf

from r2ccl_ctl.launch import visible_gpus

GBIT = 10**9
MIB = 1 << 20
NICS, RANKS = 2, 2
MTU = 9000
SMALL = ["-b", "8", "-e", "256K", "-f", "32"]
SAME_RATE = 0.05
TARGET_CPU, TARGET_LATENCY = 1.0, 1.1
TITLE = "CPU seconds per GB and latency beside NCCL's sockets"
# As tests/gpu has them: nothing here needs NVLink multicast, which can hang GPUs that others share.
GPU_ENV = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class Case:
    """A lab. rate: of each NIC, None: unshaped. iters: of the large AllReduce. threads: of the
    plugin, 0: its own choice, which is one where cores are few."""

    name: str
    rate: int | None
    iters: int
    threads: int = 0

    def check(self, found: Sequence[Perf]) -> None:
        if self.rate is None:
            return
        bound, credit = NICS * payload_bound(self.rate, MTU), burst_credit([self.rate] * NICS)
        for one in found:
            check_bound("all_reduce", one.size, one.size / one.busbw, bound, credit)


CASES = (
    Case(f"{NICS} x 1 Gbit/s", GBIT, 5),
    Case(f"{NICS} x 1 Gbit/s, 3 I/O threads", GBIT, 5, 3),
    Case(f"{NICS} x 10 Gbit/s", 10 * GBIT, 20),
    Case("unshaped", None, 10),
)
SMOKE = (Case(f"{NICS} x 0.5 Gbit/s", GBIT // 2, 5), CASES[-1])


@dataclass
class Both:
    """Interleaved runs of one program over the plugin and over NCCL's sockets."""

    case: Case
    ours: list[Perf] = field(default_factory=list)
    theirs: list[Perf] = field(default_factory=list)

    def run(self, bed: Bed, argv: Sequence[str], options: Options) -> None:
        env: dict[str, str] = {}
        if options.nccl != "standin":  # by its path: one that cannot be loaded is an error
            library = str(Path(options.nccl, "libnccl.so.2").resolve())
            env = {**GPU_ENV, "R2CCL_PERF_NCCL": library}
        threads = {"R2CCL_IO_THREADS": str(self.case.threads)} if self.case.threads else {}
        for turn in range(1 if options.smoke else options.repetitions):
            options.say(f"{' '.join(argv)}: turn {turn + 1}")
            for sockets, found in ((False, self.ours), (True, self.theirs)):
                # Named, so that NCCL fails where it would quietly take the other one.
                net = {"NCCL_NET": "Socket"} if sockets else {"NCCL_NET": "R2CCL", **threads}
                found += perf(
                    argv, lab=bed.lab, sockets=sockets, env={**env, **net}, nccl=options.nccl
                )

    @property
    def baseline(self) -> str:
        return "stand-in's sockets" if all(one.standin for one in self.theirs) else "NCCL's sockets"


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    section.notes.append(
        f"{RANKS} nodes x 1 rank x {NICS} NICs. CPU: user and system time of all ranks, the "
        "caller's and (stand-in) its own threads' included, which poll in both transports."
    )
    if options.nccl != "standin":
        section.notes.append(_gpus())
    for case in SMOKE if options.smoke else CASES:
        if not options.wants(case.name):
            continue
        with lab_bed("cost", NICS, (case.rate,)) as bed:
            _large(section, bed, case, options)
            _small(section, bed, case, options)


def _gpus() -> str:
    """Whether ranks have a GPU each, or share one in a way that says something of transports."""
    count = len(visible_gpus(os.environ))
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    text = f"GPUs: {count}"
    if 0 < count < RANKS:
        mps = Path(pipes, "control").exists()
        text += (
            ", shared with MPS"
            if mps
            else (
                ", shared without MPS: ranks take turns on it, and times say nothing of transports "
                "(nvidia-cuda-mps-control -d)"
            )
        )
    return f"{text}."


def _cpu_per_gb(found: Sequence[Perf]) -> list[float]:
    """Two ranks exchange `size` bytes each way."""
    return [one.cpu / (2 * one.size) * 1e9 for one in found]


def _large(section: Section, bed: Bed, case: Case, options: Options) -> None:
    size, both = str(8 * MIB if options.smoke else 64 * MIB), Both(case)
    argv = ["--op", "all_reduce", "-b", size, "-n", str(case.iters), "-c", "0"]
    try:
        both.run(bed, argv, options)
    finally:
        _large_rows(section, case, both)


def _large_rows(section: Section, case: Case, both: Both) -> None:
    if not both.theirs:
        return
    try:
        case.check([*both.ours, *both.theirs])
    except MeasurementWrong as err:
        section.errors.append(str(err))
        return
    ours, theirs = ([one.busbw / 1e9 for one in found] for found in (both.ours, both.theirs))
    same = abs(median(ours) / median(theirs) - 1) <= SAME_RATE
    section.compare(
        f"{case.name}, all_reduce: bus bandwidth",
        ours,
        theirs,
        "GB/s",
        both.baseline,
        1.0 if case.rate is None else None,
    )
    section.compare(
        f"{case.name}, all_reduce: CPU seconds per GB",
        _cpu_per_gb(both.ours),
        _cpu_per_gb(both.theirs),
        "s/GB",
        both.baseline,
        TARGET_CPU if same or case.rate is None else None,
        at_least=False,
        note="at the same throughput" if same else "at each one's own throughput",
    )


def _small(section: Section, bed: Bed, case: Case, options: Options) -> None:
    rounds, both = "20" if options.smoke else "200", Both(case)
    argv = ["--op", "all_reduce", *SMALL, "-n", rounds, "-w", "20", "-c", "0"]
    try:
        both.run(bed, argv, options)
    finally:
        for size in sorted({one.size for one in both.theirs}):
            section.compare(
                f"{case.name}, all_reduce of {size} B: time",
                [one.seconds * 1e6 for one in both.ours if one.size == size],
                [one.seconds * 1e6 for one in both.theirs if one.size == size],
                "us",
                both.baseline,
                TARGET_LATENCY,
                at_least=False,
            )
