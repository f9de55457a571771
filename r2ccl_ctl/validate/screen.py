"""What stderr shows while the cases run: a bar with the remaining time, a line for each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from r2ccl_ctl.units import show_span
from r2ccl_ctl.validate.cases import Case
from r2ccl_ctl.validate.judge import judge

COLOURS = {"passed": "green", "slow": "yellow", "failed": "red", "unknown": "magenta"}


class Screen:
    """The remaining time is what the plan of the cases says, corrected by what they took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=1.0, left="")
        self._total = self._done = self._case_s = 0.0

    def begin(self, todo: Sequence[Case], before: int, seconds: float) -> None:
        self._total = seconds
        if before:
            self._console.print(f"{before} cases are finished from before: --again runs them anew")
        if todo:
            self._console.print(f"{len(todo)} cases, about {show_span(seconds)}")
        if self._console.is_terminal and todo:
            self._bar.start()

    def case(self, case: Case, seconds: float) -> None:
        self._case_s = seconds
        self._bar.update(self._task, description=f"{case.name}: {case.title}")
        if not self._console.is_terminal:
            left = show_span(max(0.0, self._total - self._done))
            self._console.print(f"{case.name}: {case.title} (about {left} left)")
        self.tick(0.0)

    def say(self, text: str) -> None:
        self._console.print(text, style="bold")

    def tick(self, seconds: float) -> None:
        """So much of the case is over."""
        at = self._done + min(seconds, self._case_s)
        left = f"about {show_span(max(1.0, self._total - at))} left"
        self._bar.update(self._task, completed=at, total=self._total, left=left)

    def done(self, case: Case, record: Mapping[str, Any]) -> None:
        self._done += self._case_s
        result = judge(case, record)
        why = f": {result.reasons[0]}" if result.reasons else ""
        self._console.print(f"  {case.name}: {result.status}{why}",
                            style=COLOURS[result.status])  # fmt: skip

    def end(self) -> None:
        self._bar.stop()
