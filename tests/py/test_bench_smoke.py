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
import resume
import rig


def test_a_row_without_a_number_is_a_problem() -> None:
    assert figures.Row("x", math.nan, "s").problems()
    assert figures.Row("x", 1.0, "s", baseline=0.0).problems()
    assert not figures.Row("x", 1.0, "s", baseline=2.0).problems()


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
