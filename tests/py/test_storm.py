"""NICs that all communicators of many processes use are lost, and flap: one planning round and few
messages for each, and no change before the plan's time.

Rung 3. Loopback NICs, the stand-in for NCCL; tests/bench/storm.py has what is done, and has it for
256 processes (`make bench BENCH_ARGS="--only storm"`). It says nothing about speed.
"""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT, Build

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import storm


@pytest.mark.soak
def test_32_processes_with_16_communicators(build: Build) -> None:
    found = storm.blow(storm.SMALL, print)
    assert not storm.problems(found, storm.SMALL)
    assert found.small == 0
    assert found.total("agreed") == 2 * storm.SMALL.all_comms, "made, then taken, by each"
    assert found.flap_events > found.total("events"), "NICs flapped"


def counts(proposals: int, agreed: int) -> storm.Counts:
    return storm.Counts(0, 0, 0, proposals, agreed, 8)


def test_held_from_the_agreement_to_the_next_proposal() -> None:
    seen = [(1.0, counts(0, 0)), (2.0, counts(2, 1)), (4.0, counts(2, 2)), (15.5, counts(3, 2))]
    assert storm.held_s(seen, counts(2, 2)) == 11.5


def test_what_must_not_be_is_said() -> None:
    change = {"a": storm.Counts(160, 4, 3, 2, 2, 8)}
    found = storm.Found(small=3, change=change, held_s=4.0)
    assert storm.problems(found, storm.SMALL) == [
        "3 proposals for a gain below 5 %",
        "3 planning rounds for 4 events",
        "a plan was held for 4.0 s, not 20",
        "10.0 messages of each of 8 ranks for a proposal",
    ]
