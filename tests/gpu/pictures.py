#!/usr/bin/env python3
"""Tables and pictures of docs/evidence.md from the JSON of run_retention.py and run_training.py.

    pictures.py retention r.json --to docs/img/retention.png
    pictures.py training t.json fsdp.json --to docs/img/training.png

Prints the tables in Markdown. Exit code 2: no such file, nothing in it to draw, or unlike machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import run_retention
import training_figures
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

COLOURS = {
    "sockets": "#8c8c8c",
    "fastsocket": "#bbbbbb",
    "balance": "#4c72b0",
    "migrate": "#dd8452",
    "direct": "#55a868",
    "auto": "#8172b3",
}
SHADES = {2: "#a6bddb", 4: "#5b8fc1", 8: "#2b5c8a"}


def retention_table(result: dict[str, Any]) -> list[str]:
    """Share and part of what is left, one line for each operation and size."""
    found = {(r["op"], r["size"], r["nics"]): r for r in result["rows"]}
    nics = sorted({r["nics"] for r in result["rows"]})
    lines = [
        "| operation | MiB | " + " | ".join(f"1 of {k} lost: share, left" for k in nics) + " |",
        "|---" * (2 + len(nics)) + "|",
    ]
    for op, size in sorted({key[:2] for key in found}):
        cells = []
        for k in nics:
            row = found.get((op, size, k))
            good = row is not None and run_retention.figure(row)
            cells.append(
                f"{row['share']:.3f}, {row['of_left']:.3f}" if row and good else "no figure"
            )
        lines.append(f"| {op} | {size >> 20} | {' | '.join(cells)} |")
    return lines


def retention(result: dict[str, Any], upper: Any) -> None:
    """What the largest messages keep, beside what is left and the paper's claim."""
    rows = [r for r in result["rows"] if run_retention.figure(r)]
    size = max(r["size"] for r in rows)
    ops = list(dict.fromkeys(r["op"] for r in rows))
    nics = sorted({r["nics"] for r in rows})
    width = 0.8 / len(nics)
    for i, k in enumerate(nics):
        colour = SHADES.get(k, "#888888")
        kept = {r["op"]: r["share"] for r in rows if r["nics"] == k and r["size"] == size}
        places = [x + (i - (len(nics) - 1) / 2) * width for x in range(len(ops))]
        bars = upper.bar(
            places,
            [kept.get(op, 0) for op in ops],
            width,
            color=colour,
            label=f"1 of {k} NICs lost",
        )
        upper.bar_label(bars, fmt=lambda v: f"{v:.2f}" if v else "", fontsize=7)
        upper.axhline((k - 1) / k, color=colour, linestyle=":", linewidth=1)
    upper.axhspan(
        *run_retention.PAPER, color="#c0392b", alpha=0.2, label="paper, 1 of 8: 0.85 to 0.89"
    )
    upper.set_xticks(range(len(ops)), ops)
    upper.set_ylim(0, 1.1)
    upper.set_ylabel(f"share of the healthy rate, {size >> 20} MiB")
    upper.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    bed = "a stand-in for NCCL" if result["standin"] else f"NCCL, {result['gpus']} GPU"
    upper.set_xlabel(
        f"{result['nodes']} emulated nodes, {bed}, {result['cores']} cores. Dotted: what "
        "is left, (k-1)/k."
    )


def colour(mode: str) -> str:
    """Variants of NCCL's sockets have one colour."""
    return COLOURS[mode.partition("-")[0]]


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["parallel"], row["nodes"], row["nics"], row["state"], row["asked"]


def overheads(results: Sequence[dict[str, Any]], axes: Any) -> None:
    """After a loss, of the healthy step; a mark at the bound of the communication's share."""
    rows = [
        row | {"parallel": result["parallel"]}
        for result in results
        for row in result["rows"]
        if row["overhead"] is not None and row["state"].endswith(" lost")
    ]
    groups = list(dict.fromkeys(map(group_of, rows)))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    width = 0.8 / max(1, len(modes))
    for i, mode in enumerate(modes):
        for x, group in enumerate(groups):
            for row in rows:
                if row["mode"] == mode and group_of(row) == group:
                    place = x + (i - (len(modes) - 1) / 2) * width
                    axes.bar(place, row["overhead"] * 100, width, color=colour(mode))
                    axes.plot(
                        [place - width / 2, place + width / 2],
                        [row["bound"] * 100] * 2,
                        color="#c0392b",
                        linewidth=1.5,
                    )
    handles = [Rectangle((0, 0), 1, 1, color=colour(mode)) for mode in modes]
    axes.legend(
        [*handles, Line2D([], [], color="#c0392b")],
        [*modes, "bound of the share"],
        fontsize=8,
    )
    axes.set_xticks(
        range(len(groups)),
        [
            f"{parallel}\n{nodes} nodes\n{state.replace(' lost', '')}\n{asked} %"
            for parallel, nodes, _, state, asked in groups
        ],
        fontsize=6,
    )
    axes.set_ylabel("step after the loss, % longer")


def training(results: Sequence[dict[str, Any]], figure: Any) -> None:
    """Overheads of all runs, and the losses of the first run's first bed."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    overheads(results, left)
    result = results[0]
    first = result["curves"][0]
    for curve in result["curves"]:
        if (curve["nodes"], curve["nics"]) == (first["nodes"], first["nics"]) and curve["loss"]:
            right.plot(curve["tokens"], curve["loss"], color=colour(curve["mode"]), linewidth=1)
    right.set_xlabel("million tokens")
    right.set_ylabel(f"loss, {first['nodes']} nodes of {first['nics']} NICs")
    figure.supxlabel(
        f"A small GPT, {result['gpus']} GPU, emulated nodes, "
        f"{result['node_rate'] / 1e9:g} Gbit/s a node. Lost: of the last node's NICs; percent: the "
        "share of communication.",
        fontsize=8,
    )


def draw(kind: str, results: Sequence[dict[str, Any]], to: str) -> list[str]:
    """Returns the tables."""
    figure = pyplot.figure(figsize=(11, 4.6), layout="constrained")
    if kind == "retention":
        merged = results[0] | {"rows": [row for result in results for row in result["rows"]]}
        table = retention_table(merged)
        retention(merged, figure.subplots())
    else:
        table = [line for result in results for line in training_figures.markdown(result)]
        training(results, figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=110)
    pyplot.close(figure)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("kind", choices=("retention", "training"))
    p.add_argument("json", nargs="+", help="what the script wrote; of several runs")
    p.add_argument("--to", required=True, metavar="FILE", help="the picture")
    opts = p.parse_args(argv)
    say: Callable[[str], None] = print
    try:
        results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in opts.json]
        if not all(result["rows"] for result in results):
            raise ValueError("no rows in it")
        machines = [f"{result['gpus']} GPUs and {result['cores']} cores" for result in results]
        if len(set(machines)) > 1:
            raise ValueError(f"runs on unlike machines ({', '.join(machines)}) are not comparable")
        say("\n".join(draw(opts.kind, results, opts.to)))
    except (OSError, ValueError, KeyError) as err:
        print(
            f"pictures: {' '.join(opts.json)}: {err}; give what run_{opts.kind}.py --json wrote",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
