"""Plan changes between many processes over loopback: every operation of every rank runs under the
same plan. Rung 3; short, `make chaos` has the long one."""

from __future__ import annotations

import re
from pathlib import Path

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
    assert_commits(finished.stdout)


def test_over_ipv6(build: Build, run_bounded: RunBounded, seed: int) -> None:
    table = Path("/proc/net/if_inet6")
    if not table.exists() or " lo" not in table.read_text("utf-8"):
        pytest.skip("the loopback interface has no IPv6 address")
    finished = run_bounded(
        [build.path / "stress" / "agree", "--seconds", "3", "--seed", str(seed)],
        env={"NCCL_SOCKET_FAMILY": "AF_INET6"},
        timeout=60,
    )
    assert "wrong: 0;" in finished.stdout, finished.stdout
    assert_commits(finished.stdout)


def assert_commits(text: str) -> None:
    commits = re.search(r"(\d+) plans committed", text)
    assert commits and int(commits[1]) > 0, text
