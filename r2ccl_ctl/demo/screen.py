"""Progress while the demo runs: a live view on a terminal, plain lines elsewhere. On stderr, so
that stdout holds nothing but the result."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from r2ccl_ctl.demo.feeds import JobFeed, Window
from r2ccl_ctl.demo.plan import DemoSpec
from r2ccl_ctl.units import show_rate

BAR = 24
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 40
LINE_EVERY_S = 2.0
REFRESH_S = 0.25


def make_screen(console: Console) -> PlainScreen | LiveScreen:
    """What suits this console."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(console)
    return PlainScreen(console)


class PlainScreen:
    """Lines, each with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last = 0.0
        self._counted = 0

    def begin(self, spec: DemoSpec, job: str) -> None:
        self._began = self._last = time.monotonic()
        self._line(f"job {job}: {spec.headline()}")

    def say(self, text: str) -> None:
        self._line(text)

    def phase(self, title: str) -> None:
        self._line(f"phase: {title}")

    def show(self, feed: JobFeed, windows: list[Window]) -> None:
        now = time.monotonic()
        if now - self._last < LINE_EVERY_S or len(windows) == self._counted:
            return
        fresh = windows[self._counted :]
        self._last, self._counted = now, len(windows)
        spent = sum(w.seconds for w in fresh)
        rate = sum(w.bytes for w in fresh) / spent / 1e9 if spent else 0.0
        wrong = sum(max(w.wrong, 0) for w in windows)
        self._line(f"  {len(windows)} AllReduces, now {rate:.3f} GB/s, wrong {wrong}")

    def end(self) -> None:
        """Nothing is left open."""

    def _line(self, text: str) -> None:
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self._console.print(stamp + text, soft_wrap=True, markup=False, highlight=False)


class LiveScreen:
    """One view that is redrawn; what was said stays above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = time.monotonic()
        self._drawn = 0.0
        self._title = "starting"
        self._spec = DemoSpec()
        self._open = False

    def begin(self, spec: DemoSpec, job: str) -> None:
        self._began = time.monotonic()
        self._spec = spec
        self.say(f"job {job}: {spec.headline()}")
        self._live.start()
        self._open = True

    def say(self, text: str) -> None:
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        style = "bold magenta" if text.startswith("$") else ""
        self._console.print(Text(stamp, style="dim") + Text(text, style=style))

    def phase(self, title: str) -> None:
        self._title = title
        self.say(f"phase: {title}")

    def show(self, feed: JobFeed, windows: list[Window]) -> None:
        now = time.monotonic()
        if not self._open or now - self._drawn < REFRESH_S:
            return
        self._drawn = now
        view = draw(self._spec, self._title, now - self._began, feed, windows)
        self._live.update(view, refresh=True)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._live.stop()


def draw(
    spec: DemoSpec, title: str, seconds: float, feed: JobFeed, windows: list[Window]
) -> RenderableType:
    """The view: the job's bandwidth, and what each NIC of node 0 carries."""
    wrong = sum(max(w.wrong, 0) for w in windows)
    head = Text(f"\n{seconds:5.1f} s  {title}", style="bold")
    flow = Text("AllReduce  ")
    if windows:
        flow.append(sparkline([w.algbw_gbs for w in windows[-SPARKS:]]), style="cyan")
        flow.append(f"  {windows[-1].algbw_gbs:.3f} GB/s   wrong values: ")
        flow.append(str(wrong), style="bold red" if wrong else "bold green")
        flow.append(f" in {len(windows)} AllReduces")
    else:
        flow.append("the ranks are joining")
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(5):
        table.add_column(justify="right" if column == 3 else "left", no_wrap=True)
    rates = feed.rates()
    top = max([*rates.values(), float(spec.nic_rate * spec.ranks_per_node), 1.0])
    for nic in feed.nics:
        failed = nic.fault.startswith(("blackhole", "error"))
        rate = rates.get(nic.name, 0.0)
        filled = round(BAR * min(rate / top, 1.0))
        table.add_row(
            "node0",
            nic.name,
            Text("█" * filled, style="green") + Text("·" * (BAR - filled), style="dim"),
            show_rate(rate) or "0 bit/s",
            Text(nic.fault or "healthy", style="bold red") if failed else Text("healthy", "green"),
        )
    return Group(head, flow, table)


def sparkline(values: list[float]) -> str:
    top = max(values, default=0.0)
    if top <= 0:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(int(v / top * len(BLOCKS)), len(BLOCKS) - 1)] for v in values)
