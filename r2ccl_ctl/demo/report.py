"""The verdict, as a dictionary and as text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2ccl_ctl.control import SCHEMA
from r2ccl_ctl.demo.evidence import Outcome, innocent_downs
from r2ccl_ctl.demo.feeds import JobFeed, Sample, Window
from r2ccl_ctl.demo.plan import Action, DemoSpec, Phase
from r2ccl_ctl.journal import Event
from r2ccl_ctl.units import rfc3339, show_bytes, show_rate

NOTE = (
    "The NICs are loopback addresses and NCCL is a CPU stand-in: all ranks, and all NICs, share "
    "this machine's CPU. The figures show what a failure does to a job; they do not measure NICs."
)
MEANING = (
    "Resumed, of a failure: from the fault to the first acknowledgement over another NIC since the "
    "lost bytes were queued again. Of a recovery: until every pair of processes has a path over "
    "the NIC again. Each of the rank that took longest. Slowest: the longest AllReduce meanwhile."
)
ELEMENT_BYTES = 4  # float


@dataclass
class PhaseResult:
    """A phase as it was played. settled_ns: from when on it was undisturbed."""

    phase: Phase
    begin_ns: int
    settled_ns: int = 0
    end_ns: int = 0

    def whole(self, windows: Sequence[Window]) -> list[Window]:
        """The AllReduces that lie wholly in the undisturbed part."""
        start = max(self.begin_ns, self.settled_ns)
        end = self.end_ns or time.monotonic_ns()
        return [w for w in windows if w.begin_ns >= start and w.end_ns <= end]


@dataclass
class Deed:
    """What was done to a NIC, and what came of it."""

    action: Action
    phase: str
    command: str
    asked_ns: int
    outcome: Outcome = field(default_factory=Outcome)

    def slowest(self, windows: Sequence[Window]) -> Window | None:
        """The longest AllReduce that was under way between the action and its end."""
        start = self.outcome.began_ns or self.asked_ns
        end = self.outcome.settled_ns or start
        hit = [w for w in windows if w.end_ns > start and w.begin_ns < end]
        return max(hit, key=lambda w: w.seconds, default=None)


@dataclass
class Report:
    """All there is to say about one performance."""

    spec: DemoSpec
    job: str
    folder: Path
    began_ns: int
    ended_ns: int
    windows: list[Window]
    phases: list[PhaseResult]
    deeds: list[Deed]
    samples: list[Sample]
    journal: list[Event]
    problems: list[str]
    other_downs: int = 0
    picture: Path | None = None
    picture_problem: str = ""

    @property
    def wrong(self) -> int:
        return sum(max(w.wrong, 0) for w in self.windows)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def values_checked(self) -> int:
        """Over all ranks and AllReduces."""
        return sum(w.bytes // ELEMENT_BYTES for w in self.windows) * self.spec.ranks

    def seconds(self, mono_ns: int) -> float:
        """Since the demo began."""
        return (mono_ns - self.began_ns) / 1e9

    def algbw_gbs(self, result: PhaseResult) -> float | None:
        whole = result.whole(self.windows)
        spent = sum(w.seconds for w in whole)
        return sum(w.bytes for w in whole) / spent / 1e9 if spent else None

    def share(self, result: PhaseResult) -> float | None:
        """Of the bandwidth before any failure."""
        first, now = self.algbw_gbs(self.phases[0]), self.algbw_gbs(result)
        return now / first if first and now is not None else None

    def as_dict(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "schema": SCHEMA,
            "time": rfc3339(time.time_ns()),
            "ok": self.ok,
            "problems": self.problems,
            "wrong": self.wrong,
            "values_checked": self.values_checked,
            "iterations": len(self.windows),
            "seconds": round(self.seconds(self.ended_ns), 3),
            "job": self.job,
            "note": NOTE,
            "setup": {
                "nccl": "stand-in",
                "nodes": spec.nodes,
                "ranks_per_node": spec.ranks_per_node,
                "nics_per_node": spec.nics,
                "size": spec.size,
                "kind": spec.kind,
                "nic_rate": spec.nic_rate,
            },
            "phases": [self._phase_dict(result) for result in self.phases],
            "events": [self._event_dict(deed) for deed in self.deeds],
            "other_path_downs": self.other_downs,
            "timeline": [
                {
                    "t": round(self.seconds(w.end_ns), 3),
                    "seconds": round(w.seconds, 6),
                    "algbw_gbs": round(w.algbw_gbs, 6),
                    "wrong": w.wrong,
                }
                for w in self.windows
            ],
            "files": {
                "folder": str(self.folder),
                "json": str(self.folder / "demo.json"),
                "journal": str(self.folder / "journal.jsonl"),
                "png": str(self.picture) if self.picture else None,
                "png_problem": self.picture_problem,
            },
        }

    def _phase_dict(self, result: PhaseResult) -> dict[str, Any]:
        return {
            "name": result.phase.name,
            "nics": result.phase.nics,
            "begin": round(self.seconds(result.begin_ns), 3),
            "end": round(self.seconds(result.end_ns), 3),
            "iterations": len(result.whole(self.windows)),
            "algbw_gbs": _rounded(self.algbw_gbs(result), 6),
            "share": _rounded(self.share(result), 4),
            "share_of_nics": round(result.phase.nics / self.spec.nics, 4),
        }

    def _event_dict(self, deed: Deed) -> dict[str, Any]:
        outcome = deed.outcome
        slowest = deed.slowest(self.windows)
        return {
            "nic": deed.action.nic,
            "action": deed.action.verb,
            "phase": deed.phase,
            "t": round(self.seconds(outcome.began_ns or deed.asked_ns), 3),
            "resume_ms": _rounded(outcome.resume_ms, 3),
            "detect_ms": _rounded(outcome.detect_ms, 3),
            "failover_ms": _rounded(outcome.failover_ms, 3),
            "replayed_bytes": outcome.replayed_bytes,
            "paths": outcome.paths,
            "slowest_iteration_ms": _rounded(slowest.seconds * 1e3 if slowest else None, 3),
            "command": deed.command,
        }

    def save(self) -> None:
        """Into the folder: the report, and the ranks' journals that it was made from."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        (self.folder / "demo.json").write_text(text, encoding="utf-8")
        with (self.folder / "journal.jsonl").open("w", encoding="utf-8") as file:
            for event in sorted(self.journal, key=lambda event: event.mono_ns):
                t = round(self.seconds(event.mono_ns), 6)
                row = {"t": t, "rank": event.process.rank, **event.as_dict()}
                file.write(json.dumps(row) + "\n")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def build_report(
    spec: DemoSpec,
    job: str,
    folder: Path,
    began_ns: int,
    feed: JobFeed,
    windows: Sequence[Window],
    phases: Sequence[PhaseResult],
    deeds: Sequence[Deed],
    problems: Sequence[str],
) -> Report:
    """Put together what was seen, and add the problems that only the whole shows."""
    report = Report(
        spec=spec,
        job=job,
        folder=folder,
        began_ns=began_ns,
        ended_ns=time.monotonic_ns(),
        windows=list(windows),
        phases=list(phases),
        deeds=list(deeds),
        samples=list(feed.samples),
        journal=list(feed.events),
        problems=list(problems),
        other_downs=innocent_downs(feed.events, spec.victims),
    )
    if report.wrong:
        report.problems.append(f"{report.wrong} values are wrong")
    if any(w.wrong < 0 for w in report.windows):
        report.problems.append("some values were not checked")
    for deed in report.deeds:
        report.problems += deed.outcome.missing
    for result in report.phases:
        if report.algbw_gbs(result) is None:
            report.problems.append(f"no AllReduce ended within the phase '{result.phase.title}'")
    if feed.lost:
        report.problems.append(f"{feed.lost} events of the journals were overwritten unread")
    report.problems = list(dict.fromkeys(report.problems))
    return report


