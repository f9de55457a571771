"""The demo: what its verdict rests on, and the whole of it on loopback. Rung 3. It cannot prove
that a NIC that fails by itself is noticed as an injected failure is."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build, Finished, RunBounded
from rich.console import Console

from r2ccl_ctl import paths
from r2ccl_ctl.control import Process, list_processes
from r2ccl_ctl.demo import DemoSpec, Report
from r2ccl_ctl.demo import screen as screens
from r2ccl_ctl.demo.evidence import Outcome, innocent_downs, judge_failure, judge_recovery
from r2ccl_ctl.demo.feeds import JobFeed, Sample, Timeline, Window
from r2ccl_ctl.demo.picture import save_picture
from r2ccl_ctl.demo.plan import Action, Phase
from r2ccl_ctl.demo.report import Deed, PhaseResult, build_report, event_rows, phase_rows
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.journal import Event

TOOL = [sys.executable, "-m", "r2ccl_ctl"]
ENV = {"PYTHONPATH": str(ROOT)}
SHORT = ["--size", "4M", "--seconds-per-phase", "0.5", "--nic-rate", "0"]
NIC = "127.0.2.1"
MS = 1_000_000

# Evidence


def process(rank: int) -> Process:
    return Process(
        name=f"rank{rank}",
        path=Path(f"rank{rank}"),
        state="running",
        pid=100 + rank,
        local_pid=None,
        uid=0,
        pidns=0,
        host=f"node{rank // 2}",
        rank=rank,
    )


_numbers = itertools.count()


def event(
    ms: float,
    rank: int,
    word: str,
    nic: str = "",
    remote: str = "",
    peer: int = 0,
    size: int = 0,
    cause: str = "",
) -> Event:
    return Event(
        process=process(rank),
        number=next(_numbers),
        real_ns=0,
        mono_ns=int(ms * MS),
        event=word,
        nic=nic,
        remote_nic=remote,
        peer_host=f"node{peer // 2}" if nic and remote else "",
        peer_pid=100 + peer if nic and remote else 0,
        generation=1,
        bytes=size,
        duration_us=0,
        cause=cause,
    )


def failure() -> list[Event]:
    """127.0.2.1 of node 0 fails at 1000 ms under ranks 1 -> 2 and 3 -> 0."""
    return [
        event(500, 0, "fault-injected", NIC, cause="slow 5 B/s tx"),
        event(1000, 0, "fault-injected", NIC, cause="blackhole both"),
        event(1002, 1, "fault-injected", NIC, cause="blackhole both"),
        event(1300, 1, "path-down", NIC, "127.0.2.2", 2, cause="heartbeats unanswered"),
        event(1301, 2, "path-down", "127.0.2.2", NIC, 1, cause="the peer's word"),
        event(1302, 1, "replay", NIC, "127.0.2.2", 2, size=3000),
        event(1303, 1, "resume", "127.0.1.1", "127.0.1.2", 2),
        event(1310, 3, "path-down", "127.0.2.2", NIC, 0),
        event(1311, 3, "replay", "127.0.2.2", NIC, 0, size=500),
        event(1330, 3, "resume", "127.0.1.2", "127.0.1.1", 0),
        event(1900, 3, "resume", "127.0.3.2", "127.0.3.1", 0),
    ]


def test_failure_is_measured() -> None:
    outcome = judge_failure(failure(), NIC, "blackhole", 900 * MS)
    assert outcome.missing == []
    assert outcome.began_ns == 1000 * MS
    assert outcome.resume_ms == 330  # rank 3 took longest
    assert outcome.detect_ms == 310
    assert outcome.failover_ms == 20
    assert outcome.replayed_bytes == 3500
    assert outcome.paths == 3


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        (lambda e: e.event == "fault-injected", "no rank's journal shows the fault"),
        (lambda e: e.event == "path-down", "no rank noticed"),
        (lambda e: e.event == "replay", "nothing was replayed"),
        (lambda e: e.event == "resume" and e.process.rank == 3, "rank 3 .* did not resume"),
    ],
)
def test_missed_failover_is_seen(drop: Callable[[Event], bool], says: str) -> None:
    events = [e for e in failure() if not drop(e)]
    outcome = judge_failure(events, NIC, "blackhole", 900 * MS)
    assert outcome.resume_ms is None and outcome.settled_ns is None
    assert len(outcome.missing) == 1
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(outcome.missing[0])


def test_what_does_not_count_as_resumed() -> None:
    """Acknowledgements on the failed NIC, to another peer, before the replay, of another rank."""
    events = [e for e in failure() if not (e.event == "resume" and e.process.rank == 3)]
    events += [
        event(1330, 3, "resume", "127.0.1.2", NIC, 0),
        event(1330, 3, "resume", "127.0.1.2", "127.0.1.2", 2),
        event(1309, 3, "resume", "127.0.1.2", "127.0.1.1", 0),
        event(1330, 2, "resume", "127.0.1.2", "127.0.1.1", 0),
    ]
    assert judge_failure(events, NIC, "blackhole", 900 * MS).resume_ms is None


def test_older_failures_do_not_count() -> None:
    assert judge_failure(failure(), NIC, "blackhole", 1001 * MS).began_ns == 1002 * MS
    assert judge_failure(failure(), NIC, "blackhole", 1003 * MS).began_ns is None
    assert judge_failure(failure(), NIC, "error", 0).began_ns is None
    assert judge_failure(failure(), "127.0.3.1", "blackhole", 0).began_ns is None


def recovery() -> list[Event]:
    return [
        *failure(),
        event(5000, 0, "fault-cleared", NIC, cause="operator"),
        event(5100, 1, "path-up", NIC, "127.0.2.2", 2, cause="back"),
        event(5101, 2, "path-up", "127.0.2.2", NIC, 1, cause="back"),
        event(5700, 3, "path-up", "127.0.2.2", NIC, 0, cause="back"),
    ]


def test_recovery_is_measured() -> None:
    outcome = judge_recovery(recovery(), NIC, 900 * MS, 4000 * MS)
    assert outcome.missing == []
    assert outcome.resume_ms == 700
    assert outcome.paths == 3


def test_missed_recovery_is_seen() -> None:
    events = [e for e in recovery() if not (e.event == "path-up" and e.process.rank == 3)]
    outcome = judge_recovery(events, NIC, 900 * MS, 4000 * MS)
    assert outcome.resume_ms is None
    assert outcome.missing == [f"{NIC}: rank 3 (node1) to node0 pid 100 has no path of it again"]
    assert judge_recovery(failure(), NIC, 900 * MS, 4000 * MS).missing


def test_innocent_paths() -> None:
    assert innocent_downs(failure(), [NIC]) == 0
    assert innocent_downs(failure(), ["127.0.3.1"]) == 3


# The plan


def test_phases() -> None:
    phases = DemoSpec().phases()
    assert [(p.name, p.nics) for p in phases] == [
        ("before", 4),
        ("one_down", 3),
        ("two_down", 2),
        ("after", 4),
    ]
    assert phases[1].actions == (Action("fail", "127.0.2.1"),)
    assert phases[2].actions == (Action("fail", "127.0.4.1"),)
    assert phases[3].actions == (Action("recover", "127.0.2.1"), Action("recover", "127.0.4.1"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nics": 1}, "--nics 1"),
        ({"nics": 17}, "--nics 17"),
        ({"nodes": 1}, "--nodes 1"),
        ({"ranks_per_node": 0}, "--ranks-per-node 0"),
        ({"nodes": 16, "ranks_per_node": 16}, "256"),
        ({"size": 1000}, "--size 1000 B"),
        ({"seconds": 0.0}, "--seconds-per-phase 0"),
        ({"seconds": float("nan")}, "--seconds-per-phase nan"),
        ({"kind": "slow"}, "--kind slow"),
        ({"nic_rate": 10}, "--nic-rate"),
    ],
)
def test_what_cannot_be_shown(change: dict[str, Any], says: str) -> None:
    with pytest.raises(R2UsageError, match=says):
        replace(DemoSpec(), **change).check()


def test_one_nic_is_always_left() -> None:
    for nics in range(2, 17):
        spec = DemoSpec(nics=nics)
        assert min(p.nics for p in spec.phases()) >= 1
        assert len(set(spec.victims)) == len(spec.victims)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(R2UsageError, match="cannot write there"):
        DemoSpec(output=tmp_path / "file" / "folder").make_folder()


# Feeds


def line(end_ms: float, iteration: int, wrong: int = 0, ms: float = 50) -> str:
    row = {
        "t": end_ms / 1e3,
        "monotonic_ns": int(end_ms * MS),
        "iteration": iteration,
        "size": 100_000_000,
        "time_us": ms * 1e3,
        "wrong": wrong,
    }
    return json.dumps(row) + "\n"


def test_timeline_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "timeline"
    timeline = Timeline(path)
    assert timeline.poll() == []
    text = line(1000, 1) + line(1100, 2, wrong=3)
    path.write_text(text[:-20])
    (first,) = timeline.poll()
    assert (first.begin_ns, first.end_ns) == (950 * MS, 1000 * MS)
    assert first.algbw_gbs == pytest.approx(2.0)
    assert timeline.poll() == []
    path.write_text(text)
    (second,) = timeline.poll()
    assert (second.begin_ns, second.wrong) == (1000 * MS, 3)
    assert timeline.windows == [first, second]


# The report


def windows(count: int, wrong: int = 0) -> list[Window]:
    return [
        Window(i * 100 * MS, (i + 1) * 100 * MS, i + 1, 0.05, 100_000_000, wrong)
        for i in range(count)
    ]


def make_report(folder: Path, seen: list[Window], outcome: Outcome | None = None) -> Report:
    spec = DemoSpec(output=folder)
    phases = [
        PhaseResult(Phase("before", "before", 4), 0, 0, 1000 * MS),
        PhaseResult(Phase("one_down", "one NIC lost", 3), 1000 * MS, 1330 * MS, 2000 * MS),
    ]
    deed = Deed(Action("fail", NIC), "one_down", "r2ccl-ctl fail-nic", 900 * MS)
    deed.outcome = outcome or judge_failure(failure(), NIC, "blackhole", 900 * MS)
    feed = JobFeed([], "node0")
    feed.events = failure()
    return build_report(spec, "demo-0", folder, 0, feed, seen, phases, [deed], [])


def test_good_report(tmp_path: Path) -> None:
    report = make_report(tmp_path, windows(20))
    assert report.ok, report.problems
    data = report.as_dict()
    assert data["schema"] == 1 and data["wrong"] == 0 and data["iterations"] == 20
    assert [p["iterations"] for p in data["phases"]] == [10, 6]
    assert [p["algbw_gbs"] for p in data["phases"]] == [2.0, 2.0]
    (found,) = data["events"]
    assert found["nic"] == NIC and found["action"] == "fail"
    assert found["resume_ms"] == 330 and found["replayed_bytes"] == 3500
    assert phase_rows(report)[1][:4] == ("one NIC lost", "3", "6", "2.000 GB/s")
    assert event_rows(report)[0][2] == "330 ms"
    report.save()
    assert json.loads((tmp_path / "demo.json").read_text())["events"] == data["events"]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == len(failure())


def test_bad_reports(tmp_path: Path) -> None:
    report = make_report(tmp_path, windows(20, wrong=1))
    assert report.wrong == 20 and not report.ok
    assert make_report(tmp_path, windows(20, wrong=-1)).problems == ["some values were not checked"]
    report = make_report(tmp_path, windows(10))
    assert report.problems == ["no AllReduce ended within the phase 'one NIC lost'"]
    missed = judge_failure(failure()[:3], NIC, "blackhole", 0)
    report = make_report(tmp_path, windows(20), missed)
    assert len(report.problems) == 1 and "no rank noticed" in report.problems[0]
    assert event_rows(report)[0][2] == "-"


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = make_report(tmp_path, windows(20))
    report.samples = [Sample(int(t * MS), {NIC: t}) for t in range(0, 2000, 100)]
    save_picture(report)
    assert report.picture is not None, report.picture_problem
    data = report.picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = make_report(tmp_path, windows(20))
    save_picture(report)
    assert report.picture is None and "matplotlib" in report.picture_problem
    assert report.ok


# Screens


def test_plain_lines() -> None:
    out = io.StringIO()
    screen = screens.make_screen(Console(file=out, force_terminal=False))
    assert isinstance(screen, screens.PlainScreen)
    screen.begin(DemoSpec(), "demo-0")
    screen.phase("before")
    screen.say("$ r2ccl-ctl fail-nic [red]x[/red]")
    screen.end()
    text = out.getvalue()
    assert "job demo-0: 2 nodes x 2 ranks" in text and "[red]x[/red]" in text
    assert "\x1b" not in text and len(text.splitlines()) == 3


def test_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, no_color=True, width=100)
    screen = screens.make_screen(console)
    assert isinstance(screen, screens.LiveScreen)
    screen.begin(DemoSpec(), "demo-0")
    try:
        screen.phase("one NIC lost")
        screen.show(JobFeed([], "node0"), windows(3))
    finally:
        screen.end()
    text = out.getvalue()
    assert "one NIC lost" in text and "2.000 GB/s" in text
    assert "\x1b[3" not in text, "a colour in spite of NO_COLOR"


# The whole


def leftovers(job: str) -> list[str]:
    return [p.title for p in list_processes(dead=True) if p.job == job]


def demo_json(finished: Finished) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(finished.stdout)
    assert "Traceback" not in finished.stderr
    assert leftovers(report["job"]) == []
    return report


@pytest.mark.slow
def test_demo_as_text(build: Build, tmp_path: Path, run_bounded: RunBounded) -> None:
    finished = run_bounded(
        [*TOOL, "demo", "--nics", "2", "--ranks-per-node", "1", "--output", tmp_path, *SHORT],
        cwd=tmp_path,
        env={**ENV, "NO_COLOR": "1"},
        timeout=180,
    )
    assert "one NIC lost" in finished.stdout and "recover 127.0.2.1" in finished.stdout
    assert "wrong = 0 of " in finished.stdout
    assert "share this machine's CPU" in finished.stdout
    assert "\x1b" not in finished.stdout + finished.stderr


LIAR = """\
#!{python}
# r2ccl_perf, but every line of its timeline says that seven values are wrong.
import os, subprocess, sys, threading
argv = [{perf!r}, *sys.argv[1:]]
if os.environ["R2CCL_RANK"] == "0":
    at = argv.index("--timeline") + 1
    told, argv[at] = argv[at], argv[at] + ".true"
    os.mkfifo(argv[at])
    def lie():
        with open(argv[at]) as source, open(told, "w", buffering=1) as out:
            for line in source:
                out.write(line.replace('"wrong": 0', '"wrong": 7'))
    threading.Thread(target=lie, daemon=True).start()
