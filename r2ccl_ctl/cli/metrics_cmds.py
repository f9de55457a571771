"""metrics: for Prometheus, once or whenever it asks."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r2ccl_ctl.cli.common import of_option, selection_options
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.units import parse_duration

if TYPE_CHECKING:
    from r2ccl_ctl.control import Selection


@click.command()
@selection_options
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Into FILE, which is replaced as a whole: for node_exporter's textfile collector.",
)
@click.option(
    "--listen",
    metavar="[ADDR:]PORT",
    help="Serve http://ADDR:PORT/metrics until Ctrl-C. Without ADDR: 127.0.0.1, this machine only. "
    "There is no password: who reaches it can read it.",
)
@click.option(
    "--keep",
    default="5min",
    show_default=True,
    metavar="DURATION",
    help="How long a process that has ended keeps its series: longer than a scrape interval.",
)
def metrics(
    wanted: Selection,
    output: Path | None,
    listen: str | None,
    keep: str,
) -> None:
    """Print metrics for Prometheus, or serve them.

    They are of every process of this machine that you may read. docs/monitoring.md explains the
    metrics and alerts. If no process runs, there is a page, too, so a scrape fails only when
    something is wrong.

    \b
    Example:
      r2ccl-ctl metrics
      r2ccl-ctl metrics --output /var/lib/node_exporter/textfile_collector/r2ccl.prom
      r2ccl-ctl metrics --listen 0.0.0.0:9435
    """
    if output is not None and listen is not None:
        raise R2UsageError("--output and --listen exclude each other: give one")
    # Loaded here: no other command needs it.
    from r2ccl_ctl import exporter

    keep_s = of_option("--keep", parse_duration, keep)
    if listen is not None:
        address, port = exporter.parse_listen(listen)
        server = exporter.serve(wanted, address, port, keep_s)
        shown = f"[{address}]" if ":" in address else address
        url = f"http://{shown}:{server.server_port}/metrics"
        click.echo(f"metrics at {url} (Ctrl-C ends)", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    elif output is not None:
        exporter.write_atomically(output, exporter.page(wanted, keep_s))
    else:
        click.echo(exporter.page(wanted, keep_s), nl=False)
