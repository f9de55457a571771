"""What the shim adds to a collective that it does not replace, on an NCCL that does nothing: what
does not depend on the machine is counted, and the time is held against the target.

Rung 3. One communicator of one rank, and one of two whose ranks have met. An error of the other one
is told at the end, which proves it. Not here: a plan in force, other threads on the same core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Build, RunBounded

FLOATS = 4 << 20  # 16 MiB: an operation that a plan could run on
CASES = {
    "one-rank": (1, 4, {}),
    "two-ranks": (2, 4, {}),
    "two-ranks-with-plans": (2, FLOATS, {"R2CCL_PLAN": "auto"}),
    "two-ranks-shadow": (2, FLOATS, {"R2CCL_PLAN": "shadow"}),
}


class Cost:
    def __init__(self, build: Build, run_bounded: RunBounded) -> None:
        self._build, self._run = build, run_bounded
        self.shim = str(build.path / "libr2ccl.so")

    def __call__(self, calls: int, ranks: int, floats: int, **env: str) -> dict[str, Any]:
        tool: Path = self._build.path / "tests/shim/cost"
        env = {"NCCL_SOCKET_IFNAME": "lo", **env}
        finished = self._run([tool, str(calls), str(ranks), str(floats)], env=env, timeout=60)
        assert finished.code == 0, finished
        row: dict[str, Any] = json.loads(finished.stdout)
        return row


@pytest.fixture
def cost(build: Build, run_bounded: RunBounded) -> Cost:
    return Cost(build, run_bounded)


def added(ours: dict[str, Any], plain: dict[str, Any], where: str, what: str) -> int:
    return int(ours[f"{where}_counts"][what]) - int(plain[f"{where}_counts"][what])


@pytest.mark.parametrize("case", CASES)
def test_what_a_collective_costs_is_counted(cost: Cost, case: str) -> None:
    """Of 1000 operations: one uncontended lock each (the table of communicators), one allocation
    per group, and no call of the kernel. A few more are the thread's first."""
    ranks, floats, env = CASES[case]
    plain = cost(1000, 1, floats)
    if plain["single_counts"]["locks"] < 0:
        pytest.skip("a build with a sanitizer has its own locks and allocations")
    ours = cost(1000, ranks, floats, LD_PRELOAD=cost.shim, **env)
    assert ours["told"] == (ranks == 2), "the ranks have not met: what is measured is not on"
    for where, allocations in (("single", 0), ("group", 1000)):
        assert added(ours, plain, where, "kernel") == 0
        assert 1000 <= added(ours, plain, where, "locks") <= 1010
        assert added(ours, plain, where, "allocations") <= allocations + 10


def test_off_adds_no_lock(cost: Cost) -> None:
    plain = cost(1000, 1, 4)
    if plain["single_counts"]["locks"] < 0:
        pytest.skip("a build with a sanitizer has its own locks and allocations")
    ours = cost(1000, 2, 4, LD_PRELOAD=cost.shim, R2CCL_MODE="0")
    assert not ours["told"]
    for where in ("single", "group"):
        for what in ("kernel", "locks", "allocations"):
            assert added(ours, plain, where, what) <= 10


@pytest.mark.parametrize("case", CASES)
def test_a_collective_takes_no_longer(cost: Cost, case: str) -> None:
    """The target, with the best of three medians: a third of it is used on an idle machine."""
    ranks, floats, env = CASES[case]
    plain = [cost(50000, 1, floats) for _ in range(3)]
    if plain[0]["single_counts"]["locks"] < 0:
        pytest.skip("a build with a sanitizer has its own speed")
    ours = [cost(50000, ranks, floats, LD_PRELOAD=cost.shim, **env) for _ in range(3)]
    for where in ("single", "group"):
        best, least = (min(one[where]["median"] for one in all_) for all_ in (ours, plain))
        assert best - least < 500, f"{where}: {best} ns instead of {least} ns"
