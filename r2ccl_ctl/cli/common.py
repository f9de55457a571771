"""What the commands share: errors as exit codes, the choice of processes, JSON, tables."""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from r2ccl_ctl.errors import R2Error, R2Unknown, R2UsageError
from r2ccl_ctl.units import parse_duration, rfc3339, show_span

if TYPE_CHECKING:  # every command loads this module: what takes long is loaded where it is used
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

    from r2ccl_ctl.control import Process, Selection

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

WIDE = 1000  # columns, where the output goes to no terminal: a line is a row


class Failure(click.ClickException):
    """An R2Error as click prints it."""


class UsageFailure(Failure):
    """An R2UsageError as click prints it."""

    exit_code = 2


class UnknownFailure(Failure):
    """An R2Unknown as click prints it."""

    exit_code = 3


def failure(err: R2Error) -> Failure:
    if isinstance(err, R2UsageError):
        return UsageFailure(str(err))
    return UnknownFailure(str(err)) if isinstance(err, R2Unknown) else Failure(str(err))


@contextlib.contextmanager
def of_a_check() -> Iterator[None]:
    """1 and 2 are findings of a check: what keeps it from being made ends with 3."""
    try:
        yield
    except (R2UsageError, R2Unknown):
        raise
    except R2Error as err:
        raise R2Unknown(str(err)) from err
    except OSError as err:
        if err.errno == errno.EPIPE:
            raise
        raise R2Unknown(refusal(err)) from err


def _must_be(
    kind: type[int] | type[float],
    parse: Callable[[Any, click.Parameter | None, click.Context | None], Any],
    value: Any,
    limits: click.IntRange | click.FloatRange,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    """What click's own type makes of it; else say what the option takes."""
    span = f"{limits.min:g} to {limits.max:g}" if limits.max else f"{limits.min:g} or more"
    if limits.min_open:
        span = f"more than {limits.min:g}" + (f", up to {limits.max:g}" if limits.max else "")
    try:
        kind(value)
    except (TypeError, ValueError):
        what = "whole number" if kind is int else "number"
        limits.fail(f"'{value}' is no {what}: give {span}", param, ctx)
    try:
        return parse(value, param, ctx)
    except click.BadParameter:
        limits.fail(f"{value} is out of range: give {span}", param, ctx)


class WholeNumber(click.IntRange):
    """A whole number in a range, with its least one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _must_be(int, super().convert, value, self, param, ctx)


class Number(click.FloatRange):
    """A number in a range, with its least one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _must_be(float, super().convert, value, self, param, ctx)


class R2Group(click.Group):
    """A group whose commands may raise R2Error. What the system refuses is a message as well."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except R2Error as err:
            raise failure(err) from err
        except OSError as err:
            if err.errno == errno.EPIPE:  # the reader has seen enough: Main decides
                raise
            raise Failure(refusal(err)) from err


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def refusal(err: OSError) -> str:
    """An OSError in words."""
    why = err.strerror or str(err)
    if err.filename is not None:
        return f"{os.fsdecode(err.filename)}: {why}"
    if err.errno in _NO_ROOM:
        drop_output()
        return f"the output cannot be written: {why}"
    return why


def drop_output() -> None:
    """What is left in the buffer of stdout goes nowhere: the end of Python would try again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def is_utf8(stream: Any) -> bool:
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        return codecs.lookup(stream.encoding).name == "utf-8"
    return False


def prepare_streams() -> None:
    """Output that cannot fail for the sake of a character, whatever the locale. There is a
    descriptor behind each stream: no file that is opened later takes the place of a closed one."""
    while True:
        spare = os.open(os.devnull, os.O_RDWR)
        if spare > 2:
            os.close(spare)
            break
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    # Names from the command line and the environment may be any bytes: they come out as they are.
    out: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError):
        out.reconfigure(errors="surrogateescape" if is_utf8(out) else "backslashreplace")


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--pid, --job, --node; the command gets them as one `wanted`."""
    return _choosing(command)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """For commands that ask processes to act: --all as well, and `timeout` in seconds."""
    for option in (
        click.option(
            "--timeout",
            default="2s",
            show_default=True,
            metavar="DURATION",
            callback=some_time,
            help="How long to wait for the processes' answers.",
        ),
        click.option("--all", "everything", is_flag=True, help="Processes of all jobs."),
    ):
        command = option(command)
    return _choosing(command, takes_all=True)


def some_time(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds. With none, nobody could answer, and each process would be called hung."""
    seconds = of_option(param.opts[0], parse_duration, value)
    if seconds < 0.001:
        raise R2UsageError(f"{param.opts[0]} {value}: at least 1ms")
    return seconds


