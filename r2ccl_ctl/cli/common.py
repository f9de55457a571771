"""What the commands share: errors as exit codes, the choice of processes, JSON, tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from r2ccl_ctl.control import Selection, list_processes
from r2ccl_ctl.errors import R2Error, R2UsageError

F = TypeVar("F", bound=Callable[..., Any])

WIDE = 400  # columns, where the output goes to no terminal: a line is a row


class Failure(click.ClickException):
    """An R2Error as click prints it."""


class UsageFailure(Failure):
    """An R2UsageError as click prints it."""

    exit_code = 2


class R2Group(click.Group):
    """A group whose commands may raise R2Error."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except R2Error as err:
            kind = UsageFailure if isinstance(err, R2UsageError) else Failure
            raise kind(str(err)) from err


def selection_options(command: F) -> F:
    """--pid, --job, --node: which processes."""
    for option in (
        click.option("--node", metavar="NAME", help="Processes of this node (host name)."),
        click.option("--job", metavar="JOB", help="Processes of this job."),
        click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="This process."),
    ):
        command = option(command)
    return command


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="JSON, with a schema number.")(
        command
    )


def selection(
    pid: int | None, job: str | None, node: str | None, everything: bool = False
) -> Selection:
    return Selection(pid=pid, job=job, node=node, everything=everything)


def print_json(data: Any, *, line: bool = False) -> None:
    """One JSON document, or one line of JSON lines."""
    click.echo(json.dumps(data, indent=None if line else 2, ensure_ascii=False))


def console() -> Console:
    """For data on stdout. Honours NO_COLOR; nothing is wrapped when it is no terminal."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out = Console(highlight=False, markup=False, emoji=False, width=WIDE)
    return out


def show(data: RenderableType) -> None:
    """Print a table or text, without blanks at the ends of lines where it is no terminal."""
    out = console()
    if out.is_terminal:
        out.print(data)
        return
    with out.capture() as captured:
        out.print(data)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str) -> Table:
    """A table without lines. A column that starts with ">" is for numbers."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(
            Text(column.removeprefix(">")),
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
        )
    return found


STYLES = {
    "healthy": "green",
    "up": "green",
    "running": "green",
    "failed": "red",
    "down": "red",
    "gone": "red",
    "died": "red",
    "damaged": "red",
    "suspect": "yellow",
    "probing": "yellow",
    "ramping": "yellow",
    "drained": "yellow",
    "damped": "yellow",
    "fencing": "yellow",
    "connecting": "yellow",
}


def state(word: str) -> Text:
    return Text(word, style=STYLES.get(word, ""))


def add_row(to: Table, *cells: object) -> None:
    """Cells as plain text: what comes from a segment is no markup."""
    to.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def complete_nic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The NICs of the running processes, for the shell."""
    names: set[str] = set()
    try:
        for process in list_processes():
            names.update(nic.name for nic in process.snapshot().nics)
    except R2Error:
        pass
    return sorted(name for name in names if name.startswith(incomplete))
