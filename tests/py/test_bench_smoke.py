"""The benchmarks' harness: its figures are figures, and it refuses impossible ones.

Rungs 1 and 3. That each benchmark runs is shown by `make bench BENCH_ARGS=--smoke`.
"""

from __future__ import annotations

import math
import sys

import pytest
from conftest import ROOT, Build

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import completion
import figures
import instructions
import resume
import rig
import unshaped


def test_ratio_and_verdict() -> None:
    row = figures.Row("x", 97.0, "GB/s", baseline=100.0, target=0.95)
    assert row.ratio == pytest.approx(0.97)
    assert row.met is True
    assert figures.Row("x", 94.0, "GB/s", baseline=100.0, target=0.95).met is False
    late = figures.Row("x", 21.0, "ms", target=20.0, judged="value", at_least=False)
    assert late.met is False
    assert figures.Row("x", 1.0, "").met is None


def test_instructions_by_file() -> None:
    """What a function cost itself counts for its file and for files inlined into it; what it called
    does not, though a file may be named there for the first time; nor does what the stand-in's
    library has of such files."""
    text = """events: Ir
ob=(1) /x/libnccl-net-r2ccl.so
fl=(1) net_plugin/a.c
fn=(1) a
0 10
fi=(2) net_plugin/b.h
0 5
fe=(1)
cob=(2) /x/fakeverbs/libibverbs.so.1
cfi=(3) net_plugin/c.c
cfn=(2) c
calls=2 0
0 700
+0 1
fl=(3)
fn=(2)
0 600
* 100
ob=(2)
fl=(1)
fn=(3) in the stand-in
0 10000
"""
    found = instructions.count(text.splitlines())
    assert found == {"net_plugin/a.c": 11, "net_plugin/b.h": 5, "net_plugin/c.c": 700}


def test_a_row_without_a_number_is_a_problem() -> None:
    assert figures.Row("x", math.nan, "s").problems()
    assert figures.Row("x", 1.0, "s", baseline=0.0).problems()
    assert not figures.Row("x", 1.0, "s", baseline=2.0).problems()


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.001, 1), (0.951, 96)]
)
def test_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    assert figures.percentile(list(range(100, 0, -1)), share) == value


def test_faster_than_the_wire_is_refused() -> None:
    bound = figures.payload_bound(1e9, 9000)
    assert 0.99 < bound / 125e6 < 0.994
    figures.check_bound("at the bound", int(bound), 1.0, bound, 0)
    figures.check_bound("with credit", int(bound) + 250_000, 1.0, bound, 250_000)
    with pytest.raises(figures.MeasurementWrong, match="the shapers need"):
        figures.check_bound("beyond", int(bound * 1.01), 1.0, bound, 250_000)


def test_stall_is_the_gap_that_overlaps() -> None:
    times = [0, 10, 20, 120, 130, 400]
    assert resume.stall(times, 25, 40) == 100
    assert resume.stall(times, 11, 12) == 10
    assert resume.stall(times, 125, 500) == 270
    assert resume.stall([], 1, 2) == 0
    assert resume.stall_before(times, 125, 135) == 10  # the next fault's begins at 130
    assert resume.stall_before(times, 125, 390) == 260
    assert resume.stall_before(times, 25, 125) == 100
    assert resume.stall_before(times, 25, 1000) == 600
    assert resume.stall_before([], 1, 2) == 0
    assert resume.calm_gap(times, 5, 125) == 100
    assert resume.calm_gap(times, 5, 115) == 10
    assert resume.calm_gap(times, 21, 30) == 0


def test_wrong_words_are_no_figure() -> None:
    row = {"bytes": 8, "seconds": 1.0, "cpu_send_s": 0.1, "cpu_recv_s": 0.1, "wrong": 1}
    with pytest.raises(figures.MeasurementWrong):
        rig.parse_iteration(row)


def test_streams_of_a_path() -> None:
    """The plugin's gauge of sockets has a listener per NIC and a control socket per path in it."""
    assert unshaped.streams_of(2 + 2 * (1 + 1), 2, 2) == 1
    assert unshaped.streams_of(2 + 3 * (1 + 4), 2, 3) == 4
    assert unshaped.streams_of(2 + 3 * (1 + 4) - 1, 2, 3) == 0  # one is still being made
    assert unshaped.streams_of(2 + 2, 2, 2) == 0
    assert unshaped.streams_of(2, 2, 0) == 0


@pytest.fixture
def verbs(build: Build) -> None:
    """The stand-in for libibverbs."""
    if not completion.fakeverbs().is_file():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")


def test_an_error_that_shows_nowhere(
    build: Build, verbs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of which nobody hears is no figure: the benchmark fails."""
    monkeypatch.setattr(completion, "CODES", (0,))  # which is success
    monkeypatch.setattr(resume, "GIVE_UP_S", 1.0)
    section = figures.Section("resume", "")
    with pytest.raises(rig.BenchError, match="known at nodes \\[\\]"):
        completion.run(rig.Options(smoke=True, verbose=False), section, math.inf)


def test_a_wrong_value_is_an_error(
    build: Build, verbs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes arrive with a changed byte once the first path has failed; test chunks do, too, so it
    does not come back."""
    ask = completion.ask

    def damaging(pid: int, command: str) -> str:
        ask(pid, "chaos damage=1000000")
        return ask(pid, command)

    monkeypatch.setattr(completion, "ask", damaging)
    monkeypatch.setattr(resume, "GIVE_UP_S", 1.0)
    section = figures.Section("resume", "")
    with pytest.raises(rig.BenchError):
        completion.run(rig.Options(smoke=True, verbose=False), section, math.inf)
    assert any("wrong words" in error for error in section.errors), section.errors