def _choosing(command: Callable[..., Any], *, takes_all: bool = False) -> Callable[..., Any]:
    @functools.wraps(command)
    def with_selection(
        *args: Any, pid: int | None, job: str | None, node: str | None, **rest: Any
    ) -> Any:
        from r2ccl_ctl.control import Selection

        everything = rest.pop("everything") if takes_all else False
        wanted = Selection(pid=pid, job=job, node=node, everything=everything)
        return command(*args, wanted=wanted, **rest)

    found: Callable[..., Any] = with_selection
    for option in (
        click.option(
            "--node",
            metavar="NAME",
            shell_complete=complete_node,
            help="Processes of this node (host name).",
        ),
        click.option(
            "--job", metavar="JOB", shell_complete=complete_job, help="Processes of this job."
        ),
        click.option(
            "--pid",
            type=WholeNumber(min=1),
            metavar="PID",
            shell_complete=complete_pid,
            help="This process.",
        ),
    ):
        found = option(found)
    return found


def of_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """What `parse` makes of an option's text; the error names the option as well."""
    try:
        return parse(text)
    except R2UsageError as err:
        raise R2UsageError(f"{option}: {err}") from err


def count_option(name: str, default: int, text: str) -> Callable[[F], F]:
    """One or more of something."""
    return click.option(
        name, type=WholeNumber(min=1), default=default, show_default=True, help=text
    )


def not_empty(ctx: click.Context, option: click.Parameter, text: str) -> str:
    """Refuse a text that is given and empty, as a shell variable is that is not set."""
    source = ctx.get_parameter_source(option.name or "")
    if not text and source is ParameterSource.COMMANDLINE:
        raise R2UsageError(f"{option.opts[0]} is empty: give a value, or leave it out")
    return text


def only_with(option: str, other: str, given: bool) -> None:
    """Refuse an option of this command that says nothing where the other one is not `given`."""
    source = click.get_current_context().get_parameter_source(option[2:].replace("-", "_"))
    if not given and source is ParameterSource.COMMANDLINE:
        raise R2UsageError(f"{option} has no effect without {other}: add that, or leave it out")


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="JSON, with a schema number.")(
        command
    )


def say_left_out(wanted: Selection, found: Iterable[Process] = ()) -> None:
    """Say, once a command, which running processes may be meant and are not among those found since
    this tool does not know their layout."""
    from r2ccl_ctl.control import left_out

    text = left_out(wanted, found)
    context = click.get_current_context(silent=True)
    said = context.meta.setdefault("r2ccl_ctl.said", set()) if context else set()
    if text and text not in said:
        said.add(text)
        click.echo(f"warning: {text}", err=True)


def print_json(data: Any, *, line: bool = False) -> None:
    """One JSON document, or one line of JSON lines."""
    indent = None if line else 2
    text = json.dumps(data, indent=indent, ensure_ascii=not is_utf8(sys.stdout))
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no text
        text = json.dumps(data, indent=indent)
    click.echo(text)


def console() -> Console:
    """For data on stdout. Honours NO_COLOR; nothing is wrapped when it is no terminal."""
    from rich.console import Console

    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out = Console(highlight=False, markup=False, emoji=False, width=WIDE)
    return out


class Whole:
    """Rows as long as they need to be. Where the terminal is narrower they go on in its next line:
    a row that is cut to fit loses its numbers, and a name with an ellipsis cannot be typed."""

    def __init__(self, data: RenderableType) -> None:
        self.data = data

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        width = max(options.max_width, 1)
        wide = options.update(width=max(width, WIDE), height=None)
        for line in out.render_lines(self.data, wide, pad=False):
            for part in folded(line, width):
                yield from part
                yield Segment.line()