sys.exit(subprocess.run(argv).returncode)
"""


@pytest.fixture
def lying_build(build: Build, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / paths.PLUGIN).symlink_to(build.plugin)
    (folder / "hostnccl").symlink_to(build.host_nccl)
    perf = folder / paths.PERF
    perf.write_text(LIAR.format(python=sys.executable, perf=str(build.perf)))
    perf.chmod(0o755)
    yield folder


@pytest.mark.slow
def test_wrong_values_fail_the_demo(
    lying_build: Path, tmp_path: Path, run_bounded: RunBounded
) -> None:
    finished = run_bounded(
        [*TOOL, "demo", "--json", "--output", tmp_path / "out", *SHORT],
        cwd=tmp_path,
        env={**ENV, "R2CCL_BUILD_DIR": str(lying_build)},
        timeout=120,
        code=1,
    )
    report = demo_json(finished)
    assert report["wrong"] >= 7
    assert any("values are wrong" in problem for problem in report["problems"])


class Performance:
    """A demo that is under way, for tests that disturb it."""

    def __init__(self, folder: Path) -> None:
        self.errors = (folder / "errors").open("w+b")
        self.output = (folder / "output").open("w+b")
        self.process = subprocess.Popen(
            [*TOOL, "demo", "--json", "--output", folder, *SHORT, "--seconds-per-phase", "60"],
            stdout=self.output,
            stderr=self.errors,
            cwd=folder,
            env={**os.environ, **ENV},
            start_new_session=True,
        )

    def text(self) -> str:
        # Not through the descriptor that the demo writes with: a seek would move where it writes.
        return Path(self.errors.name).read_text(encoding="utf-8", errors="replace")

    def until_playing(self) -> str:
        """The job's name, once the first phase runs."""
        end = time.monotonic() + 90
        while not all(words in self.text() for words in ("phase: before", "job ")):
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the demo does not come to its first phase: {self.text()}")
            time.sleep(0.05)
        return self.text().split("job ", 1)[1].split(":", 1)[0]


@pytest.fixture
def performance(build: Build, tmp_path: Path) -> Iterator[Performance]:
    play = Performance(tmp_path)
    try:
        yield play
    finally:
        if play.process.poll() is None:
            play.process.kill()
        play.process.wait(20)
        play.errors.close()
        play.output.close()


@pytest.mark.slow
def test_interrupted_demo_cleans_up(performance: Performance) -> None:
    job = performance.until_playing()
    ranks = [p.pid for p in list_processes() if p.job == job]
    assert len(ranks) == 4, job
    performance.process.send_signal(signal.SIGINT)
    assert performance.process.wait(30) == 128 + signal.SIGINT
    assert "Traceback" not in performance.text()
    assert leftovers(job) == []
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_dead_rank_fails_the_demo(performance: Performance) -> None:
    job = performance.until_playing()
    victim = next(p for p in list_processes() if p.job == job and p.rank == 2)
    os.kill(victim.pid, signal.SIGKILL)
    assert performance.process.wait(60) == 1
    performance.output.seek(0)
    report = json.loads(performance.output.read())
    assert any("the job died" in problem for problem in report["problems"])
    assert leftovers(job) == []
