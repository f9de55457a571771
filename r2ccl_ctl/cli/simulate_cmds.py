"""simulate: AllReduce on clusters of up to 1024 nodes that have lost NICs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from r2ccl_ctl import baselines
from r2ccl_ctl import simulate as simulation
from r2ccl_ctl.baselines import Approach
from r2ccl_ctl.cli.common import (
    WholeNumber,
    add_row,
    count_option,
    json_option,
    of_option,
    print_json,
    show,
    table,
)
from r2ccl_ctl.control import SCHEMA
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.simulate import Cluster, Pattern, Rails, Row
from r2ccl_ctl.units import parse_rate, parse_size, rfc3339, show_bytes, show_span


def _numbers(text: str) -> list[int]:
    """ "1,2,5-8"."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise R2UsageError(f"'{text}' is no list of numbers: give one such as 1,2,5-8")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise R2UsageError(f"'{part}' names no number: give the lower one first")
        found += range(first, last + 1)
    return found


@click.command()
@click.option("--nodes", default="8", show_default=True, help="Of each cluster, such as 8,16,64.")
@count_option("--gpus", 8, "Of each node.")
@count_option("--nics", 8, "Of each node.")
@click.option("--rate", default="400gbit", show_default=True, help="Of each NIC.")
@click.option("--size", default="1G", show_default=True, help="Of the AllReduce; or 64M,1G.")
@click.option("--lost", default="1", show_default=True, help="NICs, such as 1-10.")
@count_option("--patterns", 20, "Random ones for each.")
@click.option(
    "--seed",
    type=WholeNumber(min=0),
    default=1,
    show_default=True,
    help="Of the random patterns.",
)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Patterns, a line each: NODE:NIC NODE:NIC, from 0.",
)
@click.option("--rails", is_flag=True, help="Also compare ring orders on rail-only fabrics.")
@click.option(
    "--model",
    type=click.Choice(list(baselines.MODELS)),
    help="Also what one lost NIC costs a training job, beside other approaches.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw into FILE.")
