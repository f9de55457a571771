"""The stand-in for libibverbs (tests/fakeverbs) against soft-RoCE: the same steps of the same
program, the same answers, but for the differences below. Rung 2 to 3, no guest needed: what
soft-RoCE answers is in facts.json, which test_facts.py checks. It cannot prove that either of them
behaves as an HCA does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rdma import facts
from tests.rdma.work import build_folder

FAULTS = Path(__file__).with_name("fake_act.py")
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
    "removal.told": (True, "it plays a device that fails, not one that is unloaded"),
    "removal.events": (["DEVICE_FATAL"], "it plays a device that fails, not one that is unloaded"),
    "removal.modify": ("Input/output error", "it plays a device that fails"),
    "removal.removal_waits_for_us": (False, "it plays a device that fails"),
}
LEFT_OUT = {"write_imm": UNUSED, "read": UNUSED, "send_too_long": UNUSED}


@pytest.fixture(scope="module")
def seen() -> facts.Steps:
    build = build_folder()
    library, probe = build / "fakeverbs" / "libibverbs.so.1", build / "rdma" / "probe"
    for file in (library, probe):
        if not file.exists():
            pytest.skip(f"no {file}: the headers of libibverbs-dev were missing in the build")
    words = [str(probe), "--lib", str(library), "--a", "fv0", "--b", "fv1", "--act", str(FAULTS)]
    done = subprocess.run(
        words,
        env={**os.environ, "R2_FAKEVERBS": "fv0=127.0.1.1,fv1=127.0.2.1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return facts.parse(done.stdout)


def test_all_steps_were_asked(seen: facts.Steps) -> None:
    recorded = set(facts.recorded())
    assert set(seen) >= recorded, f"the probe did not run {recorded - set(seen)}"


def test_the_same_answers(seen: facts.Steps) -> None:
    wanted = facts.recorded()
    for name, (value, _) in DIFFERENCES.items():
        step, fact = name.split(".")
        wanted[step]["facts"][fact] = value
    steps = {step: value for step, value in seen.items() if step in wanted and step not in LEFT_OUT}
    found = facts.differences(wanted, steps)
    assert not found, "the stand-in answers otherwise than soft-RoCE:\n" + "\n".join(found)


def test_differences_are_real() -> None:
    """None of the differences is listed that is none."""
    recorded = facts.recorded()
    for name, (value, why) in DIFFERENCES.items():
        step, fact = name.split(".")
        assert recorded[step]["facts"][fact] != value and why, name
