"""What the verbs transport depends on, asked of soft-RoCE: facts.json is what docs/rdma.md tells.
Rung 5: it cannot prove what an HCA does."""

from __future__ import annotations

import os
import warnings

from tests.rdma import facts
from tests.rdma.work import Work

# Of these the fence and the answers to a failure are made; they hold on any kernel.
PROMISES: dict[str, dict[str, object]] = {
    "write_imm": {"memory_right": True, "receiver_opcode": "RECV_RDMA_WITH_IMM"},
    "order": {"receives_in_order": True, "memory_right": True},
    "write_then_send": {"in_order": True, "chunk_complete_when_told": True},
    "drain": {"all_receives_come_back": True, "flushed": 16},
    "drain_marker": {"all_posted_before_come_back": True},
    "late_write_err": {"memory_changed_afterwards": False, "all_drained_each_time": True},
    "late_write_destroy": {"memory_changed_afterwards": False},
    "dereg": {"memory_untouched": True},
    "dereg_busy": {"memory_changed_after_it_returned": False, "refused": False},
    "sender_err": {"all_sends_come_back": True, "sender_never_knows_less": True},
    "down_sender": {"all_receives_come_back": True, "all_sends_come_back": True},
    "down_receiver": {"all_receives_come_back": True, "all_sends_come_back": True},
    "lost_acks": {"memory_right": True, "receiver_completions": 1},
    "short_hole": {"once_and_in_order": True},
    "loss": {"memory_right": True},
}


def test_facts_of_soft_roce(work: Work) -> None:
    """What the transport is built on holds; all else is as recorded (a warning outside of soak)."""
    seen, _ = facts.observe(work)
    broken = [
        f"{step}.{name} is {seen.get(step, {}).get('facts', {}).get(name)!r}, not {value!r}"
        for step, promises in PROMISES.items()
        for name, value in promises.items()
        if seen.get(step, {}).get("facts", {}).get(name) != value
    ]
    assert not broken, "\n".join(broken)
    changed = facts.differences(facts.recorded(), seen)
    text = (
        "soft-RoCE answers otherwise than docs/rdma.md tells; look at what it means, then"
        " `python -m tests.rdma record`:\n" + "\n".join(changed)
    )
    if changed and not os.environ.get("RDMA_SOAK"):
        warnings.warn(text, stacklevel=1)
    else:
        assert not changed, text
