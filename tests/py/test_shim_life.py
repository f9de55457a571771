"""ncclCommRevoke, ncclCommSuspend and ncclCommGrow under the shim, over the stand-in, in the middle
of a plan.

Rung 3: five nodes on loopback. Not proven here: what NCCL itself does with its memory when it
suspends, and GPUs.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import Build
from plan_bed import digests, end_at, lose, meets, runs, sized, working
from segment_bed import until

RANKS = 5
INVALID_USAGE, REMOTE = 5, 6

pytestmark = pytest.mark.slow


def hangs(name: str) -> bool:
    """All ranks but the last have been inside one operation for half a second."""
    since = time.monotonic_ns() - 500_000_000
    found = sorted(sized(name, RANKS), key=lambda comm: comm.rank or 0)
    return len(found) == RANKS and all(
        comm.calling and comm.op_mono_ns < since for comm in found[:-1]
    )


def same(folder: Path, ranks: int) -> None:
    """All of them got the same, and a plan has added up in another order."""
    found = [digests(folder, rank, ranks) for rank in range(ranks)]
    assert len(found[0]) > 20 and all(lines == found[0] for lines in found), ranks


def test_suspend_and_revoke_under_a_plan(build: Build, tmp_path: Path) -> None:
    """Operations of a suspended communicator are refused. One that waits for a rank that stands
    still ends. The other ranks go on without that one, with a plan of their own."""
    name = "revokes"
    with working(build, name, tmp_path, "life_worker.py", RANKS, "revoke") as running:
        until(lambda: meets(name, RANKS), "the ranks meet", 60)
        lose(name)
        until(lambda: runs(name, RANKS, "direct"), "the plan is taken everywhere", 90)
        end_at(tmp_path, "pause")
        until(lambda: len(list(tmp_path.glob("resumed.*"))) == RANKS, "the pause is over", 60)
        end_at(tmp_path, "stall")
        until(lambda: hangs(name), "the others wait for the last rank", 60)
        assert runs(name, RANKS, "direct")
        (tmp_path / "revoke").touch()
        until(lambda: runs(name, RANKS - 1, "direct"), "a plan among those that are left", 120)
        end_at(tmp_path, "stop")
        assert running.wait(240) == 0, "".join(rank.output for rank in running.ranks)
    for rank in range(RANKS - 1):
        codes = [int(word) for word in (tmp_path / f"codes.{rank}").read_text().split()]
        # A rank may hear that a peer has gone before it revokes, itself.
        assert codes[0] == INVALID_USAGE, rank
        assert set(codes[1:3]) <= {INVALID_USAGE, REMOTE} and codes[3] in (0, REMOTE), codes
    same(tmp_path, RANKS)
    same(tmp_path, RANKS - 1)


def test_grow_under_a_plan(build: Build, tmp_path: Path) -> None:
    """The grown communicator has no plans, as its ranks have no id in common that the shim has
    signed; the one that it came from goes on under its own."""
    name, old = "grows", RANKS - 1
    with working(build, name, tmp_path, "life_worker.py", RANKS, "grow") as running:
        until(lambda: meets(name, old), "the ranks meet", 60)
        lose(name)
        until(lambda: runs(name, old, "direct"), "the plan is taken everywhere", 90)
        end_at(tmp_path, "grow")
        until(lambda: len(sized(name, RANKS)) == RANKS, "it grows", 60)
        parents = {comm.id for comm in sized(name, old)}
        grown = sized(name, RANKS)
        assert {comm.plan for comm in grown} == {""}
        assert {comm.parent for comm in grown if comm.rank != old} == parents
        until(lambda: all(c.operations > 30 for c in sized(name, RANKS)), "its operations", 60)
        end_at(tmp_path, "back")
        before = sum(comm.planned for comm in sized(name, old))
        until(lambda: not sized(name, RANKS), "it is destroyed", 60)
        until(
            lambda: sum(comm.planned for comm in sized(name, old)) > before + 40,
            "the old one runs on under its plan",
            60,
        )
        end_at(tmp_path, "stop")
        assert running.wait(240) == 0, "".join(rank.output for rank in running.ranks)
    same(tmp_path, RANKS)
    same(tmp_path, old)
