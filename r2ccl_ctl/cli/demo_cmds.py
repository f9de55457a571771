"""`r2ccl-ctl demo`: a thin command over r2ccl_ctl.demo."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from r2ccl_ctl.cli.common import add_row, json_option, of_option, print_json, show, table
from r2ccl_ctl.demo import DemoSpec, Interrupted, Report, run
from r2ccl_ctl.demo.picture import save_picture
from r2ccl_ctl.demo.plan import KINDS
from r2ccl_ctl.demo.report import (
    EVENT_COLUMNS,
    PHASE_COLUMNS,
    closing_lines,
    event_rows,
    phase_rows,
)
from r2ccl_ctl.demo.screen import make_screen
from r2ccl_ctl.units import parse_duration, parse_rate, parse_size


@click.command()
@click.option("--nics", default=4, show_default=True, metavar="M", help="NICs of each node.")
@click.option("--nodes", default=2, show_default=True, metavar="K", help="Nodes to emulate.")
@click.option(
    "--ranks-per-node", default=2, show_default=True, metavar="P", help="Ranks of each node."
)
@click.option(
    "--size", default="64M", show_default=True, metavar="BYTES", help="Size of the AllReduce."
)
@click.option(
    "--seconds-per-phase",
    "seconds",
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="How long each of the four phases lasts, or longer where it saw too little.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="blackhole",
    show_default=True,
    help="How NICs fail: bytes vanish and nobody is told, or connections are reset.",
)
@click.option(
    "--nic-rate",
    default="400mbit",
    show_default=True,
    metavar="RATE",
    help="Limit every NIC to RATE per rank, so that the loss of one shows; 0: no limit.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for bandwidth.png and demo.json. Default: r2ccl-demo here; build/demo in a "
    "checkout.",
)
@json_option
def demo(
    nics: int,
    nodes: int,
    ranks_per_node: int,
    size: str,
    seconds: str,
    kind: str,
    nic_rate: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Take NICs away under a running AllReduce, and give them back.

    Needs no privileges, no GPU and no network. Two emulated nodes with loopback NICs run a CPU
    stand-in for NCCL over the real net plugin, and check every value of every AllReduce. A separate
    process fails one NIC of the first node, then a second, then recovers both, with the commands
    that an operator uses. Ends with 1 if a value was wrong or a failover was missed.

    \b
    Example:
      r2ccl-ctl demo
      r2ccl-ctl demo --kind error --seconds-per-phase 10 --json
    """
    spec = DemoSpec(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        nics=nics,
        size=of_option("--size", parse_size, size),
        seconds=of_option("--seconds-per-phase", parse_duration, seconds),
        kind=kind,
        nic_rate=of_option("--nic-rate", parse_rate, nic_rate) if nic_rate.strip() != "0" else 0,
        output=output,
    )
    progress = Console(stderr=True, highlight=False, markup=False, emoji=False)
    try:
        report = run(spec, make_screen(progress))
    except Interrupted as signal:
        click.echo("demo: interrupted; the job is ended", err=True)
        sys.exit(128 + signal.number)
    save_picture(report)
    report.save()
    if as_json:
        print_json(report.as_dict())
    else:
        show_report(report)
    for problem in report.problems:
        click.echo(f"Error: {problem}", err=True)
    sys.exit(0 if report.ok else 1)


def show_report(report: Report) -> None:
    """The tables and the verdict."""
    phases, events = table(*PHASE_COLUMNS), table(*EVENT_COLUMNS)
    for row in phase_rows(report):
        add_row(phases, *row)
    for row in event_rows(report):
        add_row(events, *row)
    show(phases)
    click.echo()
    if report.deeds:
        show(events)
        click.echo()
    for line in closing_lines(report):
        click.echo(line)
