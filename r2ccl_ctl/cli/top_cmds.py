"""top: jobs on one screen, again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from r2ccl_ctl import overview
from r2ccl_ctl.cli.common import (
    WholeNumber,
    console,
    fitted,
    of_option,
    selection_options,
    show,
)
from r2ccl_ctl.cli.host_options import OF_HOSTS, host_options, host_timeout
from r2ccl_ctl.cli.overview_view import overview_view
from r2ccl_ctl.cli.scene import on_screen, source, watch, watch_live
from r2ccl_ctl.control import Selection
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.units import parse_duration

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command()
@selection_options
@host_options(OF_HOSTS, peers=True)
@host_timeout
@click.option(
    "--sort",
    type=click.Choice(list(overview.SORTS)),
    default="worst",
    show_default=True,
    help="Which processes of a job come first.",
)
@click.option("--unwell", "-u", is_flag=True, help="Only processes that are not healthy.")
@click.option(
    "--interval", default="2s", show_default=True, metavar="DURATION",
    help="Time between two updates.",
)  # fmt: skip
@click.option("--count", "-n", type=WholeNumber(min=1), metavar="N", help="Look N times, then end.")
def top(
    wanted: Selection,
    hosts: list[str],
    via: str,
    timeout: float,
    sort: str,
    unwell: bool,
    interval: str,
    count: int | None,
) -> None:
    """Show jobs on one screen, the worst first, until Ctrl-C.

    Each process is a row. HEALTH is what `status --check` says, with the first reason behind it.
    NICS: healthy ones of all. FAILS: failures of NICs. BEHIND: collectives that another rank has
    called and this one has not.

    For programs there is `status --json --watch`, with the same options for hosts.

    \b
    Example:
      r2ccl-ctl top
      r2ccl-ctl top --hosts peers
      r2ccl-ctl top --hostfile hosts.txt --unwell
      r2ccl-ctl top --hosts node1,node2 --sort tx --count 1
    """
    every = of_option("--interval", parse_duration, interval)
    if every < 0.05:
        raise R2UsageError(f"--interval {interval}: at least 50ms")
    live = count is None and on_screen()
    with source(wanted, hosts, via, timeout) as where:

        def draw() -> RenderableType:
            scene = where.look()
            jobs = overview.jobs(scene.looks, scene.seen, sort=sort, unwell=unwell)
            if not live:
                return overview_view(jobs, scene.hosts)
            return fitted(console(), lambda lines: overview_view(jobs, scene.hosts, lines))

        if live:
            watch_live(every, draw)
        elif count is None:
            watch(every, lambda: show(draw()))
        else:
            for number in range(count):
                time.sleep(every if number else 0)
                show(draw())
