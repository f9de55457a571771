"""Commands that only look: ps, status, nics, journal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.live import Live

from r2ccl_ctl.cli import view
from r2ccl_ctl.cli.common import (
    console,
    json_option,
    print_json,
    selection,
    selection_options,
)
from r2ccl_ctl.control import Process, Selection, Snapshot, list_processes, select
from r2ccl_ctl.journal import Cursor, Event, read_all
from r2ccl_ctl.segment import SegmentError
from r2ccl_ctl.units import parse_duration

FOLLOW_S = 0.1
RESCAN_S = 0.5

Looks = list[tuple[Snapshot, dict[int, tuple[float, float]]]]


@click.command()
@click.option("--all", "everything", is_flag=True, help="Processes that are gone as well.")
@selection_options
@json_option
def ps(
    everything: bool, pid: int | None, job: str | None, node: str | None, as_json: bool
) -> None:
    """List the processes that use R2CCL.

    \b
    Example:
      r2ccl-ctl ps --all
    """
    wanted = selection(pid, job, node)
    found = [process for process in list_processes(dead=everything) if wanted.wants(process)]
    if as_json:
        print_json(view.document("processes", [view.process_dict(process) for process in found]))
    elif found:
        console().print(view.process_table(found))
    else:
        more = "" if everything else "; --all lists those that are gone as well"
        click.echo(f"no process uses R2CCL here{more}", err=True)


def look(wanted: Selection, rates: view.Rates, *, dead: bool) -> Looks:
    """All chosen processes, read once. Those that end meanwhile are left out."""
    found: Looks = []
    problems: list[SegmentError] = []
    for process in select(wanted, dead=dead):
        try:
            snapshot = process.snapshot()
        except SegmentError as err:
            problems.append(err)
            continue
        found.append((snapshot, rates.update(snapshot)))
    if not found and problems:
        raise problems[0]
    return found


def watch(interval: float, draw: Callable[[], object], live: bool) -> None:
    """Call `draw` every `interval` seconds until Ctrl-C; `live`: in place, on the whole screen."""
    with contextlib.suppress(KeyboardInterrupt):
        if not live:
            while True:
                draw()
                sys.stdout.flush()
                time.sleep(interval)
        out = console()
        with Live(console=out, screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(draw(), refresh=True)  # type: ignore[arg-type]
                time.sleep(interval)


def watch_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--interval", default="1s", show_default=True, metavar="DURATION",
                     help="With --watch: time between two looks."),
        click.option("--watch", "-w", "watching", is_flag=True,
                     help="Look again and again, until Ctrl-C. With --json: one line per look."),
    ):
        command = option(command)
    return command


def report(
    wanted: Selection, *, as_json: bool, watching: bool, interval: str,
    render: Callable[[Looks], object], as_dicts: Callable[[Looks], dict[str, object]],
) -> None:
    """Print once, or watch."""
    rates = view.Rates()
    seconds = parse_duration(interval)
    if seconds < 0.05:
        raise click.BadParameter("at least 50ms", param_hint="--interval")
    dead = wanted.pid is not None

    def once() -> None:
        looks = look(wanted, rates, dead=dead)
        if as_json:
            print_json(as_dicts(looks), line=watching)
        else:
            console().print(render(looks))

    if not watching:
        once()
    elif as_json or not console().is_terminal:
        watch(seconds, once, live=False)
    else:
        watch(seconds, lambda: render(look(wanted, rates, dead=dead)), live=True)


@click.command()
@selection_options
@click.option("--details", "-d", is_flag=True, help="All peers and all paths.")
@watch_options
@json_option
def status(
    pid: int | None, job: str | None, node: str | None, details: bool, watching: bool,
    interval: str, as_json: bool,
) -> None:
    """Show NICs, peers, paths and counters of running processes.

    With --pid also of a process that is gone, as it was at its end.

    \b
    Example:
      r2ccl-ctl status --watch
      r2ccl-ctl status --job 4711 --json
    """
    report(
        selection(pid, job, node), as_json=as_json, watching=watching, interval=interval,
        render=lambda looks: view.status_view(looks, details=details),
        as_dicts=lambda looks: view.document(
            "processes", [view.snapshot_dict(snapshot, rates) for snapshot, rates in looks]
        ),
    )


@click.command()
@selection_options
@watch_options
@json_option
def nics(
    pid: int | None, job: str | None, node: str | None, watching: bool, interval: str,
    as_json: bool,
) -> None:
    """List the NICs of running processes, with state, weight, rates and injected faults.

    \b
    Example:
      r2ccl-ctl nics --job 4711
    """

    def dicts(looks: Looks) -> dict[str, object]:
        return view.document("nics", [
            {"node": snapshot.process.host, "pid": snapshot.process.pid,
             "job": snapshot.process.job, **view.nic_dict(nic, rates)}
            for snapshot, rates in looks for nic in snapshot.nics
        ])

    report(
        selection(pid, job, node), as_json=as_json, watching=watching, interval=interval,
        render=lambda looks: view.nic_table(looks, titles=True), as_dicts=dicts,
    )


def show_events(events: list[Event], as_json: bool, titled: bool) -> None:
    for event in events:
        if as_json:
            print_json(view.event_dict(event), line=True)
        else:
            console().print(view.event_line(event, titled=titled))
    if events:
        sys.stdout.flush()


def follow_events(wanted: Selection, stop: Callable[[], bool]) -> Iterator[list[Event]]:
    """Batches of events in order of time, from now on, of processes that start later too. Ends
    with a chosen --pid, or when `stop` says so."""
    cursors: dict[str, Cursor] = {}
    first, scanned = True, 0.0
    with contextlib.ExitStack() as stack:
        while not stop():
            if time.monotonic() - scanned > RESCAN_S:
                for process in _new(wanted, cursors, first):
                    with contextlib.suppress(SegmentError):
                        cursor = stack.enter_context(Cursor(process))
                        cursor.next = cursor.head() if first else 0
                        cursors[process.name] = cursor
                first, scanned = False, time.monotonic()
            ended = wanted.pid is not None and all(c.ended() for c in cursors.values())
            batch: list[Event] = []
            for name, cursor in list(cursors.items()):
                try:
                    batch += cursor.events()
                except SegmentError:
                    del cursors[name]
            yield sorted(batch, key=lambda event: event.real_ns)
            if ended:
                return
            time.sleep(FOLLOW_S)


def _new(wanted: Selection, known: dict[str, Cursor], first: bool) -> list[Process]:
    found = select(wanted) if first else list_processes()
    return [p for p in found if p.name not in known and wanted.wants(p)]


@click.command()
@selection_options
@click.option("--all", "everything", is_flag=True, help="Processes that are gone as well.")
@click.option("--follow", "-f", is_flag=True, help="Then wait for more, until Ctrl-C.")
@click.option("--last", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N events.")
@json_option
def journal(
    pid: int | None, job: str | None, node: str | None, everything: bool, follow: bool,
    last: int | None, as_json: bool,
) -> None:
    """Show what happened: failures, replays, recoveries, who said so and how long it took.

    With --pid also of a process that is gone. --json prints one object per line.

    \b
    Example:
      r2ccl-ctl journal --follow
      r2ccl-ctl journal --pid 4242 --json
    """
    wanted = selection(pid, job, node)
    processes = select(wanted, dead=everything or pid is not None)
    if pid is not None:
        processes = processes[-1:]
    titled = pid is None
    events: list[Event] = []
    for process in processes:
        with contextlib.suppress(SegmentError):
            events += read_all(process)
    events.sort(key=lambda event: event.real_ns)
    show_events(events if last is None else events[len(events) - min(last, len(events)):],
                as_json, titled)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            if os.environ.get("R2CCL_TEST_FOLLOW"):
                return
            for batch in follow_events(wanted, lambda: False):
                show_events(batch, as_json, titled)
