"""What commands look at: the processes of this host or of several, once or again and again."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from r2ccl_ctl.cli import view
from r2ccl_ctl.cli.common import (
    Whole,
    console,
    of_option,
    only_with,
    print_json,
    say_left_out,
    show,
)
from r2ccl_ctl.control import Nobody, Process, Selection, Snapshot, list_processes, select
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.gather import HostLook, Hosts, hosts_of
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.segment import SegmentError
from r2ccl_ctl.units import parse_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

SAMPLE_S = 0.2
NAMED = 4  # processes in a sentence
GONE = ("ended", "died")

Looks = list[tuple[Snapshot, dict[int, tuple[float, float]]]]


@dataclass(frozen=True)
class Scene:
    """One look. seen: all processes, also those that are left out. hosts: what each one of several
    hosts answered, none for this host alone."""

    looks: Looks
    seen: Seen
    hosts: list[HostLook] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        return not self.hosts or any(not host.error for host in self.hosts)


class Here:
    """This host."""

    def __init__(self, wanted: Selection) -> None:
        self.wanted = wanted
        self.rates = view.Rates()

    def look(self) -> Scene:
        looks = look(self.wanted, self.rates, dead=self.wanted.pid is not None)
        say_left_out(self.wanted, [snapshot.process for snapshot, _ in looks])
        return Scene(looks, beside(self.wanted, [snapshot for snapshot, _ in looks]))


class There:
    """Several hosts."""

    def __init__(self, wanted: Selection, hosts: Hosts) -> None:
        self.wanted = wanted
        self.hosts = hosts
        self.rates = view.Rates()

    def look(self) -> Scene:
        """The first time it looks twice, a moment apart, so that there are rates."""
        first = self.rates.fresh
        scene = self._look()
        if first and scene.looks:
            time.sleep(SAMPLE_S)
            scene = self._look()
        return scene

    def _look(self) -> Scene:
        hosts = self.hosts.look()
        snapshots = [snapshot for host in hosts for snapshot in host.snapshots]
        wanted = [snapshot for snapshot in snapshots if self.wanted.wants(snapshot.process)]
        looks = [(snapshot, self.rates.update(snapshot)) for snapshot in wanted]
        return Scene(looks, Seen(snapshots), hosts)


@contextlib.contextmanager
def source(
    wanted: Selection, hosts: Sequence[str], via: str, timeout: float
) -> Iterator[Here | There]:
    if not hosts:
        yield Here(wanted)
        return
    with hosts_of(hosts, via, timeout, wanted.job) as several:
        yield There(wanted, several)


def beside(wanted: Selection, shown: list[Snapshot]) -> Seen:
    """Those that are shown, and the others of their jobs on this machine that --pid or --node leave
    out: who is behind is a comparison of all."""
    jobs = {snapshot.process.job for snapshot in shown if snapshot.comms}
    others = []
    if jobs and (wanted.pid is not None or wanted.node is not None):
        names = {snapshot.process.name for snapshot in shown}
        for process in list_processes():
            if process.job in jobs and process.name not in names:
                with contextlib.suppress(SegmentError):  # one that ends just now
                    others.append(process.snapshot())
    return Seen([*shown, *others])


def chosen(wanted: Selection, *, dead: bool, remedy: str) -> list[Process]:
    """As `select`. Where those meant are gone the error says so first, and the `remedy`."""
    try:
        return select(wanted, dead=dead)
    except R2UsageError:
        raise
    except R2Error as err:
        there = [] if dead else list_processes(dead=True)
        gone = [one for one in there if one.state in GONE and wanted.wants(one)]
        if not gone:
            raise
        pids = ", ".join(str(one.pid) for one in gone[:NAMED])
        pids += f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
        what = f" with {wanted}" if str(wanted) else ""
        what += f" is gone (pid {pids})" if len(gone) == 1 else f" are gone (pids {pids})"
        count = "1 process" if len(gone) == 1 else f"{len(gone)} processes"
        rest = "" if isinstance(err, Nobody) else f"; {err}"
        none = "" if str(wanted) or rest else "no process of R2CCL runs here; "
        raise R2Error(f"{none}{count}{what}: {remedy}{rest}") from err


def look(wanted: Selection, rates: view.Rates, *, dead: bool) -> Looks:
    """All chosen processes. Those that end meanwhile are left out. The first time it looks twice,
    a moment apart, so that there are rates."""
    if rates.fresh:
        looks = _look(wanted, rates, dead=dead)
        if not any(snapshot.process.running for snapshot, _ in looks):
            return looks
        time.sleep(SAMPLE_S)
    return _look(wanted, rates, dead=dead)


def _look(wanted: Selection, rates: view.Rates, *, dead: bool) -> Looks:
    found: Looks = []
    problems: list[SegmentError] = []
    for process in chosen(wanted, dead=dead, remedy="--pid shows one, as it was at its end"):
        try:
            snapshot = process.snapshot()
        except SegmentError as err:
            problems.append(err)
            continue
        found.append((snapshot, rates.update(snapshot)))
    if not found and problems:
        raise problems[0]
    return found


def watch(interval: float, draw: Callable[[], object]) -> None:
    """Call `draw` every `interval` seconds until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            draw()
            sys.stdout.flush()
            time.sleep(interval)