def fitted(out: Console, view: Callable[[int], RenderableType]) -> RenderableType:
    """A view of so many lines that it fits on the screen, where long ones take several."""
    lines = room = max(out.height - 1, 1)
    while True:
        found = view(lines)
        height = len(out.render_lines(Whole(found), pad=False))
        if height <= room or lines <= 1:
            return found
        lines = max(1, min(lines - 1, lines * room // height))


def folded(line: list[Segment], width: int) -> Iterator[list[Segment]]:
    """A line without the blanks at its end, in parts of at most `width` columns: between words, so
    that each can be copied, but for those that are longer than that."""
    from rich.cells import cell_len
    from rich.segment import Segment

    while line and not line[-1].text.strip(" "):
        line = line[:-1]
    if line:
        line = [*line[:-1], Segment(line[-1].text.rstrip(" "), line[-1].style)]
    while Segment.get_line_length(line) > width:
        columns = [c if i == 0 else "" for s in line for c in s.text for i in range(cell_len(c))]
        starts = [i for i in range(1, len(columns)) if columns[i]]  # no half of a wide character
        whole = max((i for i in starts if i <= width), default=[*starts, len(columns)][0])
        end = next((i for i in range(width, 0, -1) if columns[i] == " " != columns[i - 1]), whole)
        rest = next((i for i in range(end, len(columns)) if columns[i] != " "), end)
        if rest == len(columns):
            break
        first, _, line = Segment.divide(line, [end, rest, len(columns)])
        yield first
    yield line


def show(data: RenderableType) -> None:
    """Print a table or text, without blanks at the ends of lines."""
    from rich.text import Text

    out = console()
    if out.is_terminal and isinstance(data, Text):
        out.print(data, soft_wrap=True)  # by the terminal: what is copied is one line
        return
    if out.is_terminal:
        out.print(Whole(data))
        return
    with out.capture() as captured:
        out.print(data)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str) -> Table:
    """A table without lines. A column that starts with ">" is for numbers."""
    from rich.table import Table
    from rich.text import Text

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
    "recovered": "green",
    "failed": "red",
    "down": "red",
    "gone": "red",
    "died": "red",
    "damaged": "red",
    "other version": "yellow",
    "suspect": "yellow",
    "probing": "yellow",
    "ramping": "yellow",
    "drained": "yellow",
    "damped": "yellow",
    "fencing": "yellow",
    "connecting": "yellow",
}


def state(word: str, more: str = "") -> Text:
    from rich.text import Text

    return Text(word + more, style=STYLES.get(word, ""))


def ago(mono_ns: int, now_ns: int | None = None) -> str:
    """How long a state has lasted."""
    now = time.monotonic_ns() if now_ns is None else now_ns
    return show_span((now - mono_ns) / 1e9) if mono_ns and mono_ns <= now else ""


def process_state(process: Process) -> Text:
    if process.silent_s:
        from rich.text import Text

        return Text(f"silent for {show_span(process.silent_s)}", style="yellow")
    return state(process.state)


def row_dict(row: Any) -> dict[str, Any]:
    return {**vars(row), "since": rfc3339(row.since_real_ns)}


def add_row(to: Table, *cells: object) -> None:
    """Cells as plain text: what comes from a segment is no markup."""
    from rich.text import Text

    to.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def complete_nic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The NICs of the running processes, for the shell."""
    from r2ccl_ctl.control import list_processes

    names: set[str] = set()
    try:
        for process in list_processes():
            names.update(nic.name for nic in process.snapshot().nics)
    except (R2Error, OSError):
        pass
    return sorted(name for name in names if name.startswith(incomplete))


def complete_process(
    value: Callable[[Process], str],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What the running processes have for it, for the shell."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from r2ccl_ctl.control import list_processes

        try:
            found = {value(process) for process in list_processes()}
        except (R2Error, OSError):
            return []
        return sorted(word for word in found if word and word.startswith(incomplete))

    return complete


complete_job = complete_process(lambda process: process.job)
complete_node = complete_process(lambda process: process.host)
complete_pid = complete_process(lambda process: str(process.pid))
