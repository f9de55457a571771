"""Plan changes between many processes over loopback: every operation of every rank runs under the
same plan. Rung 3; short, `make chaos` has the long one."""

from __future__ import annotations

import re

import pytest
from conftest import Build, RunBounded


@pytest.mark.parametrize(
    "words",
    [
        ["--procs", "8", "--comms", "4"],
        ["--procs", "6", "--comms", "2", "--generation", "1500"],
        ["--procs", "6", "--comms", "4", "--kill", "--timeout", "1"],
    ],
    ids=["changes", "generations", "kill"],
)
def test_one_plan_per_operation(
    build: Build, run_bounded: RunBounded, seed: int, words: list[str]
) -> None:
    program = build.path / "stress" / "agree"
    finished = run_bounded(
        [program, "--seconds", "6", "--gap", "20", "--seed", str(seed), *words], timeout=80
    )
    assert "wrong: 0;" in finished.stdout, finished.stdout
    commits = re.search(r"(\d+) plans committed", finished.stdout)
    assert commits and int(commits[1]) > 0, finished.stdout
