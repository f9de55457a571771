"""What AllReduce should take when nodes have lost NICs, and how the runs' figures become a table.

Pure: no clock, no process. Bandwidths are payload bytes per second each way, sizes bytes, times
seconds. The models are those of docs/shim.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MTU = 9000
# Of an Ethernet frame of MTU 9000, as r2ccl's own overhead is not counted: IPv4, TCP with time
# stamps; what tbf counts beside the packet is the Ethernet header.
PAYLOAD = (MTU - 52) / (MTU + 14)


@dataclass(frozen=True)
class State:
    """Which nodes have lost how many of their NICs."""

    name: str
    lost: dict[int, int]

    def bandwidths(self, nodes: int, nics: int, rate: int) -> list[float]:
        """By the rate that the shapers were told."""
        return self.of_nics(nodes, [rate / 8 * PAYLOAD] * nics)

    def of_nics(self, nodes: int, each: Sequence[float]) -> list[float]:
        """By the rate of each NIC of a node; the last ones are lost first."""
        return [sum(each[:len(each) - self.lost.get(node, 0)]) for node in range(nodes)]


def states(names: Sequence[str], nodes: int, nics: int) -> list[State]:
    """healthy; one, pair: 1 NIC of 1, 2 nodes; half, two, three: half of the NICs of 1, 2, 3;
    mixed: 1 NIC of one, half of another."""
    half = nics // 2
    known = {
        "healthy": {},
        "one": {1: 1},
        "pair": {1: 1, 2: 1},
        "mixed": {1: 1, 2: half},
        "half": {1: half},
        "two": {1: half, 2: half},
        "three": {1: half, 2: half, 3: half},
    }
    for name in names:
        if name not in known:
            raise ValueError(f"state '{name}' does not exist: choose from {', '.join(known)}")
        if len(known[name]) > nodes - 1:
            raise ValueError(f"state '{name}' takes {len(known[name]) + 1} nodes or more")
    if nics < 2:
        raise ValueError(f"{nics} NIC per node: half of them cannot be lost, use 2 or more")
    return [State(name, known[name]) for name in names]


def ring(size: int, bandwidths: Sequence[float], per_node: int = 1) -> float:
    p = len(bandwidths) * per_node
    return 2 * (p - 1) / p * size / min(bandwidths)


def lower(size: int, bandwidths: Sequence[float]) -> float:
    """No schedule can take less."""
    p = len(bandwidths)
    return max(size / min(bandwidths), 2 * (p - 1) * size / sum(bandwidths))


def published(size: int, bandwidths: Sequence[float]) -> float | None:
    """R2CCL-AllReduce by its authors' formula, with 16 chunks; None where no node is slower than
    all others."""
    least, *others = sorted(bandwidths)
    if not others or least == others[0]:
        return None
    p, tail, spare = len(bandwidths), 1 - least / others[0], others[0] - least
    ring_part = max(2 * (p - 1) / p * (1 - tail) / least, 2 * (p - 2) / (p - 1) * tail / spare)
    return size * (ring_part + (1 + 1 / 16) * tail / least)


@dataclass(frozen=True)
class Window:
    """One AllReduce: when it ended (monotonic seconds), and what it took the slowest rank."""

    end: float
    size: int
    seconds: float
    wrong: int

    @property
    def begin(self) -> float:
        return self.end - self.seconds


def windows(lines: Sequence[dict[str, Any]]) -> list[Window]:
    """From r2ccl_perf's timeline."""
    return [
        Window(w["monotonic_ns"] / 1e9, int(w["size"]), w["slowest_us"] / 1e6, int(w["wrong"]))
        for w in lines
    ]


def by_size(found: Sequence[Window], since: float, skip: int) -> dict[int, list[float]]:
    """Times of the windows that began after `since`, without the first `skip` of these."""
    times: dict[int, list[float]] = {}
    for window in [w for w in found if w.begin >= since][skip:]:
        times.setdefault(window.size, []).append(window.seconds)
    return times


@dataclass
class Change:
    """A loss of NICs under a job with plans: when (monotonic seconds) what was seen of the plan."""

    state: str
    lost: float
    decided: float | None = None
    made: float | None = None
    taken: float | None = None
    plan: str = ""
    cause: str = ""
    wait_s: float | None = None
    stall: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        def after(when: float | None) -> float | None:
            return None if when is None else round(when - self.lost, 3)

        return {
            "state": self.state, "decided_s": after(self.decided), "made_s": after(self.made),
            "taken_s": after(self.taken), "plan": self.plan, "cause": self.cause,
            "wait_s": self.wait_s, "stall_s": self.stall,
        }


def stalls(found: Sequence[Window], change: Change, before: dict[int, float],
           under: dict[int, float]) -> dict[str, float]:
    """How much longer than usual single operations took. before, under: the usual time of each size
    in this state without and with the plan. loss: those that the loss met; making: those until the
    switch; switch: the first two under the plan, which connect."""
    if change.taken is None:
        return {}
    taken = change.taken
    after = [w for w in found if w.end > change.lost]
    met = [w for w in after if w.begin <= change.lost + 0.5]
    rest = [w for w in after if w.begin > change.lost + 0.5]
    making = [w for w in rest if w.end <= taken]
    switch = [w for w in rest if w.end > taken][:2]

    def worst(some: Sequence[Window], usual: dict[int, float]) -> float:
        return round(max((w.seconds - usual.get(w.size, w.seconds) for w in some), default=0.0), 3)

    return {"loss": worst(met, before), "making": worst(making, before),
            "switch": worst(switch, under)}


