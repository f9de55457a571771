"""How the step times of run_training.py become a table: shares, overheads and their bounds.

Pure: no clock, no process. Times are seconds, shares and overheads parts of 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OTHERS = ("sockets", "fastsocket")  # names of NCCL's own transports begin so
POINTS = 200  # of a loss curve


@dataclass
class Cell:
    """Steps of one state. lost: of the last node's NICs."""

    nodes: int
    nics: int
    mode: str
    state: str
    lost: int
    asked: int  # share of communication in percent
    micro: int
    compute: float
    tokens: int  # of a micro-batch, per rank
    seconds: list[float] = field(default_factory=list)
    plan: str = ""

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        return sorted(self.seconds)[max(0, -(-len(self.seconds) * 95 // 100) - 1)]

    def words(self) -> str:
        return (
            f"step {self.step * 1e3:.1f} ms, p95 {self.p95 * 1e3:.1f}, of "
            f"{len(self.seconds)}, without communication {self.compute * 1e3:.1f}"
            f"{', plan ' + self.plan if self.plan else ''}"
        )


def micro_for(share: float, travel: float, one: float, eight: float) -> int:
    """How many micro-batches make the communication, `travel` seconds, that share of a step. one,
    eight: what a step of so many takes without communication."""
    each = max((eight - one) / 7, 1e-6)
    return max(1, round((travel * (1 - share) / share - (one - each)) / each))


def shares_of(text: str) -> list[int]:
    shares = [int(word) for word in text.split(",") if word.isdecimal()]
    if len(shares) != len(text.split(",")) or not all(0 < share < 100 for share in shares):
        raise ValueError(f"--shares {text}: whole numbers from 1 to 99")
    return shares


def bed_of(name: str) -> tuple[int, int]:
    nodes, x, nics = name.partition("x")
    if not (x and nodes.isdecimal() and nics.isdecimal() and int(nodes) > 1 and int(nics) > 1):
        raise ValueError(f"--jobs '{name}': NODESxNICS, such as 2x2, with 2 or more of each")
    return int(nodes), int(nics)


def jobs_of(text: str) -> list[tuple[str, list[str]]]:
    """Beds with the modes that run on them."""
    found = []
    for part in text.split(","):
        bed, colon, modes = part.partition(":")
        bed_of(bed)
        if not (colon and all(modes.split("+"))):
            raise ValueError(f"--jobs '{part}': NODESxNICS:MODE+MODE, such as 2x2:balance+sockets")
        found.append((bed, modes.split("+")))
    return found


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """to_other: more time than the best other transport; overhead: than the same mode's healthy
    step; bound: what a ring over the NICs that are left costs more, by the measured share."""
    found = []
    for cell in cells:
        same = [
            c
            for c in cells
            if (c.nodes, c.nics, c.asked, c.state) == (cell.nodes, cell.nics, cell.asked, "healthy")
        ]
        others = [c.step for c in same if c.mode.startswith(OTHERS)]
        healthy = next((c for c in same if c.mode == cell.mode), None)
        row = {
            "nodes": cell.nodes,
            "nics": cell.nics,
            "mode": cell.mode,
            "state": cell.state,
            "asked": cell.asked,
            "micro": cell.micro,
            "steps": len(cell.seconds),
            "step_ms": round(cell.step * 1e3, 2),
            "p95_ms": round(cell.p95 * 1e3, 2),
            "compute_ms": round(cell.compute * 1e3, 2),
            "plan": cell.plan,
            "tokens_s": round(cell.tokens * cell.micro * cell.nodes / cell.step),
            "share": None,
            "to_other": None,
            "overhead": None,
            "bound": None,
        }
        if cell.state == "healthy":
            row["share"] = round(1 - cell.compute / cell.step, 3)
            if others and not cell.mode.startswith(OTHERS):
                row["to_other"] = round(cell.step / min(others) - 1, 4)
        elif healthy:
            share = 1 - cell.compute / healthy.step
            row["overhead"] = round(cell.step / healthy.step - 1, 4)
            row["bound"] = round(share * cell.lost / (cell.nics - cell.lost), 4)
        found.append(row)
    return found


def curve(steps: Sequence[dict[str, Any]], tokens: int) -> dict[str, list[float]]:
    """Loss over millions of tokens, at most POINTS of them. tokens: of a micro-batch, all ranks."""
    seen, points = 0, []
    for step in steps:
        if step["micro"] > 0:
            seen += step["micro"] * tokens
            points.append((round(seen / 1e6, 4), step["loss"]))
    every = max(1, -(-len(points) // POINTS))
    return {"tokens": [t for t, _ in points[::every]], "loss": [x for _, x in points[::every]]}


def percent(part: float | None) -> str:
    return "" if part is None else f"{part * 100:.1f} %"


def markdown(result: dict[str, Any]) -> list[str]:
    """The tables of a run."""
    lines = [
        f"{result['parallel']}, {result['gpus']} GPUs, {result['cores']} cores, "
        f"{result['node_rate'] / 1e9:g} Gbit/s a node",
        "| nodes x NICs | mode | state | share | step ms, p95 | tokens/s | to the best other | "
        "after the loss | bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        share = percent(row["share"]) or f"({row['asked']} %)"
        lines.append(
            f"| {row['nodes']} x {row['nics']} | {row['mode']} | {row['state']} | {share} | "
            f"{row['step_ms']:.1f}, {row['p95_ms']:.1f} | {row['tokens_s']} | "
            f"{percent(row['to_other'])} | {percent(row['overhead'])} | {percent(row['bound'])} |"
        )
    for stall in result["stalls"]:
        lines.append(
            f"{stall['nodes']} x {stall['nics']}, {stall['mode']}: next step {stall['next_step_s']}"
            f" s after the loss, slowest step {stall['slowest_s']} s, usual {stall['usual_s']} s"
        )
    for restart in result["restarts"]:
        lines.append(
            f"{restart['nodes']} x {restart['nics']}, {restart['mode']}: "
            f"{restart['steps_after_loss']} steps after the loss; killed and restarted: first step "
            f"{restart['first_step_s']} s after the kill, {restart['steps_lost']} lost steps done "
            f"again after {restart['caught_up_s']} s, a checkpoint takes "
            f"{restart['checkpoint_s']} s"
        )
    return lines


__all__ = ["Cell", "bed_of", "curve", "jobs_of", "markdown", "micro_for", "rows", "shares_of"]