PHASE_COLUMNS = ("PHASE", ">NICS", ">ALLREDUCES", ">BANDWIDTH", ">OF BEFORE", ">NICS LEFT")
EVENT_COLUMNS = (
    "EVENT",
    ">AT",
    ">RESUMED",
    ">NOTICED",
    ">FAILOVER",
    ">SLOWEST",
    ">REPLAYED",
)


def phase_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for result in report.phases:
        algbw, share = report.algbw_gbs(result), report.share(result)
        rows.append(
            (
                result.phase.title,
                str(result.phase.nics),
                str(len(result.whole(report.windows))),
                f"{algbw:.3f} GB/s" if algbw is not None else "-",
                f"{share:.0%}" if share is not None else "-",
                f"{result.phase.nics / report.spec.nics:.0%}",
            )
        )
    return rows


def event_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for deed in report.deeds:
        outcome, slowest = deed.outcome, deed.slowest(report.windows)
        rows.append(
            (
                f"{deed.action.verb} {deed.action.nic}",
                f"{report.seconds(outcome.began_ns or deed.asked_ns):.1f} s",
                _ms(outcome.resume_ms),
                _ms(outcome.detect_ms),
                _ms(outcome.failover_ms),
                _ms(slowest.seconds * 1e3 if slowest else None),
                show_bytes(outcome.replayed_bytes),
            )
        )
    return rows


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def closing_lines(report: Report) -> list[str]:
    """What stands under the tables."""
    spec = report.spec
    lines = [
        f"wrong = {report.wrong} of {report.values_checked:,} values, checked after every one of "
        f"{len(report.windows)} AllReduces",
    ]
    if spec.nic_rate:
        lines.append(
            f"Every NIC is limited to {show_rate(spec.nic_rate)} per rank, so that the loss of "
            "one can be seen; --nic-rate 0 lifts the limit."
        )
    lines += [MEANING, NOTE]
    if report.picture:
        lines.append(f"Picture: {report.picture}")
    elif report.picture_problem:
        lines.append(f"No picture: {report.picture_problem}")
    return lines