def watch_live(interval: float, draw: Callable[[], RenderableType]) -> None:
    """Show `draw` in place, on the whole screen, every `interval` seconds until Ctrl-C. When nobody
    is left the last view stays, also on the screen that this one was put over."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = console()
    last = shown = draw()
    ended = ""
    try:
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(console=out, screen=True, auto_refresh=False) as screen,
        ):
            while True:
                screen.update(Whole(shown), refresh=True)
                time.sleep(interval)
                try:
                    last = shown = draw()
                    ended = ""
                except R2Error:
                    ended = ended or time.strftime("%H:%M:%S")
                    note = Text(f"ended {ended}, waiting for more (Ctrl-C ends)", style="yellow")
                    shown = Group(last, Text(""), note)
    finally:
        out.print(Whole(shown))


def watch_options(command: Callable[..., None]) -> Callable[..., None]:
    """--watch and --interval; the command gets `every`: seconds, or None to look once."""

    @functools.wraps(command)
    def with_interval(*args: Any, watching: bool, interval: str, **rest: Any) -> None:
        seconds = of_option("--interval", parse_duration, interval)
        if seconds < 0.05:
            raise R2UsageError(f"--interval {interval}: at least 50ms")
        only_with("--interval", "--watch", watching)
        command(*args, every=seconds if watching else None, **rest)

    found: Callable[..., None] = with_interval
    for option in (
        click.option(
            "--interval",
            default="1s",
            show_default=True,
            metavar="DURATION",
            help="With --watch: time between two updates.",
        ),
        click.option(
            "--watch",
            "-w",
            "watching",
            is_flag=True,
            help="Repeat until Ctrl-C. With --json: one line each time.",
        ),
    ):
        found = option(found)
    return found


def report(
    where: Here | There,
    *,
    as_json: bool,
    every: float | None,
    render: Callable[[Scene], RenderableType],
    as_dicts: Callable[[Scene], dict[str, Any]],
) -> None:
    """Print once, or watch: look `every` so many seconds."""

    def once() -> None:
        scene = where.look()
        if as_json:
            print_json(as_dicts(scene), line=every is not None)
        else:
            show(render(scene))
        if every is None and not scene.answered:
            sys.exit(1)

    if every is None:
        once()
    elif as_json or not on_screen():
        watch(every, once)
    else:
        watch_live(every, lambda: render(where.look()))


def on_screen() -> bool:
    """A view can be put over what the terminal shows."""
    return console().is_terminal and not console().is_dumb_terminal
