"""The stand-in for libibverbs (tests/fakeverbs) against soft-RoCE: the same steps of the same
program, the same answers, but for the differences below. Rung 2 to 3, no guest needed: what
soft-RoCE answers is in facts.json, which test_facts.py checks. It cannot prove that either of them
behaves as an HCA does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rdma import facts
from tests.rdma.standin import StandIn

pytestmark = pytest.mark.core
SPECIFIED = "soft-RoCE departs from the specification, the stand-in follows it"
UNUSED = "the transport does not use it"
WIRES = "the stand-in's ports lose what they send and what they receive alike"

# step.fact: (what the stand-in answers, why it differs from soft-RoCE)
DIFFERENCES: dict[str, tuple[Any, str]] = {
    "drain.receive_posted_in_err": (["WR_FLUSH_ERR"], SPECIFIED),
    "access.beyond_receiver_events": (["QP_ACCESS_ERR"], SPECIFIED),
    "access.bad_rkey_receiver_events": (["QP_ACCESS_ERR"], SPECIFIED),
    "access.no_remote_write_receiver_events": (["QP_ACCESS_ERR"], SPECIFIED),
    "access.bad_lkey_sender": (["LOC_PROT_ERR", "WR_FLUSH_ERR"], SPECIFIED),
    "dereg.written_with_the_old_key_receiver_events": (["QP_ACCESS_ERR"], SPECIFIED),
    "rnr.limited": ("nothing", "the stand-in waits for a receive for ever"),
    "rnr.endless": (["SUCCESS"], SPECIFIED),
    "rnr.endless_waits": (True, SPECIFIED),
    "rnr.then_completes": (True, SPECIFIED),
    "black_hole.timeout_10_retry_7": ("RETRY_EXC_ERR", SPECIFIED),
    "black_hole.sender_events": (["PORT_ACTIVE"], "its way to end a hole"),
    "lost_acks.receiver": ([], WIRES),
    "lost_acks.receiver_completions": (0, WIRES),
    "lost_acks.memory_right": (False, WIRES),
    "address.gid_still_in_table_while_used": (True, "the GID stands in its table twice"),
    "address.old_queue_pair_off": (["SUCCESS"], "its wires do not look at the table"),
    "address.same_index_again": (True, "its entries stay where they are"),
    "removal.removal_waits_for_us": (False, "its command does not wait, but its device stays"),
}
TURNS = 3
LEFT_OUT = {"write_imm": UNUSED, "send_too_long": UNUSED}


@pytest.fixture(scope="module")
def seen(standin: StandIn) -> facts.Steps:
    return standin.answers()


def test_all_steps_were_asked(seen: facts.Steps) -> None:
    recorded = set(facts.recorded())
    assert set(seen) >= recorded, f"the probe did not run {recorded - set(seen)}"


def test_the_same_answers(seen: facts.Steps, standin: StandIn) -> None:
    """What a step answers may hang on time (a hole no longer than the sender's patience) while
    guests boot on all cores: steps that differ are asked again, alone."""
    wanted = facts.recorded()
    for name, (value, _) in DIFFERENCES.items():
        step, fact = name.split(".")
        wanted[step]["facts"][fact] = value
    steps = {step: value for step, value in seen.items() if step in wanted and step not in LEFT_OUT}
    for _ in range(TURNS):
        found = facts.differences(wanted, steps)
        if not found:
            return
        print("asked again:", *found, sep="\n")
        again = sorted({line.partition(".")[0] for line in found})
        steps = standin.answers_again(*again)
        assert set(steps) == set(again)
    found = facts.differences(wanted, steps)
    assert not found, "the stand-in answers otherwise than soft-RoCE:\n" + "\n".join(found)


def test_differences_are_real() -> None:
    """None of the differences is listed that is none."""
    recorded = facts.recorded()
    for name, (value, why) in DIFFERENCES.items():
        step, fact = name.split(".")
        assert recorded[step]["facts"][fact] != value and why, name
