"""ncclCommShrink under the shim, over the stand-in: a rank leaves in the middle of a plan, the
others meet over the old communicator's channel and plan for the new one.

Rung 3: five nodes on loopback; the last rank is not asked for the new communicator and ends.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Build
from plan_bed import digests, end_at, lose, meets, regain, runs, working
from segment_bed import until

RANKS = 5

pytestmark = pytest.mark.slow


def test_shrink_under_a_plan(build: Build, tmp_path: Path) -> None:
    name = "shrinks"
    with working(build, name, tmp_path, "shrink_worker.py", RANKS) as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        lose(name)
        until(lambda: runs(name, RANKS, "direct"), "the plan is taken everywhere", 90)
        end_at(tmp_path, "shrink")
        until(lambda: runs(name, RANKS - 1, "direct"), "and among those that are left", 120)
        regain(name)
        until(lambda: runs(name, RANKS - 1, ""), "back to NCCL's own choice", 120)
        end_at(tmp_path, "stop")
        assert running.wait(240) == 0, "".join(rank.output for rank in running.ranks)
    for ranks in (RANKS, RANKS - 1):
        found = [digests(tmp_path, rank, ranks) for rank in range(ranks)]
        assert len(found[0]) > 20 and all(lines == found[0] for lines in found), ranks
        assert len({line.split()[2] for line in found[0]}) > 1, "another order adds up otherwise"
    assert not digests(tmp_path, RANKS - 1, RANKS - 1), "it has left"
