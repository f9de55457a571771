"""CPU seconds per GB and latency on the stand-in, beside its Socket transport (NCCL's sockets).

Rung 4. Shaped NICs hold both at the same throughput; there the callers' polling is most of what is
spent, and the transports differ by little. Unshaped, the cores are the limit, and what a byte
costs shows. The plugin's healthy job pays nothing it can notice: latency of small sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from figures import Section, check_bound, median, payload_bound
from rig import Bed, Options, Perf, burst_credit, lab_bed, perf

GBIT = 10**9
MIB = 1 << 20
NICS = 2
MTU = 9000
SMALL = (8, 8192, 262144)
SAME_RATE = 0.05
TARGET_CPU, TARGET_LATENCY = 1.0, 1.1
Pair = tuple[list[Perf], list[Perf]]
TITLE = "CPU seconds per GB and latency beside the stand-in's sockets"


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails."""
    rate = GBIT // 2 if options.smoke else GBIT
    with lab_bed("cost", NICS, (rate,)) as bed:
        _shaped(section, bed, rate, options)
    with lab_bed("cost", NICS, (None,)) as bed:
        _unshaped(section, bed, options)
        _latency(section, bed, options)
    section.notes.append(
        f"2 nodes x 1 rank x {NICS} NICs. CPU: user and system time of all ranks, the stand-in's "
        "own threads included, which poll in both transports."
    )


def _both(bed: Bed, argv: Sequence[str], options: Options) -> Pair:
    """Interleaved repetitions: (plugin, sockets)."""
    ours: list[Perf] = []
    theirs: list[Perf] = []
    for turn in range(1 if options.smoke else options.repetitions):
        options.say(f"{' '.join(argv)}: turn {turn + 1}")
        ours += perf(argv, lab=bed.lab)
        theirs += perf(argv, lab=bed.lab, sockets=True)
    return ours, theirs


def _cpu_per_gb(found: Sequence[Perf]) -> list[float]:
    """Two ranks exchange `size` bytes each way."""
    return [one.cpu / (2 * one.size) * 1e9 for one in found]


def _shaped(section: Section, bed: Bed, rate: int, options: Options) -> None:
    size = str(8 * MIB if options.smoke else 64 * MIB)
    ours, theirs = _both(bed, ["--op", "all_reduce", "-b", size, "-n", "5", "-c", "0"], options)
    rates = [median([one.busbw for one in found]) for found in (ours, theirs)]
    shaped = [rate] * NICS
    bound = sum(payload_bound(one, MTU) for one in shaped)
    for one in (*ours, *theirs):
        check_bound("all_reduce", one.size, one.size / one.busbw, bound, burst_credit(shaped))
    name = f"{NICS} x 1 Gbit/s, all_reduce"
    section.compare(
        f"{name}: bus bandwidth",
        [one.busbw / 1e9 for one in ours],
        [one.busbw / 1e9 for one in theirs],
        "GB/s",
        "stand-in's sockets",
        None,
    )
    same = abs(rates[0] / rates[1] - 1) <= SAME_RATE
    note = "" if same else "throughputs differ: no like for like"
    section.compare(
        f"{name}: CPU seconds per GB",
        _cpu_per_gb(ours),
        _cpu_per_gb(theirs),
        "s/GB",
        "stand-in's sockets",
        TARGET_CPU if same else None,
        at_least=False,
        note=note,
    )


def _unshaped(section: Section, bed: Bed, options: Options) -> None:
    size = str((8 if options.smoke else 64) * MIB)
    ours, theirs = _both(bed, ["--op", "all_reduce", "-b", size, "-n", "10", "-c", "0"], options)
    section.compare(
        "unshaped, all_reduce: bus bandwidth",
        [one.busbw / 1e9 for one in ours],
        [one.busbw / 1e9 for one in theirs],
        "GB/s",
        "stand-in's sockets",
        1.0 if not options.smoke else None,
    )
    section.compare(
        "unshaped, all_reduce: CPU seconds per GB",
        _cpu_per_gb(ours),
        _cpu_per_gb(theirs),
        "s/GB",
        "stand-in's sockets",
        TARGET_CPU,
        at_least=False,
        note="at each one's own throughput",
    )


def _latency(section: Section, bed: Bed, options: Options) -> None:
    for size in SMALL:
        rounds = "20" if options.smoke else "200"
        argv = ["--op", "all_reduce", "-b", str(size), "-n", rounds, "-w", "20", "-c", "0"]
        ours, theirs = _both(bed, argv, options)
        section.compare(
            f"unshaped, all_reduce of {size} B: time",
            [one.seconds * 1e6 for one in ours],
            [one.seconds * 1e6 for one in theirs],
            "us",
            "stand-in's sockets",
            TARGET_LATENCY,
            at_least=False,
        )
