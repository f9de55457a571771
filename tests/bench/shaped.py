"""Shaped NICs in the lab: does the plugin carry the sum of what each NIC carries by itself?

Rung 4. The baseline is the sum of the single-NIC rates of raw TCP, measured in turn with the
plugin; raw TCP over all NICs at once says whether this machine can carry the sum at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from figures import Section, check_bound, median, payload_bound
from rig import (
    Bed,
    Cores,
    Iteration,
    Options,
    burst_credit,
    lab_bed,
    perf,
    plugin,
    plugin_sides,
    raw,
)

GBIT = 10**9
MIB = 1 << 20
MTU = 9000
TARGET, TARGET_LOST = 0.95, 0.97
CREDIT_SHARE = 0.005
WARMUP_S = 0.15
COLLECTIVE = 64 * MIB
SETTLE_S, TIMED_S = 1.0, 2.0  # of collectives: what paths need to know their rates, and then
TITLE = "Shaped NICs: the plugin beside the sum of raw single-NIC rates"


@dataclass(frozen=True)
class Case:
    """A lab. rates: of each NIC, bits per second. conns: connections of the plugin."""

    name: str
    rates: tuple[int, ...]
    conns: tuple[int, ...] = (1,)
    collective: bool = True
    lose: bool = False


CASES = (
    Case("1 x 1 Gbit/s", (GBIT,)),
    Case("2 x 1 Gbit/s", (GBIT,) * 2, (1, 2), lose=True),
    Case("4 x 1 Gbit/s", (GBIT,) * 4, (1, 4), lose=True),
    Case("8 x 1 Gbit/s", (GBIT,) * 8, (1, 8), lose=True),
    Case("8 x 0.25 Gbit/s", (GBIT // 4,) * 8, (1, 8), lose=True),
    Case("1 and 3 Gbit/s", (GBIT, 3 * GBIT), (1, 2)),
)
SMOKE = (Case("2 x 0.2 Gbit/s", (GBIT // 5,) * 2, lose=True),)


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    for case in SMOKE if options.smoke else CASES:
        if not options.wants(case.name):
            continue
        with lab_bed("shaped", len(case.rates), case.rates) as bed:
            cores = Cores()
            _rates(section, bed, case, options)
            if case.collective:
                _collective(section, bed, case, options)
            busy = cores.busy()
        if case.lose:
            _lost(section, case, options)
        section.details[f"{case.name}: cores busy"] = round(busy, 3)


def _size(rates: Sequence[int], options: Options) -> list[str]:
    """Two iterations, and a warm-up that takes TCP to its pace."""
    warmup = int(sum(rates) / 8 * WARMUP_S)
    return ["--bytes", str(_bytes(rates, options)), "--iters", "2", "--warmup", str(warmup)]


def _bytes(rates: Sequence[int], options: Options) -> int:
    """Of one iteration: long enough to make the shapers' credit small."""
    seconds = 0.2 if options.smoke else 0.7
    wanted = max(sum(rates) / 8 * seconds, burst_credit(rates) / CREDIT_SHARE)
    return (int(wanted) // MIB + 1) * MIB


def _checked(what: str, found: list[Iteration], rates: Sequence[int]) -> list[Iteration]:
    bound = sum(payload_bound(rate, MTU) for rate in rates)
    for one in found:
        check_bound(what, one.bytes, one.seconds, bound, burst_credit(rates))
    return found


def _rates(section: Section, bed: Bed, case: Case, options: Options) -> None:
    everything = range(len(case.rates))
    size = _size(case.rates, options)
    sums, joint = [], []
    ours: dict[int, list[float]] = {conns: [] for conns in case.conns}
    try:
        for turn in range(1 if options.smoke else 3):
            options.say(f"{case.name}: turn {turn + 1}")
            total = 0.0
            for nic in everything:
                found = raw(bed, [nic], *_size([case.rates[nic]], options))
                found = _checked(f"raw TCP, NIC {nic}", found, [case.rates[nic]])
                total += median([one.rate for one in found])
            sums.append(total)
            found = raw(bed, everything, *size)
            joint += [one.rate for one in _checked("raw TCP, all NICs", found, case.rates)]
            for conns in case.conns:
                found = plugin(bed, *size, "--conns", str(conns))
                ours[conns] += [one.rate for one in _checked("the plugin", found, case.rates)]
    finally:
        gbs = [value / 1e9 for value in sums]
        name = "sum of single NICs, raw"
        section.compare(
            f"{case.name}: raw TCP on all at once",
            [v / 1e9 for v in joint],
            gbs,
            "GB/s",
            name,
            None,
        )
        for conns, values in ours.items():
            plural = "connection" if conns == 1 else "connections"
            section.compare(
                f"{case.name}: plugin, {conns} {plural}",
                [v / 1e9 for v in values],
                gbs,
                "GB/s",
                name,
                TARGET,
                note="1 MiB messages, 4 outstanding",
            )
    section.details[f"{case.name}: raw sum"] = median(sums)


def _collective(section: Section, bed: Bed, case: Case, options: Options) -> None:
    """AllReduce of 64 MiB between two nodes: busbw is what crosses each way."""
    size = 4 * MIB if options.smoke else COLLECTIVE
    bound = sum(payload_bound(rate, MTU) for rate in case.rates)
    warmup, timed = (1, 4) if options.smoke else _rounds(size / bound)
    argv = ["--op", "all_reduce", "-b", str(size), "-n", str(timed), "-w", str(warmup), "-c", "0"]
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 if options.smoke else 2):
        for sockets, rates in found.items():
            one = perf(argv, lab=bed.lab, sockets=sockets)[0]
            check_bound("all_reduce", size, size / one.busbw, bound, burst_credit(case.rates))
            rates.append(one.busbw / 1e9)
    for sockets, rates in found.items():
        over = "its sockets" if sockets else "plugin"
        section.compare(
            f"{case.name}: all_reduce {size // MIB} MiB on the stand-in, {over}",
            rates,
            [section.details[f"{case.name}: raw sum"] / 1e9],
            "GB/s",
            "sum of single NICs, raw",
            None if sockets else TARGET,
            note="bus bandwidth; both directions at once",
        )


def _rounds(one_s: float) -> tuple[int, int]:
    """Warm-up and timed operations, of `one_s` seconds each."""
    return math.ceil(SETTLE_S / one_s), max(4, math.ceil(TIMED_S / one_s))


def _lost(section: Section, case: Case, options: Options) -> None:
    """The rate after one of the NICs went down, against (k - 1) / k of the rate before."""
    size = str(_bytes(case.rates, options))
    before: list[Iteration] = []
    after: list[Iteration] = []
    with lab_bed("lost", len(case.rates), case.rates) as bed:
        assert bed.lab is not None
        with plugin_sides(bed, "--bytes", size, "--iters", "6") as sides:
            for count, one in enumerate(sides.iterations(), start=1):
                # The NIC goes down in the third iteration, which counts for neither.
                (before if count < 3 else after).append(one)
                if count == 2:
                    bed.lab.fail_link("n0", f"nic{len(case.rates) - 1}")
    after = after[1:]
    if len(after) != 3:
        section.errors.append(f"{case.name}: {len(after)} iterations after the loss, not 3")
        return
    _checked("the plugin before the loss", before, case.rates)
    _checked("the plugin after the loss", after, case.rates[:-1])
    left = (len(case.rates) - 1) / len(case.rates)
    section.compare(
        f"{case.name}: one NIC lost, plugin",
        [one.rate / 1e9 for one in after],
        [one.rate / 1e9 * left for one in before],
        "GB/s",
        "(k - 1) / k of before",
        TARGET_LOST,
    )