@dataclass(frozen=True)
class Bed:
    """raw: what raw TCP carried over each NIC of a node in the same run, one way; empty: not
    measured. both: what it carried over all of them one way while all nodes sent as much."""

    nodes: int
    nics: int
    rate: int
    raw: tuple[float, ...] = ()
    both: float = 0.0
    per_node: int = 1


def table(bed: Bed, order: Sequence[State], rings: dict[str, dict[int, list[float]]],
          plans: dict[str, dict[int, list[float]]], taken: dict[str, str]) -> list[dict[str, Any]]:
    """A row per state and size; times in ms. The models twice: by the rate that the shapers were
    told, less headers, and (raw_...) by what raw TCP carried over them."""
    rows = []
    for state in order:
        bandwidths = state.bandwidths(bed.nodes, bed.nics, bed.rate)
        for size in sorted(rings.get(state.name, {})):
            without, with_plan = rings[state.name][size], plans.get(state.name, {}).get(size, [])
            row: dict[str, Any] = {
                "state": state.name, "size": size, "plan": taken.get(state.name, ""),
                "ring_ms": round(statistics.median(without) * 1e3, 2), "ring_runs": len(without),
                "ring_model_ms": round(ring(size, bandwidths, bed.per_node) * 1e3, 2),
                "lower_ms": round(lower(size, bandwidths) * 1e3, 2),
                "planned_ms": None, "planned_runs": len(with_plan),
            }
            if with_plan:
                row["planned_ms"] = round(statistics.median(with_plan) * 1e3, 2)
                row["planned_each_ms"] = [round(t * 1e3, 1) for t in with_plan]
                row["of_ring"] = round(row["planned_ms"] / row["ring_ms"], 3)
                row["of_lower"] = round(row["planned_ms"] / row["lower_ms"], 3)
                formula = published(size, bandwidths)
                if row["plan"].startswith("r2ccl") and formula:
                    row["of_formula"] = round(row["planned_ms"] / formula / 1e3, 3)
                row["spread"] = round((max(with_plan) - min(with_plan)) * 1e3
                                      / row["planned_ms"], 3)
            if bed.raw:
                row |= _beside_raw(bed, row, state.of_nics(bed.nodes, bed.raw))
            rows.append(row)
    return rows


def _beside_raw(bed: Bed, row: dict[str, Any], bandwidths: Sequence[float]) -> dict[str, Any]:
    size, planned = row["size"], row["planned_ms"]
    both = bed.both / sum(bed.raw)  # of a NIC's bandwidth, while all nodes sent as much
    more: dict[str, Any] = {
        "raw_ring_model_ms": round(ring(size, bandwidths, bed.per_node) * 1e3, 2),
        "raw_lower_ms": round(lower(size, bandwidths) * 1e3, 2),
    }
    more["ring_of_raw"] = round(row["ring_ms"] / more["raw_ring_model_ms"], 3)
    if planned is not None:
        more["of_raw_lower"] = round(planned / more["raw_lower_ms"], 3)
        more["of_both_lower"] = round(planned / more["raw_lower_ms"] * both, 3)
    return more


def markdown(rows: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| state | size | ring, no plan | its model, raw | with plans | lower bound, raw "
        "| / lower | / lower raw | / lower raw both ways | / formula | / ring | plan | runs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        planned = "-" if r["planned_ms"] is None else f"{r['planned_ms']:.1f} ms"
        lines.append(
            f"| {r['state']} | {r['size'] >> 20} MiB | {r['ring_ms']:.1f} ms "
            f"| {_two(r, 'ring_model_ms')} | {planned} | {_two(r, 'lower_ms')} "
            f"| {r.get('of_lower', '-')} | {r.get('of_raw_lower', '-')} "
            f"| {r.get('of_both_lower', '-')} | {r.get('of_formula', '-')} "
            f"| {r.get('of_ring', '-')} "
            f"| {r['plan'] or 'stock'} | {r['ring_runs']}, {r['planned_runs']} |"
        )
    lines += ["", "| loss | decided | made | taken | longest wait at the switch "
              "| op at the loss | ops until then | first ops under the plan |",
              "|---|---|---|---|---|---|---|---|"]
    for c in changes:
        stall = c["stall_s"]
        cells = [_s(c["decided_s"]), _s(c["made_s"]), _s(c["taken_s"]), _s(c["wait_s"]),
                 *(_s(stall.get(k)) for k in ("loss", "making", "switch"))]
        lines.append(f"| {c['state']} | " + " | ".join(cells) + " |")
    return lines


def _two(row: dict[str, Any], name: str) -> str:
    raw = row.get(f"raw_{name}")
    return f"{row[name]:.1f}, " + ("-" if raw is None else f"{raw:.1f}")


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