@json_option
def simulate(
    nodes: str,
    gpus: int,
    nics: int,
    rate: str,
    size: str,
    lost: str,
    patterns: int,
    seed: int,
    file: Path | None,
    rails: bool,
    model: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate AllReduce on large clusters that have lost NICs.

    SimGrid carries out the schedules of the executor. It needs libsimgrid-dev at build time. Rates
    are shared fairly; there is no packet loss, no incast and no cost of CPUs. A ring of more than
    32 nodes comes from the planner's model instead.

    \b
    Example:
      r2ccl-ctl simulate --nodes 8,16,64,128 --lost 1-10 --plot simulated.png
      r2ccl-ctl simulate --nodes 16 --lost 2,4 --rails
    """
    speed = of_option("--rate", parse_rate, rate)
    clusters = [Cluster(n, nics, speed, gpus) for n in of_option("--nodes", _numbers, nodes)]
    sizes = [of_option("--size", parse_size, one) for one in size.split(",")]
    for cluster in clusters:
        simulation.check(cluster)
    if min(sizes) < 1 << 20:
        raise R2UsageError(f"--size {size}: give 1M or more, smaller ones are NCCL's own")
    wanted = [
        (cluster, count, some)
        for cluster in clusters
        for count, some in _patterns(cluster, lost, patterns, seed, file)
    ]
    simulation.program()  # missing: said at once
    rows, orders = _simulate(wanted, sizes, rails)
    compared = baselines.approaches(clusters[-1], model) if model else []
    if plot is not None:
        simulation.draw(rows, plot)
    if as_json:
        print_json(_as_dict(clusters, seed, rows, orders, model, compared))
        return
    _show(rows, orders)
    if model:
        _show_approaches(clusters[-1], model, compared)


def _patterns(
    cluster: Cluster, lost: str, count: int, seed: int, file: Path | None
) -> list[tuple[int, list[Pattern]]]:
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise R2UsageError(f"--file {file} is no text in UTF-8") from None
        found = of_option(
            f"--file {file}", lambda given: simulation.read_patterns(given, cluster), text
        )
        counts = sorted({len(pattern) for pattern in found})
        return [(n, [pattern for pattern in found if len(pattern) == n]) for n in counts]
    return [
        (n, simulation.random_patterns(cluster, n, count, seed))
        for n in of_option("--lost", _numbers, lost)
    ]


def _simulate(
    wanted: Sequence[tuple[Cluster, int, list[Pattern]]], sizes: Sequence[int], rails: bool
) -> tuple[list[Row], list[Rails]]:
    rows: list[Row] = []
    orders: list[Rails] = []
    steps = len(wanted) * len(sizes) * (len(simulation.SCHEDULES) + rails)
    with click.progressbar(length=steps, label="simulating", file=sys.stderr) as bar:
        for cluster, lost, patterns in wanted:
            for size in sizes:
                rows += simulation.rows_of(cluster, size, lost, patterns, lambda: bar.update(1))
                if rails:
                    one = simulation.rails_of(cluster, size, lost, patterns, lambda: bar.update(1))
                    orders.append(one)
    return rows, orders


def _as_dict(
    clusters: Sequence[Cluster],
    seed: int,
    rows: Sequence[Row],
    orders: Sequence[Rails],
    model: str | None,
    compared: Sequence[Approach],
) -> dict[str, Any]:
    one = clusters[0]
    return {
        "schema": SCHEMA,
        "time": rfc3339(time.time_ns()),
        "nics": one.nics,
        "rate": one.rate,
        "nvlink": one.nvlink,
        "latency_s": one.latency,
        "seed": seed,
        "rows": [asdict(row) for row in rows],
        "rails": [_finite(row) for row in orders],
        "model": model,
        "assumed": baselines.ASSUMED if model else "",
        "approaches": [asdict(row) for row in compared],
    }


def _finite(row: Rails) -> dict[str, Any]:
    """JSON knows no infinity: a ring that stops has no time."""
    return {name: None if value == float("inf") else value for name, value in vars(row).items()}


def _show(rows: Sequence[Row], orders: Sequence[Rails]) -> None:
    found = table(
        ">GPUS", ">SIZE", ">LOST", "SCHEDULE", ">MEDIAN", ">RATIO", ">P95", ">BOUND", "BY"
    )
    for row in rows:
        add_row(
            found,
            row.gpus,
            show_bytes(row.size),
            row.lost,
            row.schedule,
            f"{row.median_s * 1e3:.2f} ms",
            f"{row.median:.3f}",
            f"{row.p95:.3f}",
            f"{row.bound:.3f}",
            row.engine,
        )
    show(found)
    click.echo("RATIO, P95 and BOUND: to the ring with all NICs. Simulated, not measured.")
    if not orders:
        return
    found = table(
        ">NODES", ">LOST", ">RING", ">P95", ">BRIDGED", ">P95", ">SAVED", ">P95", ">HELPED"
    )
    for one in orders:
        ratios = (one.plain_median, one.plain_p95, one.bridged_median, one.bridged_p95)
        shares = (one.gain_median, one.gain_p95, one.helped)
        add_row(
            found,
            one.nodes,
            one.lost,
            *(f"{ratio:.3f}" for ratio in ratios),
            *(f"{share:.1%}" for share in shares),
        )
    show(found)
    click.echo(
        "Rail-only fabric, AllGather and ReduceScatter: the ring in the nodes' order, and with "
        "bridge nodes."
    )


def _show_approaches(cluster: Cluster, name: str, compared: Sequence[Approach]) -> None:
    compute, comm = baselines.step_time(cluster, baselines.MODELS[name])
    click.echo(
        f"{name} on {cluster.nodes * cluster.gpus} GPUs: a step computes {compute * 1e3:.0f} ms "
        f"and communicates {comm * 1e3:.0f} ms. One NIC is lost."
    )
    found = table("APPROACH", "BY", ">STOP", ">STEP", ">LOST IN 1 H", ">FACTOR")
    for one in compared:
        add_row(
            found,
            one.name,
            one.kind,
            show_span(one.stop_s),
            f"{one.step:.4f}",
            f"{one.lost_s:.1f} s",
            f"{one.factor:.1f}",
        )
    show(found)
    click.echo(f"Models, not measurements. Assumed: {baselines.ASSUMED}.")
    for one in compared:
        click.echo(f"{one.name}: {one.assumes}.")
